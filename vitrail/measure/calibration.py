"""Calibration of probabilities on held-out images: temperature scaling, vector scaling, and calibration metrics.

Logits are [images, classes]; labels are class numbers [images] (softmax), or 0/1 [images, classes] (multi-label, a
sigmoid per label). Computed in float64 on the CPU, some images at a time. A label whose logit is minus infinity has an
infinite loss whatever is fitted: fits leave it out, metrics do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.counter import seed_of, uniform
from vitrail.measure.classification import (
    CALIBRATION_BINS,
    SCORES_AT_ONCE,
    Floats,
    checked_predictions,
    class_names,
    image_metrics,
    single_label_metrics,
)

LOWEST, HIGHEST = 0.01, 100.0  # temperature: without a limit it is 0 where every image is classified correctly
RIDGE = 1.0
FOLDS, FEWEST = 5, 50  # of cross-validation; images of every class that vector scaling needs
KINDS = ("identity", "temperature", "vector")
Scores = Tensor | NDArray[Any]


@dataclass(frozen=True)
class Calibration:
    """Logits to calibrated logits, in float32 at least: divided by a temperature, or by class times scale plus bias.
    Minus infinity stays so."""

    kind: str = "identity"
    temperature: float = 1.0  # of vector scaling: the one it is regularised towards
    scale: tuple[float, ...] = ()  # [classes] of vector scaling
    bias: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of calibration; there are {', '.join(KINDS)}")
        if not (self.temperature > 0 and all(map(math.isfinite, (self.temperature, *self.scale, *self.bias)))):
            raise ValueError("temperature, scale and bias of a calibration must be finite, the temperature above 0")
        if len(self.scale) != len(self.bias) or (self.kind == "vector") != bool(self.scale):
            raise ValueError("vector scaling, and no other calibration, has a scale and a bias of every class")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.kind == "identity":
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "temperature":
            return wide / self.temperature
        if wide.shape[-1] != len(self.scale):
            raise ValueError(f"logits of {wide.shape[-1]} classes, but the calibration is of {len(self.scale)} classes")
        scale, bias = wide.new_tensor(self.scale), wide.new_tensor(self.bias)
        return torch.where(wide == -math.inf, wide, wide * scale + bias)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "scale": list(self.scale), "bias": list(self.bias)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_json` wrote. Raises `ValueError`, one sentence, where it is damaged."""
        try:
            vectors = (tuple(map(float, stored[name])) for name in ("scale", "bias"))
            return cls(stored["kind"], float(stored["temperature"]), *vectors)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"this is no stored calibration ({error}); fit it again") from None


def fit_temperature(logits: Scores, target: Scores) -> float:
    """The T > 0 of least log loss of logits / T (Guo et al., 2017, arXiv 1706.04599).

    The loss is convex in 1/T; the root of its slope is found by Newton's method on log T inside a bracket, and by
    bisection where a step leaves it. T stays between `LOWEST` and `HIGHEST`, which are reached where all images are
    classified correctly, or no better than by chance; it is 1 where no temperature changes the loss.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # 4 / log(3): a probability of 3/4
    3.641
    """
    slope = partial(_slope, *_usable(logits, target))
    low, high, point, step = -math.log(HIGHEST), -math.log(LOWEST), 0.0, math.inf
    gradient, curvature = slope(point)
    if gradient == 0:
        return 1.0
    if gradient > 0 and slope(low)[0] >= 0:
        return HIGHEST
    if gradient < 0 and slope(high)[0] <= 0:
        return LOWEST
    while step > 1e-12:  # every step is at most half of the one before it, or halves the bracket
        low, high = (point, high) if gradient < 0 else (low, point)
        newton = point - gradient / curvature if curvature > 0 else math.inf
        fine = low - 1e-12 <= newton <= high + 1e-12 and abs(newton - point) <= step / 2
        following = newton if fine else (low + high) / 2
        step, point = abs(following - point), following
        gradient, curvature = slope(point)
    return math.exp(-point)


