"""Triton kernels of `vitrail.kernels.ragged_attention`.

A program is a tile of an image's queries (or, for the gradients of k and v, keys) in one head, and goes over the tiles
of the other side. The grid has as many tiles per image as the longest can have; those past an image's end do nothing
but their share of the padding rows, which they fill with zeros: no pass over the whole output for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.attention_triton import LOG2E, power_of_two

FORWARD = ((32, 32, 32, 2), (64, 64, 64, 4), (None, 64, 64, 4))
"""Up to how many tokens per image: queries and keys of a tile, warps."""
BACKWARD = ((32, 32, 32, 2), (64, 64, 64, 4), (None, 64, 64, 4))
"""The same for the gradients."""


@triton.jit
def _span(OFFSETS, image):
    """First row and number of rows of an image."""
    first = tl.load(OFFSETS + image).to(tl.int64)
    return first, (tl.load(OFFSETS + image + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def _take(at, rows, real, stride, D: tl.constexpr, DP: tl.constexpr):
    """Rows of a head, [rows, DP], zeros where they are not real."""
    d = tl.arange(0, DP)
    return tl.load(at + rows[:, None] * stride + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _put(at, value, rows, real, stride, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(
        at + rows[:, None] * stride + d[None, :], value.to(at.dtype.element_ty), mask=real[:, None] & (d[None, :] < D)
    )


@triton.jit
def _clear(at, OFFSETS, heads, rows, stride, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr):
    """Zeros in this program's share of a head's rows from the last image's end to `rows`."""
    end = tl.load(OFFSETS + tl.num_programs(0) // heads).to(tl.int64)
    tile = (tl.program_id(0) // heads).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    first = end + tile * M
    if first < rows:
        row = first + tl.arange(0, M)
        _put(at, tl.zeros([M, DP], tl.float32), row, row < rows, stride, D, DP)


@triton.jit
def _asking(QUERIES, first, at, count, M: tl.constexpr, SOME: tl.constexpr):
    """A tile of an image's queries: their places among all queries, their rows, and which are real."""
    m = at + tl.arange(0, M)
    real = m < count
    place = first + m
    rows = tl.load(QUERIES + place, mask=real, other=0).to(tl.int64) if SOME else place
    return place, rows, real


@triton.jit
def _forward(
    QKV, OFFSETS, QUERIES, QUERY_OFFSETS, OUT, LSE, asked, heads, scale,
    SOME: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program: M queries of an image in one head."""
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stride = 3 * heads * D
    QKV += head * D
    OUT += head * D
    _clear(OUT, QUERY_OFFSETS, heads, asked, heads * D, D, DP, M)
    first, tokens = _span(OFFSETS, image)
    first_query, count = _span(QUERY_OFFSETS, image)
    at = tl.program_id(1) * M
    if at < count:
        place, rows, real = _asking(QUERIES, first_query, at, count, M, SOME)
        q = _take(QKV, rows, real, stride, D, DP)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        out = tl.zeros([M, DP], tl.float32)
        for start in range(0, tokens, N):
            n = start + tl.arange(0, N)
            k = _take(QKV + heads * D, first + n, n < tokens, stride, D, DP)
            v = _take(QKV + 2 * heads * D, first + n, n < tokens, stride, D, DP)
            scores = tl.where(n[None, :] < tokens, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, out * fade[:, None])
            top = higher
        _put(OUT, out / total[:, None], place, real, heads * D, D, DP)
        tl.store(LSE + head.to(tl.int64) * asked + place, top + tl.log2(total), mask=real)


@triton.jit
def _inner(q, k, v, grad, delta, lse, n, tokens, scale, plain_scale):
    """Weights [queries, keys] again, and the gradient of q kᵀ."""
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    weights = tl.where(n[None, :] < tokens, weights, 0.0)
    inner = weights * (tl.dot(grad, tl.trans(v)) - delta[:, None]) * plain_scale
    return weights.to(q.dtype), inner.to(q.dtype)


@triton.jit
def _backward_queries(
    QKV, OFFSETS, QUERIES, QUERY_OFFSETS, OUT, LSE, GRAD, DELTA, MADE, asked, heads, scale, plain_scale,
    SOME: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of M queries of an image in one head, and their Σ out · grad for `_backward_keys`."""
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stride = 3 * heads * D
    QKV += head * D
    sums = head.to(tl.int64) * asked
    first, tokens = _span(OFFSETS, image)
    first_query, count = _span(QUERY_OFFSETS, image)
    at = tl.program_id(1) * M
    if at < count:
        place, rows, real = _asking(QUERIES, first_query, at, count, M, SOME)
        q = _take(QKV, rows, real, stride, D, DP)
        grad = _take(GRAD + head * D, place, real, heads * D, D, DP)
        out = _take(OUT + head * D, place, real, heads * D, D, DP)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(DELTA + sums + place, delta, mask=real)
        # Queries that are not there have an infinite sum, so all of their weights are 0.
        lse = tl.load(LSE + sums + place, mask=real, other=float("inf"))
        grad_q = tl.zeros([M, DP], tl.float32)
        for start in range(0, tokens, N):
            n = start + tl.arange(0, N)
            k = _take(QKV + heads * D, first + n, n < tokens, stride, D, DP)
            v = _take(QKV + 2 * heads * D, first + n, n < tokens, stride, D, DP)
            _, inner = _inner(q, k, v, grad, delta, lse, n, tokens, scale, plain_scale)
            grad_q = tl.dot(inner, k, grad_q)
        _put(MADE + head * D, grad_q, rows, real, stride, D, DP)


@triton.jit
def _backward_keys(
    QKV, OFFSETS, QUERIES, QUERY_OFFSETS, LSE, GRAD, DELTA, MADE, all_rows, asked, heads, scale, plain_scale,
    SOME: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of N keys and values of an image in one head."""
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stride = 3 * heads * D
    QKV += head * D
    MADE += head * D
    sums = head.to(tl.int64) * asked
    for part in tl.static_range(3):
        _clear(MADE + part * heads * D, OFFSETS, heads, all_rows, stride, D, DP, N)
    first, tokens = _span(OFFSETS, image)
    first_query, count = _span(QUERY_OFFSETS, image)
    at = tl.program_id(1) * N
    if at < tokens:
        n = at + tl.arange(0, N)
        k = _take(QKV + heads * D, first + n, n < tokens, stride, D, DP)
        v = _take(QKV + 2 * heads * D, first + n, n < tokens, stride, D, DP)
        grad_k = tl.zeros([N, DP], tl.float32)
        grad_v = tl.zeros([N, DP], tl.float32)
        for start in range(0, count, M):
            place, rows, real = _asking(QUERIES, first_query, start, count, M, SOME)
            q = _take(QKV, rows, real, stride, D, DP)
            grad = _take(GRAD + head * D, place, real, heads * D, D, DP)
            lse = tl.load(LSE + sums + place, mask=real, other=float("inf"))
            delta = tl.load(DELTA + sums + place, mask=real, other=0.0)
            weights, inner = _inner(q, k, v, grad, delta, lse, n, tokens, scale, plain_scale)
            grad_v = tl.dot(tl.trans(weights), grad, grad_v)
            grad_k = tl.dot(tl.trans(inner), q, grad_k)
        _put(MADE + heads * D, grad_k, first + n, n < tokens, stride, D, DP)
        _put(MADE + 2 * heads * D, grad_v, first + n, n < tokens, stride, D, DP)


def tiles(table: tuple[tuple[int | None, int, int, int], ...], most: int) -> tuple[int, int, int]:
    """Queries and keys of a tile and warps, for images of at most `most` tokens."""
    return next(tuple(sizes) for limit, *sizes in table if limit is None or most <= limit)  # type: ignore[return-value]


def _room(like: Tensor, shape: tuple[int, ...], batch: int, most: int) -> Tensor:
    """Room for an output: the programs of all images reach every padding row, unless capacity is beyond all need."""
    return like.new_empty(shape) if shape[0] <= batch * most else like.new_zeros(shape)


def forward(
    qkv: Tensor, offsets: Tensor, queries: Tensor | None, query_offsets: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    """Attention [queries, heads, dim] and the base-2 logarithm of each query's sum [heads, queries]."""
    rows, _, heads, dim = qkv.shape
    batch = len(offsets) - 1
    asked = rows if queries is None else len(queries)
    m, n, warps = tiles(FORWARD, most)
    out = _room(qkv, (asked, heads, dim), batch, most)
    lse = torch.empty(heads, asked, dtype=torch.float32, device=qkv.device)
    layout = _layout(qkv, offsets, queries, query_offsets)
    sizes = _sizes(queries, dim, m, n, warps)
    _forward[(batch * heads, triton.cdiv(most, m))](*layout, out, lse, asked, heads, LOG2E * dim**-0.5, **sizes)
    return out, lse


def backward(
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
    rows, _, heads, dim = qkv.shape
    batch = len(offsets) - 1
    asked = len(out)
    m, n, warps = tiles(BACKWARD, most)
    # Rows that did not ask have no gradient of q, and no program.
    grad_qkv = _room(qkv, tuple(qkv.shape), batch, most) if queries is None else torch.zeros_like(qkv)
    delta = torch.empty_like(lse)
    layout = _layout(qkv, offsets, queries, query_offsets)
    scales = (asked, heads, LOG2E * dim**-0.5, dim**-0.5)
    sizes = _sizes(queries, dim, m, n, warps)
    all_heads = batch * heads
    _backward_queries[(all_heads, triton.cdiv(most, m))](*layout, out, lse, grad, delta, grad_qkv, *scales, **sizes)
    _backward_keys[(all_heads, triton.cdiv(most, n))](*layout, lse, grad, delta, grad_qkv, rows, *scales, **sizes)
    return grad_qkv


def _layout(
    qkv: Tensor, offsets: Tensor, queries: Tensor | None, query_offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return qkv, offsets, offsets if queries is None else queries, offsets if query_offsets is None else query_offsets


def _sizes(queries: Tensor | None, dim: int, m: int, n: int, warps: int) -> dict[str, int]:
    # Wider heads want more shared memory in three stages than many devices have.
    launch = {"num_warps": warps, "num_stages": 3 if dim <= 64 else 2}
    return {"SOME": queries is not None, "D": dim, "DP": power_of_two(dim), "M": m, "N": n, **launch}
