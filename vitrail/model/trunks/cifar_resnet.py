"""Residual networks for 32-pixel images (He et al. 2016, arXiv 1512.03385, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.base import BaseTrunk

STAGE_WIDTHS = (16, 32, 64)
EXPANSION = 4  # of a bottleneck
Shortcut = Literal["pad", "project"]


class CifarResNetTrunk(BaseTrunk):
    """A trunk: 3x3 stem, three stages of equal depth, the final feature map as tokens without prefix.

    Depth is 6n + 2 with two convolutions per block, 9n + 2 with bottlenecks of three (`bottleneck`). Where a block
    changes the shape, the shortcut subsamples and pads channels with zeros (`pad`, option A, the default of plain
    blocks) or is a 1x1 convolution with BatchNorm (`project`, option B, the default of bottlenecks). Attributes are
    named as in the usual ports of these networks, so that their weights load.
    """

    prefix = 0
    opaque = "a CIFAR ResNet gives no intermediates by name; use trunk.feature_maps(images)"

    def __init__(self, depth: int, bottleneck: bool = False, shortcut: Shortcut | None = None, inputs: int = 3) -> None:
        super().__init__()
        layers = 3 if bottleneck else 2
        count, rest = divmod(depth - 2, 3 * layers)
        if rest or count < 1:
            fitting = ", ".join(str(3 * layers * n + 2) for n in (1, 2, 3, 5, 7, 9)) + ", ..."
            kind = "with bottlenecks" if bottleneck else "of plain blocks"
            raise ValueError(f"a CIFAR ResNet {kind} has a depth of {3 * layers}n + 2 ({fitting}), not {depth}")
        way = shortcut or ("project" if bottleneck else "pad")
        block: type[Residual] = Bottleneck if bottleneck else Plain
        self.depth = depth
        self.conv1 = nn.Conv2d(inputs, STAGE_WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STAGE_WIDTHS[0])
        channels, stages = STAGE_WIDTHS[0], []
        for stage, width in enumerate(STAGE_WIDTHS):
            blocks = []
            for i in range(count):
                blocks.append(block(channels, width, 2 if stage and i == 0 else 1, way))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.width = channels
        self.blocks_per_stage, self.layers = count, 3 * count
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Outputs of the three stages, `[batch, channels, rows, columns]`, finest first."""
        x = F.relu(self.bn1(self.conv1(images)))
        maps = []
        for stage in (self.layer1, self.layer2, self.layer3):
            x = stage(x)
            maps.append(x)
        return maps

    def embed(self, images: Tensor) -> Tokens:
        """The final feature map; it is not cut into stem and blocks."""
        last = self.feature_maps(images)[-1]
        return Tokens(last.flatten(2).transpose(1, 2), 0, (int(last.shape[2]), int(last.shape[3])))

    def forward(self, images: Tensor) -> Tokens:
        return self.embed(images)

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay: 0 for the stem, i + 1 for block i."""
        if not name.startswith("layer"):
            return 0
        stage, block = name.removeprefix("layer").split(".")[:2]
        return (int(stage) - 1) * self.blocks_per_stage + int(block) + 1


class Residual(nn.Module):
    """A residual block; `[batch, inputs, rows, columns]` to `[batch, width * expansion, rows / stride, ...]`."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.stride = stride
        outputs = width * self.expansion
        self.padding = (outputs - inputs) // 2  # zero channels on either side
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if shortcut == "project" and (stride != 1 or inputs != outputs)
            else None
        )

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            kept = self.shortcut(x)
        elif self.stride != 1 or self.padding:
            kept = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        else:
            kept = x
        return F.relu(self.branch(x) + kept)


class Plain(Residual):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__(inputs, width, stride, shortcut)
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 one strides."""

    expansion = EXPANSION

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__(inputs, width, stride, shortcut)
        outputs = width * EXPANSION
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


def load_reference(model_state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the usual CIFAR ResNet ports under our names, complete for `load_state_dict`.

    `model_state` is the state of a classifier of a `CifarResNet` and a linear head. Batch counters, which the ports
    leave out, stay the model's. Raises `ValueError` with every name that is missing, foreign or of another shape.
    """
    renamed = {port_name(name): tensor for name, tensor in tensors.items()}
    ready = {n: renamed.pop(n, t if n.endswith("num_batches_tracked") else None) for n, t in model_state.items()}
    wrong = [f"{name}: not a part of this model" for name in renamed]
    for name, value in ready.items():
        if value is None:
            wrong.append(f"{name}: missing")
        elif value.shape != model_state[name].shape:
            wrong.append(f"{name}: {tuple(value.shape)}, expected {tuple(model_state[name].shape)}")
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise ValueError(f"these weights do not fit the CIFAR ResNet: {shown}; check depth, shortcut and classes")
    return cast("dict[str, Tensor]", ready)


def port_name(name: str) -> str:
    """The name that a tensor of the usual ports has here."""
    name = name.removeprefix("module.")
    return "head.fc." + name.removeprefix("linear.") if name.startswith("linear.") else f"trunk.{name}"
