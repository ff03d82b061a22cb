"""Mixers that know the places of patches: learned matrices over them, and convolutions over their grid."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.mixers.mixer import Mixer
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Probe, Tokens
from vitrail.registry import settings


class FixedPatches(Mixer):
    """A mixer over a fixed number of patches: rejects other image sizes, padding and class tokens."""

    takes_prefix = False

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid

    @classmethod
    def build(cls, config: Any, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
        return cls(grid, **settings(config))

    def check(self, tokens: Tokens) -> None:
        if tuple(tokens.grid) != tuple(self.grid) or tokens.mask is not None:
            rows, columns = self.grid
            raise ValueError(
                f"this model mixes exactly {rows}x{columns} patches, the images have "
                f"{tokens.grid[0]}x{tokens.grid[1]}; build it with image_size=... for another size "
                "(weights are then interpolated when loaded)"
            )


class LinearPatchesMixer(FixedPatches):
    """X -> A X with A [patches, patches] shared by all channels, and a bias per patch (ResMLP, arXiv 2105.03404)."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__(grid)
        self.tokens = nn.Linear(grid[0] * grid[1], grid[0] * grid[1])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.tokens)

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        self.check(tokens)
        return self.tokens(x.transpose(1, 2)).transpose(1, 2)


class PatchMlpMixer(FixedPatches):
    """Two linear layers over patches with a GELU between (ablation of ResMLP, arXiv 2105.03404)."""

    def __init__(self, grid: tuple[int, int], ratio: float) -> None:
        super().__init__(grid)
        count = grid[0] * grid[1]
        self.fc1 = nn.Linear(count, int(count * ratio))
        self.fc2 = nn.Linear(int(count * ratio), count)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.fc1, self.fc2)

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        self.check(tokens)
        return self.fc2(F.gelu(self.fc1(x.transpose(1, 2)))).transpose(1, 2)


class NoMixer(Mixer):
    """The identity: patches never meet (ablation of ResMLP)."""

    takes_prefix = False

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        return x


class GridMixer(Mixer):
    """A mixer on the patch grid as an image [batch, width, rows, columns]; any size, no class tokens, no padding."""

    takes_prefix = False

    @classmethod
    def build(cls, config: Any, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
        return cls(width, **settings(config))

    def on_grid(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        if tokens.mask is not None or x.shape[1] != tokens.grid[0] * tokens.grid[1]:
            raise ValueError("a convolution over patches needs the whole grid: no class tokens, no dropped patches")
        batch, _, width = x.shape
        image = x.transpose(1, 2).reshape(batch, width, *tokens.grid)
        return self.on_grid(image).flatten(2).transpose(1, 2)


class PatchConvMixer(GridMixer):
    """A 3x3 convolution: full, depth-wise, or depth-wise then 1x1 (ablations of ResMLP, arXiv 2105.03404)."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=1 if style == "full" else width)
        self.point = nn.Conv2d(width, width, 1) if style == "separable" else nn.Identity()

    def on_grid(self, x: Tensor) -> Tensor:
        return self.point(self.conv(x))


class GatedConvMixer(GridMixer):
    """1x1, GELU, depth-wise 3x3, GELU, squeeze-and-excitation, 1x1 (PatchConvNet, arXiv 2112.13692, section 3).

    The text says "3x3 convolution"; only a depth-wise one gives the printed 25.2 M of S60. All convolutions start as
    torch starts them, as in the authors' code (which gives normal weights of std 0.02 to linear layers alone): a
    depth-wise kernel of nine weights then has a std of 0.19, and the branch starts a hundred times larger than at 0.02.
    """

    def __init__(self, width: int, squeeze: float) -> None:
        super().__init__()
        inner = max(1, int(width * squeeze))
        self.fc1 = nn.Conv2d(width, width, 1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.squeeze = nn.Conv2d(width, inner, 1)
        self.excite = nn.Conv2d(inner, width, 1)
        self.fc2 = nn.Conv2d(width, width, 1)

    def last_linear(self) -> nn.Module:
        return self.fc2

    def on_grid(self, x: Tensor) -> Tensor:
        x = F.gelu(self.depthwise(F.gelu(self.fc1(x))))
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.fc2(x * gate)
