"""Linear layers trained in 8-bit floats; parameters and optimiser stay as they are.

x [rows, inputs], weight [outputs, inputs], gradient [rows, outputs]. The products of the output and of the input's
gradient are of 8-bit floats (e4m3) with one scale per token and per channel. The gradient of the weight, a sum over all
tokens, stays in bf16: tensor cores multiply 8-bit floats along rows only, and the transposed copies that it would need
cost as much time as its product would save (docs/results/speed-profiles.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.kernels.fp8 import plain_product, quantise

LEAST = 1e-30  # largest magnitude of a row of zeros; gradients go down to 1e-12 and below


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """(a a_scale) (b b_scale)ᵀ + bias of 8-bit a [m, k] and b [n, k] -> [m, n], bf16 on CUDA and else float32."""
    if a.is_cuda:
        bias = None if bias is None else bias.to(torch.bfloat16)
        return torch._scaled_mm(a, b.T, a_scale, b_scale.T, bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    with torch.autocast(a.device.type, enabled=False):
        out = plain_product(a, b, a_scale, b_scale)
        return out if bias is None else out + bias


class RowwiseProduct(torch.autograd.Function):
    """x weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *quantise(weight.T.contiguous()))
        ctx.biased, ctx.weight_dtype = bias is not None, weight.dtype
        (small, scale), (w_small, w_scale) = quantise(x), quantise(weight)
        out = product(small, w_small, scale, w_scale, bias)
        # No cast to the type that it has: torch.compile of PyTorch 2.11 (pytorch/pytorch#180642) takes the gradient of
        # an output that has two names for zero.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, w_scale = ctx.saved_tensors
        small, scale = quantise(grad, LEAST)
        to_input = product(small, weight, scale, w_scale).to(grad.dtype)
        # The sum of rows as a product: as a sum, torch.compile would keep all of `grad` in float32 for it.
        to_bias = (grad.new_ones(1, len(grad)) @ grad)[0].float() if ctx.biased else None
        return to_input, (grad.T @ x).to(ctx.weight_dtype), to_bias


class Fp8TrainingLinear(nn.Linear):
    """A linear layer with products of 8-bit floats in training (emulated off CUDA), an ordinary one in evaluation.

    Under autocast the weight is rounded to its type first, as an ordinary layer's is.
    """

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        kind = x.device.type
        rows = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
        out: Tensor = RowwiseProduct.apply(rows.flatten(0, -2), self.weight.to(rows.dtype), self.bias)
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
