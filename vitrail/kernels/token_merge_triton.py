"""Triton kernels of `vitrail.kernels.token_merge`.

Matching is one program per image, which holds all similarities and decides by counting: nothing is sorted. Merging is a
product with a matrix of sizes, on tensor cores: sums of rows that share a slot, whatever their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.attention_triton import power_of_two

CHANNELS, ROWS = 32, 64
"""Channels that the matching kernel reads at once, and tokens that the merging kernel adds."""


@triton.jit
def _keys(K, at, inside, d, heads, head_stride, token_stride, D: tl.constexpr):
    """Channels d of keys of tokens `at`, summed over heads, in float32; zeros where not `inside`."""
    place = K + at[:, None] * token_stride + d[None, :]
    mask = inside[:, None] & (d[None, :] < D)
    total = tl.zeros(place.shape, tl.float32)
    for head in range(heads):
        total += tl.load(place + head * head_stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _match(
    K, INDEX, SLOTS, LEFT, heads, tokens, r, image_stride, head_stride, token_stride,
    PREFIX: tl.constexpr, INDEXED: tl.constexpr, D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One program: an image of at most 2 T patches. Sources are patches FIRST, FIRST + 2, ..., targets the others."""
    FIRST: tl.constexpr = PREFIX % 2
    image = tl.program_id(0).to(tl.int64)
    patches = tokens - PREFIX
    K += image * image_stride
    SLOTS += image * tokens
    INDEX += image * patches
    LEFT += image * (patches - r)
    i = tl.arange(0, T)
    source, target = 2 * i + FIRST, 2 * i + 1 - FIRST
    is_source, is_target = source < patches, target < patches

    similar = tl.zeros([T, T], tl.float32)
    norm_a, norm_b = tl.zeros([T], tl.float32), tl.zeros([T], tl.float32)
    for channel in range(0, D, C):
        d = channel + tl.arange(0, C)
        a = _keys(K, source + PREFIX, is_source, d, heads, head_stride, token_stride, D)
        b = _keys(K, target + PREFIX, is_target, d, heads, head_stride, token_stride, D)
        norm_a += tl.sum(a * a, 1)
        norm_b += tl.sum(b * b, 1)
        similar = tl.dot(a, tl.trans(b), similar, input_precision="tf32x3")
    similar /= tl.maximum(tl.sqrt(norm_a), 1e-12)[:, None] * tl.maximum(tl.sqrt(norm_b), 1e-12)[None, :]
    # What is no number is the least similar, so that as many merge in every image.
    similar = tl.where(is_target[None, :] & (similar >= -2.0), similar, float("-inf"))
    best, nearest = tl.max(similar, 1, return_indices=True, return_indices_tie_break_left=True)

    column = i[None, :]
    ahead = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (column < i[:, None]))
    rank = tl.sum((ahead & is_source[None, :]).to(tl.int32), 1)
    merged = is_source & (rank < r)
    gone = merged.to(tl.int32)
    before_source = tl.cumsum(gone, 0) - gone
    # A source stands before (FIRST 0) or after (FIRST 1) the target of its number.
    before_target = before_source + gone * (1 - FIRST)
    before_nearest = tl.sum(tl.where(column < nearest[:, None] + 1 - FIRST, gone[None, :], 0), 1)
    source_place = tl.where(merged, 2 * nearest + 1 - FIRST - before_nearest, source - before_source)
    target_place = target - before_target

    if PREFIX > 0:
        p = tl.arange(0, P)
        tl.store(SLOTS + p, p, mask=p < PREFIX)
    tl.store(SLOTS + PREFIX + source, source_place + PREFIX, mask=is_source)
    tl.store(SLOTS + PREFIX + target, target_place + PREFIX, mask=is_target)
    source_patch, target_patch = source.to(tl.int64), target.to(tl.int64)
    if INDEXED:
        source_patch = tl.load(INDEX + source, mask=is_source, other=0)
        target_patch = tl.load(INDEX + target, mask=is_target, other=0)
    tl.store(LEFT + source_place, source_patch, mask=is_source & (rank >= r))
    tl.store(LEFT + target_place, target_patch, mask=is_target)


@triton.jit
def _merge(
    X, BRANCH, SIZE, SLOTS, OUT, TOTAL, tokens, left, width,
    SIZED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: M slots of an image, C channels; tokens come N at a time."""
    image = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * M + tl.arange(0, M)
    channel = tl.program_id(2) * C + tl.arange(0, C)
    X += image * tokens * width
    BRANCH += image * tokens * width
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, C], tl.float32)
    for first in range(0, tokens, N):
        n = first + tl.arange(0, N)
        goes = tl.load(SLOTS + image * tokens + n, mask=n < tokens, other=-1)
        size = tl.full([N], 1.0, tl.float32)
        if SIZED:
            size = tl.load(SIZE + image * tokens + n, mask=n < tokens, other=0.0)
        weight = tl.where(goes[None, :] == slot[:, None], size[None, :], 0.0)
        inside = (n[:, None] < tokens) & (channel[None, :] < width)
        place = n[:, None] * width + channel[None, :]
        x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(BRANCH + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(X.dtype.element_ty)  # rounded as an addition of its own would round it
        total += tl.sum(weight, 1)
        sums = tl.dot(weight.to(x.dtype), x, sums, input_precision="ieee")
    place = (image * left + slot[:, None]) * width + channel[None, :]
    mask = (slot[:, None] < left) & (channel[None, :] < width)
    tl.store(OUT + place, (sums / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    if tl.program_id(2) == 0:
        tl.store(TOTAL + image * left + slot, total, mask=slot < left)


def match(k: Tensor, index: Tensor | None, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Slots [batch, tokens], int32, and patches [batch, left], of keys [batch, heads, tokens, dim] as they lie."""
    k = k if k.stride(-1) == 1 else k.contiguous()
    batch, heads, tokens, dim = k.shape
    slots = torch.empty(batch, tokens, dtype=torch.int32, device=k.device)
    left = torch.empty(batch, tokens - prefix - r, dtype=torch.int64, device=k.device)
    sizes = {"D": dim, "C": min(CHANNELS, power_of_two(dim)), "T": power_of_two((tokens - prefix + 1) // 2)}
    shown = slots if index is None else index.contiguous()  # not read where there is none
    flags = {"PREFIX": prefix, "INDEXED": index is not None, "P": power_of_two(prefix)}
    _match[(batch,)](k, shown, slots, left, heads, tokens, r, *k.stride()[:3], **flags, **sizes, num_warps=8)
    return slots, left


def merge(x: Tensor, branch: Tensor, size: Tensor | None, slots: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Means of x + branch [batch, left, width] over the tokens of each slot, and sizes [batch, left]."""
    batch, tokens, width = x.shape
    out = x.new_empty(batch, left, width)
    total = torch.empty(batch, left, dtype=torch.float32, device=x.device)
    rows, channels = min(128, power_of_two(left)), min(64, power_of_two(width))
    grid = (batch, triton.cdiv(left, rows), triton.cdiv(width, channels))
    tensors = (x.contiguous(), branch.contiguous(), slots if size is None else size.contiguous(), slots, out, total)
    sizes = {"M": rows, "N": ROWS, "C": channels, "num_warps": 8 if rows == 128 else 4}
    _merge[grid](*tensors, tokens, left, width, SIZED=size is not None, **sizes)
    return out, total
