"""Comparison of finished runs: mean and spread over seeds, paired tests against a baseline, disagreement, classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.compare.statistics import (
    Floats,
    disagreement,
    holm,
    paired_interval,
    pareto,
    sign_flip_p,
    sign_flip_p_whole,
)
from vitrail.data.dataset import UNLABELLED
from vitrail.measure.classification import STANDARD, MultiLabelFigures, classification
from vitrail.measure.evaluator import StoredPredictions
from vitrail.measure.probe import FEWEST, Correlation, Spread, early_and_final


@dataclass(frozen=True)
class Member:
    """One finished run of a variant. Its metrics are those of the weights that it kept (`engine.select`)."""

    variant: str
    seed: int
    path: str
    metrics: Mapping[str, float]  # on `split`, as the run itself measured them at its end
    split: str
    data: str = ""
    classes: tuple[str, ...] = ()
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    predictions: StoredPredictions | None = None
    elsewhere: Mapping[str, float] = field(default_factory=dict)  # the same metric on further test sets, by URI
    fold: str = ""  # I/K of cross-validation

    @property
    def seconds(self) -> float | None:
        """Of training steps, evaluations on val not counted."""
        times = [float(line["seconds"]) for line in self.history if line.get("split") == "train" and "seconds" in line]
        return sum(times) if times else None

    @property
    def epochs(self) -> float | None:
        return float(self.history[-1]["epoch"]) if self.history else None

    def course(self, metric: str, split: str = "val") -> dict[float, float]:
        """Epoch -> metric, as logged while training; NaN is left out."""
        lines = [line for line in self.history if line.get("split") == split and not line.get("final")]
        return {float(line["epoch"]): float(line[metric]) for line in lines if line.get(metric) is not None}

    def same_images(self, other: Member) -> bool:
        """Whether both stored predictions of images of one split of one data set."""
        known = self.predictions is not None and other.predictions is not None
        return known and (self.data, self.split) == (other.data, other.split)


@dataclass(frozen=True)
class Failure:
    """A run that failed, and why."""

    variant: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Price:
    """Cost of a variant."""

    parameters: int
    macs: int  # per image, forward
    image_size: int
    images_per_second: float | None = None  # of inference; none: not measured
    peak_memory: int | None = None  # bytes of inference; none: not known here
    speed_noise: float = 0.0  # of images_per_second, as a share: half the width of its interval
    seconds: float | None = None  # of training, mean over seeds
    seconds_noise: float = 0.0  # of seconds, as a share
    epochs: float | None = None


@dataclass(frozen=True)
class Against:
    """A variant against the baseline, on the seeds that both have."""

    seeds: int
    difference: float  # mean over pairs
    interval: tuple[float, float] | None  # 95 %, over seeds and images; none without predictions of the same images
    p_seeds: float | None  # none with one pair, of which nothing can be said
    p_images: float | None
    holm_seeds: float | None = None  # the same, corrected for the number of variants
    holm_images: float | None = None

    @property
    def p_values(self) -> tuple[tuple[float | None, float | None], ...]:
        """p as it is and as corrected: over seeds, over images."""
        return (self.p_seeds, self.holm_seeds), (self.p_images, self.holm_images)

    @property
    def clear(self) -> bool:
        """The interval leaves out zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class StudyRow:
    """One variant."""

    variant: str
    members: tuple[Member, ...]
    failures: tuple[Failure, ...]
    spread: Spread | None  # of the chosen metric; none where no run finished
    means: Mapping[str, float]  # of every other metric
    price: Price | None = None
    against: Against | None = None  # none for the baseline itself
    length: str = ""  # how long it trained, and why so long
    front: bool = False  # nothing is both cheaper (in MACs) and better

    @property
    def noise(self) -> float:
        """Half the width of the 95 % interval of the mean, over seeds or test images (unpaired), whichever is more."""
        assert self.spread is not None
        mean, seeds = self.spread.mean, np.nan_to_num(self.spread.std) / self.spread.count**0.5
        images = [len(m.predictions.index) for m in self.members if m.predictions is not None]
        return 1.96 * max([float(seeds), *((mean * (1 - mean) / count) ** 0.5 for count in images)])

    def to_json(self, metric: str) -> dict[str, Any]:
        against = None if self.against is None else {**asdict(self.against), "clear": self.against.clear}
        runs = [
            {
                **{"seed": m.seed, "path": m.path, metric: float(m.metrics[metric]), "elsewhere": dict(m.elsewhere)},
                "metrics": plain(m.metrics),
            }
            for m in self.members
        ]
        return {
            "variant": self.variant,
            "runs": runs,
            "failures": [{"seed": f.seed, "reason": f.reason} for f in self.failures],
            metric: None if self.spread is None else self.spread.to_json(),
            "means": plain(self.means),
            "against": plain(against),
            "price": None if self.price is None else plain(asdict(self.price)),
            "length": self.length,
            "front": self.front,
        }


