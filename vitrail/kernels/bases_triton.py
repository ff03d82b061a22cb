# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of `vitrail.kernels.bases`: bases are made in registers, contracted there and forgotten.

One Philox call makes four bases, so a tile is four matrices [groups, elements] whose coefficients lie four apart.
Shared bases meet the coefficients of many layers in a matrix product, in float32 without TF32; a layer's own bases meet
one row, for which products and sums do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)  # Philox4x32's multipliers and key steps
STEP0, STEP1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
SHARED = tl.constexpr(0xFFFFFFFF)  # in place of the layer, as `vitrail.kernels.bases.NO_LAYER`
GROUPS = 16
"""Philox calls in a tile of shared bases: the least that a matrix product takes. It fixes the order of a sum."""
OWN_GROUPS = 8
"""The same for a layer's own bases."""
KEYS = ("factor", "low", "high")
"""Numbers without meaning: a kernel of its own for those that happen to be 1 or a multiple of 16 would be a waste."""
PROGRAMS = 528
"""As many programs as keep a large accelerator busy (four per multiprocessor of 132): backward sums are split until
then."""


@triton.jit
def _unit(word):
    """The upper 24 bits as a number in [-1, 1)."""
    return ((word >> 8).to(tl.int32) - 8388608).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def _four(element, group, layer, factor, low, high):
    """Four bases of each group at each element: counters are broadcast together."""
    a = element + group * 0
    b = group + element * 0
    c = a * 0 + layer
    d = a * 0 + factor
    # Unrolled: the compiler then folds the schedule of keys.
    for _ in tl.static_range(10):
        x = a.to(tl.uint64) * M0
        y = c.to(tl.uint64) * M1
        a, b, c, d = (
            (y >> 32).to(tl.uint32) ^ b ^ low,
            y.to(tl.uint32),
            (x >> 32).to(tl.uint32) ^ d ^ high,
            x.to(tl.uint32),
        )
        low = low + STEP0
        high = high + STEP1
    return _unit(a), _unit(b), _unit(c), _unit(d)


