"""LoRA: both factors are trained (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from vitrail.model.adapters.config import Lora
from vitrail.model.adapters.group import Change, Group, LowRank
from vitrail.model.adapters.quantise import straight_through
from vitrail.model.adapters.targets import Piece


class LoraGroup(Group):
    """up [pieces, outputs, rank] starts at 0, down [pieces, rank, inputs] uniform as a linear layer does."""

    def __init__(self, config: Lora, pieces: Sequence[Piece], first: int, device: torch.device) -> None:
        super().__init__(pieces, first)
        self.config = config
        outputs, inputs = self.shape
        self.up = nn.Parameter(torch.empty(len(pieces), outputs, config.rank, device=device))
        self.down = nn.Parameter(torch.empty(len(pieces), config.rank, inputs, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.up)
        bound = 1 / math.sqrt(self.shape[1])
        nn.init.uniform_(self.down, -bound, bound)

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        bits = self.config.bits
        up = straight_through(self.up[rows], bits) * (self.config.scale / self.config.rank)
        # Unbound, not indexed: the gradient then comes back as one stack, not as a sum of mostly empty ones.
        return [LowRank(*pair) for pair in zip(up, straight_through(self.down[rows], bits).unbind(0), strict=True)]
