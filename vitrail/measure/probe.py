"""Linear probes on frozen features, with all labels and with few, and spreads over seeds.

A grid of learning rates and weight decays is trained in one pass: all points see the same batches, so their weights lie
side by side, [grid * classes, features], and a step is one matrix product for all of them. The best point is chosen on
validation images, and test images are read once.

With few labels (CompRess, Koohpayegani et al. 2020, arXiv 2010.14713) a few training images are drawn, several times,
and the test images are classified by their nearest neighbours among them and by a linear classifier fitted to them.
Statistics over seeds are those of RSB (Wightman et al. 2021, arXiv 2110.00476): runs that differ in nothing else, their
standard deviation and range, whether the best seed on one test set is the best on another, and whether early metrics
predict the final ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, draw_by_class, evaluator
from vitrail.measure.retrieval import Rows, embedded_split, knn_accuracy
from vitrail.quantities import percent

ROWS_AT_ONCE = 4096
STEPS = (3 / 8, 3 / 4)  # 15 and 30 of 40 epochs
FEWEST = 3  # seeds of which a correlation says anything at all

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ProbeSettings:
    """How probes are trained: SGD with momentum, every combination of learning rate and weight decay at once."""

    learning_rates: tuple[float, ...] = tuple(10 ** (-3 + i / 3) for i in range(10))  # 0.001 to 1
    weight_decays: tuple[float, ...] = (1e-6, 1e-4, 1e-2)
    epochs: int = 40
    batch: int = 256
    momentum: float = 0.9
    schedule: Literal["cosine", "steps"] = "cosine"  # steps: a tenth of it from 3/8 and 3/4 of the epochs on
    normalise: bool = True  # features to unit length
    standardise: bool = True  # then each to mean 0 and variance 1 over training images
    val_share: float = 0.1  # of training images, where none are given to choose by
    refit: bool = True  # train the chosen point again on training and validation images
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.learning_rates or not self.weight_decays:
            raise ValueError("a probe needs at least one learning rate and one weight decay")
        if self.epochs < 1 or self.batch < 1:
            raise ValueError(f"a probe of {self.epochs} epochs and batches of {self.batch} learns nothing")
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share {self.val_share:g} must lie between 0 and 1")

    @property
    def grid(self) -> list[tuple[float, float]]:
        """(learning rate, weight decay) of every point."""
        return [(rate, decay) for rate in self.learning_rates for decay in self.weight_decays]

    def factors(self, steps: int) -> list[float]:
        """The factor of the learning rate at each of `steps` steps."""
        done = [step / steps for step in range(steps)]
        if self.schedule == "cosine":
            return [0.5 * (1 + math.cos(math.pi * share)) for share in done]
        return [0.1 ** sum(share >= at for at in STEPS) for share in done]


LINEAR = ProbeSettings(learning_rates=(0.01,), weight_decays=(1e-4,), schedule="steps")
"""The published protocol: one point, no choice (CompRes, ISD, MSF, CMSF)."""


@dataclass(frozen=True, eq=False)
class Probes:
    """A linear classifier for every point of a grid."""

    weight: Tensor  # [grid, classes, features]
    bias: Tensor  # [grid, classes]

    def logits(self, features: Tensor) -> Tensor:
        """[rows, features] -> [rows, grid, classes]."""
        return F.linear(features, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(1, self.bias.shape)

    def evaluate(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Share of right answers and mean loss of every point, [grid] float64; one that diverged is never right."""
        right, loss = torch.zeros(2, len(self.bias), dtype=torch.float64, device=features.device)
        for rows, label in zip(features.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True):
            logits = self.logits(rows)
            finite = logits.isfinite().all(2)
            right += ((logits.argmax(2) == label[:, None]) & finite).sum(0)
            each = F.cross_entropy(logits.transpose(1, 2), label[:, None].expand(finite.shape), reduction="none")
            loss += torch.where(finite, each, torch.inf).sum(0, dtype=torch.float64)
        return right / len(labels), loss / len(labels)


@dataclass(frozen=True)
class ProbeResult:
    """A linear probe and how it was chosen."""

    accuracy: float  # of the chosen point on the evaluated images
    learning_rate: float
    weight_decay: float
    tried: tuple[tuple[float, float, float], ...]  # learning rate, weight decay, validation accuracy; empty: no choice
    images: int  # that the evaluated probe was trained on

    def to_json(self) -> dict[str, Any]:
        names = ("learning_rate", "weight_decay", "val")
        return {**vars(self), "tried": [dict(zip(names, point, strict=True)) for point in self.tried]}


