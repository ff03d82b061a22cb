"""Learned position embeddings at any grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_positions(
    positions: Tensor,
    prefix: int,
    old: tuple[int, int],
    new: tuple[int, int],
    mode: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Position embeddings [1, prefix + rows * columns, width] moved from grid `old` to grid `new`.

    Bicubic, because bilinear lowers the norm of the vectors it makes (architectures-and-training §2.3). Antialiased by
    default, as timm does, on which published weights at other sizes depend; the thesis's own resize is not
    (`antialias=False`). Half precision is resized in float32.
    """
    if old == new:
        return positions
    kept, grid = positions[:, :prefix], positions[:, prefix:]
    exact = grid if grid.dtype == torch.float64 else grid.float()
    exact = exact.reshape(1, *old, -1).permute(0, 3, 1, 2)
    exact = F.interpolate(exact, size=new, mode=mode, antialias=antialias, align_corners=False)
    return torch.cat([kept, exact.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)
