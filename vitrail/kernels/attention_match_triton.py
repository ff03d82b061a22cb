"""Triton kernels of `vitrail.kernels.attention_match`.

One program takes M queries of one head and goes through its keys N at a time, with the usual running maximum for the
student's logits and for the teacher's. Backward is two kernels of the same kind, one for q (over keys) and one for k
(over queries): each tile of softmax(s) - softmax(t) is computed again from the stored sums. Logarithms are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.attention_triton import LOG2E, _load, _store, power_of_two

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, IEEE: tl.constexpr, UP: tl.constexpr):
    """a b in float32. `IEEE`: float32 is not rounded to 19 bits, which a difference of two softmaxes would show."""
    if UP:
        made = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        made = tl.dot(a, b, input_precision="ieee" if IEEE else "tf32")
    return made


@triton.jit
def _logits(q, k, first, count: tl.constexpr, tokens, scale, IEEE: tl.constexpr, UP: tl.constexpr):
    """Products of some queries with some keys; what is not there is 0, so that it may be multiplied by 0."""
    n = first + tl.arange(0, count)
    return tl.where(n[None, :] < tokens, _dot(q, tl.trans(k), IEEE, UP) * scale, 0.0)


@triton.jit
def _running(logits, there, top, total):
    """Running maximum and sum, with this tile's weights and how much earlier ones shrink."""
    new = tl.maximum(top, tl.max(tl.where(there, logits, float("-inf")), 1))
    weights = tl.where(there, tl.exp2(logits - new[:, None]), 0.0)
    shrink = tl.exp2(top - new)
    return new, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def _starts(which, heads, batch_step, head_step):
    return (which // heads).to(tl.int64) * batch_step + (which % heads).to(tl.int64) * head_step


@triton.jit
def _forward(
    Q, K, QT, KT, CROSS, ENTROPY, LSE, LSET, tokens, heads, scale, scale_t,
    qb, qh, qn, kb, kh, kn, qtb, qth, qtn, ktb, kth, ktn,
    D: tl.constexpr, DP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    IEEE: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one head."""
    which, first = tl.program_id(0), tl.program_id(1) * M
    K += _starts(which, heads, kb, kh)
    KT += _starts(which, heads, ktb, kth)
    q = _load(Q + _starts(which, heads, qb, qh), first, M, tokens, qn, D, DP)
    qt = _load(QT + _starts(which, heads, qtb, qth), first, M, tokens, qtn, DT, DTP)
    top = tl.full([M], float("-inf"), tl.float32)
    top_t = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    total_t = tl.zeros([M], tl.float32)
    cross = tl.zeros([M], tl.float32)
    own = tl.zeros([M], tl.float32)
    for start in range(0, tokens, N):
        there = (start + tl.arange(0, N))[None, :] < tokens
        s = _logits(q, _load(K, start, N, tokens, kn, D, DP), start, N, tokens, scale, IEEE, UP)
        t = _logits(qt, _load(KT, start, N, tokens, ktn, DT, DTP), start, N, tokens, scale_t, IEEE, UP)
        top, total, _, _ = _running(s, there, top, total)
        top_t, total_t, weights, shrink = _running(t, there, top_t, total_t)
        cross = cross * shrink + tl.sum(weights * s, 1)
        own = own * shrink + tl.sum(weights * t, 1)
    lse, lse_t = top + tl.log2(total), top_t + tl.log2(total_t)
    m = first + tl.arange(0, M)
    at = which.to(tl.int64) * tokens + m
    tl.store(CROSS + at, (lse - cross / total_t) * _LN2, mask=m < tokens)
    tl.store(ENTROPY + at, (lse_t - own / total_t) * _LN2, mask=m < tokens)
    tl.store(LSE + at, lse, mask=m < tokens)
    tl.store(LSET + at, lse_t, mask=m < tokens)


@triton.jit
def _difference(s, t, LSE, LSET, GRAD, first, count: tl.constexpr, tokens, plain_scale):
    """Gradient of the products of `count` queries with some keys: grad (softmax(s) - softmax(t)) / √dim."""
    m = first + tl.arange(0, count)
    there = m < tokens
    # Queries that are not there have an infinite sum, so all of their weights are 0.
    lse = tl.load(LSE + m, mask=there, other=float("inf"))
    lse_t = tl.load(LSET + m, mask=there, other=float("inf"))
    grad = tl.load(GRAD + m, mask=there, other=0.0) * plain_scale
    return grad[:, None] * (tl.exp2(s - lse[:, None]) - tl.exp2(t - lse_t[:, None]))


@triton.jit
def _backward(
    Q, K, QT, KT, LSE, LSET, GRAD, OUT, tokens, heads, scale, scale_t, plain_scale, qb, qh, qn, kb, kh, kn, qtb,
    qth, qtn, ktb, kth, ktn,
    D: tl.constexpr, DP: tl.constexpr, DT: tl.constexpr, DTP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OF_KEYS: tl.constexpr, IEEE: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of M queries of one head (or, `OF_KEYS`, of N keys), laid out [.., tokens, D]."""
    which = tl.program_id(0)
    Q += _starts(which, heads, qb, qh)
    K += _starts(which, heads, kb, kh)
    QT += _starts(which, heads, qtb, qth)
    KT += _starts(which, heads, ktb, kth)
    row = which.to(tl.int64) * tokens
    LSE += row
    LSET += row
    GRAD += row
    if OF_KEYS:
        held = tl.program_id(1) * N
        k = _load(K, held, N, tokens, kn, D, DP)
        kt = _load(KT, held, N, tokens, ktn, DT, DTP)
        made = tl.zeros([N, DP], tl.float32)
        for start in range(0, tokens, M):
            q = _load(Q, start, M, tokens, qn, D, DP)
            qt = _load(QT, start, M, tokens, qtn, DT, DTP)
            s = _logits(q, k, held, N, tokens, scale, IEEE, UP)
            t = _logits(qt, kt, held, N, tokens, scale_t, IEEE, UP)
            inner = _difference(s, t, LSE, LSET, GRAD, start, M, tokens, plain_scale).to(q.dtype)
            made += _dot(tl.trans(inner), q, IEEE, UP)
        _store(OUT + row * D, made, held, N, tokens, D, D, DP)
    else:
        held = tl.program_id(1) * M
        q = _load(Q, held, M, tokens, qn, D, DP)
        qt = _load(QT, held, M, tokens, qtn, DT, DTP)
        made = tl.zeros([M, DP], tl.float32)
        for start in range(0, tokens, N):
            k = _load(K, start, N, tokens, kn, D, DP)
            kt = _load(KT, start, N, tokens, ktn, DT, DTP)
            s = _logits(q, k, start, N, tokens, scale, IEEE, UP)
            t = _logits(qt, kt, start, N, tokens, scale_t, IEEE, UP)
            # Keys that are not there have logits of 0, of which a query of far lower ones would make infinity.
            inner = _difference(s, t, LSE, LSET, GRAD, held, M, tokens, plain_scale)
            inner = tl.where((start + tl.arange(0, N))[None, :] < tokens, inner, 0.0).to(k.dtype)
            made += _dot(inner, k, IEEE, UP)
        _store(OUT + row * D, made, held, M, tokens, D, D, DP)


def _arguments(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], list[int], dict[str, int]]:
    """The tensors with neighbouring channels, their steps, and the constants of all kernels."""
    contiguous = [x if x.stride(-1) == 1 else x.contiguous() for x in parts]
    steps = [step for x in contiguous for step in x.stride()[:3]]
    dim, dim_t = parts[0].shape[-1], parts[2].shape[-1]
    wide = contiguous[0].dtype == torch.float32
    # The interpreter keeps bfloat16 as whole numbers and would multiply those.
    up = triton.knobs.runtime.interpret and contiguous[0].dtype == torch.bfloat16
    sizes = {"D": dim, "DP": power_of_two(dim), "DT": dim_t, "DTP": power_of_two(dim_t), "IEEE": wide, "UP": up}
    # Four tiles of queries and keys, of the larger head, must fit into shared memory together.
    side = min(32 if wide or max(dim, dim_t) > 64 else 64, power_of_two(parts[0].shape[2]))
    return contiguous, steps, sizes | {"M": side, "N": side}


def forward(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy, the teacher's entropy, base-2 logarithms of both sums: [batch, heads, tokens] each."""
    batch, heads, tokens, dim = q.shape
    parts, steps, sizes = _arguments((q, k, q_t.to(q.dtype), k_t.to(q.dtype)))
    rows = [torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device) for _ in range(4)]
    scales = (LOG2E * dim**-0.5, LOG2E * q_t.shape[-1] ** -0.5)
    grid = (batch * heads, triton.cdiv(tokens, sizes["M"]))
    _forward[grid](*parts, *rows, tokens, heads, *scales, *steps, **sizes)
    return rows[0], rows[1], rows[2], rows[3]


def backward(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, lse: Tensor, lse_t: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k, contiguous."""
    batch, heads, tokens, dim = q.shape
    parts, steps, sizes = _arguments((q, k, q_t.to(q.dtype), k_t.to(q.dtype)))
    scales = (LOG2E * dim**-0.5, LOG2E * q_t.shape[-1] ** -0.5, dim**-0.5)
    grads = []
    for of_keys in (False, True):
        out = torch.empty(batch, heads, tokens, dim, dtype=q.dtype, device=q.device)
        grid = (batch * heads, triton.cdiv(tokens, sizes["N" if of_keys else "M"]))
        _backward[grid](*parts, lse, lse_t, grad, out, tokens, heads, *scales, *steps, OF_KEYS=of_keys, **sizes)
        grads.append(out)
    return grads[0], grads[1]
