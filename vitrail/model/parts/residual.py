"""Residual branches: normalisation layers, gains and stochastic depth, and their values by depth."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.model.parts.tokens import Tokens


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


class LayerScale(nn.Module):
    """Learned per-channel gain on a residual branch (CaiT, Touvron et al. 2021, arXiv 2103.17239).

    Starts at `init`, so a deep stack begins close to the identity and still has gradients in every branch
    (a gain of exactly zero would not); or uniformly in [0, 2 init]. `learned=False` freezes it. `shift` adds a learned
    constant: the post-operation affine map of ResMLP's equations, which its published counts do not have.
    """

    def __init__(
        self,
        width: int,
        init: float,
        start: Literal["constant", "uniform"] = "constant",
        learned: bool = True,
        shift: bool = False,
    ) -> None:
        super().__init__()
        self.init, self.start = init, start
        self.gamma = nn.Parameter(torch.empty(width), requires_grad=learned)
        self.shift = nn.Parameter(torch.empty(width)) if shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.start == "uniform":
            nn.init.uniform_(self.gamma, 0.0, 2 * self.init)
        else:
            nn.init.constant_(self.gamma, self.init)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, branch: Tensor) -> Tensor:  # [..., width]
        return branch * self.gamma if self.shift is None else torch.addcmul(self.shift, branch, self.gamma)


class ScalarGate(nn.Module):
    """One learned scalar per branch: ReZero and SkipInit start it at 0, Fixup at 1 with a shift (compared in CaiT)."""

    def __init__(self, init: float, shift: bool = False) -> None:
        super().__init__()
        self.init = init
        self.gain = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(1)) if shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.init)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, branch: Tensor) -> Tensor:
        return branch * self.gain if self.shift is None else branch * self.gain + self.shift


class DropPath(nn.Module):
    """Drops the whole branch of a sample with probability `rate` in training and rescales the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor, keep: Tensor | None = None) -> Tensor:  # [batch, ...]
        if keep is not None:  # drawn by the caller and shared: 0, or 1 / (1 - rate)
            return branch * keep.to(branch.dtype)
        if self.rate == 0.0 or not self.training:
            return branch
        # As torchvision.ops.stochastic_depth, whose import costs seconds.
        keep = branch.new_empty(len(branch), *[1] * (branch.ndim - 1)).bernoulli_(1 - self.rate)
        return branch * (keep / (1 - self.rate) if self.rate < 1 else keep)

    def rows(self, tokens: Tokens) -> Tensor | None:
        """One draw per image for packed tokens, as `forward` takes it: [capacity, 1]; none where all is kept."""
        if self.rate == 0.0 or not self.training or tokens.offsets is None:
            return None
        keep = torch.rand(len(tokens.offsets) - 1, device=tokens.sequence.device) >= self.rate
        row = torch.arange(len(tokens.sequence), device=keep.device)
        image = torch.bucketize(row, tokens.offsets[1:], right=True).clamp(max=len(keep) - 1)
        return (keep / (1 - self.rate))[image, None]

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def layerscale_init_for_depth(depth: int) -> float:
    """LayerScale's start by depth (CaiT, arXiv 2103.17239): 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond.

    >>> [layerscale_init_for_depth(d) for d in (12, 18, 24, 36)]
    [0.1, 0.1, 1e-05, 1e-06]
    """
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def drop_path_for_depth(depth: int) -> float:
    """Uniform drop-path rate by depth at width 384 (CaiT, arXiv 2103.17239): max(0.1 (depth / 12 - 1), 0).

    The printed formula, min(0.1 depth / 12 - 1, 0), is never positive; this one gives the rates of its own table.

    >>> [round(drop_path_for_depth(d), 3) for d in (12, 24, 36, 48)]
    [0.0, 0.1, 0.2, 0.3]
    """
    return max(0.1 * (depth / 12 - 1), 0.0)


def drop_path_rates(rate: float, depth: int, rule: str) -> list[float]:
    """The rate of every block: rising linearly to `rate`, or the same everywhere."""
    if rule == "uniform" or depth == 1:
        return [rate] * depth
    return [rate * i / (depth - 1) for i in range(depth)]
