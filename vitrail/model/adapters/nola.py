"""NOLA: both factors are sums of random bases, of which only the coefficients are trained.

Koohpayegani et al. 2024, arXiv 2310.02556. The paper does not specify distribution, scale and initial values, and its
three public versions contradict each other. Here bases are uniform, and scaled such that coefficients of variance 1
make a factor whose rows have the gain of a fresh linear layer: variance 1 / rank for A, 1 / inputs for B.
A starts so, B at 0. No frozen offset is added to the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.kernels.bases import NO_LAYER, bases, combine
from vitrail.model.adapters.config import Nola
from vitrail.model.adapters.group import Change, Group, LowRank
from vitrail.model.adapters.quantise import straight_through
from vitrail.model.adapters.targets import Piece

FACTOR_A, FACTOR_B, START = 0, 1, 3  # words of the counter; 2 is PRANC's


class NolaGroup(Group):
    """alpha [pieces, k] for A [outputs, rank], beta [pieces, l] for B [rank, inputs]."""

    layers: Tensor | None

    def __init__(self, config: Nola, pieces: Sequence[Piece], first: int, device: torch.device) -> None:
        super().__init__(pieces, first)
        self.config = config
        outputs, inputs = self.shape
        many, k, l = len(pieces), config.coefficients, config.coefficients_in or config.coefficients  # noqa: E741
        self.alpha = nn.Parameter(torch.empty(many, k, device=device))
        self.beta = nn.Parameter(torch.empty(many, l, device=device))
        self.remember_seed(config.seed)
        numbers = None if config.shared else torch.arange(first, first + many, device=device)
        self.register_buffer("layers", numbers, persistent=False)
        self.up_scale = config.scale / config.rank * math.sqrt(3 / (k * config.rank))
        self.down_scale = math.sqrt(3 / (l * inputs))
        self.elements = (outputs * config.rank, config.rank * inputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.beta)
        if self.alpha.is_meta:
            return
        many, k = self.alpha.shape
        like = torch.empty(0, dtype=torch.float32)
        start = bases(0, k, self.first, many, seed=self.config.seed, factor=START, layer=NO_LAYER, like=like)
        with torch.no_grad():
            self.alpha.copy_(start.T * math.sqrt(3))

    def changes(self, rows: slice = slice(None)) -> list[Change]:
        config = self.config
        layers = None if self.layers is None else self.layers[rows]

        def factor(coefficients: Tensor, number: int) -> Tensor:
            coefficients = straight_through(coefficients[rows], config.bits)
            return combine(coefficients, self.elements[number], seed=config.seed, factor=number, layers=layers)

        up = (factor(self.alpha, FACTOR_A) * self.up_scale).unflatten(1, (self.shape[0], config.rank))
        down = (factor(self.beta, FACTOR_B) * self.down_scale).unflatten(1, (config.rank, self.shape[1]))
        return [LowRank(*pair) for pair in zip(up.unbind(0), down.unbind(0), strict=True)]
