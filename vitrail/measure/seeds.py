"""Effect of the seed: spread of a metric over seeds, and correlation between metrics.

As in RSB (Wightman et al. 2021, arXiv 2110.00476): n runs that differ in nothing else, their standard deviation and
range, whether the best seed on one test set is the best on another, and whether early metrics predict the
final ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 3  # seeds of which a correlation says anything at all

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    count: int
    mean: float
    std: float  # with n - 1; NaN of one value
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("no values: a spread needs at least one seed")
        std = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(len(values), statistics.fmean(values), std, min(values), max(values))

    @property
    def range(self) -> float:
        """Largest minus smallest."""
        return self.high - self.low

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "std": None if math.isnan(self.std) else self.std, "range": self.range}


@dataclass(frozen=True)
class Correlation:
    """How two figures of the same seeds go together; NaN where there are too few seeds or a figure is constant."""

    count: int
    pearson: float
    spearman: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Correlation:
        if len(first) != len(second):
            raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
        ranks = [_ranks(np.asarray(v, np.float64)) for v in (first, second)]
        return cls(len(first), _pearson(np.asarray(first, float), np.asarray(second, float)), _pearson(*ranks))

    def to_json(self) -> dict[str, Any]:
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(self).items()}


def early_and_final(curves: Sequence[Mapping[float, float]], final: Sequence[float]) -> dict[float, Correlation]:
    """For every epoch that all seeds recorded: how the figure at that epoch goes together with the final one.

    `curves` has one mapping a seed from epoch to figure, `final` one figure a seed.
    """
    if len(curves) != len(final):
        raise ValueError(f"{len(curves)} curves and {len(final)} final figures cannot be paired")
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {epoch: Correlation.of([curve[epoch] for curve in curves], final) for epoch in sorted(shared)}


def _pearson(first: Floats, second: Floats) -> float:
    if len(first) < FEWEST:
        return math.nan
    a, b = first - first.mean(), second - second.mean()
    # Constant but for rounding is constant: figures are shares of at most millions of images.
    if min(np.abs(a).max(), np.abs(b).max()) < 1e-12:
        return math.nan
    return float(np.clip(a @ b / math.sqrt((a @ a) * (b @ b)), -1, 1))


def _ranks(values: Floats) -> Floats:
    """1, 2, ...; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[place.reshape(-1)]
