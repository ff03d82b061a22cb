"""Calibration of probabilities on held-out images, calibration metrics, and prediction sets.

Logits are [images, classes]; labels are class numbers [images] (softmax), or 0/1 [images, classes] (multi-label, a
sigmoid per label). Computed in float64 on the CPU, some images at a time. A label whose logit is minus infinity has an
infinite loss whatever is fitted: fits leave it out, metrics do not.

Prediction sets are split conformal: sets of classes that hold the label of a new image with a stated probability.
A rule is fitted on held-out images that are exchangeable with those to come. With n of them, the threshold is the
ceil((n + 1) * coverage)-th smallest score of their labels, and a set has all classes whose score is at most that: the
label is among them with at least this probability, averaged over images, whatever the model. Scores of a class, from
probabilities [images, classes]:

- `lac`: one minus its probability; the smallest sets (Sadinle, Lei and Wasserman, 2019, arXiv 1609.00451).
- `aps`: the probability of all classes before it, by falling probability, and its own; with a seed its own counts by a
  random share, which makes coverage exact (Romano, Sesia and Candès, 2020, arXiv 2006.02544).
- `raps`: the same plus `lam` for every rank beyond `k_reg` (Angelopoulos et al., 2021, arXiv 2009.14193).

Of equal probabilities the lower class number comes first. A set that would be empty gets the most probable class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
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
    check_scores,
    checked_predictions,
    class_names,
    image_metrics,
    single_label_metrics,
)
from vitrail.model.classifier import Calibration

LOWEST, HIGHEST = 0.01, 100.0  # temperature: without a limit it is 0 where every image is classified correctly
RIDGE = 1.0
FOLDS, FEWEST = 5, 50  # of cross-validation; images of every class that vector scaling needs
MOST_SCORES = 2**24  # logits for which vector scaling is tried: it takes some hundred passes over them
Scores = Tensor | NDArray[Any]


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


def fit_robust_temperature(logits: Scores, target: Scores) -> float:
    """As `fit_temperature`; where that raises the Brier score, the temperature (0.1 to 10) of least Brier score.

    The log loss of a few images with huge logits can outweigh that of all others, and what lowers it most is to make
    all probabilities equal. The Brier score of an image is bounded.
    """
    logits, target = _usable(logits, target)
    temperature = fit_temperature(logits, target)
    if _brier(logits / temperature, target) <= _brier(logits, target):
        return temperature
    return min(np.logspace(-1, 1, 201).tolist(), key=lambda value: _brier(logits / value, target))


def _brier(logits: Tensor, target: Tensor) -> float:
    squares = 0.0
    for rows, labels in _pieces(logits, target):
        squares += float(_residual(rows.sigmoid() if labels.ndim == 2 else rows.softmax(1), labels).square().sum())
    return squares / len(logits)


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
    scaling needs `FEWEST` images of every class (multi-label: with and without it), and at most `MOST_SCORES` logits.
    """
    logits, target = _usable(logits, target)
    (images, classes), several = logits.shape, target.ndim == 2
    temperature = Calibration("temperature", fit_robust_temperature(logits, target))
    support = target.sum(0) if several else torch.bincount(target, minlength=classes)
    fewest = int((torch.minimum(support, images - support) if several else support).min())
    robust = temperature.temperature != fit_temperature(logits, target)  # log loss would choose badly here
    if robust or fewest < FEWEST or logits.numel() > MOST_SCORES:
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


def chance_ece(confidence: Scores) -> float:
    """The ECE that one in forty would exceed by chance alone if these confidences [images] were calibrated.

    Right answers of a bin are then a sum of independent draws, taken as normal.
    """
    values = torch.as_tensor(confidence).double().numpy()
    bins = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1], values, side="left")
    spread = np.sqrt(np.bincount(bins, values * (1 - values), CALIBRATION_BINS).clip(0))
    draws = np.abs(np.random.default_rng(0).standard_normal((10_000, CALIBRATION_BINS))) @ spread / len(values)
    return float(np.quantile(draws, 0.975))


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


METHODS = ("lac", "aps", "raps")
SIZES = (1, 3, 6, 10, 100)  # largest sets of the strata by size, as Angelopoulos et al. divide them; then all others


