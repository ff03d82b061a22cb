"""Evaluation of embeddings with few labels (CompRess, Koohpayegani et al. 2020, arXiv 2010.14713), and spreads over
seeds.

Everything is embedded once; then a few training images are drawn, several times, and the test images are classified by
their nearest neighbours among them and by a linear classifier fitted to them. Mean and spread are over draws.
Statistics over seeds are those of RSB (Wightman et al. 2021, arXiv 2110.00476): runs that differ in nothing else, their
standard deviation and range, whether the best seed on one test set is the best on another, and whether early metrics
predict the final ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, draw_by_class, evaluator
from vitrail.measure.probe import ProbeSettings, linear_probe
from vitrail.measure.retrieval import embedded_split, knn_accuracy
from vitrail.quantities import percent

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

    `curves` has one mapping per seed from epoch to metric, `final` one metric per seed.
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


DRAWS = 5
NEIGHBOURS = (1, 20)
SHORT, LONG = 30, 60  # epochs: with a tenth of the labels, with fewer


@dataclass(frozen=True)
class Labelled:
    """How many training images have a label: a share of every class, or the same number of each."""

    share: float | None = None
    shots: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.shots is None):
            raise ValueError("say either which share of the labels is known, or how many of each class")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share:g} labels is impossible; use one above 0 and up to 1")
        if self.shots is not None and self.shots < 1:
            raise ValueError(f"{self.shots} images per class teach nothing; use at least 1")

    @property
    def name(self) -> str:
        return f"{100 * self.share:g} %" if self.share is not None else f"{self.shots} a class"

    def rows(self, labels: Tensor, seed: int) -> Tensor:
        """The rows whose labels are known. Every class keeps at least one image; one with too few gives all it has."""
        if self.shots is not None:
            shots = self.shots
            return draw_by_class(labels, lambda _: shots, seed)
        share = self.share or 0.0
        return draw_by_class(labels, lambda n: max(1, round(share * n)), seed)

    @property
    def settings(self) -> ProbeSettings:
        """The published ones: a single learning rate, so that no labelled image is spent on choosing it."""
        epochs = SHORT if self.share is not None and self.share >= 0.1 else LONG
        return ProbeSettings(learning_rates=(0.05,), weight_decays=(1e-4,), epochs=epochs)


PROTOCOLS = (Labelled(share=0.01), Labelled(share=0.1), Labelled(shots=1), Labelled(shots=5))


@dataclass(frozen=True)
class FewLabels:
    """Accuracy with few labels, over draws."""

    name: str
    images: int  # with a label
    figures: dict[str, Spread]  # knn1, knn20, linear

    def to_json(self) -> dict[str, Any]:
        return {"images": self.images, **{name: spread.to_json() for name, spread in self.figures.items()}}


def few_labels(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    protocols: Sequence[Labelled] = PROTOCOLS,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[FewLabels]:
    """kNN and linear accuracy on `test`, for every protocol, over `draws` sets of labelled images."""
    if draws < 1:
        raise ValueError(f"{draws} draws measure nothing; use at least 1")
    found = []
    for protocol in protocols:
        values: dict[str, list[float]] = {}
        for draw in range(draws):
            rows = protocol.rows(train[1], seed + draw)
            known = train[0][rows], train[1][rows]
            for k, accuracy in knn_accuracy(*test, *known, neighbours=NEIGHBOURS).items():
                values.setdefault(f"knn{k}", []).append(accuracy)
            linear = linear_probe(known, test, classes, protocol.settings)
            values.setdefault("linear", []).append(linear.accuracy)
        spreads = {name: Spread.of(each) for name, each in values.items()}
        found.append(FewLabels(protocol.name, len(rows), spreads))
    return found


def few_labels_table(results: Mapping[str, Any]) -> ResultTable:
    """Accuracy with few labels, mean and deviation."""
    rows = []
    for name, row in results.items():
        spreads = [row[key] for key in ("knn1", "knn20", "linear")]
        cells = [percent(s["mean"]) + ("" if s["std"] is None else f" ± {100 * s['std']:.1f}") for s in spreads]
        rows.append((name, f"{row['images']:,}", *cells))
    title = "few labels, mean and deviation over draws"
    return ResultTable(title, ("labelled", "images", "1-NN", "20-NN", "linear"), rows)


@evaluator("train", "embedding", table=few_labels_table)
def evaluate_few(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """KNN and linear accuracy with 1 %, 10 %, and 1 and 5 images per class labelled."""
    if data.split == "train":
        raise ValueError("few: the images that are labelled are drawn from train; evaluate another split")
    train, test = (embedded_split(model, data, split, **where) for split in ("train", data.split))
    made = few_labels((train.embedding, train.label), (test.embedding, test.label), len(data.classes))
    numbers = {
        f"{figure}_{row.name.replace(' %', 'percent').replace(' a class', 'shot')}": spread.mean
        for row in made
        for figure, spread in row.figures.items()
    }
    return {"numbers": numbers, "tables": {"few": {row.name: row.to_json() for row in made}}, "pictures": {}}
