"""The Triton kernels of `vitrail.kernels.fp8` and `fp8_training`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.kernels.gelu import _A1, _A2, _A3, _A4, _A5, _EXPONENT, _P


@triton.jit
def _kernel(
    X, OUT, SCALE, width,
    largest: tl.constexpr, p: tl.constexpr, exponent: tl.constexpr, a1: tl.constexpr, a2: tl.constexpr,
    a3: tl.constexpr, a4: tl.constexpr, a5: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One program: a row. GELU as in `vitrail.kernels.gelu`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, W)
    x = tl.load(X + row * width + c, mask=c < width, other=0.0).to(tl.float32)
    t = 1.0 / (1.0 + p * tl.abs(x))
    tail = 0.5 * tl.exp2(exponent * x * x) * t * (a1 + t * (a2 + t * (a3 + t * (a4 + t * a5))))
    made = x * tl.where(x < 0, tail, 1.0 - tail)
    scale = tl.maximum(tl.max(tl.abs(made), 0), 1e-12) / largest
    small = tl.minimum(tl.maximum(made / scale, -largest), largest)
    tl.store(OUT + row * width + c, small.to(OUT.dtype.element_ty), mask=c < width)
    tl.store(SCALE + row, scale)


def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, channels] -> GELU of it as e4m3, and the factor of each row [rows, 1]."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(width)
    constants = {"largest": torch.finfo(torch.float8_e4m3fn).max, "p": _P, "exponent": _EXPONENT, "W": size}
    polynomial = {"a1": _A1, "a2": _A2, "a3": _A3, "a4": _A4, "a5": _A5}
    _kernel[(rows,)](x, out, scale, width, **constants, **polynomial, num_warps=4 if size <= 2048 else 8)
    return out, scale


@triton.jit
def _layouts_kernel(
    X, FACTOR, OUT, TRANSPOSED, SUMS, rows, width, padded, largest: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """One program: a tile of B x B, read once and written as it is and transposed; its rows added up."""
    across = tl.cdiv(width, B)
    down = tl.program_id(0) // across
    r = down.to(tl.int64) * B + tl.arange(0, B)
    c = (tl.program_id(0) % across).to(tl.int64) * B + tl.arange(0, B)
    inside = (r < rows)[:, None] & (c < width)[None, :]
    x = tl.load(X + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD:
        tl.store(SUMS + down * width + c, tl.sum(x, 0), mask=c < width)
    small = tl.minimum(tl.maximum(x * tl.load(FACTOR), -largest), largest).to(OUT.dtype.element_ty)
    tl.store(OUT + r[:, None] * width + c[None, :], small, mask=inside)
    inside = (c < width)[:, None] & (r < padded)[None, :]
    tl.store(TRANSPOSED + c[:, None] * padded + r[None, :], tl.trans(small), mask=inside)


def layouts(
    x: Tensor, factor: Tensor, dtype: torch.dtype, add: bool, tile: int = 0, warps: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """`vitrail.kernels.fp8_training.plain_layouts` of a contiguous x [rows, channels], in one pass."""
    (rows, width), padded = x.shape, len(x) + -len(x) % 16
    tile = tile or (64 if add else 128)  # sums of 128 x 128 take 185 registers: one program per multiprocessor
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    transposed = torch.empty(width, padded, dtype=dtype, device=x.device)
    down = triton.cdiv(padded, tile)
    sums = torch.empty(down if add else 0, width, dtype=torch.float32, device=x.device)
    constants = {"largest": torch.finfo(dtype).max, "ADD": add, "B": tile}
    grid = (down * triton.cdiv(width, tile),)
    _layouts_kernel[grid](x, factor, out, transposed, sums, rows, width, padded, **constants, num_warps=warps)
    return out, transposed, sums.sum(0) if add else sums.view(-1)
