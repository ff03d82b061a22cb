"""GELU, exact to float32's rounding, in few enough operations to be bound by memory and not by arithmetic.

erf by Abramowitz and Stegun 7.1.26 (absolute error at most 1.5e-7) needs one exponential, and that exponential is also
the density in the derivative. torch.compile makes one kernel of each direction; without it, PyTorch's own is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_A1, _A2, _A3, _A4, _A5 = 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429
_P = 0.3275911 * math.sqrt(0.5)
_EXPONENT = -0.5 * math.log2(math.e)  # exp(-x² / 2) = 2 ** (_EXPONENT x²)
_DENSITY = 1 / math.sqrt(2 * math.pi)
HALF = (torch.bfloat16, torch.float16)


def _distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Φ(x) and exp(-x² / 2) of the standard normal."""
    t = 1 / (1 + _P * x.abs())
    bell = torch.exp2(_EXPONENT * x * x)
    tail = 0.5 * bell * t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5))))  # Φ(-|x|)
    return torch.where(x < 0, tail, 1 - tail), bell


class _FewOperations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, bell = _distribution(wide)
        return (grad.float() * (below + wide * bell * _DENSITY)).to(x.dtype)


def few_operations_gelu(x: Tensor) -> Tensor:
    """x Φ(x) of half-precision x, computed in float32.

    Not for float32: there `x.float()` is x itself, and torch.compile of PyTorch 2.11 lost the first term of the
    gradient of a function that works on its own input under a second name.
    """
    assert x.dtype in HALF or not torch.compiler.is_compiling()
    out: Tensor = _FewOperations.apply(x)
    return out


class Gelu(nn.Module):
    """x Φ(x)."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.is_cuda and x.dtype in HALF:
            return few_operations_gelu(x)
        return F.gelu(x)


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=(), device_types="cuda")
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return out


_linear_gelu.register_fake(lambda x, weight, bias: x.new_empty(len(x), len(weight)))


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of a linear layer [..., inputs] -> [..., outputs] with the activation inside the product: for inference.

    On CUDA in half precision that is the tanh approximation of GELU, which is off by at most 5e-4 and costs nothing;
    elsewhere the exact one.
    """
    if x.is_cuda and x.dtype in HALF:
        out: Tensor = torch.ops.vitrail.linear_gelu(x.flatten(0, -2), weight, bias)
        return out.unflatten(0, x.shape[:-1])
    return F.gelu(F.linear(x, weight, bias))
