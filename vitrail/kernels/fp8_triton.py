"""The Triton kernel of `vitrail.kernels.fp8`."""

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