@triton.jit(do_not_specialize=KEYS)
def _shared(C, OUT, layers, bases, elements, factor, low, high, L: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """One program: E elements of L layers, over all bases."""
    e = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    row = tl.program_id(1) * L + tl.arange(0, L)
    low, high, factor = low.to(tl.uint32), high.to(tl.uint32), factor.to(tl.uint32)
    total = tl.zeros([L, E], tl.float32)
    for first in range(0, tl.cdiv(bases, 4), K):
        group = first + tl.arange(0, K)
        words = _four(e.to(tl.uint32)[None, :], group.to(tl.uint32)[:, None], SHARED, factor, low, high)
        for word in tl.static_range(4):
            basis = 4 * group + word
            inside = (row[:, None] < layers) & (basis[None, :] < bases)
            c = tl.load(C + row[:, None] * bases + basis[None, :], mask=inside, other=0.0)
            total = tl.dot(c, words[word], total, input_precision="ieee")
    place = row[:, None].to(tl.int64) * elements + e[None, :]
    tl.store(OUT + place, total, mask=(row[:, None] < layers) & (e[None, :] < elements))


@triton.jit(do_not_specialize=KEYS)
def _own(C, LAYERS, OUT, bases, elements, factor, low, high, K: tl.constexpr, E: tl.constexpr):
    """One program: E elements of one layer, over all of its own bases."""
    e = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    row = tl.program_id(1)
    layer = tl.load(LAYERS + row).to(tl.uint32)
    low, high, factor = low.to(tl.uint32), high.to(tl.uint32), factor.to(tl.uint32)
    total = tl.zeros([K, E], tl.float32)
    for first in range(0, tl.cdiv(bases, 4), K):
        group = first + tl.arange(0, K)
        words = _four(e.to(tl.uint32)[None, :], group.to(tl.uint32)[:, None], layer, factor, low, high)
        for word in tl.static_range(4):
            basis = 4 * group + word
            c = tl.load(C + row * bases + basis, mask=basis < bases, other=0.0)
            total += c[:, None] * words[word]
    tl.store(OUT + row.to(tl.int64) * elements + e, tl.sum(total, 0), mask=e < elements)


@triton.jit(do_not_specialize=KEYS)
def _shared_back(
    GRAD, PARTS, layers, bases, elements, span, factor, low, high,
    L: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One program: 4 K coefficients of L layers, over `span` elements, to PARTS [splits, layers, bases]."""
    group = tl.program_id(0) * K + tl.arange(0, K)
    row = tl.program_id(1) * L + tl.arange(0, L)
    begin = tl.program_id(2).to(tl.int64) * span
    low, high, factor = low.to(tl.uint32), high.to(tl.uint32), factor.to(tl.uint32)
    c0 = tl.zeros([L, K], tl.float32)
    c1 = tl.zeros([L, K], tl.float32)
    c2 = tl.zeros([L, K], tl.float32)
    c3 = tl.zeros([L, K], tl.float32)
    for start in range(0, span, E):
        e = begin + start + tl.arange(0, E)
        inside = (row[:, None] < layers) & (e[None, :] < elements)
        grad = tl.load(GRAD + row[:, None].to(tl.int64) * elements + e[None, :], mask=inside, other=0.0)
        w0, w1, w2, w3 = _four(e.to(tl.uint32)[:, None], group.to(tl.uint32)[None, :], SHARED, factor, low, high)
        c0 = tl.dot(grad, w0, c0, input_precision="ieee")
        c1 = tl.dot(grad, w1, c1, input_precision="ieee")
        c2 = tl.dot(grad, w2, c2, input_precision="ieee")
        c3 = tl.dot(grad, w3, c3, input_precision="ieee")
    basis = 4 * group[None, :]
    place = PARTS + (tl.program_id(2) * layers + row[:, None]) * bases + basis
    inside = row[:, None] < layers
    tl.store(place, c0, mask=inside & (basis < bases))
    tl.store(place + 1, c1, mask=inside & (basis + 1 < bases))
    tl.store(place + 2, c2, mask=inside & (basis + 2 < bases))
    tl.store(place + 3, c3, mask=inside & (basis + 3 < bases))


@triton.jit(do_not_specialize=KEYS)
def _own_back(GRAD, LAYERS, PARTS, layers, bases, elements, span, factor, low, high, K: tl.constexpr, E: tl.constexpr):
    """One program: 4 K coefficients of one layer, over `span` elements, to PARTS [splits, layers, bases]."""
    group = tl.program_id(0) * K + tl.arange(0, K)
    row = tl.program_id(1)
    begin = tl.program_id(2).to(tl.int64) * span
    layer = tl.load(LAYERS + row).to(tl.uint32)
    low, high, factor = low.to(tl.uint32), high.to(tl.uint32), factor.to(tl.uint32)
    c0 = tl.zeros([K, E], tl.float32)
    c1 = tl.zeros([K, E], tl.float32)
    c2 = tl.zeros([K, E], tl.float32)
    c3 = tl.zeros([K, E], tl.float32)
    for start in range(0, span, E):
        e = begin + start + tl.arange(0, E)
        grad = tl.load(GRAD + row.to(tl.int64) * elements + e, mask=e < elements, other=0.0)[None, :]
        w0, w1, w2, w3 = _four(e.to(tl.uint32)[None, :], group.to(tl.uint32)[:, None], layer, factor, low, high)
        c0 += grad * w0
        c1 += grad * w1
        c2 += grad * w2
        c3 += grad * w3
    basis = 4 * group
    place = PARTS + (tl.program_id(2) * layers + row) * bases + basis
    tl.store(place, tl.sum(c0, 1), mask=basis < bases)
    tl.store(place + 1, tl.sum(c1, 1), mask=basis + 1 < bases)
    tl.store(place + 2, tl.sum(c2, 1), mask=basis + 2 < bases)
    tl.store(place + 3, tl.sum(c3, 1), mask=basis + 3 < bases)


def _signed(word: int) -> int:
    """A word as the int32 of the same bits: Triton would make a larger type of a larger number."""
    return word - 2**32 if word >= 2**31 else word


def _key(seed: int, factor: int) -> tuple[int, int, int]:
    return _signed(factor), _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def _tile(layers: int) -> tuple[int, int]:
    """Layers of a tile, and warps: 4 have too few registers for 64 layers."""
    tile = min(64, max(16, triton.next_power_of_2(layers)))
    return tile, 8 if tile == 64 else 4


def combine(coefficients: Tensor, layers: Tensor | None, elements: int, seed: int, factor: int) -> Tensor:
    """coefficients [layers, bases] -> [layers, elements]"""
    many, bases = coefficients.shape
    out = coefficients.new_empty(many, elements)
    key = _key(seed, factor)
    if layers is None:
        tile, warps = _tile(many)
        grid = (triton.cdiv(elements, 64), triton.cdiv(many, tile))
        _shared[grid](coefficients, out, many, bases, elements, *key, L=tile, K=GROUPS, E=64, num_warps=warps)
    else:
        grid = (triton.cdiv(elements, 256), many)
        _own[grid](coefficients, layers, out, bases, elements, *key, K=OWN_GROUPS, E=256, num_warps=4)
    return out


def backward(coefficients: Tensor, grad: Tensor, layers: Tensor | None, seed: int, factor: int) -> Tensor:
    """The gradient of the coefficients; parts of a sum are added in a fixed order, so it is the same every time."""
    many, bases = coefficients.shape
    elements = grad.shape[1]
    groups = triton.cdiv(bases, 4)
    tile, warps = _tile(many)
    across, wide, rows = (GROUPS, 32, triton.cdiv(many, tile)) if layers is None else (4, 256, many)
    programs = triton.cdiv(groups, across) * rows
    splits = max(1, min(triton.cdiv(PROGRAMS, programs), triton.cdiv(elements, 4 * wide)))
    span = triton.cdiv(triton.cdiv(elements, splits), wide) * wide
    splits = triton.cdiv(elements, span)
    parts = torch.empty(splits, many, bases, dtype=torch.float32, device=grad.device)
    grid = (triton.cdiv(groups, across), rows, splits)
    sizes = (many, bases, elements, span)
    if layers is None:
        _shared_back[grid](grad, parts, *sizes, *_key(seed, factor), L=tile, K=across, E=wide, num_warps=warps)
    else:
        _own_back[grid](grad, layers, parts, *sizes, *_key(seed, factor), K=across, E=wide, num_warps=4)
    return parts.sum(0)