@dataclass(frozen=True)
class ConformalRule:
    """A fitted threshold."""

    method: str
    coverage: float
    quantile: float  # a class whose score is at most this is in the set; infinite: all classes are
    images: int  # of calibration
    k_reg: int = 5
    lam: float = 0.01
    seed: int | None = None
    """Of the random share with which the probability of a class itself counts in aps and raps. None: only those of more
    probable classes count, so that the most probable one is in every set and coverage is as asked, or the accuracy
    where that is higher; with its whole probability confident images would need larger sets than doubtful ones."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"{self.method!r} is no method of prediction sets; there are {', '.join(METHODS)}")
        if not 0 < self.coverage < 1:
            raise ValueError(f"a coverage of {self.coverage:g} is impossible; use one between 0 and 1, as 0.9")
        if self.images < 1 or self.k_reg < 0 or not 0 <= self.lam < math.inf or math.isnan(self.quantile):
            raise ValueError("images must be at least 1, k_reg and lam at least 0, and the quantile a number")

    @property
    def note(self) -> str:
        """One sentence where there were too few images to exclude any class; else empty."""
        if self.quantile < math.inf:
            return ""
        needed = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
        return (
            f"a coverage of {self.coverage:g} needs at least {needed} calibration images, and there are {self.images}: "
            "every set has all classes; add images or lower the coverage"
        )

    def sets(self, probabilities: Scores, index: Scores | None = None) -> Tensor:
        """Which classes are in the set of each image: bool [images, classes].

        `index` [images] is the stable index of each image: a randomised rule draws by it and by nothing else, so that
        batches do not matter, and raises `ValueError` without it.
        """
        probabilities = torch.as_tensor(probabilities).detach().cpu()
        if self.seed is not None and index is None:
            raise ValueError("these sets are randomised by the index of each image: give it, or fit without a seed")
        inside = torch.zeros(probabilities.shape, dtype=torch.bool)
        for rows, chances, scores in self._scores(probabilities, index, "sets"):
            chosen = scores <= self.quantile
            top = torch.zeros_like(chosen).scatter_(1, chances.argmax(1, keepdim=True), True)
            inside[rows] = chosen | (top & ~chosen.any(1, keepdim=True))
        return inside

    def label_scores(self, probabilities: Scores, target: Scores, index: Scores | None = None) -> Tensor:
        """The score of the label [images] of every image, from probabilities [images, classes]."""
        probabilities, target = checked_predictions(probabilities, target, probabilities=True)
        if target.ndim == 2:
            raise ValueError("prediction sets need one label per image; these have several: use a threshold for each")
        scores = torch.empty(len(target), dtype=torch.float64)
        for rows, _, of_classes in self._scores(probabilities, index, "fit"):
            scores[rows] = of_classes.gather(1, target[rows].long()[:, None])[:, 0]
        return scores

    def at(self, scores: Tensor) -> ConformalRule:
        """The rule with the quantile of these scores of labels, by the same method."""
        rank, fitted = _rank(len(scores), self.coverage), replace(self, images=len(scores), quantile=math.inf)
        return fitted if rank > len(scores) else replace(fitted, quantile=float(scores.kthvalue(rank).values))

    def _scores(
        self, probabilities: Tensor, index: Scores | None, stream: str
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their probabilities and the score of every class, in float64.

        Random shares are of a `stream`, so that an image of calibration and a later one with its index differ in them.
        """
        if probabilities.ndim != 2 or not probabilities.shape[1]:
            raise ValueError(f"probabilities have shape {list(probabilities.shape)}, not [images, classes]")
        check_scores(probabilities, probabilities=True)
        images, size = len(probabilities), max(1, SCORES_AT_ONCE // probabilities.shape[1])
        places = np.arange(images) if index is None else torch.as_tensor(index).cpu().numpy()
        if places.shape != (images,):
            raise ValueError(f"there are {images} rows of probabilities, but the index has shape {list(places.shape)}")
        drawn = np.zeros(images) if self.seed is None else uniform(seed_of(stream, self.seed), places)
        share = torch.from_numpy(drawn)[:, None]
        for rows in (slice(first, first + size) for first in range(0, images, size)):
            chances = probabilities[rows].double()
            if ((chances.sum(1) - 1).abs() > 0.01).any():
                raise ValueError("the probabilities of an image do not sum to 1; pass the softmax of its logits")
            yield rows, chances, self._class_scores(chances, share[rows])

    def _class_scores(self, chances: Tensor, share: Tensor) -> Tensor:
        if self.method == "lac":
            return 1 - chances
        falling, order = chances.sort(dim=1, descending=True, stable=True)
        scores = F.pad(falling.cumsum(1)[:, :-1], (1, 0)) + share * falling
        if self.method == "raps":
            rank = torch.arange(1, chances.shape[1] + 1, dtype=torch.float64)
            scores = scores + self.lam * (rank - self.k_reg).clamp(min=0)
        return torch.empty_like(chances).scatter_(1, order, scores)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "quantile": self.quantile if math.isfinite(self.quantile) else None}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ConformalRule:
        """The rule that `to_json` wrote. Raises `ValueError`, one sentence, where it is damaged."""
        try:
            quantile = math.inf if stored["quantile"] is None else float(stored["quantile"])
            images, k_reg = int(stored["images"]), int(stored["k_reg"])
            seed = None if stored["seed"] is None else int(stored["seed"])
            return cls(stored["method"], float(stored["coverage"]), quantile, images, k_reg, float(stored["lam"]), seed)
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"this is no stored rule of prediction sets ({error}); fit it again") from None


