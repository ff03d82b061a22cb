"""Triton kernels of `vitrail.kernels.sima_attention`.

Forward and backward have the same two passes over the tokens of a head. `_gather` adds up kᵀ v and the norms (backward:
qᵀ grad, too); `_spread` multiplies every token by the scaled matrices. One program does both where a head is short or
there are heads enough; else tokens are split over programs, and the sums go through memory once.

With M = diag(1 / |q|) diag(1 / |k|) kᵀ v, S = diag(1 / |q|) diag(1 / |k|) qᵀ grad and u = rowsum(M ∘ qᵀ grad):

    grad_q = grad Mᵀ - slope(q) u / |q|    grad_k = v Sᵀ - slope(k) u / |k|    grad_v = k S

where slope(x) is sign(x) for the l1 norm and x / |x| for l2.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.attention_triton import _load, _store, power_of_two

EPS = tl.constexpr(1e-6)  # as `vitrail.kernels.sima_attention.EPS`
WHOLE_TOKENS = 512
"""Up to here one program does a whole head."""
PROGRAMS = 528
"""Programs that keep a large accelerator busy (four per multiprocessor of 132): long heads are split until then."""


@triton.jit
def _head(QKV, GRAD, OFFSETS, tokens, heads, D: tl.constexpr, RAGGED: tl.constexpr):
    """The tokens of this program's image, and the starts of its head in qkv and in what has the shape of the output."""
    which = tl.program_id(0)
    image, head = which // heads, which % heads
    if RAGGED:
        first = tl.load(OFFSETS + image).to(tl.int64)
        count = (tl.load(OFFSETS + image + 1).to(tl.int64) - first).to(tl.int32)
    else:
        first = image.to(tl.int64) * tokens
        count = tokens
    place = (first * heads + head) * D
    return count, first * 3 * heads * D + head * D, place


@triton.jit
def _amount(x, P: tl.constexpr):
    x = x.to(tl.float32)
    return tl.abs(x) if P == 1 else x * x


