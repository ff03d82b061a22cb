"""Dense features: their shapes and places against timm and loops, and a small segmentation head that learns on them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.open import open_data
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.dense import resized, taps
from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk

SMALL = {"image_size": 32, "patch": 8, "width": 32, "depth": 4, "heads": 2, "classes": 3}


def images(count: int = 2, height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(count, 3, height, width)


@pytest.mark.parametrize("name", ["deit_tiny_distilled", "cait_xxs24", "resmlp_s12", "xcit_t12_p8"])
def test_one_stride_repeated_is_the_tokens_of_evenly_chosen_blocks(name: str) -> None:
    model = create_model(name, **SMALL).eval()
    seen = images()
    found = model.feature_maps(seen, levels=2)
    captured = model.outputs(seen, want={"tokens.1", "tokens.3"}).captured
    rows, columns = model.outputs(seen).tokens.grid
    for one, tokens in zip(found, captured.values(), strict=True):
        assert one.shape == (2, 32, rows, columns)
        for r, c in ((0, 1), (rows - 1, 0)):
            torch.testing.assert_close(one[:, :, r, c], tokens[:, tokens.shape[1] - rows * columns + r * columns + c])


def test_a_class_token_that_enters_late_is_in_no_map() -> None:
    model = create_model("vit_tiny", **SMALL, class_token_at=2).eval()
    assert [tuple(m.shape) for m in model.feature_maps(images())] == [(2, 32, 4, 4)] * 4


def test_a_plain_timm_vit_gives_what_timm_gives() -> None:
    model = create_model("timm:vit_tiny_patch16_224", classes=3, depth=3, embed_dim=48, num_heads=2).eval()
    seen = images(1, 224, 224)
    with torch.no_grad():
        expected = model.trunk.backbone.forward_intermediates(seen, indices=[0, 1, 2], intermediates_only=True)
        for one, other in zip(model.feature_maps(seen, levels=3), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_stages_of_timm_are_its_own_pyramid_and_the_last_ones_are_kept() -> None:
    model = create_model("timm:resnet10t", classes=3).eval()
    seen = images(1, 64, 64)
    with torch.no_grad():
        found = model.feature_maps(seen)
        expected = model.trunk.backbone.forward_intermediates(seen, intermediates_only=True)
        asked = model.feature_maps(seen, levels=(4, 8, 16, 32))
    assert [m.shape[-1] for m in found] == [16, 8, 4, 2]
    for one, other, exact in zip(found, asked, expected[-4:], strict=True):
        torch.testing.assert_close(one, exact)
        torch.testing.assert_close(other, exact)


def test_a_cifar_resnet_gives_its_three_stages() -> None:
    model = create_model("cifar_resnet20", classes=3).eval()
    seen = images()
    assert isinstance(model.trunk, CifarResNetTrunk)
    for one, other in zip(model.feature_maps(seen), model.trunk.feature_maps(seen), strict=True):
        torch.testing.assert_close(one, other)
    assert [m.shape[1] for m in model.feature_maps(seen, levels=2)] == [32, 64]
    assert [m.shape[-1] for m in model.feature_maps(seen, levels=(1, 2, 4, 8))] == [32, 16, 8, 4]
    with pytest.raises(ValueError, match="levels is 4, but this trunk has 3 stages"):
        model.feature_maps(seen, levels=4)


def test_a_pyramid_of_one_stride_has_the_size_of_every_stride() -> None:
    model = create_model("vit_tiny", **SMALL).eval()
    found = model.feature_maps(images(1, 32, 40), levels=(4, 8, 16, 32))
    assert [tuple(m.shape[2:]) for m in found] == [(8, 10), (4, 5), (2, 3), (1, 2)]
    own = model.feature_maps(images(1, 32, 32), levels=4)
    pyramid = model.feature_maps(images(1, 32, 32), levels=(4, 8, 16, 32))
    assert own[1].shape == pyramid[1].shape


def test_coarser_is_the_mean_of_blocks_and_finer_lies_between_neighbours() -> None:
    one = torch.arange(16.0).view(1, 1, 4, 4)
    coarse = resized(one, (2, 2))
    assert coarse.flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    # Middles of twice as many columns lie a quarter of a patch to either side: 0, 1/4, 3/4, ... in between.
    fine = resized(one[:, :, :1], (1, 8))
    assert fine.flatten().tolist() == pytest.approx([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])


def test_bytes_are_normalised_as_the_model_does_and_gradients_flow() -> None:
    model = create_model("vit_tiny", **SMALL)
    seen = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(model.feature_maps(seen)[0], model.feature_maps(model._images(seen))[0])
    model.feature_maps(seen)[-1].sum().backward()
    assert model.trunk.patch_embed.proj.weight.grad is not None


def test_what_cannot_be_had_is_said() -> None:
    adaptive = create_model("vit_tiny", **SMALL, adaptive={"kind": "ats", "layers": [1], "cap": [0.5]})
    with pytest.raises(ValueError, match="its patches leave on the way"):
        adaptive.feature_maps(images())
    model = create_model("vit_tiny", **SMALL)
    for wrong in (0, (), (8, 4), (4, 4), (4, 0)):
        with pytest.raises(ValueError, match="levels"):
            model.feature_maps(images(), levels=wrong)


def test_taps_end_with_the_last_block() -> None:
    for depth in (1, 2, 7, 12, 24):
        for count in (1, 3, 4):
            found = taps(depth, count)
            assert found[-1] == depth - 1
            assert all(0 <= a <= b for a, b in pairwise(found))


class SmallUperNet(nn.Module):
    """Pooled context of the coarsest map, a top-down path, all levels joined: logits of the finest level."""

    def __init__(self, channels: list[int], width: int = 16) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)
        self.context = nn.Conv2d(channels[-1], width, 1)
        self.join = nn.Conv2d(width * len(channels), width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        levels = [side(one) for side, one in zip(self.sides, maps, strict=True)]
        levels[-1] = levels[-1] + self.context(maps[-1].mean((2, 3), keepdim=True))
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], levels[i - 1].shape[2:], mode="bilinear")
        fine = [F.interpolate(level, levels[0].shape[2:], mode="bilinear") for level in levels]
        return self.out(F.relu(self.join(torch.cat(fine, 1))))[:, 0]


def scenes(count: int = 24) -> tuple[Tensor, Tensor]:
    """Pictures of shapes and where the box of the object is, at a stride of 4."""
    split = open_data(f"synthetic:shapes?n={2 * count}&size=32&classes=6")["train"]
    pixels = torch.stack([torch.tensor(list(split.read(i).tobytes()), dtype=torch.uint8) for i in range(count)])
    place = torch.arange(32)
    assert split.boxes is not None
    masks = []
    for left, top, right, bottom in split.boxes[:count].tolist():
        inside_x, inside_y = (place >= left) & (place < right), (place >= top) & (place < bottom)
        masks.append((inside_y[:, None] & inside_x).float())
    return pixels.view(count, 32, 32, 3).permute(0, 3, 1, 2), F.avg_pool2d(torch.stack(masks)[:, None], 4)[:, 0]


def test_a_small_upernet_learns_masks_on_a_pyramid() -> None:
    pixels, masks = scenes()
    model: Classifier = create_model("vit_tiny", **{**SMALL, "depth": 2})
    levels = (4, 8, 16)
    head = SmallUperNet([m.shape[1] for m in model.feature_maps(pixels[:1], levels)])
    weights = [*model.trunk.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    for _ in range(80):
        loss = F.binary_cross_entropy_with_logits(head(model.feature_maps(pixels, levels)), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = float(masks.mean())
    constant = -share * math.log(share) - (1 - share) * math.log(1 - share)  # the best that one number can do
    # Edges that cross a cell make some loss unavoidable: that of knowing the mask.
    least = float(F.binary_cross_entropy(masks, masks))
    assert float(loss.detach()) - least < 0.5 * (constant - least)
