"""Triton kernels of `vitrail.kernels.attention`.

Up to 128 tokens a head is held in two parts, of A and B tokens: 65 tokens are 64 + 16 places and not 128, which is less
than half of the products. Above, all queries are held in one part and keys come N at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
WHOLE_TOKENS = 128
"""Up to here the forward pass is one program per head, too."""


@triton.jit
def _load(at, first, count: tl.constexpr, tokens, row, D: tl.constexpr, DP: tl.constexpr):
    """Rows `first` to `first + count` of a head [tokens, D], zeros beyond."""
    n = first + tl.arange(0, count)
    d = tl.arange(0, DP)
    return tl.load(at + n[:, None] * row + d[None, :], mask=(n[:, None] < tokens) & (d[None, :] < D), other=0.0)


@triton.jit
def _store(at, value, first, count: tl.constexpr, tokens, row, D: tl.constexpr, DP: tl.constexpr):
    n = first + tl.arange(0, count)
    d = tl.arange(0, DP)
    tl.store(
        at + n[:, None] * row + d[None, :], value.to(at.dtype.element_ty), mask=(n[:, None] < tokens) & (d[None, :] < D)
    )


@triton.jit
def _scores(q, k, SIZE, first, count: tl.constexpr, tokens, scale, SIZED: tl.constexpr):
    n = first + tl.arange(0, count)
    scores = tl.dot(q, tl.trans(k)) * scale
    if SIZED:
        scores += tl.log2(tl.load(SIZE + n, mask=n < tokens, other=1.0))[None, :]
    return tl.where(n[None, :] < tokens, scores, float("-inf"))


@triton.jit
def _attend(q, ka, va, kb, vb, SIZE, tokens, scale, A: tl.constexpr, B: tl.constexpr, SIZED: tl.constexpr):
    """Attention of some queries to all keys, and the base-2 logarithm of each query's sum."""
    sa = _scores(q, ka, SIZE, 0, A, tokens, scale, SIZED)
    top = tl.max(sa, 1)
    if B > 0:
        sb = _scores(q, kb, SIZE, A, B, tokens, scale, SIZED)
        top = tl.maximum(top, tl.max(sb, 1))
        pb = tl.exp2(sb - top[:, None])
    pa = tl.exp2(sa - top[:, None])
    total = tl.sum(pa, 1)
    out = tl.dot(pa.to(va.dtype), va)
    if B > 0:
        total += tl.sum(pb, 1)
        out = tl.dot(pb.to(vb.dtype), vb, out)
    return out / total[:, None], top + tl.log2(total)


@triton.jit
def _forward_whole(
    QKV, SIZE, OUT, LSE, tokens, heads, scale,
    D: tl.constexpr, DP: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SIZED: tl.constexpr,
):  # fmt: skip
    """One program: a whole head of at most A + B tokens."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    SIZE += image.to(tl.int64) * tokens
    row = 3 * heads * D
    base = QKV + image.to(tl.int64) * tokens * row + head * D
    out = OUT + (image.to(tl.int64) * tokens * heads + head) * D
    lse = LSE + which.to(tl.int64) * tokens
    ka = _load(base + heads * D, 0, A, tokens, row, D, DP)
    va = _load(base + 2 * heads * D, 0, A, tokens, row, D, DP)
    kb, vb = ka, va
    if B > 0:
        kb = _load(base + heads * D, A, B, tokens, row, D, DP)
        vb = _load(base + 2 * heads * D, A, B, tokens, row, D, DP)
    qa = _load(base, 0, A, tokens, row, D, DP)
    oa, la = _attend(qa, ka, va, kb, vb, SIZE, tokens, scale, A, B, SIZED)
    _store(out, oa, 0, A, tokens, heads * D, D, DP)
    m = tl.arange(0, A)
    tl.store(lse + m, la, mask=m < tokens)
    if B > 0:
        qb = _load(base, A, B, tokens, row, D, DP)
        ob, lb = _attend(qb, ka, va, kb, vb, SIZE, tokens, scale, A, B, SIZED)
        _store(out, ob, A, B, tokens, heads * D, D, DP)
        n = A + tl.arange(0, B)
        tl.store(lse + n, lb, mask=n < tokens)


@triton.jit
def _forward_rows(
    QKV, SIZE, OUT, LSE, tokens, heads, scale,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SIZED: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one head against all of its keys, at most N."""
    which = tl.program_id(0)
    first = tl.program_id(1) * M
    image, head = which // heads, which % heads
    SIZE += image.to(tl.int64) * tokens
    row = 3 * heads * D
    base = QKV + image.to(tl.int64) * tokens * row + head * D
    k = _load(base + heads * D, 0, N, tokens, row, D, DP)
    v = _load(base + 2 * heads * D, 0, N, tokens, row, D, DP)
    q = _load(base, first, M, tokens, row, D, DP)
    out, lse = _attend(q, k, v, k, v, SIZE, tokens, scale, N, 0, SIZED)
    _store(OUT + (image.to(tl.int64) * tokens * heads + head) * D, out, first, M, tokens, heads * D, D, DP)
    m = first + tl.arange(0, M)
    tl.store(LSE + which.to(tl.int64) * tokens + m, lse, mask=m < tokens)


