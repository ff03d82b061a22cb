"""Results of a benchmark: one row per model and form, with the conditions it was measured under.

Joules that a device has used, where its driver tells: NVML's counter on CUDA, RAPL's on a Linux CPU.

Never an error: where nothing is told, there is no meter.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitrail.bench.claims import Checked
from vitrail.bench.roofline import Ceiling
from vitrail.measure.speed import Noise, Ratio, Timing, Work, timed_calls

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class BenchRow:
    """One model in one form."""

    model: str
    form: str  # "eager" or "optimized"
    family: str  # "vitrail" or "timm"
    parameters: int
    macs: int  # of one image, forward
    image_size: int
    timing: Timing
    peak_memory: int | None  # bytes of weights, one batch and all between; none where it is not measured
    product_share: float  # of the matrix product's speed
    copy_share: float  # of the copy's speed, at the least: weights and images read once a call
    joules_per_image: float | None
    top1: float | None  # as stated by the model's folder
    reference: str | None  # what `ratio` is to
    ratio: Ratio | None  # above 1: faster than the reference

    @property
    def batch(self) -> int:
        return self.timing.batch

    @property
    def seconds_per_image(self) -> float:
        return 1 / self.timing.images_per_second

    def to_json(self) -> dict[str, Any]:
        low, high = self.timing.quartiles
        return {
            "model": self.model,
            "form": self.form,
            "family": self.family,
            "parameters": self.parameters,
            "macs": self.macs,
            "image_size": self.image_size,
            "batch": self.batch,
            "images_per_second": self.timing.images_per_second,
            "images_per_second_quartiles": [low, high],
            "spread": self.timing.spread,
            "latency_seconds": {f"p{p}": self.timing.latency(p) for p in PERCENTILES},
            "rounds": len(self.timing.rounds),
            "calls": len(self.timing.calls),
            "peak_memory": self.peak_memory,
            "product_share": self.product_share,
            "copy_share": self.copy_share,
            "joules_per_image": self.joules_per_image,
            "top1": self.top1,
            "reference": self.reference,
            "ratio": None if self.ratio is None else asdict(self.ratio),
        }


@dataclass(frozen=True)
class Bench:
    """Rows, and under which conditions they were measured."""

    rows: tuple[BenchRow, ...]
    train: bool
    device: str
    precision: str
    versions: Mapping[str, str]
    against: str | None = None
    ceiling: Ceiling | None = None
    noise: Noise | None = None
    searches: Mapping[str, Any] = field(default_factory=dict)  # of batch sizes, by model
    checks: tuple[Checked, ...] = ()
    check_batch: int | None = None
    notes: tuple[str, ...] = ()  # what a person should know: forms left out, models without a twin

    def to_json(self) -> dict[str, Any]:
        noise = self.noise
        return {
            "what": "training" if self.train else "inference",
            "device": self.device,
            "precision": self.precision,
            "versions": dict(self.versions),
            "against": self.against,
            "ceiling": None if self.ceiling is None else self.ceiling.to_json(),
            "noise": None if noise is None else {"noisy": noise.noisy, **asdict(noise), "reasons": list(noise.reasons)},
            "rows": [row.to_json() for row in self.rows],
            "searches": dict(self.searches),
            "checks": [check.to_json() for check in self.checks],
            "check_batch": self.check_batch,
            "notes": list(self.notes),
        }


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
