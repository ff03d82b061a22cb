"""A mixer in one file: a quarter of the channels moves by one patch in each of four directions.

VITRAIL_PARTS=shift_mixer vitrail train vit --data photos/ --model.head mean --model.trunk.mixer shift
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.model.mixers.config import MixerOptions
from vitrail.model.mixers.patches import GridMixer
from vitrail.registry import register


@dataclass(frozen=True)
class Shift(MixerOptions):
    """Channels shifted over the patch grid, without parameters (Wang et al. 2022, arXiv 2201.10801)."""

    kind: Literal["shift"] = "shift"


@register("mixer", Shift)
class ShiftMixer(GridMixer):
    """x [batch, width, rows, columns]; what leaves the grid on one side comes in on the other."""

    @classmethod
    def build(cls, config: Shift, width: int, heads: int, grid: tuple[int, int]) -> Any:
        return cls()

    def on_grid(self, x: Tensor) -> Tensor:
        parts = x.chunk(4, 1)
        moves = ((1, 2), (-1, 2), (1, 3), (-1, 3))
        return torch.cat([part.roll(by, axis) for part, (by, axis) in zip(parts, moves, strict=True)], 1)
