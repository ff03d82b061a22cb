"""PRANC: the change of a weight is a sum of random bases of the size of the weight.

Nooralinejad et al. 2023, arXiv 2206.08464.

Every layer has bases of its own, as parts of one long random vector would be. Coefficients start at 0; bases are scaled
such that coefficients of variance 1 make a weight of variance 1 / inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.kernels.bases import combine
from vitrail.model.adapters.config import Pranc
from vitrail.model.adapters.group import Change, Dense, Group
from vitrail.model.adapters.quantise import straight_through
from vitrail.model.adapters.targets import Piece

FACTOR = 2


class PrancGroup(Group):
    """alpha [pieces, coefficients] for a weight [outputs, inputs]."""

    layers: Tensor

    def __init__(self, config: Pranc, pieces: Sequence[Piece], first: int, device: torch.device) -> None:
        super().__init__(pieces, first)
        self.config = config
        self.alpha = nn.Parameter(torch.empty(len(pieces), config.coefficients, device=device))
        self.remember_seed(config.seed)
        self.register_buffer("layers", torch.arange(first, first + len(pieces), device=device), persistent=False)
        self.scale = math.sqrt(3 / (config.coefficients * self.shape[1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        coefficients = straight_through(self.alpha[rows], self.config.bits)
        elements = self.shape[0] * self.shape[1]
        made = (
            combine(coefficients, elements, seed=self.config.seed, factor=FACTOR, layers=self.layers[rows]) * self.scale
        )
        return [Dense(whole) for whole in made.unflatten(1, self.shape).unbind(0)]
