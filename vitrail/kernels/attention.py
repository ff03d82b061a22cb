"""Softmax attention for short sequences: every key of a head at once, on the output of the qkv layer as it lies.

Kernels made for long sequences waste most of a tile on 65 or 197 tokens, and cutting q, k and v out of one tensor and
gluing their gradients together again costs as much as the products. Here one program holds all keys of a head, reads q,
k and v where the linear layer left them, and writes gradients where that layer's backward wants them.

qkv [batch, tokens, 3, heads, dim] -> [batch, tokens, heads, dim]
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_TOKENS = 256
"""Keys (and, in the backward pass, queries) that one program can hold."""


def packed_attention(qkv: Tensor) -> Tensor:
    """softmax(q kᵀ / √dim) v; the kernel where it is able, else its plain twin."""
    if able(qkv):
        out: Tensor = _operator()(qkv)[0]
        return out
    return plain_packed_attention(qkv)


def plain_packed_attention(qkv: Tensor) -> Tensor:
    """The same by PyTorch's own attention."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def able(qkv: Tensor) -> bool:
    """Whether the kernel takes this tensor: half precision, on CUDA, few tokens, heads of 16 to 128 channels."""
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.shape[1] <= MOST_TOKENS
        and 16 <= qkv.shape[-1] <= 128
        and _triton()
    )


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def _operator():  # type: ignore[no-untyped-def]
    from vitrail.kernels import attention_triton

    return attention_triton.attention