def prepared(train: Tensor, *others: Tensor, normalise: bool = True, standardise: bool = True) -> list[Tensor]:
    """Features of training images and of others, ready for a probe; statistics come from training images only.

    A feature that is constant over training images becomes zero there and is not scaled.
    """
    every = [features.float() for features in (train, *others)]
    if normalise:
        every = [F.normalize(features, dim=1) for features in every]
    if standardise:
        mean, deviation = every[0].mean(0), every[0].std(0, correction=0)
        # Rounding of the mean leaves a constant feature a deviation of about 1e-8 of its size.
        scale = torch.where(deviation > 1e-6 * mean.abs().clamp(min=1e-6), deviation, 1.0)
        every = [(features - mean) / scale for features in every]
    return every


def train_probes(features: Tensor, labels: Tensor, classes: int, settings: ProbeSettings) -> Probes:
    """Probes of every point of the grid, from zero weights, on `features` [rows, features] as they are given.

    Batches depend on the seed and the number of rows only; the last of an epoch may be smaller. Updates are those of
    `torch.optim.SGD`.
    """
    rows, grid, device = len(features), settings.grid, features.device
    if not rows:
        raise ValueError("a probe needs training images, and there are none")
    if int(labels.max()) >= classes:
        raise ValueError(f"label {int(labels.max())} is outside the {classes} classes")
    steps = settings.epochs * math.ceil(rows / settings.batch)
    rate, decay = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in zip(*grid, strict=True))
    factors = torch.tensor(settings.factors(steps), dtype=torch.float64).view(-1, 1, 1, 1)
    rates, decays = (factors * rate).float().to(device), decay.float().to(device)  # [steps, grid, 1, 1], [grid, 1, 1]
    weight = torch.zeros(len(grid), classes, features.shape[1], device=device, requires_grad=True)
    bias = torch.zeros(len(grid), classes, 1, device=device, requires_grad=True)
    moments = [torch.zeros_like(weight), torch.zeros_like(bias)]
    generator = torch.Generator().manual_seed(settings.seed)
    orders = (torch.randperm(rows, generator=generator).to(device) for _ in range(settings.epochs))
    for step, batch in enumerate(batch for order in orders for batch in order.split(settings.batch)):
        logits = F.linear(features[batch], weight.flatten(0, 1), bias.flatten()).view(-1, classes)
        label = labels[batch].repeat_interleave(len(grid))
        loss = F.cross_entropy(logits, label, reduction="sum") / len(batch)
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for value, gradient, momentum in zip((weight, bias), gradients, moments, strict=True):
                momentum.mul_(settings.momentum).add_(gradient + decays * value)
                value.sub_(rates[step] * momentum)
    return Probes(weight.detach(), bias.detach()[..., 0])


def linear_probe(
    train: Rows, test: Rows, classes: int, settings: ProbeSettings | None = None, val: Rows | None = None
) -> ProbeResult:
    """Accuracy on `test` of the point of the grid that is best on `val`.

    Without `val` a stratified share of `train` takes its place; a grid of one point needs neither and is trained on
    `train` as it is. Of equally accurate points the one of least loss wins. Raises `ValueError` where no class has an
    image to spare.
    """
    settings = settings or ProbeSettings()
    options = {"normalise": settings.normalise, "standardise": settings.standardise}
    chosen, tried = settings.grid[0], []
    if len(settings.grid) > 1:
        learned, held = (train, val) if val is not None else _divided(*train, settings)
        features, held_out = prepared(learned[0], held[0], **options)
        accuracy, loss = train_probes(features, learned[1], classes, settings).evaluate(held_out, held[1])
        tried = [(*point, value) for point, value in zip(settings.grid, accuracy.tolist(), strict=True)]
        # Few images make many points equally accurate, among them those that have hardly learned: the loss tells.
        chosen = settings.grid[min(range(len(tried)), key=lambda i: (-tried[i][2], float(loss[i])))]
        if settings.refit and val is not None:
            train = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
        elif not settings.refit:
            train = learned
    alone = replace(settings, learning_rates=(chosen[0],), weight_decays=(chosen[1],))
    features, tested = prepared(train[0], test[0], **options)
    probe = train_probes(features, train[1], classes, alone)
    return ProbeResult(float(probe.evaluate(tested, test[1])[0]), *chosen, tuple(tried), len(features))


