"""Linear layers trained in 8-bit floats: all three products of a step; parameters and optimiser stay as they are.

x [rows, inputs], weight [outputs, inputs], gradient [rows, outputs]. Tensor cores multiply 8-bit floats along the rows
of both operands only, and each operand is multiplied along both of its dimensions: it is stored twice, as it is and
transposed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.fp8 import plain_product

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2  # gradients need the range, values the precision
LEAST = 1e-30  # peak of a tensor of zeros; gradients go down to 1e-12 and below
_TRITON = find_spec("triton") is not None


def tensorwise(x: Tensor, dtype: torch.dtype = FORWARD, add: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [rows, channels] in 8 bits, its transpose [channels, rows + padding], the factor that restores both, and with
    `add` the sum of the rows of x [channels] in float32 (else [0]).

    The largest magnitude of x becomes the largest number of the format. Maxima of rows come first: torch.compile
    computes them in the kernel that writes x.
    """
    largest = torch.finfo(dtype).max
    peak = x.abs().amax(-1).amax().float().clamp(min=LEAST)
    work = torch.ops.vitrail.fp8_layouts if x.is_cuda and _TRITON else plain_layouts
    small, transposed, total = work(x, largest / peak, dtype, add)
    return small, transposed, peak / largest, total


def plain_layouts(x: Tensor, factor: Tensor, dtype: torch.dtype, add: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x times `factor` in `dtype`, its transpose padded with zeros to a multiple of 16, and the sum of rows of x."""
    largest = torch.finfo(dtype).max
    scaled = (x.float() * factor).clamp(-largest, largest)
    total = x.float().sum(0) if add else x.new_empty(0, dtype=torch.float32)
    return scaled.to(dtype), F.pad(scaled.T, (0, -len(x) % 16)).contiguous().to(dtype), total


@torch.library.custom_op("vitrail::fp8_layouts", mutates_args=(), device_types="cuda")
def _layouts(x: Tensor, factor: Tensor, dtype: torch.dtype, add: bool) -> tuple[Tensor, Tensor, Tensor]:
    from vitrail.kernels import fp8_triton

    # Of float32, ptxas 12.8 compiles the kernel into one that writes undefined registers to the transpose.
    rows = x.to(torch.bfloat16) if x.dtype == torch.float32 else x
    return fp8_triton.layouts(rows.contiguous(), factor, dtype, add)


@_layouts.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype, add: bool) -> tuple[Tensor, Tensor, Tensor]:
    (rows, width), total = x.shape, x.new_empty(x.shape[1] if add else 0, dtype=torch.float32)
    return x.new_empty(rows, width, dtype=dtype), x.new_empty(width, rows + -rows % 16, dtype=dtype), total


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, fast: bool = True
) -> Tensor:
    """(a a_scale) (b b_scale)ᵀ + bias of 8-bit a [m, k] and b [n, k] -> [m, n], bf16 on CUDA and else float32.

    `fast` keeps partial sums in fewer bits, which long sums would show.
    """
    if a.is_cuda:
        bias, columns = None if bias is None else bias.to(torch.bfloat16), b_scale.T if b_scale.ndim else b_scale
        return torch._scaled_mm(a, b.T, a_scale, columns, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        out = plain_product(a, b, a_scale, b_scale)
        return out if bias is None else out + bias


class TensorwiseProduct(torch.autograd.Function):
    """x weightᵀ + bias with one scale per tensor, all three products in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x_small, x_transposed, x_scale, _ = tensorwise(x)
        w_small, w_transposed, w_scale, _ = tensorwise(weight)
        ctx.save_for_backward(x_transposed, x_scale, w_transposed, w_scale)
        ctx.biased, ctx.weight_dtype = bias is not None, weight.dtype
        out = product(x_small, w_small, x_scale, w_scale, bias)
        # No cast to the type that it has: torch.compile of PyTorch 2.11 (pytorch/pytorch#180642) takes the gradient of
        # an output that has two names for zero.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, x_scale, weight, w_scale = ctx.saved_tensors
        small, transposed, scale, to_bias = tensorwise(grad, BACKWARD, ctx.biased)
        to_input = product(small, weight, scale, w_scale).to(grad.dtype)
        to_weight = product(transposed, x, scale, x_scale, fast=False)  # a sum over all tokens
        return to_input, to_weight.to(ctx.weight_dtype), to_bias if ctx.biased else None


class Fp8TrainingLinear(nn.Linear):
    """A linear layer with products of 8-bit floats in training (emulated off CUDA), an ordinary one in evaluation.

    Under autocast the weight is rounded to its type first, as an ordinary layer's is.
    """

    product: ClassVar[type[torch.autograd.Function]] = TensorwiseProduct

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        kind = x.device.type
        rows = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
        out: Tensor = self.product.apply(rows.flatten(0, -2), self.weight.to(rows.dtype), self.bias)
        return out.unflatten(0, x.shape[:-1])


def train_in_fp8(model: nn.Module) -> None:
    """Let the linear layers of a model's blocks train in 8-bit floats, where both sizes are multiples of 16.

    Layers change their class and nothing else: parameters, their names and checkpoints are the same. Layers with an
    adapter, stem, norms and head stay as they are. Raises `ValueError` where there is no such layer.
    """
    blocks = getattr(getattr(model, "trunk", None), "blocks", None)
    layers = [] if blocks is None else [m for m in blocks.modules() if type(m) is nn.Linear]
    chosen = [m for m in layers if m.in_features % 16 == 0 and m.out_features % 16 == 0]
    if not chosen:
        raise ValueError(
            "engine.precision: fp8 is for linear layers in the blocks of our own trunks, with sizes that are multiples "
            "of 16, and this model has none; use bf16"
        )
    for layer in chosen:
        layer.__class__ = Fp8TrainingLinear
