"""The best batch size: doubled until memory is out, then closed in on, and the fastest of all that were tried."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