def fit_vector_scaling(logits: Scores, target: Scores, *, ridge: float = RIDGE) -> Calibration:
    """Scale and bias of every class of least log loss (Guo et al., 2017, arXiv 1706.04599), by L-BFGS.

    The sum of losses has a penalty of ridge / 2 * sum((scale * T - 1)^2 + bias^2), where T is the fitted temperature:
    with a ridge of 1 a normal prior of unit variance, which matters less the more images there are.
    """
    logits, target = _usable(logits, target)
    temperature = fit_temperature(logits, target)
    change = torch.zeros(2, logits.shape[1], dtype=torch.float64)  # scale * T - 1, and bias

    def loss() -> float:
        total, gradient = ridge / 2 * float(change.square().sum()), ridge * change
        for rows, labels in _pieces(logits, target):
            possible = rows > -math.inf
            finite = rows.where(possible, 0.0)
            scores = ((1 + change[0]) / temperature * finite + change[1]).where(possible, -math.inf)
            residual = _residual(scores.sigmoid() if labels.ndim == 2 else scores.softmax(1), labels)
            gradient = gradient + torch.stack([(residual * finite).sum(0) / temperature, residual.sum(0)])
            total += float(_losses(scores, labels).sum())
        change.grad = gradient / len(logits)
        return total / len(logits)

    torch.optim.LBFGS([change], max_iter=300, line_search_fn="strong_wolfe").step(loss)
    scale, bias = (1 + change[0]) / temperature, change[1]
    return Calibration("vector", temperature, tuple(scale.tolist()), tuple(bias.tolist()))


def choose_calibration(logits: Scores, target: Scores, seed: int = 0) -> Calibration:
    """A temperature; vector scaling where its log loss in cross-validation is lower by more than one standard error.

    The error is that of the mean over images of the paired difference; folds are stratified and drawn by `seed`. Vector
    scaling needs `FEWEST` images of every class (multi-label: with and without it).
    """
    logits, target = _usable(logits, target)
    (images, classes), several = logits.shape, target.ndim == 2
    temperature = Calibration("temperature", fit_temperature(logits, target))
    support = target.sum(0) if several else torch.bincount(target, minlength=classes)
    if int((torch.minimum(support, images - support) if several else support).min()) < FEWEST:
        return temperature
    draws = uniform(seed_of("folds", seed), np.arange(images))
    order = np.lexsort((draws, np.zeros(images) if several else target.numpy()))
    fold = torch.empty(images, dtype=torch.int64)
    fold[torch.from_numpy(order)] = torch.arange(images) % FOLDS
    differences = []
    for number in range(FOLDS):
        vector = fit_vector_scaling(logits[fold != number], target[fold != number])
        for rows, labels in _pieces(logits[fold == number], target[fold == number]):
            differences.append(_losses(vector(rows), labels) - _losses(rows / vector.temperature, labels))
    difference = torch.cat(differences)
    lower = difference.mean() + difference.std() / math.sqrt(images) < 0
    return fit_vector_scaling(logits, target) if lower else temperature


