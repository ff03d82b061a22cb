"""Peak throughput of this machine: a large matrix product, and a copy larger than its caches.

The best batch size: doubled until memory is out, then closed in on, and the fastest of all that were tried.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
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


MOST = {"cuda": 4096, "cpu": 64}  # batches beyond these are not faster; a CPU gives no sign before it is out of memory
MEMORY_SHARE = 0.5  # of a CPU's memory that the process may have taken before the batch is doubled no more

Attempt = Callable[[int], float]  # batch -> images a second; raises `torch.OutOfMemoryError` where it does not fit


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: int  # the fastest batch
    largest: int  # the largest that fits, to the closeness asked for
    speeds: dict[int, float]  # images a second of every batch that fits, smallest first
    limit: str  # what ended the search: "memory", "cap", or what `stop` said

    def to_json(self) -> dict[str, Any]:
        tried = {str(batch): speed for batch, speed in self.speeds.items()}
        return {"best": self.best, "largest": self.largest, "limit": self.limit, "images_per_second": tried}


def search_batch(
    attempt: Attempt,
    *,
    most: int,
    least: int = 1,
    closeness: float = 0.0,
    stop: Callable[[], str] = lambda: "",
) -> Found:
    """Try `least`, twice that, ... up to `most`; after the first that is out of memory, halve the gap.

    The gap is closed to `closeness` as a share of the batch (0: to the very last image). `stop` may end the doubling
    with a word, where memory runs short without a sign. Raises `ValueError` where not even `least` fits.
    """
    speeds: dict[int, float] = {}
    failed: int | None = None
    batch = least
    while failed is None and batch <= most:
        speed = _tried(attempt, batch)
        if speed is None:
            failed = batch
            break
        speeds[batch] = speed
        reason = stop()
        if reason:
            return _found(speeds, reason)
        if batch == most:
            break
        batch = min(2 * batch, most)
    if not speeds:
        raise ValueError(f"not even a batch of {least} fits into memory; use a smaller model or image size")
    if failed is None:
        return _found(speeds, "cap")
    largest = max(speeds)
    while failed - largest > max(1, closeness * largest):
        middle = (largest + failed) // 2
        speed = _tried(attempt, middle)
        if speed is None:
            failed = middle
        else:
            speeds[middle] = speed
            largest = middle
    return _found(speeds, "memory")


def memory_is_short(device: torch.device) -> bool:
    """Whether a process on a CPU, given twice its memory, would have more than `MEMORY_SHARE` (accelerators raise)."""
    if device.type != "cpu":
        return False
    try:
        import resource

        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    except (ImportError, ValueError, OSError):
        return False  # the cap alone holds
    return 2 * peak > MEMORY_SHARE * whole


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is out, also where a library below torch says it in its own words."""
    words = str(error).lower()
    said = ("out of memory", "can't allocate memory", "alloc_failed", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in words for each in said)
    )


def free_memory() -> None:
    """Give back what a failed attempt held on an accelerator."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _tried(attempt: Attempt, batch: int) -> float | None:
    try:
        return attempt(batch)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    free_memory()  # outside the handler: inside it the error's frames still hold the tensors
    return None


def _found(speeds: dict[int, float], limit: str) -> Found:
    ordered = dict(sorted(speeds.items()))
    return Found(max(ordered, key=ordered.__getitem__), max(ordered), ordered, limit)
