"""Split conformal prediction: sets of classes that hold the label of a new image with a stated probability.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.counter import seed_of, uniform
from vitrail.measure.calibration import Scores
from vitrail.measure.classification import SCORES_AT_ONCE, check_scores, checked_predictions

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
    seed: int | None = None  # of the random share; none: a class counts with its whole probability

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
        drawn = np.ones(images) if self.seed is None else uniform(seed_of(stream, self.seed), places)
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
        scores = falling.cumsum(1) - (1 - share) * falling
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
    probabilities, target = checked_predictions(probabilities, target, probabilities=True)
    if target.ndim == 2:
        raise ValueError("prediction sets need one label per image; these have several: use a threshold for each label")
    images = len(target)
    rule = ConformalRule(method, coverage, math.inf, images, k_reg, lam, None if method == "lac" else seed)
    scores = torch.empty(images, dtype=torch.float64)
    for rows, _, of_classes in rule._scores(probabilities, index, "fit"):
        scores[rows] = of_classes.gather(1, target[rows].long()[:, None])[:, 0]
    rank = _rank(images, coverage)
    return rule if rank > images else replace(rule, quantile=float(scores.kthvalue(rank).values))


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