def calibration_metrics(scores: Scores, target: Scores, *, probabilities: bool = False) -> dict[str, float]:
    """`loss`, `brier`, `ece`, `adaptive_ece` and `classwise_ece` of logits (or `probabilities`) against labels.

    Loss is the log loss. The Brier score sums squared differences of probabilities and labels over classes. ECE is the
    mean gap between confidence and accuracy by 15 bins of equal width (Guo et al., 2017, arXiv 1706.04599), or with
    equally many images in each (adaptive, Nguyen and O'Connor, 2015, arXiv 1508.05154; equal confidences share a bin).
    Class-wise it compares the probability of each class with its share of images, mean over classes (Kull et al., 2019,
    arXiv 1910.12656). Multi-label, all are means over labels, and `ece` is `classwise_ece`.
    """
    scores, target = checked_predictions(scores, target, probabilities=probabilities)
    (images, classes), several = scores.shape, target.ndim == 2
    squares, loss, edges = 0.0, 0.0, np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    gaps = np.zeros(classes * CALIBRATION_BINS)  # probabilities minus labels, summed in every bin of every class
    for rows, labels in _pieces(scores, target):
        shares = rows.clamp(max=1) if probabilities else rows.sigmoid() if several else rows.softmax(1)
        residual = _residual(shares, labels)
        squares += float(residual.square().sum())
        bins = np.searchsorted(edges, shares.numpy(), side="left") + CALIBRATION_BINS * np.arange(classes)
        gaps += np.bincount(bins.ravel(), residual.numpy().ravel(), len(gaps))
        if several:
            loss += float(_losses(shares.logit() if probabilities else rows, labels).sum()) / (images * classes)
    classwise = float(np.abs(gaps).sum()) / (images * classes)
    if several:
        columns = (column.double() if probabilities else column.double().sigmoid() for column in scores.T)
        errors = [_adaptive_error(p.numpy(), y.double().numpy()) for p, y in zip(columns, target.T, strict=True)]
        brier, ece, adaptive = squares / (images * classes), classwise, sum(errors) / classes
    else:
        each = image_metrics(scores, target, probabilities=probabilities)
        metrics = single_label_metrics(each, target, class_names(classes, None))
        adaptive = _adaptive_error(each.confidence.numpy(), (each.guess == target).double().numpy())
        brier, ece, loss = squares / images, metrics.ece, metrics.loss
    return {"loss": loss, "brier": brier, "ece": ece, "adaptive_ece": adaptive, "classwise_ece": classwise}


def _adaptive_error(confidence: Floats, right: Floats) -> float:
    first = np.searchsorted(np.sort(confidence), confidence, side="left")  # images below
    gaps = np.bincount(first * CALIBRATION_BINS // len(confidence), confidence - right)
    return float(np.abs(gaps).sum()) / len(confidence)


def _usable(logits: Scores, target: Scores) -> tuple[Tensor, Tensor]:
    """Logits and labels (bool where several may hold) without labels that are impossible."""
    logits, target = checked_predictions(logits, target)
    if target.ndim == 2:
        return logits, target.bool() & (logits > -math.inf)
    possible = logits.gather(1, target.long()[:, None])[:, 0] > -math.inf
    if not possible.any():
        raise ValueError("the logit of every label is minus infinity, which nothing calibrates; check the labels")
    return (logits, target.long()) if possible.all() else (logits[possible], target[possible].long())


def _pieces(logits: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, SCORES_AT_ONCE // logits.shape[1])
    return ((rows.double(), labels) for rows, labels in zip(logits.split(size), target.split(size), strict=True))


def _residual(shares: Tensor, labels: Tensor) -> Tensor:
    """Probabilities minus labels."""
    return shares - (labels if labels.ndim == 2 else F.one_hot(labels.long(), shares.shape[1])).double()


def _losses(rows: Tensor, labels: Tensor) -> Tensor:
    """Log loss of every image, summed over labels where several may hold."""
    if labels.ndim == 2:
        return -F.logsigmoid(torch.where(labels.bool(), rows, -rows)).sum(1)
    return -rows.log_softmax(1).gather(1, labels[:, None])[:, 0]


def _slope(logits: Tensor, target: Tensor, at: float) -> tuple[float, float]:
    """Derivative of the log loss by 1/T, and the derivative of that by log 1/T, at log 1/T = `at`."""
    first, second, sharpness = 0.0, 0.0, math.exp(at)
    for rows, labels in _pieces(logits, target):
        possible = rows > -math.inf
        if labels.ndim == 2:
            finite = rows.where(possible, 0.0)
            chance = (sharpness * finite).sigmoid()
            first += float((_residual(chance, labels) * finite).sum())
            second += float((chance * (1 - chance) * finite.square()).sum())
        else:
            below = rows - rows.amax(1, keepdim=True)
            chance, finite = (sharpness * below).softmax(1), below.where(possible, 0.0)
            centred = finite - (chance * finite).sum(1, keepdim=True)
            first -= float(centred.gather(1, labels[:, None]).sum())
            second += float((chance * centred.square()).sum())
    return first, second * sharpness
