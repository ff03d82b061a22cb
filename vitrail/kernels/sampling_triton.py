"""Triton kernel of `vitrail.kernels.sampling`.

A program holds one number for each token of its image and goes over heads and channels, so k and v are read once and
nothing in between is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.attention_triton import LOG2E, power_of_two

SCALE = tl.constexpr(2.0**36)  # 2^BITS of `vitrail.kernels.sampling`
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
TILE = 8192
"""Tokens times channels that are loaded at once."""


@triton.jit
def _points_upto(twice, total, count):
    """How many points (2i - 1) / 2K lie in (0, twice / 2 total]; all are whole numbers."""
    return (count * twice + total) // (2 * total)


@triton.jit
def _whole(scores):
    """Scores as whole numbers, the largest between 2^BITS and 2^(BITS + 1): bit for bit as `sampling._whole`."""
    top = tl.maximum(tl.max(scores, 0), TINY)
    scale = (0x7F000000 - (top.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
    return (scores * scale * SCALE).to(tl.int64)


@triton.jit
def _sample(
    QKV, OFFSETS, POINTS, SCORES, KEEP, heads, scale,
    PREFIX: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: an image of at most N tokens, C channels at a time."""
    image = tl.program_id(0)
    first = tl.load(OFFSETS + image).to(tl.int64)
    tokens = (tl.load(OFFSETS + image + 1).to(tl.int64) - first).to(tl.int32)
    row = 3 * heads * D
    QKV += first * row
    n = tl.arange(0, N)
    patch = (n >= PREFIX) & (n < tokens)
    scores = tl.zeros([N], tl.float32)
    for head in range(heads):
        logits = tl.zeros([N], tl.float32)
        size = tl.zeros([N], tl.float32)
        for channel in range(0, D, C):
            d = channel + tl.arange(0, C)
            inside = patch[:, None] & (d[None, :] < D)
            at = QKV + head * D + n[:, None] * row + d[None, :]
            q = tl.load(QKV + head * D + d, mask=d < D * tl.minimum(tokens, 1), other=0.0).to(tl.float32)
            k = tl.load(at + heads * D, mask=inside, other=0.0).to(tl.float32)
            logits += tl.sum(k * q[None, :], 1)
            if VALUES:
                v = tl.load(at + 2 * heads * D, mask=inside, other=0.0).to(tl.float32)
                size += tl.sum(v * v, 1)
        logits = tl.where(patch, logits * scale, float("-inf"))
        # A large number stands in where there is no patch at all, whose largest logit would be -inf.
        weight = tl.exp2(logits - tl.maximum(tl.max(logits, 0), -3e38))
        if VALUES:
            weight *= tl.sqrt(size)
        scores += weight / tl.maximum(tl.sum(weight, 0), TINY)
    scores = scores / tl.maximum(tl.sum(scores, 0), TINY)
    whole = _whole(scores)
    upto = tl.cumsum(whole, 0)
    total = tl.maximum(tl.sum(whole, 0), 1)
    count = tl.load(POINTS + image).to(tl.int64)
    keep = _points_upto(2 * upto, total, count) > _points_upto(2 * (upto - whole), total, count)
    tl.store(SCORES + first + n, scores, mask=n < tokens)
    tl.store(KEEP + first + n, (keep | (n < PREFIX)).to(tl.int8), mask=n < tokens)


def sample(
    qkv: Tensor, offsets: Tensor, points: Tensor, prefix: int, value_norm: bool, most: int
) -> tuple[Tensor, Tensor]:
    """Scores and which rows go on, [rows] each, of qkv [rows, 3, heads, dim]."""
    rows, _, heads, dim = qkv.shape
    scores = torch.zeros(rows, dtype=torch.float32, device=qkv.device)
    keep = torch.zeros(rows, dtype=torch.int8, device=qkv.device)
    tokens = power_of_two(most)
    channels = max(4, min(triton.next_power_of_2(dim), TILE // tokens))
    tensors = (qkv, offsets, points, scores, keep)
    sizes = {"PREFIX": prefix, "VALUES": value_norm, "D": dim, "N": tokens, "C": channels}
    _sample[(len(offsets) - 1,)](*tensors, heads, LOG2E * dim**-0.5, **sizes, num_warps=4)
    return scores, keep.view(torch.bool)
