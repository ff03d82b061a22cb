"""Joules that a device has used, where its driver tells: NVML's counter on CUDA, RAPL's on a Linux CPU.

Never an error: where nothing is told, there is no meter.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vitrail.measure.speed import Work, timed_calls

POWERCAP = Path("/sys/class/powercap")
SECONDS = 1.5  # counters move in steps of up to a tenth of a second

Meter = Callable[[], float | None]  # joules used since some fixed moment; none where the counter cannot be read


def energy_meter(device: torch.device, powercap: Path = POWERCAP) -> Meter | None:
    """A meter for the whole device (all that runs on it counts), or none."""
    try:
        found = _nvml(device) if device.type == "cuda" else _rapl(powercap) if device.type == "cpu" else None
        return found if found is not None and found() is not None else None
    except Exception:  # a library that is not there, a driver of another age, a file that may not be read
        return None


def joules_per_image(
    work: Work, batch: int, device: torch.device, meter: Meter | None, seconds: float = SECONDS
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
