"""How good predictions are: pure functions of scores [images, classes] and labels, computed in float64 on the CPU.

Conventions, so that a figure means one thing only:

- Ties: of equal scores the lower class number comes first, in top-1, top-k and the confusion matrix alike.
- Recall of a class without images is NaN. Precision and F1 that would be 0/0 count as 0 where the class occurs among
  labels or predictions; one that occurs in neither is NaN.
- Macro averages and balanced accuracy are over the classes that have images (scikit-learn: `labels=present`).
- Calibration bins are (low, high]; zero belongs to the first.
- A label of a multi-label image is predicted where its probability is above one half.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CALIBRATION_BINS = 15
Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
MATRIX_CLASSES = 1000  # up to which a confusion matrix is stored and drawn as one
SCORES_AT_ONCE = 4_096_000  # float64 copies are made of this many scores only

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Figures(ABC):
    """Metrics on one set of images. Fractions, not percent."""

    classes: tuple[str, ...]
    count: int
    """Images."""
    loss: float
    precision: Floats  # [classes]
    recall: Floats  # [classes]
    f1: Floats  # [classes]
    support: Counts  # [classes] images (or positive labels) of each class

    def absent_note(self, things: str = "images") -> str:
        """A sentence where some classes have no images (or positive labels), so that macro averages leave them out."""
        present, classes = int((self.support > 0).sum()), len(self.classes)
        if present == classes:
            return ""
        absent = f"{classes - present} of {classes} classes have no {things} here"
        return f"{absent}; macro averages are over the {present} present"

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """The metrics that are one number each."""

    def to_json(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts; an undefined metric is null."""
        stored = {"kind": type(self).__name__, **self.scalars(), **vars(self)}
        return {name: _plain(value) for name, value in stored.items()}


_MACRO = ("macro_precision", "macro_recall", "macro_f1", "balanced_accuracy", "matthews")
STANDARD = {
    "top1": frozenset(["top1", "top1_low", "top1_high", "top5", "loss", "ece", *_MACRO]),
    "map": frozenset(["map", "micro_f1", "macro_f1", "subset_accuracy", "loss"]),
}
"""Names of all metrics that `scalars` gives, by the first of them; others of a run come from another evaluator."""


