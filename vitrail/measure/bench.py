"""Results of a benchmark: one row per model and form, with the conditions it was measured under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vitrail.measure.ceiling import Ceiling
from vitrail.measure.hardware_checks import Checked
from vitrail.measure.speed import Noise, Ratio, Timing

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
