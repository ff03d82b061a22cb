"""Peak throughput of this machine: a large matrix product, and a copy larger than its caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vitrail.measure.speed import Work, timed_calls


@dataclass(frozen=True)
class Load:
    """What is timed."""

    side: int  # of the square matrices
    copied: int  # bytes
    calls: int


ON_CPU = Load(side=1024, copied=2**27, calls=5)
ON_ACCELERATOR = Load(side=8192, copied=2**30, calls=20)


@dataclass(frozen=True)
class Ceiling:
    """Best of several calls: a ceiling is what nothing else should pass."""

    product: float  # floating-point operations a second of a matrix product; a multiply-accumulate is two
    copy: float  # bytes a second, read and written ones counted
    precision: str  # of the product
    side: int  # of its matrices

    def to_json(self) -> dict[str, Any]:
        return {
            "product_flops_per_second": self.product,
            "copy_bytes_per_second": self.copy,
            "precision": self.precision,
            "product_side": self.side,
        }


def measure_ceiling(device: torch.device, dtype: torch.dtype = torch.float32, load: Load | None = None) -> Ceiling:
    """Time a matrix product in `dtype` and a copy (`load`; none: what suits the device)."""
    load = load or (ON_CPU if device.type == "cpu" else ON_ACCELERATOR)
    a, b = (torch.randn(load.side, load.side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(load.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.inference_mode():
        product = _best(lambda _: torch.mm(a, b, out=out), load.calls, device)
        copy = _best(lambda _: target.copy_(source), load.calls, device)
    return Ceiling(2 * load.side**3 / product, 2 * load.copied / copy, str(dtype).removeprefix("torch."), load.side)


def product_share(macs: int, images_per_second: float, ceiling: Ceiling, *, train: bool = False) -> float:
    """Share of the matrix product's speed that a model reaches: 2 MACs img/s / ceiling.

    A training step counts as three forward passes: the backward pass multiplies twice for every product.
    """
    return (3 if train else 1) * 2 * macs * images_per_second / ceiling.product


def copy_share(needed: int, calls_per_second: float, ceiling: Ceiling) -> float:
    """Share of the copy's speed that `needed` bytes a call take."""
    return needed * calls_per_second / ceiling.copy


def _best(work: Work, calls: int, device: torch.device) -> float:
    timed_calls(work, 2, device)
    return min(timed_calls(work, calls, device))