@dataclass(frozen=True)
class Comparison:
    """All results of a comparison."""

    name: str
    metric: str  # top1, or map where several labels hold
    baseline: str
    split: str
    rows: tuple[StudyRow, ...]
    disagreement: Floats | None = None  # [variants, variants], in the order of `predicted`
    predicted: tuple[str, ...] = ()  # variants with stored predictions
    classes: tuple[str, ...] = ()
    class_scores: Mapping[str, Floats] = field(default_factory=dict)  # variant -> [classes], mean over seeds
    seed_study: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: str = ""  # under which speed and memory were measured
    budget: str = ""
    notes: tuple[str, ...] = ()

    @property
    def repeats(self) -> str:
        return "runs" if any(m.fold for row in self.rows for m in row.members) else "seeds"

    def row(self, variant: str) -> StudyRow:
        return next(row for row in self.rows if row.variant == variant)

    @property
    def failures(self) -> list[Failure]:
        return [failure for row in self.rows for failure in row.failures]

    def further(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Metrics of evaluators other than classification: name -> variant -> mean and std over seeds."""
        usual = STANDARD[self.metric]
        table: dict[str, dict[str, tuple[float, float]]] = {}
        for name in dict.fromkeys(n for row in self.rows for m in row.members for n in m.metrics if n not in usual):
            for row in self.rows:
                values = [m.metrics[name] for m in row.members if name in m.metrics]
                if values:
                    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
                    table.setdefault(name, {})[row.variant] = (float(np.mean(values)), std)
        return table

    def class_gains(self, variant: str) -> Floats | None:
        """[classes] score minus the baseline's; none where either is not known."""
        if variant not in self.class_scores or self.baseline not in self.class_scores:
            return None
        return self.class_scores[variant] - self.class_scores[self.baseline]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; fractions, not percent; what is undefined is null."""
        gains = {row.variant: self.class_gains(row.variant) for row in self.rows if row.variant != self.baseline}
        rates = self.disagreement
        return {
            **{"name": self.name, "figure": self.metric, "baseline": self.baseline, "split": self.split},
            **{"budget": self.budget, "conditions": self.conditions},
            "rows": [row.to_json(self.metric) for row in self.rows],
            "disagreement": None if rates is None else {"variants": list(self.predicted), "rates": plain(rates)},
            "classes": list(self.classes),
            "class_gains": {variant: plain(values) for variant, values in gains.items() if values is not None},
            "seeds": plain(self.seed_study),
            "notes": list(self.notes),
        }


def plain(value: Any) -> Any:
    """Lists, dicts and numbers; NaN becomes none."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_members(
    name: str,
    members: Sequence[Member],
    baseline: str,
    *,
    failures: Sequence[Failure] = (),
    prices: Mapping[str, Price] | None = None,
    lengths: Mapping[str, str] | None = None,
    order: Sequence[str] = (),
    conditions: str = "",
    budget: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare finished runs; rows come in `order`, others behind. Raises `ValueError` without a finished run."""
    metric = _common_metric(members)
    names = list(dict.fromkeys([*order, *(m.variant for m in members), *(f.variant for f in failures)]))
    runs = {n: tuple(sorted((m for m in members if m.variant == n), key=lambda m: m.seed)) for n in names}
    rows = []
    for variant in names:
        failed = tuple(f for f in failures if f.variant == variant)
        row = _row(
            variant, runs[variant], failed, metric, (prices or {}).get(variant), (lengths or {}).get(variant, "")
        )
        against = None if variant == baseline else _against(row.members, runs.get(baseline, ()), metric)
        rows.append(replace(row, against=against))
    predicted = tuple(n for n in names if any(m.predictions is not None for m in runs[n]))
    known = {m.classes for m in members if m.predictions is not None}
    classes = next(iter(known)) if len(known) == 1 else ()
    return Comparison(
        name=name,
        metric=metric,
        baseline=baseline,
        split=members[0].split,
        rows=tuple(_on_front(_with_holm(rows))),
        disagreement=disagreement_matrix([runs[n] for n in predicted]) if predicted else None,
        predicted=predicted,
        classes=classes,
        class_scores={n: _class_scores(runs[n]) for n in predicted} if classes else {},
        seed_study={n: seed_study(runs[n], metric) for n in names if len(runs[n]) > 1},
        conditions=conditions,
        budget=budget,
        notes=(*notes, *_differences(members)),
    )


def _common_metric(members: Sequence[Member]) -> str:
    """top1, or map where several labels hold. Raises `ValueError` for runs that cannot be compared."""
    if not members:
        raise ValueError("there is nothing to compare: no run has finished")
    metric = "top1" if all("top1" in m.metrics for m in members) else "map"
    for member in members:
        if "perplexity" in member.metrics:
            raise ValueError(f"{member.path} is a language model, and accuracies are compared; see its metrics.jsonl")
    for member in members:
        if member.classes == (UNLABELLED,):
            raise ValueError(
                f"{member.path} learned from images without labels, and accuracies are compared; evaluate it on some "
                "that have labels: vitrail evaluate RUN --data LABELLED --protocol knn,linear"
            )
    for member in members:
        if metric not in member.metrics:
            raise ValueError(f"{member.path} has no {metric}: runs with one label and with several cannot be compared")
    return metric


def _differences(members: Sequence[Member]) -> list[str]:
    """Notes on what makes runs hard to compare."""
    notes = []
    splits, sources = (sorted({getattr(m, name) for m in members}) for name in ("split", "data"))
    if len(splits) > 1:
        notes.append(f"metrics are of different splits ({', '.join(splits)}): they cannot be compared directly")
    if len(sources) > 1:
        notes.append(f"runs were tested on different data ({', '.join(sources)})")
    if any(m.fold for m in members):
        notes.append("folds share training images, so p over runs is lower than for independent ones")
    silent = [m.path for m in members if m.predictions is None]
    if silent:
        notes.append(
            f"{len(silent)} runs kept no predictions, so they have no paired test (first: {silent[0]}); "
            f"renew them with: vitrail train --resume {silent[0]}"
        )
    return notes


def _row(
    variant: str,
    members: tuple[Member, ...],
    failures: tuple[Failure, ...],
    metric: str,
    price: Price | None,
    length: str,
) -> StudyRow:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if known else None

    shared = set.intersection(*(set(m.metrics) for m in members)) if members else set()
    if price is not None:
        seconds = [m.seconds for m in members if m.seconds]
        over = 1.96 * np.std(seconds, ddof=1) / np.mean(seconds) / len(seconds) ** 0.5 if len(seconds) > 1 else 0.0
        noise = float(max(over, price.speed_noise))  # one run alone: that of speeds on this machine
        price = replace(price, seconds=mean(seconds), seconds_noise=noise, epochs=mean([m.epochs for m in members]))
    spread = Spread.of([float(m.metrics[metric]) for m in members]) if members else None
    means = {name: float(np.mean([m.metrics[name] for m in members])) for name in sorted(shared)}
    return StudyRow(variant, members, failures, spread, means, price, length=length)


def _against(members: Sequence[Member], baseline: Sequence[Member], metric: str) -> Against | None:
    repeats = {(m.seed, m.fold): m for m in baseline}
    pairs = [(m, repeats[m.seed, m.fold]) for m in members if (m.seed, m.fold) in repeats]
    if not pairs and len(members) == len(baseline) == 1:  # single runs, compared although their seeds differ
        pairs = [(members[0], baseline[0])]
    if not pairs:
        return None
    gains = [float(a.metrics[metric]) - float(b.metrics[metric]) for a, b in pairs]
    folds = [_hit_differences([p for p in pairs if p[0].fold == f]) for f in dict.fromkeys(m.fold for m in members)]
    known = [fold for fold in folds if fold is not None and len(fold) == len(pairs) / len(folds)]
    hits = np.concatenate(known, 1) if metric == "top1" and len(known) == len(folds) else None
    return Against(
        seeds=len(pairs),
        difference=float(np.mean(gains)),
        interval=None if hits is None else paired_interval(hits),
        p_seeds=sign_flip_p(gains) if len(pairs) > 1 else None,
        p_images=None if hits is None else sign_flip_p_whole(hits.sum(0)),
    )


def _hit_differences(pairs: Sequence[tuple[Member, Member]]) -> NDArray[np.int64] | None:
    """[seeds, images] hits of the first less those of the second, on images that all of them saw."""
    members = [member for pair in pairs for member in pair]
    if not all(member.same_images(members[0]) for member in members):
        return None
    stored = [m.predictions for m in members if m.predictions is not None]
    shared = stored[0].index.numpy()
    for predictions in stored[1:]:
        shared = np.intersect1d(shared, predictions.index.numpy(), assume_unique=True)
    if not len(shared):
        return None
    hits = np.stack([p.right.numpy()[np.searchsorted(p.index.numpy(), shared)] for p in stored])
    return np.asarray(hits[0::2] - hits[1::2])


def _with_holm(rows: Sequence[StudyRow]) -> list[StudyRow]:
    tests = [row.against for row in rows if row.against is not None]
    by_seeds = iter(holm([test.p_seeds for test in tests if test.p_seeds is not None]))
    by_images = iter(holm([test.p_images for test in tests if test.p_images is not None]))
    corrected = {}
    for row in rows:
        if (test := row.against) is not None:
            seeds, images = test.p_seeds is not None, test.p_images is not None
            corrected[row.variant] = replace(
                test, holm_seeds=next(by_seeds) if seeds else None, holm_images=next(by_images) if images else None
            )
    return [replace(row, against=corrected.get(row.variant)) for row in rows]


def _on_front(rows: Sequence[StudyRow]) -> list[StudyRow]:
    known = [(r.variant, r.price.macs, r.spread.mean, r.noise) for r in rows if r.price and r.spread is not None]
    front = pareto([m for _, m, _, _ in known], [v for _, _, v, _ in known], value_noise=[n for *_, n in known])
    best = {point[0] for point, on in zip(known, front, strict=True) if on}
    return [replace(row, front=row.variant in best) for row in rows]


def disagreement_matrix(groups: Sequence[Sequence[Member]]) -> Floats:
    """[variants, variants] share of images that two runs classify differently, mean over pairs of equal seeds.

    On the diagonal: two seeds of one variant, mean over all pairs; NaN with one seed. Also NaN where no two runs saw
    the same images. Where variants share no seed, all pairs count.
    """
    matrix = np.full((len(groups), len(groups)), np.nan)
    for i, first in enumerate(groups):
        for j, second in enumerate(groups):
            pairs = list(combinations(first, 2)) if i == j else [(a, b) for a in first for b in second]
            equal = [(a, b) for a, b in pairs if a.seed == b.seed]
            rates = [r for a, b in (equal if equal and i != j else pairs) if (r := _rate(a, b)) is not None]
            if rates:
                matrix[i, j] = float(np.mean(rates))
    return matrix


def _rate(first: Member, second: Member) -> float | None:
    a, b = first.predictions, second.predictions
    if a is None or b is None or not first.same_images(second) or first.classes != second.classes:
        return None
    if a.multilabel != b.multilabel:
        return None
    _, here, there = np.intersect1d(a.index.numpy(), b.index.numpy(), assume_unique=True, return_indices=True)
    if not len(here):
        return None
    if a.multilabel:  # share of labels
        return float((a.guess[here] != b.guess[there]).double().mean())
    return disagreement({"first": a.guess[here], "second": b.guess[there]}, a.target[here]).between("first", "second")


def _class_scores(members: Sequence[Member]) -> Floats:
    """[classes] recall (average precision where several labels hold), mean over seeds with predictions."""
    scores = []
    for member in members:
        if member.predictions is None:
            continue
        if member.predictions.multilabel:
            metrics = classification(member.predictions.logits.float(), member.predictions.target)
            assert isinstance(metrics, MultiLabelFigures)
            scores.append(metrics.average_precision)
        else:
            target, right = member.predictions.target.numpy(), member.predictions.right.numpy()
            count = np.bincount(target, minlength=len(member.classes))
            hits = np.bincount(target, weights=right, minlength=len(member.classes))
            scores.append(np.where(count > 0, hits / np.maximum(count, 1), np.nan))
    return np.asarray(np.mean(scores, axis=0))


def seed_study(members: Sequence[Member], metric: str) -> dict[str, Any]:
    """Effect of the seed: spread of the final metric, correlations, early and final evaluations; and of folds."""
    final = [float(m.metrics[metric]) for m in members]
    courses = [m.course(metric) for m in members]
    sets = {members[0].split: final}
    for kind in ("fold", "seed") if members[0].fold else ():
        groups: dict[Any, list[float]] = {}
        for member, value in zip(members, final, strict=True):
            groups.setdefault(getattr(member, kind), []).append(value)
        sets[f"over {kind}s"] = [float(np.mean(group)) for group in groups.values()]
    if members[0].split != "val" and all(courses):
        sets["val"] = [course[max(course)] for course in courses]
    for uri in members[0].elsewhere:
        if all(uri in m.elsewhere for m in members):
            sets[uri] = [m.elsewhere[uri] for m in members]
    study: dict[str, Any] = {
        "seeds": [m.seed for m in members],
        "sets": {name: {**Spread.of(values).to_json(), "values": values} for name, values in sets.items()},
    }
    if len(members) >= FEWEST and not members[0].fold:
        study["between"] = [
            {"sets": [a, b], **Correlation.of(sets[a], sets[b]).to_json()} for a, b in combinations(sets, 2)
        ]
        study["early"] = [{"epoch": e, **c.to_json()} for e, c in early_and_final(courses, final).items()]
    return study