def fit_conformal(
    probabilities: Scores,
    target: Scores,
    coverage: float = 0.9,
    method: str = "raps",
    seed: int | None = None,
    *,
    index: Scores | None = None,
    k_reg: int = 5,
    lam: float = 0.01,
) -> ConformalRule:
    """The rule whose sets hold the label with probability `coverage` at least, from probabilities [n, classes].

    `target` [n] are class numbers. With a `seed` aps and raps are randomised, by `index` [n] (none: row numbers); lac
    never is. Too few images for the coverage give an infinite quantile, and the rule's `note` says so.

    >>> fit_conformal(torch.tensor([[0.9, 0.1], [0.75, 0.25], [0.5, 0.5]]), torch.zeros(3).long(), 0.5, "lac").quantile
    0.25
    """
    rule = ConformalRule(method, coverage, math.inf, max(1, len(target)), k_reg, lam, None if method == "lac" else seed)
    return rule.at(rule.label_scores(probabilities, target, index))


def coverage_interval(n: int, coverage: float, m: int, level: float = 0.99) -> tuple[float, float]:
    """Where the coverage on m new images lies with probability `level`, for a rule that was fitted on n.

    With k = ceil((n + 1) * coverage) the number of labels inside is beta-binomial with parameters m, k and n + 1 - k,
    where no two scores are equal (Vovk, 2012, arXiv 1209.2673; Angelopoulos and Bates, 2021, arXiv 2107.07511): equal
    scores, and top classes in place of empty sets, only raise it. The tails are equal; too few images give (1, 1).

    >>> coverage_interval(1000, 0.9, 1000)
    (0.863, 0.932)
    """
    if n < 1 or m < 1 or not (0 < coverage < 1 and 0 < level < 1):
        raise ValueError("an interval needs images on both sides, and a coverage and a level between 0 and 1")
    k = _rank(n, coverage)
    if k > n:
        return 1.0, 1.0
    inside = torch.arange(m + 1, dtype=torch.float64)
    outside, other = m - inside, n + 1 - k
    logs = (
        torch.lgamma(inside + k) - torch.lgamma(inside + 1) + torch.lgamma(outside + other) - torch.lgamma(outside + 1)
    )
    cumulative = logs.softmax(0).cumsum(0)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.searchsorted(cumulative, tails).clamp(max=m).tolist()
    return low / m, high / m


def set_metrics(sets: Tensor, target: Tensor) -> dict[str, Any]:
    """Coverage and size of sets [images, classes] (bool) for labels [images], as plain numbers and lists.

    `by_class` has the coverage and the mean size for images of every class (none without images); `by_size` the
    coverage of sets of similar size, and `worst_size_coverage` the lowest of these (Angelopoulos et al., 2021).
    """
    sets, target = torch.as_tensor(sets).detach().cpu().bool(), torch.as_tensor(target).detach().cpu().long()
    if sets.ndim != 2 or not len(sets) or target.shape != sets.shape[:1]:
        raise ValueError(f"sets {list(sets.shape)} and labels {list(target.shape)} do not belong together")
    classes = sets.shape[1]
    if int(target.min()) < 0 or int(target.max()) >= classes:
        raise ValueError(f"labels {int(target.min())} to {int(target.max())} are not all among {classes} classes")
    held, size = sets.gather(1, target[:, None])[:, 0].double(), sets.sum(1)
    support, *sums = (torch.bincount(target, weights, classes) for weights in (None, held, size.double()))
    means = [[float(s / n) if n else None for s, n in zip(each, support, strict=True)] for each in sums]
    strata = []
    for low, high in zip((0, *(s + 1 for s in SIZES)), (*SIZES, classes), strict=True):
        some = (size >= low) & (size <= high)
        if some.any():
            row = {"smallest": low, "largest": min(high, classes), "images": int(some.sum())}
            strata.append({**row, "coverage": float(held[some].mean())})
    return {
        "coverage": float(held.mean()),
        "mean_size": float(size.double().mean()),
        "median_size": float(size.double().quantile(0.5)),
        "worst_size_coverage": min(float(row["coverage"]) for row in strata),
        "by_class": {"coverage": means[0], "size": means[1]},
        "by_size": strata,
    }


def _rank(images: int, coverage: float) -> int:
    """ceil((n + 1) * coverage), of the decimal that was written: 100 * 0.55 is 55, and a little more in floats."""
    return math.ceil((images + 1) * coverage - 1e-9)
