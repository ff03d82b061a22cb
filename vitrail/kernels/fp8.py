"""Linear layers in 8-bit floats (e4m3): half the bytes and twice the products of bf16, where there are units for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 448.0  # of e4m3


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [rows, channels] as e4m3, and the factor of each row [rows, 1] in float32 that restores it.

    A row's largest magnitude becomes the largest number of the format, so the error is relative to it.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def plain_fp8_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """What the accelerator computes, in float32: (x x_scale) (weight weight_scale)ᵀ."""
    return (x.float() * x_scale) @ (weight.float() * weight_scale).T


class Fp8Linear(nn.Module):
    """A linear layer with weights quantised once, by output channel, and inputs quantised as they come, by token."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantise(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        flat, factor = quantise(x.flatten(0, -2))
        if x.is_cuda:
            out = torch._scaled_mm(
                flat,
                self.weight.T,
                scale_a=factor,
                scale_b=self.scale.T,
                bias=self.bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        else:
            out = plain_fp8_product(flat, self.weight, factor, self.scale).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.unflatten(0, x.shape[:-1])
