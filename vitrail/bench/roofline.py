"""Limits of this machine: peak throughput, the fastest batch that fits into memory, energy per image.

Peak throughput is that of a large matrix product, and of a copy larger than the caches. Energy is what the driver
counts (NVML on CUDA, RAPL on a Linux CPU); where it counts nothing there is no meter, and never an error.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitrail.console import out_of_memory
from vitrail.measure.speed import Work, peak_memory, timed_calls

MOST = {"cuda": 4096, "cpu": 64}  # batches beyond these are not faster; a CPU gives no sign before it is out of memory
MEMORY_SHARE = 0.5  # of a CPU's memory that the process may have taken before the batch is doubled no more
POWERCAP = Path("/sys/class/powercap")
ENERGY_SECONDS = 1.5  # counters move in steps of up to a tenth of a second

T = TypeVar("T")
Meter = Callable[[], float | None]  # joules used since some fixed moment; none where the counter cannot be read


@dataclass(frozen=True)
class Load:
    """Sizes of the operations that are timed."""

    side: int  # of the square matrices
    copied: int  # bytes
    calls: int


ON_CPU = Load(side=1024, copied=2**27, calls=5)
ON_ACCELERATOR = Load(side=8192, copied=2**30, calls=20)


@dataclass(frozen=True)
class Ceiling:
    """Best of several calls: a ceiling is what nothing else should pass."""

    product: float  # FLOP/s of a matrix product; a multiply-accumulate is two
    copy: float  # bytes/s, read and written ones counted
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

    def fastest(work: Work) -> float:
        timed_calls(work, 2, device)
        return min(timed_calls(work, load.calls, device))

    with torch.inference_mode():
        product = fastest(lambda _: torch.mm(a, b, out=out))
        copy = fastest(lambda _: target.copy_(source))
    return Ceiling(2 * load.side**3 / product, 2 * load.copied / copy, str(dtype).removeprefix("torch."), load.side)


def product_share(macs: int, images_per_second: float, ceiling: Ceiling, *, train: bool = False) -> float:
    """Share of the matrix product's speed that a model reaches: 2 MACs img/s / ceiling.

    A training step counts as three forward passes: the backward pass multiplies twice for every product.
    """
    return (3 if train else 1) * 2 * macs * images_per_second / ceiling.product


def copy_share(needed: int, calls_per_second: float, ceiling: Ceiling) -> float:
    """Share of the copy's speed that `needed` bytes per call take."""
    return needed * calls_per_second / ceiling.copy


@dataclass(frozen=True)
class BatchSearch:
    """Result of a search for the fastest batch."""

    best: int
    largest: int  # that fits, to the closeness asked for
    limit: str  # what ended the search: "memory", "cap", or the word of `stop`
    images_per_second: dict[int, float]  # of every batch that fits, smallest first

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "images_per_second": {str(k): v for k, v in self.images_per_second.items()}}


def search_batch(
    attempt: Callable[[int], float],
    *,
    most: int,
    least: int = 1,
    closeness: float = 0.0,
    stop: Callable[[], str] = lambda: "",
) -> BatchSearch:
    """Try `least`, twice that, ... up to `most`; after the first that is out of memory, halve the gap.

    `attempt` takes a batch and returns images/s. The gap is closed to `closeness` as a share of the batch (0: to the
    very last image). `stop` may end the doubling with a word, where memory runs short without a sign. Raises
    `ValueError` where not even `least` fits.
    """
    speeds: dict[int, float] = {}
    batch, limit, failed = least, "", 0
    while not limit:
        speed = fitting(attempt, batch)
        if speed is None:
            limit, failed = "memory", batch
        else:
            speeds[batch] = speed
            limit = stop() or ("cap" if batch == most else "")
            batch = min(2 * batch, most)
    if not speeds:
        raise ValueError(f"not even a batch of {least} fits into memory; use a smaller model or image size")
    largest = max(speeds)
    while failed - largest > max(1, closeness * largest):
        batch = (largest + failed) // 2
        speed = fitting(attempt, batch)
        if speed is None:
            failed = batch
        else:
            speeds[batch], largest = speed, batch
    return BatchSearch(max(sorted(speeds), key=speeds.__getitem__), largest, limit, dict(sorted(speeds.items())))


def fitting(call: Callable[..., T], *args: Any) -> T | None:
    """The result of a call, or none where memory was out."""
    try:
        return call(*args)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    free_memory()  # outside the handler: inside it the error's frames still hold the tensors
    return None


def memory_is_short(device: torch.device) -> bool:
    """Whether a process on a CPU, given twice its memory, would have more than `MEMORY_SHARE` (accelerators raise)."""
    if device.type != "cpu":
        return False
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return 2 * (peak_memory(device) or 0) > MEMORY_SHARE * whole
    except (AttributeError, ValueError, OSError):  # not known here: the cap alone holds
        return False


def free_memory() -> None:
    """Give back what a failed attempt held on an accelerator."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def energy_meter(device: torch.device, powercap: Path = POWERCAP) -> Meter | None:
    """A meter for the whole device (all that runs on it counts), or none."""
    try:
        meter = _nvml(device) if device.type == "cuda" else _rapl(powercap) if device.type == "cpu" else None
        return meter if meter is not None and meter() is not None else None
    except Exception:  # a library that is not there, a driver of another age, a file that may not be read
        return None


def joules_per_image(
    work: Work, batch: int, device: torch.device, meter: Meter | None, seconds: float = ENERGY_SECONDS
) -> float | None:
    """Energy of the device over the images of calls made for about `seconds`, its idle power included."""
    if meter is None:
        return None
    once = max(1e-6, sum(timed_calls(work, 1, device)))
    calls, began, before = 0, time.perf_counter(), meter()
    while time.perf_counter() - began < seconds:
        calls += len(timed_calls(work, max(1, round(seconds / 8 / once)), device, calls))
    after = meter()
    if before is None or after is None or after <= before:
        return None
    return (after - before) / (calls * batch)


def _nvml(device: torch.device) -> Meter | None:
    """NVML comes with the driver; its counter (Volta and later) is in millijoules."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()
    name = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None

    def read() -> float | None:
        used = ctypes.c_ulonglong()
        failed = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
        return None if failed else used.value / 1e3

    return read


def _rapl(powercap: Path) -> Meter | None:
    """The packages' counters in microjoules; each begins anew at its range."""
    packages = [p for p in sorted(powercap.glob("intel-rapl:*")) if p.name.count(":") == 1]
    if not packages:
        return None
    ranges = [int((p / "max_energy_range_uj").read_text()) for p in packages]
    turns, last = [0] * len(packages), [0] * len(packages)

    def read() -> float | None:
        try:
            now = [int((p / "energy_uj").read_text()) for p in packages]
        except (OSError, ValueError):
            return None
        for i, value in enumerate(now):
            turns[i] += value < last[i]
            last[i] = value
        return sum(turn * size + value for turn, size, value in zip(turns, ranges, now, strict=True)) / 1e6

    return read
