"""SimA: attention without softmax, a product of three matrices whose q and k are normalised over tokens.

Every channel of q and of k is divided by its own norm over the tokens of its image, so

    q̂ (k̂ᵀ v) = q diag(1 / |q|) diag(1 / |k|) (kᵀ v):

one pass over the tokens gathers kᵀ v [dim, dim] and both norms, the small matrix is scaled, and a second pass
multiplies q by it. Neither q̂ nor k̂ is ever written.

qkv [batch, tokens, 3, heads, dim] -> [batch, tokens, heads, dim]
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

Norm = Literal["l1", "l2", "none"]
Order = Literal["auto", "qk_first", "kv_first"]
EPS = 1e-6
"""Smallest norm, in float32: torch's 1e-12 would be 0 in half precision and make gradients of 1e12 elsewhere."""
CROSSOVER = {"cpu": 1.0, "cuda": 1.0}
"""Tokens over channels of a head from which kᵀ v comes first. Products alone say 1 (2 N² d against 2 N d²)."""
_TRITON = find_spec("triton") is not None


def sima(qkv: Tensor, norm: Norm = "l1", order: Order = "auto") -> Tensor:
    """q̂ k̂ᵀ v; the kernel where it is able and no other order is asked for, else its plain twin."""
    if order != "qk_first" and able(qkv, norm):
        out: Tensor = torch.ops.vitrail.sima(qkv, None, 1 if norm == "l1" else 2)
        return out
    return plain_sima(qkv, norm, order)


def ragged_sima(qkv: Tensor, offsets: Tensor, norm: Norm = "l1") -> Tensor:
    """The same for images of different lengths: qkv [capacity, 3, heads, dim], offsets [batch + 1].

    Norms run over each image's own tokens. Rows beyond `offsets[-1]` come out as zeros.
    """
    if able(qkv[None], norm):
        out: Tensor = torch.ops.vitrail.sima(qkv, offsets, 1 if norm == "l1" else 2)
        return out
    bounds = offsets.tolist()
    parts = [plain_sima(qkv[None, a:b], norm)[0] for a, b in pairwise(bounds)]
    return torch.cat([*parts, qkv.new_zeros(len(qkv) - bounds[-1], *qkv.shape[2:])])


def plain_sima(qkv: Tensor, norm: Norm = "l1", order: Order = "auto") -> Tensor:
    """The same by PyTorch's own operations."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return product(normalised(q, norm), normalised(k, norm), v, order).transpose(1, 2)


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """Channels divided by their norm over tokens, x [..., tokens, dim]."""
    return x if norm == "none" else (x / channel_norm(x, norm)).to(x.dtype)


def channel_norm(x: Tensor, norm: Norm) -> Tensor:
    """The norm of every channel over tokens, x [..., tokens, dim] -> [..., 1, dim], at least in float32.

    The sum over many tokens leaves float16's range, and `EPS` lies below it.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if norm == "l1":
        return wide.abs().sum(-2, keepdim=True).clamp_min(EPS)
    return wide.square().sum(-2, keepdim=True).clamp_min(EPS**2).sqrt()


def product(q: Tensor, k: Tensor, v: Tensor, order: Order = "auto") -> Tensor:
    """q kᵀ v [..., tokens, dim] in the cheaper of its two orders, which are equal to rounding."""
    if order == "auto":
        order = cheaper(q.shape[-2], q.shape[-1], q.device.type)
    return (q @ k.mT) @ v if order == "qk_first" else q @ (k.mT @ v)


def cheaper(tokens: int, dim: int, device: str = "cpu") -> Order:
    """Which product comes first.

    >>> cheaper(16, 64), cheaper(197, 64)
    ('qk_first', 'kv_first')
    """
    return "qk_first" if tokens < CROSSOVER.get(device, 1.0) * dim else "kv_first"


def able(qkv: Tensor, norm: Norm = "l1") -> bool:
    """Whether the kernel takes this tensor: half precision, on CUDA, heads of 16 to 128 channels, a norm."""
    half = qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16)
    return _TRITON and half and norm != "none" and 16 <= qkv.shape[-1] <= 128


# Operators are declared here and call Triton when they run: torch.compile can see them without importing it.


@torch.library.custom_op("vitrail::sima", mutates_args=(), device_types="cuda")
def _sima(qkv: Tensor, offsets: Tensor | None, power: int) -> Tensor:
    """SimA with the norm of `power` 1 or 2; with `offsets` the batch is ragged."""
    from vitrail.kernels import sima_attention_triton as sima_triton

    return sima_triton.forward(qkv.contiguous(), offsets, power)


@torch.library.custom_op("vitrail::sima_backward", mutates_args=(), device_types="cuda")
def _sima_backward(qkv: Tensor, grad: Tensor, offsets: Tensor | None, power: int) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    from vitrail.kernels import sima_attention_triton as sima_triton

    return sima_triton.backward(qkv.contiguous(), grad.contiguous(), offsets, power)


_sima.register_fake(lambda qkv, *_: qkv.new_empty(*qkv.shape[:-3], *qkv.shape[-2:]))
_sima_backward.register_fake(lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: Tensor) -> None:
    qkv, offsets, power = inputs
    ctx.save_for_backward(qkv, *(() if offsets is None else (offsets,)))
    ctx.power = power


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    qkv, *rest = ctx.saved_tensors
    return _sima_backward(qkv, grad, rest[0] if rest else None, ctx.power), None, None


_sima.register_autograd(_gradient, setup_context=_save)