@dataclass(frozen=True, eq=False)
class SingleLabelFigures(Figures):
    """Every image has exactly one class."""

    top1: float
    top5: float
    """Share of images whose class is among the min(5, classes) highest scores."""
    top1_interval: tuple[float, float]
    """Wilson's 95 % confidence interval of top-1."""
    ece: float
    """Expected calibration error of the highest probability."""
    cells: Counts  # [pairs, 3] true class, predicted class, images; pairs that occur, by class
    bin_count: Counts  # [bins] images whose confidence falls into each calibration bin
    bin_confidence: Floats  # [bins] their mean confidence, NaN where empty
    bin_accuracy: Floats  # [bins] their accuracy, NaN where empty

    def scalars(self) -> dict[str, float]:
        means = [float(each[self.support > 0].mean()) for each in (self.precision, self.recall, self.f1)]
        predicted = np.bincount(self.cells[:, 1], self.cells[:, 2], len(self.classes))
        correlation = _matthews(self.support, predicted, float(self.right.sum()))
        macro = (*means, float(self.recall[self.support > 0].mean()), correlation)
        return {
            "top1": self.top1,
            "top1_low": self.top1_interval[0],
            "top1_high": self.top1_interval[1],
            "top5": self.top5,
            "loss": self.loss,
            "ece": self.ece,
            **dict(zip(_MACRO, macro, strict=True)),
        }

    @property
    def right(self) -> Counts:
        """[classes] images of each class that were predicted as such."""
        right = np.zeros(len(self.classes), np.int64)
        true, guess, images = self.cells.T
        right[true[true == guess]] = images[true == guess]
        return right

    @property
    def confusion(self) -> Counts:
        """[true class, predicted class] images. It grows with the square of the classes: `cells` does not."""
        matrix = np.zeros((len(self.classes), len(self.classes)), np.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix

    def confused_pairs(self, most: int = 10) -> list[tuple[int, int, int]]:
        """(true class, predicted class, images) of the most frequent errors, most frequent first."""
        errors = self.cells[self.cells[:, 0] != self.cells[:, 1]]
        order = np.argsort(-errors[:, 2], kind="stable")[:most]
        return [(int(true), int(guess), int(images)) for true, guess, images in errors[order]]

    def to_json(self) -> dict[str, Any]:
        """As that of all metrics; up to `MATRIX_CLASSES` classes with the confusion matrix in place of its cells."""
        stored = super().to_json()
        if len(self.classes) > MATRIX_CLASSES:
            return stored
        return {"confusion" if name == "cells" else name: value for name, value in stored.items()} | {
            "confusion": self.confusion.tolist()
        }


@dataclass(frozen=True, eq=False)
class MultiLabelFigures(Figures):
    """Every image has any number of classes; `loss` is the mean over images and classes."""

    average_precision: Floats  # [classes], NaN for a class without positive labels
    micro_f1: float
    subset_accuracy: float
    """Share of images all of whose labels are right."""

    @property
    def without_positives(self) -> tuple[str, ...]:
        """Classes that mAP leaves out because no image has them."""
        return tuple(name for name, n in zip(self.classes, self.support, strict=True) if n == 0)

    def scalars(self) -> dict[str, float]:
        return {
            "map": _mean_of_defined(self.average_precision),
            "micro_f1": self.micro_f1,
            "macro_f1": _mean_of_defined(self.f1[self.support > 0]),
            "subset_accuracy": self.subset_accuracy,
            "loss": self.loss,
        }


def classification(
    scores: Tensor | NDArray[Any],
    target: Tensor | NDArray[Any],
    classes: Sequence[str] | None = None,
    *,
    probabilities: bool = False,
) -> Figures:
    """Metrics of `scores` [n, classes] against `target` [n] of class numbers, or [n, classes] of 0/1 (multi-label).

    Scores are logits, or probabilities where `probabilities` is set. Raises `ValueError` for empty input, scores that
    are not numbers, and labels outside the classes.

    >>> metrics = classification(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), ["cat", "dog"])
    >>> metrics.scalars()["top1"]
    0.5
    """
    scores, target = checked_predictions(scores, target, probabilities=probabilities)
    names = class_names(scores.shape[1], classes)
    return (_multi_label if target.ndim == 2 else _single_label)(scores, target, names, probabilities)


def checked_predictions(
    scores: Tensor | NDArray[Any], target: Tensor | NDArray[Any], *, probabilities: bool = False
) -> tuple[Tensor, Tensor]:
    """Scores [n, classes] and labels ([n], or [n, classes] of 0/1) on the CPU; raises as `classification` does."""
    scores, target = torch.as_tensor(scores).detach().cpu(), torch.as_tensor(target).detach().cpu()
    if scores.ndim != 2 or not len(scores) or not scores.shape[1]:
        raise ValueError(
            f"scores have shape {list(scores.shape)}: one row per image and one column per class are needed, "
            "with at least one of each; check that the split is not empty"
        )
    if not target.ndim or len(target) != len(scores):
        raise ValueError(f"there are {len(scores)} rows of scores, but {len(target) if target.ndim else 1} labels")
    check_scores(scores, probabilities)
    if target.ndim == 2:
        if target.shape != scores.shape or not ((target == 0) | (target == 1)).all():
            raise ValueError(
                f"multi-label targets have shape {list(target.shape)}: 0 or 1 for each of the "
                f"{scores.shape[0]} images and {scores.shape[1]} classes are needed"
            )
        return scores, target
    if target.ndim != 1 or target.is_floating_point():
        raise ValueError(
            f"labels are {target.dtype} of shape {list(target.shape)}: class numbers [images], "
            "or 0/1 [images, classes] are needed"
        )
    _check_labels(target, scores.shape[1])
    return scores, target


def class_names(count: int, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Names of `count` classes, their numbers where none are given. Raises `ValueError` for another number of names."""
    names = tuple(map(str, range(count))) if classes is None else tuple(classes)
    if len(names) != count:
        raise ValueError(f"scores have {count} columns, but there are {len(names)} classes")
    return names


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `right` out of `count`.

    Unlike the normal approximation it stays inside [0, 1] and keeps a width when every image is right.
    """
    share = right / count
    centre = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 / (1 + Z95**2 / count) * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def reassessed_top1(guess: Sequence[int], labels: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Images whose predicted class is among their labels, and images that have any (ReaL, arXiv 2006.07159).

    >>> reassessed_top1([3, 5, 7], [[3, 4], [6], []])
    (1, 2)
    """
    kept = [predicted in known for predicted, known in zip(guess, labels, strict=True) if known]
    return sum(kept), len(kept)


def matthews(confusion: Counts) -> float:
    """Matthews correlation of a confusion matrix [true, predicted]; its generalisation (R_k) for several classes.

    0 where all labels, or all predictions, are of one class: nothing then tells them apart.

    >>> matthews(np.array([[3, 1], [1, 3]]))
    0.5
    """
    table = confusion.astype(np.float64)
    return _matthews(table.sum(1), table.sum(0), float(np.trace(table)))


def _matthews(true: NDArray[Any], predicted: NDArray[Any], right: float) -> float:
    truth, guess, total = true.astype(np.float64), predicted.astype(np.float64), float(true.sum())
    spread = (total**2 - truth @ truth) * (total**2 - guess @ guess)
    return float((right * total - truth @ guess) / math.sqrt(spread)) if spread > 0 else 0.0


def prior_loss(training: Sequence[int] | Counts, support: Counts) -> float:
    """Cross entropy of predicting the class frequencies of `training` [classes] for every image of `support` [classes].

    Each class counts as one image more, so that one without training images has a probability.

    >>> prior_loss([1, 1], np.array([5, 5]))  # log 2
    0.6931471805599453
    """
    counts = np.asarray(training, np.float64) + 1
    return float(-(support * np.log(counts / counts.sum())).sum() / support.sum())


def average_precision(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Area under the precision-recall steps of one class; equal scores are one step. NaN without a positive.

    >>> average_precision(np.array([0.9, 0.8, 0.1]), np.array([True, False, True]))  # (1/1 + 2/3) / 2
    0.8333333333333333
    """
    if not positive.any():
        return math.nan
    order = np.argsort(-score, kind="stable")
    last_of_ties = np.append(np.diff(score[order]) != 0, True)
    hits = np.cumsum(positive[order])[last_of_ties]
    taken = np.flatnonzero(last_of_ties) + 1
    return float(np.sum(np.diff(hits, prepend=0) / hits[-1] * hits / taken))


def read_figures(stored: Mapping[str, Any]) -> Figures:
    """The metrics that `to_json` wrote."""
    kinds: dict[str, type[Figures]] = {c.__name__: c for c in (SingleLabelFigures, MultiLabelFigures)}
    kind = kinds.get(str(stored.get("kind")))
    if kind is None:
        raise ValueError(f"these are no figures of vitrail: 'kind' is {stored.get('kind')!r}, not {' or '.join(kinds)}")
    whole = {"support", "cells", "bin_count"}
    if "confusion" in stored:
        matrix = np.array(stored["confusion"], np.int64)
        stored = {**stored, "cells": [[i, j, matrix[i, j]] for i, j in np.argwhere(matrix).tolist()]}

    def read(name: str) -> Any:  # null becomes NaN
        value = stored[name]
        if name in ("classes", "top1_interval"):
            return tuple(value)
        if isinstance(value, list):
            array = np.array(value, dtype=np.int64 if name in whole else np.float64)
            return array.reshape(-1, 3) if name == "cells" else array
        return math.nan if value is None else value

    return kind(**{f.name: read(f.name) for f in fields(kind)})


class ImageMetrics(NamedTuple):
    """All that single-label metrics need of each image, [images] each."""

    rank: Tensor  # of the label: how many classes come before it
    guess: Tensor  # class
    confidence: Tensor  # float64 probability of `guess`, NaN where scores are broken
    loss: Tensor  # float64 cross entropy


def image_metrics(scores: Tensor, target: Tensor, *, probabilities: bool = False) -> ImageMetrics:
    """Of `scores` [images, classes] and labels [images], on the device of the scores."""
    at_once, label = max(1, SCORES_AT_ONCE // scores.shape[1]), target.to(scores.device).long()
    pieces = zip(scores.split(at_once), label.clamp(0, scores.shape[1] - 1)[:, None].split(at_once), strict=True)
    parts = [_image_metrics(rows.double(), labels, probabilities) for rows, labels in pieces]
    return ImageMetrics(*map(torch.cat, zip(*parts, strict=True)))


def _image_metrics(rows: Tensor, label: Tensor, probabilities: bool) -> ImageMetrics:
    logs = rows.log() if probabilities else rows.log_softmax(1)
    score = rows.gather(1, label)
    before = (rows > score) | ((rows == score) & (torch.arange(rows.shape[1], device=rows.device) < label))
    best = rows.argmax(1, keepdim=True)  # the first of equals
    chosen = logs.gather(1, best)[:, 0].exp()
    return ImageMetrics(before.sum(1), best[:, 0], chosen, -logs.gather(1, label)[:, 0])


def check_scores(scores: Tensor, probabilities: bool = False) -> None:
    """Raises `ValueError` where scores [images, classes] are broken, or no probabilities."""
    # Minus infinity is the logit of an impossible class; plus infinity and NaN come from a broken model.
    _reject_broken(scores.isnan().any(1) | (scores == math.inf).any(1) | (scores == -math.inf).all(1))
    if probabilities and ((scores < 0) | (scores > 1 + 1e-6)).any():
        raise ValueError("probabilities must lie between 0 and 1; leave `probabilities` off to pass logits")


def _check_labels(target: Tensor, classes: int) -> None:
    outside = target[(target < 0) | (target >= classes)]
    if len(outside):
        raise ValueError(f"label {int(outside[0])} is outside the {classes} classes (0 to {classes - 1})")


def _reject_broken(bad: Tensor) -> None:
    if bad.any():
        raise ValueError(
            f"{int(bad.sum())} of {len(bad)} rows have scores that are NaN or infinite (first: row "
            f"{int(bad.nonzero()[0])}); the model has diverged or its input is broken: lower the learning rate or "
            "check its inputs"
        )


def _single_label(scores: Tensor, target: Tensor, names: tuple[str, ...], probabilities: bool) -> SingleLabelFigures:
    return single_label_metrics(image_metrics(scores, target, probabilities=probabilities), target, names)


def single_label_metrics(images: ImageMetrics, target: Tensor, names: Sequence[str]) -> SingleLabelFigures:
    """Metrics of all images from those of each. Raises `ValueError` for labels outside the classes, broken scores."""
    classes, count = len(names), len(target)
    _check_labels(target, classes)
    _reject_broken(images.confidence.isnan())
    ranks, guesses, confidence, labels = (t.numpy() for t in (*images[:3], target.long()))
    pairs, number = np.unique(labels * classes + guesses, return_counts=True)
    cells = np.stack([pairs // classes, pairs % classes, number], 1)
    hits = np.bincount(labels[labels == guesses], minlength=classes)
    right = int((ranks == 0).sum())
    bin_count, bin_confidence, bin_accuracy = _calibration(confidence, guesses == labels)
    gaps = np.abs(bin_confidence - bin_accuracy)
    return SingleLabelFigures(
        classes=tuple(names),
        count=count,
        loss=float(images.loss.mean()),
        **_per_class(hits, np.bincount(labels, minlength=classes), np.bincount(guesses, minlength=classes)),
        top1=right / count,
        top5=int((ranks < min(5, classes)).sum()) / count,
        top1_interval=wilson_interval(right, count),
        ece=float(np.nansum(gaps * bin_count) / count),
        cells=cells,
        bin_count=bin_count,
        bin_confidence=bin_confidence,
        bin_accuracy=bin_accuracy,
    )


def _multi_label(scores: Tensor, target: Tensor, names: tuple[str, ...], probabilities: bool) -> MultiLabelFigures:
    rows, wanted = scores.double(), target.double()
    loss = F.binary_cross_entropy(rows, wanted) if probabilities else F.binary_cross_entropy_with_logits(rows, wanted)
    predicted, positive = (rows > (0.5 if probabilities else 0.0)).numpy(), wanted.bool().numpy()
    hits, support, guessed = (predicted & positive).sum(0), positive.sum(0), predicted.sum(0)
    both = int(support.sum() + guessed.sum())
    return MultiLabelFigures(
        classes=names,
        count=len(rows),
        loss=float(loss),
        **_per_class(hits, support.astype(np.int64), guessed),
        average_precision=np.array([average_precision(rows[:, c].numpy(), positive[:, c]) for c in range(len(names))]),
        micro_f1=2 * int(hits.sum()) / both if both else 0.0,
        subset_accuracy=float((predicted == positive).all(1).mean()),
    )


def _per_class(hits: Counts, support: Counts, guessed: Counts) -> dict[str, Any]:
    both = support + guessed
    fractions = {"precision": (hits, guessed), "recall": (hits, support), "f1": (2 * hits, both)}
    shares = {n: np.where(both > 0, part / np.maximum(whole, 1), np.nan) for n, (part, whole) in fractions.items()}
    return {**shares, "recall": np.where(support > 0, shares["recall"], np.nan), "support": support}


def _calibration(confidence: Floats, right: NDArray[np.bool_]) -> tuple[Counts, Floats, Floats]:
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    bins = np.searchsorted(edges, confidence, side="left")
    count, *sums = (np.bincount(bins, weights, CALIBRATION_BINS) for weights in (None, confidence, right))
    inside = np.where(count > 0, count, np.nan)
    return count, sums[0] / inside, sums[1] / inside


def _mean_of_defined(values: Floats) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind != "f" or np.isfinite(value).all() else _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