@triton.jit
def _pair(q, grad, delta, lse, k, v, first, count: tl.constexpr, tokens, scale, plain_scale):
    """Gradients that some queries and some keys give each other: of q, of k and of v."""
    n = first + tl.arange(0, count)
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    weights = tl.where(n[None, :] < tokens, weights, 0.0)
    grad_v = tl.dot(tl.trans(weights.to(q.dtype)), grad)
    inner = (weights * (tl.dot(grad, tl.trans(v)) - delta[:, None]) * plain_scale).to(q.dtype)
    return tl.dot(inner, k), tl.dot(tl.trans(inner), q), grad_v


@triton.jit
def _queries(QKV, OUT, GRAD, LSE, first, count: tl.constexpr, tokens, heads, D: tl.constexpr, DP: tl.constexpr):
    """q, the gradient of what it became, their inner product with it, and the sums of some queries of a head."""
    q = _load(QKV, first, count, tokens, 3 * heads * D, D, DP)
    grad = _load(GRAD, first, count, tokens, heads * D, D, DP)
    out = _load(OUT, first, count, tokens, heads * D, D, DP)
    m = first + tl.arange(0, count)
    # Queries that are not there have an infinite sum, so all of their weights are 0.
    lse = tl.load(LSE + m, mask=m < tokens, other=float("inf"))
    return q, grad, tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1), lse


