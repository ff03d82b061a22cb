"""A moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A second copy of the model that follows it: average <- average + (1 - decay) * (weights - average).

    The decay rises from 0.1 as (1 + step) / (10 + step) up to its value, so that short runs do not average in their
    random start. It depends on the step alone: resuming needs no counter. What changes from step to step is a tensor
    on the device, so that `follow` can be replayed by a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.share = torch.zeros((), device=next(self.model.parameters()).device)  # 1 - decay of this step

    def set_step(self, step: int) -> None:
        """Prepare `follow` for optimiser step `step` (0 is the first)."""
        self.share.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Follow the weights; buffers are copied."""
        mine: list[Tensor] = list(self.model.parameters())
        away = torch._foreach_sub([p.detach() for p in model.parameters()], mine)
        torch._foreach_mul_(away, self.share)
        torch._foreach_add_(mine, away)
        for own, other in zip(self.model.buffers(), model.buffers(), strict=True):
            own.copy_(other)
