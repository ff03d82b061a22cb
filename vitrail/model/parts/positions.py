"""Position embeddings at any grid."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resize_positions(
    positions: Tensor,
    prefix: int,
    old: tuple[int, int],
    new: tuple[int, int],
    mode: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Position embeddings [1, prefix + rows * columns, width] moved from grid `old` to grid `new`.

    Bicubic, because bilinear lowers the norm of interpolated vectors (DeiT, arXiv 2012.12877). Antialiased by default,
    as in timm, on which published weights at other sizes depend; the resize of DeiT's code is not (`antialias=False`).
    Half precision is resized in float32.
    """
    if old == new:
        return positions
    kept, grid = positions[:, :prefix], positions[:, prefix:]
    exact = grid if grid.dtype == torch.float64 else grid.float()
    exact = exact.reshape(1, *old, -1).permute(0, 3, 1, 2)
    exact = F.interpolate(exact, size=new, mode=mode, antialias=antialias, align_corners=False)
    return torch.cat([kept, exact.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)


def resize_mixing(weight: Tensor, bias: Tensor, old: tuple[int, int], new: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix over patches [patches, patches] and its bias moved to another grid: rows and columns are both images.

    Rows are rescaled so that what a patch receives from a constant image stays the same. It adapts poorly and needs
    fine-tuning.
    """
    count = old[0] * old[1]
    columns = resize_positions(weight.float().t()[None], 0, old, new)[0].t()  # where a patch looks
    rows = resize_positions(columns[None], 0, old, new)[0]  # which patch looks
    rows = rows * (count / (new[0] * new[1]))
    moved = resize_positions(bias.float()[None, :, None], 0, old, new)[0, :, 0]
    return rows.to(weight.dtype), moved.to(bias.dtype)


def sinusoid(count: int, width: int) -> Tensor:
    """The fixed table [1, count, width] of sines and cosines (Vaswani et al.), as SoT uses it for all its tokens."""
    place = torch.arange(count, dtype=torch.float64)[:, None]
    channel = torch.arange(width, dtype=torch.float64)[None]
    angle = place / 10000 ** (2 * torch.div(channel, 2, rounding_mode="floor") / width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]


class FourierPositions(nn.Module):
    """Sines and cosines of row and column at `waves` frequencies, and a learned projection (XCiT). Names follow timm's.

    Places are shares of the image, so another grid needs no interpolation.
    """

    waves = 32
    edge_layers = ("token_projection",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token_projection = nn.Conv2d(2 * self.waves, width, 1)

    def table(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        """[1, 2 waves, rows, columns] in float32, rows first; the order of operations is that of the published code."""
        rows, columns = grid
        pair = torch.arange(self.waves, device=device).div(2, rounding_mode="floor")
        period = 10000 ** (2 * pair.float() / self.waves)

        def encoded(count: int) -> Tensor:  # [count, waves]
            place = torch.arange(1, count + 1, device=device).float()
            angle = (place / (place[-1] + 1e-6) * (2 * math.pi))[:, None] / period
            return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], 2).flatten(1)

        down = encoded(rows)[:, None].expand(-1, columns, -1)
        across = encoded(columns)[None].expand(rows, -1, -1)
        return torch.cat([down, across], 2).permute(2, 0, 1)[None]

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """[1, rows * columns, width]"""
        weight = self.token_projection.weight
        return self.token_projection(self.table(grid, weight.device).to(weight.dtype)).flatten(2).transpose(1, 2)