@triton.jit
def _backward_whole(
    QKV, OUT, GRAD, LSE, GRAD_QKV, tokens, heads, scale, plain_scale,
    D: tl.constexpr, DP: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: a whole head of at most A + B tokens."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    row = 3 * heads * D
    start = image.to(tl.int64) * tokens * row + head * D
    place = (image.to(tl.int64) * tokens * heads + head) * D
    QKV += start
    GRAD_QKV += start
    LSE += which.to(tl.int64) * tokens
    ka = _load(QKV + heads * D, 0, A, tokens, row, D, DP)
    va = _load(QKV + 2 * heads * D, 0, A, tokens, row, D, DP)
    qa, ga, da, la = _queries(QKV, OUT + place, GRAD + place, LSE, 0, A, tokens, heads, D, DP)
    grad_qa, grad_ka, grad_va = _pair(qa, ga, da, la, ka, va, 0, A, tokens, scale, plain_scale)
    if B > 0:
        kb = _load(QKV + heads * D, A, B, tokens, row, D, DP)
        vb = _load(QKV + 2 * heads * D, A, B, tokens, row, D, DP)
        qb, gb, db, lb = _queries(QKV, OUT + place, GRAD + place, LSE, A, B, tokens, heads, D, DP)
        more_qa, grad_kb, grad_vb = _pair(qa, ga, da, la, kb, vb, A, B, tokens, scale, plain_scale)
        grad_qb, more_ka, more_va = _pair(qb, gb, db, lb, ka, va, 0, A, tokens, scale, plain_scale)
        more_qb, more_kb, more_vb = _pair(qb, gb, db, lb, kb, vb, A, B, tokens, scale, plain_scale)
        grad_qa += more_qa
        grad_ka += more_ka
        grad_va += more_va
        _store(GRAD_QKV, grad_qb + more_qb, A, B, tokens, row, D, DP)
        _store(GRAD_QKV + heads * D, grad_kb + more_kb, A, B, tokens, row, D, DP)
        _store(GRAD_QKV + 2 * heads * D, grad_vb + more_vb, A, B, tokens, row, D, DP)
    _store(GRAD_QKV, grad_qa, 0, A, tokens, row, D, DP)
    _store(GRAD_QKV + heads * D, grad_ka, 0, A, tokens, row, D, DP)
    _store(GRAD_QKV + 2 * heads * D, grad_va, 0, A, tokens, row, D, DP)


@triton.jit
def _backward_keys(
    QKV, OUT, GRAD, LSE, GRAD_QKV, tokens, heads, scale, plain_scale,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program: a whole head of at most M tokens, N keys at a time and the rest in R places."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    row = 3 * heads * D
    start = image.to(tl.int64) * tokens * row + head * D
    place = (image.to(tl.int64) * tokens * heads + head) * D
    QKV += start
    GRAD_QKV += start
    q, grad, delta, lse = _queries(
        QKV, OUT + place, GRAD + place, LSE + which.to(tl.int64) * tokens, 0, M, tokens, heads, D, DP
    )
    grad_q = tl.zeros([M, DP], tl.float32)
    full = tokens // N * N
    for first in range(0, full, N):
        k = _load(QKV + heads * D, first, N, tokens, row, D, DP)
        v = _load(QKV + 2 * heads * D, first, N, tokens, row, D, DP)
        more_q, grad_k, grad_v = _pair(q, grad, delta, lse, k, v, first, N, tokens, scale, plain_scale)
        grad_q += more_q
        _store(GRAD_QKV + heads * D, grad_k, first, N, tokens, row, D, DP)
        _store(GRAD_QKV + 2 * heads * D, grad_v, first, N, tokens, row, D, DP)
    if R > 0:
        k = _load(QKV + heads * D, full, R, tokens, row, D, DP)
        v = _load(QKV + 2 * heads * D, full, R, tokens, row, D, DP)
        more_q, grad_k, grad_v = _pair(q, grad, delta, lse, k, v, full, R, tokens, scale, plain_scale)
        grad_q += more_q
        _store(GRAD_QKV + heads * D, grad_k, full, R, tokens, row, D, DP)
        _store(GRAD_QKV + 2 * heads * D, grad_v, full, R, tokens, row, D, DP)
    _store(GRAD_QKV, grad_q, 0, M, tokens, row, D, DP)


def parts(tokens: int) -> tuple[int, int]:
    """Places of the two parts that hold at most 128 tokens.

    >>> [parts(n) for n in (16, 64, 65, 100, 128)]
    [(16, 0), (64, 0), (64, 16), (64, 64), (64, 64)]
    """
    if tokens <= 64:
        return power_of_two(tokens), 0
    return 64, power_of_two(tokens - 64)


def power_of_two(number: int) -> int:
    """The side of a tile that holds `number` rows: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(number))


def forward(qkv: Tensor, size: Tensor | None = None, *, warps: int = 4, rows: int = 64) -> tuple[Tensor, Tensor]:
    """Attention [batch, tokens, heads, dim] and the base-2 logarithm of each query's sum [batch, heads, tokens]; keys
    count `size` [batch, tokens] times."""
    batch, tokens, _, heads, dim = qkv.shape
    out = qkv.new_empty(batch, tokens, heads, dim)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=qkv.device)
    arguments = (qkv, lse if size is None else size, out, lse, tokens, heads, LOG2E * dim**-0.5)
    common = {"D": dim, "DP": power_of_two(dim), "SIZED": size is not None, "num_warps": warps}
    if tokens <= WHOLE_TOKENS:
        a, b = parts(tokens)
        _forward_whole[(batch * heads,)](*arguments, A=a, B=b, **common)
    else:
        _forward_rows[(batch * heads, triton.cdiv(tokens, rows))](*arguments, M=rows, N=power_of_two(tokens), **common)
    return out, lse


def backward(
    qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, *, warps: int | None = None, keys: int = 64
) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    batch, tokens, _, heads, dim = qkv.shape
    grad_qkv = torch.empty_like(qkv)
    arguments = (qkv, out, grad, lse, grad_qkv, tokens, heads, LOG2E * dim**-0.5, dim**-0.5)
    common = {"D": dim, "DP": power_of_two(dim)}
    if tokens <= WHOLE_TOKENS:
        a, b = parts(tokens)
        _backward_whole[(batch * heads,)](*arguments, **common, A=a, B=b, num_warps=warps or 4)
    else:
        rest = tokens % keys
        sizes = {"M": power_of_two(tokens), "N": keys, "R": power_of_two(rest) if rest else 0}
        _backward_keys[(batch * heads,)](*arguments, **common, **sizes, num_warps=warps or 8)
    return grad_qkv
