"""Triton kernels of `vitrail.kernels.attention`, as an operator that autograd and torch.compile know."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634


class Tiles(NamedTuple):
    """How the work of a head is cut."""

    rows: int  # queries a forward program takes
    forward_warps: int
    keys: int  # keys a backward program takes at a time
    backward_warps: int


def tiles(tokens: int) -> Tiles:
    """By measurement on an H200 (`benchmarks/attention.py`)."""
    if tokens <= 64:
        return Tiles(64, 4, 64, 4)
    if tokens <= 128:
        return Tiles(128, 8, 64, 8)
    return Tiles(128, 8, 64, 8)


@triton.jit
def _forward(QKV, OUT, LSE, tokens, heads, scale, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """One program: M queries of one head against all of its keys (N, a power of two, holds them)."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    row = 3 * heads * D
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    base = QKV + image.to(tl.int64) * tokens * row + head * D
    q = tl.load(base + m[:, None] * row + d[None, :], mask=(m[:, None] < tokens) & (d[None, :] < D), other=0.0)
    k = tl.load(
        base + heads * D + n[:, None] * row + d[None, :], mask=(n[:, None] < tokens) & (d[None, :] < D), other=0.0
    )
    scores = tl.dot(q, tl.trans(k)) * scale
    scores = tl.where(n[None, :] < tokens, scores, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - top[:, None])
    total = tl.sum(weights, 1)
    v = tl.load(
        base + 2 * heads * D + n[:, None] * row + d[None, :], mask=(n[:, None] < tokens) & (d[None, :] < D), other=0.0
    )
    out = tl.dot(weights.to(v.dtype), v) / total[:, None]
    place = (image.to(tl.int64) * tokens + m) * heads + head
    tl.store(OUT + place[:, None] * D + d[None, :], out.to(v.dtype), mask=(m[:, None] < tokens) & (d[None, :] < D))
    tl.store(LSE + which.to(tl.int64) * tokens + m, top + tl.log2(total), mask=m < tokens)


@triton.jit
def _backward(
    QKV,
    OUT,
    GRAD,
    LSE,
    GRAD_QKV,
    tokens,
    heads,
    scale,
    plain_scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One program: a whole head. All queries (M, a power of two, holds them) against N keys at a time."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    row = 3 * heads * D
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    inside = (m[:, None] < tokens) & (d[None, :] < D)
    start = image.to(tl.int64) * tokens * row + head * D
    place = ((image.to(tl.int64) * tokens + m) * heads + head)[:, None] * D + d[None, :]
    grad = tl.load(GRAD + place, mask=inside, other=0.0)
    out = tl.load(OUT + place, mask=inside, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    q = tl.load(QKV + start + m[:, None] * row + d[None, :], mask=inside, other=0.0)
    lse = tl.load(LSE + which.to(tl.int64) * tokens + m, mask=m < tokens, other=float("inf"))
    grad_q = tl.zeros([M, DP], tl.float32)
    for first in range(0, tokens, N):
        n = first + tl.arange(0, N)
        there = (n[:, None] < tokens) & (d[None, :] < D)
        key = start + heads * D + n[:, None] * row + d[None, :]
        k = tl.load(QKV + key, mask=there, other=0.0)
        v = tl.load(QKV + key + heads * D, mask=there, other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
        weights = tl.where(n[None, :] < tokens, weights, 0.0)
        grad_v = tl.dot(tl.trans(weights.to(q.dtype)), grad)
        grad_scores = weights * (tl.dot(grad, tl.trans(v)) - delta[:, None]) * plain_scale
        grad_scores = grad_scores.to(q.dtype)
        grad_k = tl.dot(tl.trans(grad_scores), q)
        grad_q += tl.dot(grad_scores, k)
        tl.store(GRAD_QKV + key, grad_k.to(q.dtype), mask=there)
        tl.store(GRAD_QKV + key + heads * D, grad_v.to(q.dtype), mask=there)
    tl.store(GRAD_QKV + start + m[:, None] * row + d[None, :], grad_q.to(q.dtype), mask=inside)


def _power(number: int) -> int:
    return max(16, triton.next_power_of_2(number))


def forward(qkv: Tensor, cut: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """Attention [batch, tokens, heads, dim] and the base-2 logarithm of each query's sum [batch, heads, tokens]."""
    qkv = qkv.contiguous()
    batch, tokens, _, heads, dim = qkv.shape
    cut = cut or tiles(tokens)
    out = qkv.new_empty(batch, tokens, heads, dim)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)
    grid = (batch * heads, triton.cdiv(tokens, cut.rows))
    _forward[grid](
        qkv,
        out,
        lse,
        tokens,
        heads,
        _LOG2E * dim**-0.5,
        D=dim,
        DP=_power(dim),
        M=cut.rows,
        N=_power(tokens),
        num_warps=cut.forward_warps,
    )
    return out, lse


def backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cut: Tiles | None = None) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    qkv, grad = qkv.contiguous(), grad.contiguous()
    batch, tokens, _, heads, dim = qkv.shape
    cut = cut or tiles(tokens)
    grad_qkv = torch.empty_like(qkv)
    _backward[(batch * heads,)](
        qkv,
        out,
        grad,
        lse,
        grad_qkv,
        tokens,
        heads,
        _LOG2E * dim**-0.5,
        dim**-0.5,
        D=dim,
        DP=_power(dim),
        M=_power(tokens),
        N=cut.keys,
        num_warps=cut.backward_warps,
    )
    return grad_qkv


@torch.library.custom_op("vitrail::attention", mutates_args=(), device_types="cuda")
def attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """See `forward`."""
    return forward(qkv)


@torch.library.custom_op("vitrail::attention_backward", mutates_args=(), device_types="cuda")
def attention_backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """See `backward`."""
    return backward(qkv, out, lse, grad)


@attention.register_fake
def _(qkv: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, _, heads, dim = qkv.shape
    return qkv.new_empty(batch, tokens, heads, dim), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@attention_backward.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> Tensor:
    return attention_backward(*ctx.saved_tensors, grad)


attention.register_autograd(_gradient, setup_context=_remember)
