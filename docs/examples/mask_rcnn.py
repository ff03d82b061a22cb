"""Dense features of our trunks under torchvision's Mask R-CNN: maps at strides 8, 16 and 32 into its pyramid."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

import vitrail


class Pyramid(nn.Module):
    """A classifier's trunk as the backbone of a detector; its head is not used."""

    def __init__(self, model: nn.Module, width: int, channels: int = 64) -> None:
        super().__init__()
        self.model, self.out_channels = model, channels
        self.fpn = FeaturePyramidNetwork([width] * 3, channels)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.model.feature_maps(images, levels=(8, 16, 32))
        return self.fpn(OrderedDict((str(i), features) for i, features in enumerate(maps)))


trunk = vitrail.create_model("deit_tiny", classes=2, image_size=64, depth=2)  # weights="timm": published ones
names = ["0", "1", "2"]
detector = MaskRCNN(
    Pyramid(trunk, width=192),
    num_classes=3,
    min_size=64,
    max_size=64,
    rpn_anchor_generator=AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3),
    box_roi_pool=MultiScaleRoIAlign(names, 7, 2),
    mask_roi_pool=MultiScaleRoIAlign(names, 14, 2),
)
masks = torch.zeros(1, 64, 64, dtype=torch.uint8)
masks[0, 10:40, 10:40] = 1
target = {"boxes": torch.tensor([[10.0, 10.0, 40.0, 40.0]]), "labels": torch.tensor([1]), "masks": masks}
losses = detector([torch.rand(3, 64, 64)], [target])
sum(losses.values()).backward()
print({name: round(loss.item(), 3) for name, loss in losses.items()})