@triton.jit
def _tiles(
    QKV, GRAD, n, last, heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """N tokens from `n` on of q, k, v and (BACK) grad; zeros from `last` on."""
    row = 3 * heads * D
    q = _load(QKV, n, N, last, row, D, DP)
    k = _load(QKV + heads * D, n, N, last, row, D, DP)
    v = _load(QKV + 2 * heads * D, n, N, last, row, D, DP)
    grad = v
    if BACK:
        grad = _load(GRAD, n, N, last, heads * D, D, DP)
    return q, k, v, grad


@triton.jit
def _gather(
    QKV, GRAD, first, last, heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Over tokens `first` to `last` of a head: kᵀ v, qᵀ grad, and the sums of |q| and |k| to the power P.

    AHEAD: the next tiles are asked for, into registers, before these are multiplied.
    """
    kv = tl.zeros([DP, DP], tl.float32)
    qg = tl.zeros([DP, DP], tl.float32)
    # Added up token by token and reduced once: a reduction in every step would wait for all warps.
    size_q = tl.zeros([N, DP], tl.float32)
    size_k = tl.zeros([N, DP], tl.float32)
    # Not pipelined: of tiles that are both multiplied and added up Triton (3.6 to 3.9) keeps too few copies, and loads
    # the next over one that a product on the tensor cores still reads. See tests/kernels/test_kernel_buffers.py.
    if AHEAD:
        q, k, v, grad = _tiles(QKV, GRAD, first, last, heads, D, DP, N, BACK)
        for n in tl.range(first, last, N, num_stages=1):
            next_q, next_k, next_v, next_grad = _tiles(QKV, GRAD, n + N, last, heads, D, DP, N, BACK)
            kv = tl.dot(tl.trans(k), v, kv)
            if BACK:
                qg = tl.dot(tl.trans(q), grad, qg)
            size_q += _amount(q, P)
            size_k += _amount(k, P)
            q, k, v, grad = next_q, next_k, next_v, next_grad
    else:
        for n in tl.range(first, last, N, num_stages=1):
            q, k, v, grad = _tiles(QKV, GRAD, n, last, heads, D, DP, N, BACK)
            kv = tl.dot(tl.trans(k), v, kv)
            if BACK:
                qg = tl.dot(tl.trans(q), grad, qg)
            size_q += _amount(q, P)
            size_k += _amount(k, P)
    return kv, qg, tl.sum(size_q, 0), tl.sum(size_k, 0)


@triton.jit
def _norm(total, P: tl.constexpr):
    return tl.maximum(total if P == 1 else tl.sqrt(total), EPS)


@triton.jit
def _halved(matrix, like):
    """A matrix in the precision of `like`, divided by its largest entry (float16 would overflow), and that entry."""
    peak = tl.max(tl.max(tl.abs(matrix), 1), 0)
    peak = tl.where(peak > 0, peak, 1.0)
    return (matrix / peak).to(like.dtype.element_ty), peak


@triton.jit
def _slope(x, P: tl.constexpr):
    x = x.to(tl.float32)
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)) if P == 1 else x


@triton.jit
def _pull(u, norm, P: tl.constexpr):
    """What a channel's norm takes back from its gradient, for a slope of 1; nothing where the norm was held at EPS."""
    return tl.where(norm > EPS, u / norm if P == 1 else u / (norm * norm), 0.0)


@triton.jit
def _spread(
    QKV, GRAD, MADE, kv, qg, total_q, total_k, first, last, heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """From the sums over a whole head, tokens `first` to `last` of the output, or (BACK) of the gradient of qkv."""
    row = 3 * heads * D
    norm_q, norm_k = _norm(total_q, P), _norm(total_k, P)
    scale = 1.0 / norm_q / norm_k
    mixing, mixing_peak = _halved(kv * scale[:, None], QKV)
    if BACK:
        inner, inner_peak = _halved(qg * scale[:, None], QKV)
        u = tl.sum(qg * kv, 1) * scale
        pull_q, pull_k = _pull(u, norm_q, P), _pull(u, norm_k, P)
    for n in range(first, last, N):
        q = _load(QKV, n, N, last, row, D, DP)
        if BACK:
            k = _load(QKV + heads * D, n, N, last, row, D, DP)
            v = _load(QKV + 2 * heads * D, n, N, last, row, D, DP)
            grad = _load(GRAD, n, N, last, heads * D, D, DP)
            grad_q = tl.dot(grad, tl.trans(mixing)) * mixing_peak - _slope(q, P) * pull_q[None, :]
            grad_k = tl.dot(v, tl.trans(inner)) * inner_peak - _slope(k, P) * pull_k[None, :]
            _store(MADE, grad_q, n, N, last, row, D, DP)
            _store(MADE + heads * D, grad_k, n, N, last, row, D, DP)
            _store(MADE + 2 * heads * D, tl.dot(k, inner) * inner_peak, n, N, last, row, D, DP)
        else:
            _store(MADE, tl.dot(q, mixing) * mixing_peak, n, N, last, heads * D, D, DP)


@triton.jit
def _whole(
    QKV, GRAD, MADE, OFFSETS, tokens, heads,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr, RAGGED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: a whole head, N tokens at a time."""
    count, start, place = _head(QKV, GRAD, OFFSETS, tokens, heads, D, RAGGED)
    kv, qg, size_q, size_k = _gather(QKV + start, GRAD + place, 0, count, heads, D, DP, N, P, BACK, AHEAD)
    made = MADE + (start if BACK else place)
    _spread(QKV + start, GRAD + place, made, kv, qg, size_q, size_k, 0, count, heads, D, DP, N, P, BACK)


@triton.jit
def _gather_part(
    QKV, GRAD, PARTS, tokens, heads, chunk,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: the sums over `chunk` tokens of a head, to PARTS [heads of all images, chunks, rows, DP].

    Rows: DP of kᵀ v, the two of the norms, and (BACK) DP of qᵀ grad.
    """
    _, start, place = _head(QKV, GRAD, QKV, tokens, heads, D, False)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, tokens)
    kv, qg, size_q, size_k = _gather(QKV + start, GRAD + place, first, last, heads, D, DP, N, P, BACK, AHEAD)
    rows = 2 * DP + 2 if BACK else DP + 2
    parts = PARTS + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * rows * DP
    d = tl.arange(0, DP)
    square = d[:, None] * DP + d[None, :]
    tl.store(parts + square, kv)
    tl.store(parts + DP * DP + d, size_q)
    tl.store(parts + (DP + 1) * DP + d, size_k)
    if BACK:
        tl.store(parts + (DP + 2) * DP + square, qg)


@triton.jit
def _spread_part(
    QKV, GRAD, MADE, SUMS, tokens, heads, chunk,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One program: `chunk` tokens of a head, from the sums over all of them, [heads of all images, rows, DP]."""
    _, start, place = _head(QKV, GRAD, QKV, tokens, heads, D, False)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, tokens)
    rows = 2 * DP + 2 if BACK else DP + 2
    sums = SUMS + tl.program_id(0).to(tl.int64) * rows * DP
    d = tl.arange(0, DP)
    square = d[:, None] * DP + d[None, :]
    kv = tl.load(sums + square)
    size_q = tl.load(sums + DP * DP + d)
    size_k = tl.load(sums + (DP + 1) * DP + d)
    qg = kv
    if BACK:
        qg = tl.load(sums + (DP + 2) * DP + square)
    made = MADE + (start if BACK else place)
    _spread(QKV + start, GRAD + place, made, kv, qg, size_q, size_k, first, last, heads, D, DP, N, P, BACK)


class Tuning(TypedDict, total=False):
    """Launch parameters."""

    split: int | None  # programs per head (none: by the number of tokens and heads)
    block: int | None  # tokens at a time (none: 64, or 32 where heads are wide)
    warps: int
    ahead: bool  # loads come before the products of the tokens before


def forward(qkv: Tensor, offsets: Tensor | None = None, power: int = 1, **tuning: Unpack[Tuning]) -> Tensor:
    """SimA of qkv [batch, tokens, 3, heads, dim], or ragged, [capacity, 3, heads, dim]."""
    out = (qkv.new_empty if offsets is None else qkv.new_zeros)(*qkv.shape[:-3], *qkv.shape[-2:])
    _run(qkv, out, out, offsets, power, False, tuning)
    return out


def backward(
    qkv: Tensor, grad: Tensor, offsets: Tensor | None = None, power: int = 1, **tuning: Unpack[Tuning]
) -> Tensor:
    """The gradient of `qkv`, laid out as `qkv`."""
    grad_qkv = torch.empty_like(qkv) if offsets is None else torch.zeros_like(qkv)
    _run(qkv, grad, grad_qkv, offsets, power, True, tuning)
    return grad_qkv


def _run(
    qkv: Tensor, grad: Tensor, result: Tensor, offsets: Tensor | None, power: int, back: bool, tuning: Tuning
) -> None:
    heads, dim = qkv.shape[-2:]
    batch, tokens = (qkv.shape[0], qkv.shape[1]) if offsets is None else (len(offsets) - 1, 0)
    all_heads, wide = batch * heads, power_of_two(dim)
    narrow = wide <= 64  # wider heads want more shared memory than most devices have, in blocks of 64 and three stages
    block, ahead = tuning.get("block") or (64 if narrow else 32), tuning.get("ahead", False)
    common = {"D": dim, "DP": wide, "N": block, "P": power, "BACK": back}
    common |= {"num_warps": tuning.get("warps", 8), "num_stages": 3 if narrow else 2}
    split = tuning.get("split") or splits(tokens, all_heads)
    if split == 1:
        ragged = {"RAGGED": offsets is not None, "AHEAD": ahead}
        _whole[(all_heads,)](qkv, grad, result, qkv if offsets is None else offsets, tokens, heads, **common, **ragged)
        return
    chunk = triton.cdiv(triton.cdiv(tokens, split), block) * block
    grid = (all_heads, triton.cdiv(tokens, chunk))
    rows = 2 * wide + 2 if back else wide + 2
    parts = torch.empty(*grid, rows, wide, dtype=torch.float32, device=qkv.device)
    _gather_part[grid](qkv, grad, parts, tokens, heads, chunk, **common, AHEAD=ahead)
    _spread_part[grid](qkv, grad, result, parts.sum(1), tokens, heads, chunk, **common)


def splits(tokens: int, heads: int) -> int:
    """Programs per head, for `heads` heads in all images of a batch.

    >>> splits(197, 1536), splits(1025, 384), splits(4097, 96)
    (1, 2, 6)
    """
    if tokens <= WHOLE_TOKENS:
        return 1
    return max(1, min(triton.cdiv(PROGRAMS, heads), tokens // 256))
