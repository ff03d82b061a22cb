"""Softmax attention of packed batches: images of different lengths, one after the other.

Image b owns rows offsets[b] to offsets[b + 1] of a tensor whose length is fixed; rows from offsets[-1] on are
padding, change no result and come out as zeros. The kernel reads q, k and v where the linear layer left them.
Where `queries` names rows, only those ask (ATS: tokens that are dropped are still seen by those that stay).

qkv [rows, 3, heads, dim], offsets [batch + 1] -> [rows, heads, dim], or [len(queries), heads, dim]
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.packing import owners, repack, unpack

_TRITON = find_spec("triton") is not None


def ragged_attention(
    qkv: Tensor, offsets: Tensor, queries: Tensor | None = None, query_offsets: Tensor | None = None, *, most: int
) -> Tensor:
    """softmax(q kᵀ / √dim) v within each image; the kernel where it is able, else its plain twin.

    `queries` [capacity] names rows that ask, each once; image b's stand at query_offsets[b] to query_offsets[b + 1].
    `most` is the largest number of tokens an image can have, and must be true: it is never compared with the offsets,
    since that would wait for the device.
    """
    if (queries is None) != (query_offsets is None):
        raise ValueError("queries and query_offsets come together; give both or neither")
    if able(qkv):
        out: Tensor = torch.ops.vitrail.ragged_attention(qkv, offsets, queries, query_offsets, most)[0]
        return out
    return plain_ragged_attention(qkv, offsets, queries, query_offsets, most=most)


def plain_ragged_attention(
    qkv: Tensor, offsets: Tensor, queries: Tensor | None = None, query_offsets: Tensor | None = None, *, most: int
) -> Tensor:
    """The same by PyTorch's own attention, padded and masked."""
    dense, real = unpack(qkv, offsets, most)
    q, k, v = dense.permute(2, 0, 3, 1, 4).unbind(0)
    if queries is not None:
        assert query_offsets is not None
        asked = torch.where(owners(query_offsets, len(queries))[2], queries, 0)
        q = unpack(qkv[:, 0][asked], query_offsets, most)[0].transpose(1, 2)
    # An image without tokens attends to one of zeros: a softmax over nothing would be NaN.
    keys = real | (torch.arange(most, device=qkv.device) == 0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys[:, None, None]).transpose(1, 2)
    if query_offsets is None or queries is None:
        return repack(out, offsets, len(qkv))
    return repack(out, query_offsets, len(queries))


def able(qkv: Tensor) -> bool:
    """Whether the kernel takes this tensor: half precision, on CUDA, heads of 16 to 128 channels."""
    return _TRITON and qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16) and 16 <= qkv.shape[-1] <= 128


# Operators are declared here and call Triton when they run: torch.compile can see them without importing it.


@torch.library.custom_op("vitrail::ragged_attention", mutates_args=(), device_types="cuda")
def _attention(
    qkv: Tensor, offsets: Tensor, queries: Tensor | None, query_offsets: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    """Attention, and the base-2 logarithm of every query's sum of exponentials [heads, queries]."""
    from vitrail.kernels import ragged_attention_triton

    return ragged_attention_triton.forward(qkv.contiguous(), offsets, queries, query_offsets, most)


@torch.library.custom_op("vitrail::ragged_attention_backward", mutates_args=(), device_types="cuda")
def _attention_backward(
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    offsets: Tensor,
    queries: Tensor | None,
    query_offsets: Tensor | None,
    most: int,
) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    from vitrail.kernels import ragged_attention_triton

    return ragged_attention_triton.backward(
        qkv.contiguous(), out, lse, grad.contiguous(), offsets, queries, query_offsets, most
    )


@_attention.register_fake
def _(qkv: Tensor, offsets: Tensor, queries: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, dim = len(qkv), *qkv.shape[2:]
    asked = rows if queries is None else len(queries)
    return qkv.new_empty(asked, heads, dim), qkv.new_empty(heads, asked, dtype=torch.float32)


_attention_backward.register_fake(lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, int], output: tuple[Tensor, Tensor]
) -> None:
    qkv, offsets, queries, query_offsets, most = inputs
    asked = () if queries is None or query_offsets is None else (queries, query_offsets)
    ctx.save_for_backward(qkv, *output, offsets, *asked)
    ctx.most = most


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None]:
    qkv, out, lse, offsets, *asked = ctx.saved_tensors
    queries, query_offsets = asked or (None, None)
    grad = _attention_backward(qkv, out, lse, grad, offsets, queries, query_offsets, ctx.most)
    return grad, None, None, None, None


_attention.register_autograd(_gradient, setup_context=_save)
