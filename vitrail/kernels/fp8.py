"""Linear layers in 8-bit floats (e4m3): half the bytes and twice the products of bf16, where there are units for it."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 448.0  # of e4m3
_TRITON = find_spec("triton") is not None


def supports_fp8(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit floats: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantise(x: Tensor, least: float = 1e-12) -> tuple[Tensor, Tensor]:
    """Rows of x [rows, channels] as e4m3, and the factor of each row [rows, 1] in float32 that restores it.

    A row's largest magnitude becomes the largest number of the format, so the error is relative to it; `least` stands
    in for smaller ones.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=least) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise(gelu(x))`, in one pass over x on CUDA."""
    if x.is_cuda and _TRITON:
        small, scale = torch.ops.vitrail.gelu_quantise(x)
        return small, scale
    return quantise(F.gelu(x))


@torch.library.custom_op("vitrail::gelu_quantise", mutates_args=(), device_types="cuda")
def _gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    from vitrail.kernels import fp8_triton

    return fp8_triton.gelu_quantise(x.contiguous())


_gelu_quantise.register_fake(
    lambda x: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32))
)


def plain_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """The accelerator's product in float32: (x x_scale) (weight weight_scale)ᵀ."""
    return (x.float() * x_scale) @ (weight.float() * weight_scale).T


class Fp8Linear(nn.Module):
    """A linear layer with weights quantised once, by output channel, and inputs quantised as they come, by token.

    With `gelu` its input is GELU of what it is given: the second half of an MLP.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, gelu: bool = False) -> None:
        super().__init__()
        weight, scale = quantise(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = layer.bias
        self.prepare = gelu_quantise if gelu else quantise

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        small, factor = self.prepare(x.flatten(0, -2))
        if x.is_cuda:
            scales = {"scale_a": factor, "scale_b": self.scale.T, "bias": self.bias}
            out = torch._scaled_mm(small, self.weight.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            out = plain_product(small, self.weight, factor, self.scale).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.unflatten(0, x.shape[:-1])
