"""Normalisation layers: LayerNorm, BatchNorm, Affine, or none."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """A learned gain and shift per channel, without statistics (ResMLP, arXiv 2105.03404). Starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(width))
        self.beta = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return torch.addcmul(self.beta, self.alpha, x)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm over every token of the batch."""

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        return super().forward(x.flatten(0, 1)).view_as(x)


def make_norm(kind: str, width: int, eps: float = 1e-6) -> nn.Module:
    """The norm of a name of `TrunkConfig.norm`."""
    if kind == "layernorm":
        return nn.LayerNorm(width, eps=eps)
    if kind == "batchnorm":
        return TokenBatchNorm(width)
    return Affine(width) if kind == "affine" else nn.Identity()
