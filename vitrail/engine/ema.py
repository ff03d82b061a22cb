"""A moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A second copy of the model that follows it: average <- decay * average + (1 - decay) * weights.

    The decay rises from 0.1 as (1 + step) / (10 + step) up to its value, so that short runs do not average in their
    random start. It depends on the step alone: resuming needs no counter.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Follow the weights after optimiser step `step` (0 is the first); buffers are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        mine: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(mine, [p.detach() for p in model.parameters()], 1 - decay)
        for own, other in zip(self.model.buffers(), model.buffers(), strict=True):
            own.copy_(other)
