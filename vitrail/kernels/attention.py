"""Softmax attention for short sequences, on the output of the qkv layer as it lies.

Kernels made for long sequences waste most of a tile on 65 or 197 tokens, and cutting q, k and v out of one tensor and
gluing their gradients together again costs as much as the products. Here one program holds a whole head, reads q, k and
v where the linear layer left them, and writes gradients where that layer's backward wants them. Above 128 tokens
cuDNN's forward pass is the faster one and is used with our backward.

qkv [batch, tokens, 3, heads, dim] -> [batch, tokens, heads, dim]
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_TOKENS = 256
"""Queries and keys that one program can hold in the backward pass."""
_TRITON = find_spec("triton") is not None


def packed_attention(qkv: Tensor, size: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √dim) v, in which keys count `size` [batch, tokens] times (none: once; float32, no gradient); the
    kernel where it is able (with sizes: in inference), else its plain twin."""
    graded = torch.is_grad_enabled() and qkv.requires_grad
    if able(qkv) and not (graded and size is not None):
        out: Tensor = torch.ops.vitrail.attention(qkv, graded, size)[0]
        return out
    return plain_packed_attention(qkv, size)


def plain_packed_attention(qkv: Tensor, size: Tensor | None = None) -> Tensor:
    """The same by PyTorch's own attention."""
    if size is None and prefers_map(qkv):
        return attention_by_map(qkv)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    bias = None if size is None else size.log()[:, None, None].to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def prefers_map(qkv: Tensor) -> bool:
    """Whether learning is faster with the map stored: PyTorch's fused backward in bf16 is not made for a CPU's matrix
    units (65 tokens: seven times the time of the products on one with AMX)."""
    learns = torch.is_grad_enabled() and qkv.requires_grad and qkv.dtype is torch.bfloat16
    return learns and qkv.device.type == "cpu" and qkv.shape[1] <= MOST_TOKENS


def attention_by_map(qkv: Tensor) -> Tensor:
    """The same with its map stored for the backward pass."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1).contiguous()
    return (scores.softmax(-1) @ v).transpose(1, 2)


def able(qkv: Tensor) -> bool:
    """Whether the kernel takes this tensor: half precision, on CUDA, few tokens, heads of 16 to 128 channels."""
    half = qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16)
    return _TRITON and half and qkv.shape[1] <= MOST_TOKENS and 16 <= qkv.shape[-1] <= 128


# Operators are declared here and call Triton when they run: torch.compile can see them without importing it.


@torch.library.custom_op("vitrail::attention", mutates_args=(), device_types="cuda")
def _attention(qkv: Tensor, sums: bool, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention, and the base-2 logarithm of every query's sum of exponentials [batch, heads, tokens].

    Without `sums` (inference) the latter need not be filled.
    """
    from vitrail.kernels import attention_triton

    qkv = qkv.contiguous()
    if size is not None:
        return attention_triton.forward(qkv, size.contiguous())
    if qkv.shape[1] > attention_triton.WHOLE_TOKENS and torch.cuda.get_device_capability(qkv.device) >= (9, 0):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, sums)
        lse = lse.view(q.shape[:3]) * attention_triton.LOG2E if sums else _no_sums(qkv)
        return out.transpose(1, 2).contiguous(), lse
    return attention_triton.forward(qkv)


@torch.library.custom_op("vitrail::attention_backward", mutates_args=(), device_types="cuda")
def _attention_backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    from vitrail.kernels import attention_triton

    return attention_triton.backward(qkv.contiguous(), out, lse, grad.contiguous())


def _no_sums(qkv: Tensor) -> Tensor:
    batch, tokens, _, heads, _ = qkv.shape
    return qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


_attention.register_fake(lambda qkv, *_: (qkv.new_empty(*qkv.shape[:2], *qkv.shape[3:]), _no_sums(qkv)))
_attention_backward.register_fake(lambda qkv, *_: qkv.new_empty(qkv.shape))


def _save(ctx: Any, inputs: tuple[Tensor, bool, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    return _attention_backward(*ctx.saved_tensors, grad), None, None


_attention.register_autograd(_gradient, setup_context=_save)
