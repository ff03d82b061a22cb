"""The momentum encoder: an exponential moving average of a model, used as its teacher."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.classifier import Classifier


class MomentumCopy(nn.Module):
    """copy <- decay * copy + (1 - decay) * module, after every step; no gradient, part of checkpoints.

    With `steps` the decay rises on a cosine from `decay` to `end` over the run (BYOL: to 1); without, it is constant.
    Statistics of BatchNorm are its own: it is run in the mode of the module it follows.
    """

    def __init__(self, module: nn.Module, decay: float, steps: int | None = None, end: float = 1.0) -> None:
        super().__init__()
        self.decay, self.steps, self.end = decay, steps, end
        self.module = copy.deepcopy(module).requires_grad_(False)

    @classmethod
    def of(cls, module: nn.Module, decay: float, end: float | None, steps: int) -> MomentumCopy:
        """As configured: to `end` over `steps`, or constant where there is no end."""
        return cls(module, decay) if end is None else cls(module, decay, steps, end)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        with torch.no_grad():
            return self.module(*inputs, **options)

    @property
    def classifier(self) -> Classifier:
        """The copy, where it is one of a classifier."""
        assert isinstance(self.module, Classifier)
        return self.module

    def embed(self, images: Tensor) -> Tensor:
        """The copy's embeddings of images, of unit length, in float32 and without gradient: [batch, features]."""
        with torch.no_grad():
            found = self.classifier.head.embed(self.classifier.tokens(images))
            return F.normalize(found.float(), dim=-1)

    def decay_at(self, step: int) -> float:
        """Decay of a step (0 is the first)."""
        if self.steps is None:
            return self.decay
        return self.end - (self.end - self.decay) * (math.cos(math.pi * min(1.0, step / max(1, self.steps))) + 1) / 2

    @torch.no_grad()
    def follow(self, module: nn.Module, step: int) -> None:
        mine: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(mine, [p.detach() for p in module.parameters()], 1 - self.decay_at(step))