def probe_table(results: Mapping[str, Any], most: int = 5) -> ResultTable | None:
    """The best settings of a grid; none where nothing was chosen."""
    best = sorted(results["tried"], key=lambda point: -point["val"])[:most]
    rows = [(f"{p['learning_rate']:.3g}", f"{p['weight_decay']:g}", percent(p["val"])) for p in best]
    columns = ("learning rate", "weight decay", "val top-1")
    return ResultTable("best settings of the linear probe on val", columns, rows) if rows else None


@evaluator("train", "embedding", table=probe_table)
def evaluate_linear(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """A linear probe on the frozen embedding, its learning rate and decay chosen on val.

    Where val itself is evaluated, or there is none, a share of training images is held out to choose by.
    """
    train, test = (embedded_split(model, data, split, **where).rows for split in ("train", data.split))
    held_out = data.split == "test" and "val" in data.loaders
    val = embedded_split(model, data, "val", **where).rows if held_out else None
    result = linear_probe(train, test, len(data.classes), val=val)
    return {"numbers": {"linear": result.accuracy}, "tables": {"linear": result.to_json()}, "pictures": {}}


@evaluator("train", "embedding")
def evaluate_published(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """One learning rate and decay for all models and data, as CompRes to CMSF state it."""
    train, test = (embedded_split(model, data, split, **where).rows for split in ("train", data.split))
    result = linear_probe(train, test, len(data.classes), settings=LINEAR)
    return {"numbers": {"linear_published": result.accuracy}, "tables": {}, "pictures": {}}


def _divided(features: Tensor, labels: Tensor, settings: ProbeSettings) -> tuple[Rows, Rows]:
    """A stratified share held out to choose by; every class keeps an image to learn from."""
    held = draw_by_class(labels, lambda n: min(n - 1, max(1, round(n * settings.val_share))), settings.seed)
    if not len(held):
        raise ValueError(
            "every class has a single training image, so none can be held out to choose a learning rate by; give "
            "validation images, or one learning rate and one weight decay"
        )
    rest = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    rest[held] = False
    return (features[rest], labels[rest]), (features[held], labels[held])


@dataclass(frozen=True)
class Spread:
    """A metric over seeds."""

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
    """Correlation of two metrics of the same seeds; NaN where there are too few seeds or a metric is constant."""

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
    """For every epoch that all seeds recorded: correlation of the metric at that epoch with the final one.

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
    # Constant but for rounding is constant: metrics are shares of at most millions of images.
    if min(np.abs(a).max(), np.abs(b).max()) < 1e-12:
        return math.nan
    return float(np.clip(a @ b / math.sqrt((a @ a) * (b @ b)), -1, 1))


def _ranks(values: Floats) -> Floats:
    """1, 2, ...; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[group.reshape(-1)]


DRAWS = 5  # sets of labelled images
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
        shots, share = self.shots, self.share or 0.0
        return draw_by_class(labels, lambda n: shots or max(1, round(share * n)), seed)

    @property
    def settings(self) -> ProbeSettings:
        """The published ones: one learning rate, so that no labelled image is spent on choosing it."""
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
    train: Rows, test: Rows, classes: int, protocols: Sequence[Labelled] = PROTOCOLS, draws: int = DRAWS, seed: int = 0
) -> list[FewLabels]:
    """kNN and linear accuracy on `test`, for every protocol, over `draws` sets of labelled images."""
    if draws < 1:
        raise ValueError(f"{draws} draws measure nothing; use at least 1")
    results = []
    for protocol in protocols:
        values: dict[str, list[float]] = {}
        for draw in range(draws):
            rows = protocol.rows(train[1], seed + draw)
            known = train[0][rows], train[1][rows]
            for k, accuracy in knn_accuracy(*test, *known, neighbours=NEIGHBOURS).items():
                values.setdefault(f"knn{k}", []).append(accuracy)
            values.setdefault("linear", []).append(linear_probe(known, test, classes, protocol.settings).accuracy)
        spreads = {name: Spread.of(each) for name, each in values.items()}
        results.append(FewLabels(protocol.name, len(rows), spreads))
    return results


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
    train, test = (embedded_split(model, data, split, **where).rows for split in ("train", data.split))
    results = few_labels(train, test, len(data.classes))
    numbers = {
        f"{figure}_{row.name.replace(' %', 'percent').replace(' a class', 'shot')}": spread.mean
        for row in results
        for figure, spread in row.figures.items()
    }
    return {"numbers": numbers, "tables": {"few": {row.name: row.to_json() for row in results}}, "pictures": {}}
