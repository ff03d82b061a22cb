"""Quantised coefficients: integers of few bits and one scale per layer, symmetric around 0.

NOLA (arXiv 2310.02556) quantises its coefficients but does not specify the quantiser. Here the largest magnitude of a
row becomes 2^(bits - 1) - 1, so that 0 stays 0: with 2 bits there are -1, 0 and 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_whole(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values [layers, ...] as whole numbers of `bits` bits, int8, and the scale of each layer [layers, 1, ...].

    Raises `ValueError` outside of 2 to 8 bits.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"coefficients are quantised to 2 to 8 bits, not {bits}")
    most = 2 ** (bits - 1) - 1
    inner = tuple(range(1, values.ndim))
    scale = values.detach().abs().amax(inner, keepdim=True) / most
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values.detach() / scale).round().clamp(-most, most).to(torch.int8), scale


def from_whole(whole: Tensor, scale: Tensor) -> Tensor:
    """The values that whole numbers stand for."""
    return whole.to(scale.dtype) * scale


def rounded(values: Tensor, bits: int) -> Tensor:
    """The nearest values that `bits` bits a number can store."""
    return from_whole(*to_whole(values, bits))


def straight_through(values: Tensor, bits: int | None) -> Tensor:
    """Rounded values whose gradient is that of the values themselves; without `bits`, the values."""
    if bits is None:
        return values
    made: Tensor = _StraightThrough.apply(values, bits)
    return made


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        return rounded(values, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None
