"""The Triton kernel of `vitrail.data.augment.flat_images`: windows of a flat buffer, resampled along one axis."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_REACH = {"nearest": 1, "bilinear": 1, "bicubic": 2, "lanczos": 3}  # of a filter, in pixels to either side


@triton.jit
def _weight(at, centre, scale, length, KIND: tl.constexpr):
    """As `pixel_ops._resampling_weights`, before they are divided by their sum."""
    d = tl.abs(tl.div_rn(at.to(tl.float32) + 0.5 - centre, scale))
    if KIND == "nearest":
        weight = tl.where(at == tl.floor(centre).to(tl.int32), 1.0, 0.0)
    elif KIND == "bilinear":
        weight = tl.maximum(1.0 - d, 0.0)
    elif KIND == "bicubic":
        far = tl.where(d < 2, ((2.5 - 0.5 * d) * d - 4) * d + 2, 0.0)
        weight = tl.where(d < 1, (1.5 * d - 2.5) * d * d + 1, far)
    else:
        angle = 3.141592653589793 * tl.maximum(d, 1e-6)
        weight = tl.where(d < 3, 3 * tl.sin(angle) * tl.sin(angle / 3) / (angle * angle), 0.0)
    return tl.where((at >= 0) & (at < length), weight, 0.0)


@triton.jit
def _kernel(
    SOURCE, OUT, TABLE, n, size, ACROSS: tl.constexpr, LINES: tl.constexpr, NEW: tl.constexpr,
    REACH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One program: NEW new pixels of LINES lines of a channel; lines are rows where it works across, else columns."""
    T, channel = TABLE + tl.program_id(0) // 3, (tl.program_id(0) % 3).to(tl.int64)
    lines, length, start, count = tl.load(T + 4 * n), tl.load(T + 5 * n), tl.load(T + 6 * n), tl.load(T + 7 * n)
    if tl.program_id(1) * LINES >= lines:
        return
    source = SOURCE + tl.load(T) + channel * tl.load(T + n)
    line_step, pixel_step = tl.load(T + 2 * n), tl.load(T + 3 * n)
    line, new = tl.program_id(1) * LINES + tl.arange(0, LINES), tl.program_id(2) * NEW + tl.arange(0, NEW)
    if ACROSS:  # what lies side by side in memory comes last
        line, new = line[:, None], new[None, :]
    else:
        line, new = line[None, :], new[:, None]
    place = (count - 1) - tl.abs((count - 1) - tl.abs(start + tl.minimum(new, size - 1)))  # reflected
    centre = tl.div_rn(((2 * place + 1) * length).to(tl.float32), (2 * count).to(tl.float32))
    scale = tl.maximum(tl.div_rn(length.to(tl.float32), count.to(tl.float32)), 1.0)
    first, taps = tl.floor(centre - 0.5 - REACH * scale).to(tl.int32), tl.ceil(2 * REACH * scale).to(tl.int32) + 2
    inside, total = (line < lines) & (new < size), tl.zeros_like(centre)
    for tap in range(taps):
        total += _weight(first + tap, centre, scale, length, KIND)
    value = tl.zeros_like(inside.to(tl.float32))
    for tap in range(taps):
        at = first + tap
        weight = tl.div_rn(_weight(at, centre, scale, length, KIND), total)
        read = inside & (at >= 0) & (at < length)
        value += weight * tl.load(source + line * line_step + at * pixel_step, mask=read, other=0).to(tl.float32)
    value = tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)
    out = OUT + tl.load(T + 8 * n) + channel * tl.load(T + 9 * n)
    out += line * tl.load(T + 10 * n) + new * tl.load(T + 11 * n)
    tl.store(out, value.to(tl.uint8), mask=inside)


def resampled(pixels: Tensor, table: NDArray[np.int64], size: int, kind: str) -> Tensor:
    """Windows of a table [12, images] of `FlatImages`, as uint8 [images, 3, size, size], in two passes over bytes."""
    first, down, right, plane, top, left, height, width, row, column, rows, columns = table
    images, one, line, plane_between = len(first), np.ones_like(first), np.full_like(first, size), height * size
    begin = np.cumsum(3 * plane_between) - 3 * plane_between  # of images between the passes
    # Of a pass: source and steps to a channel, line and pixel; lines, their length, places in them; output and steps.
    across = [first + top * down + left * right, plane, down, right, height, width, column, columns]
    along = [begin, plane_between, one, line, line, height, row, rows]
    across += [begin, plane_between, line, one]
    along += [np.arange(images) * 3 * size * size, line * size, one, line]
    host = torch.from_numpy(np.array([across, along]))
    passes = host.pin_memory().to(pixels.device, non_blocking=True) if pixels.is_cuda else host
    between, out = pixels.new_empty(int(3 * plane_between.sum())), pixels.new_empty(images, 3, size, size)
    tiles = (32, 32), (min(256, triton.next_power_of_2(size)), 8)  # a weight serves many pixels of a thread
    for i, (source, to, lines) in enumerate(((pixels, between, int(height.max())), (between, out, size))):
        grid = (3 * images, triton.cdiv(lines, tiles[i][0]), triton.cdiv(size, tiles[i][1]))
        _kernel[grid](source, to, passes[i], images, size, i == 0, *tiles[i], _REACH[kind], kind)
    return out
