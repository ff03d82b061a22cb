"""Disagreement of predictions: of two models, and of each with the labels (DeiT, arXiv 2012.12877, table 4).

Whether one model is better than another or was lucky: paired tests, on the same images and the same seeds.

Two kinds of luck are kept apart. Over *images*: would other test images of the same kind say the same of these very
models? Over *seeds*: would the same two recipes, trained again, come out in the same order? The interval covers both.

Parts of a comparison of finished runs: runs, rows, costs, and their summary as plain values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.classification import STANDARD
from vitrail.measure.evaluator import StoredPredictions
from vitrail.measure.few_labels import Spread

LABELS = "labels"


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Share of images with different top-1 decisions, for every pair. The first row are the labels: 1 - accuracy."""

    names: tuple[str, ...]
    rates: Tensor  # [names, names] float64; symmetric, zero on the diagonal

    def between(self, one: str, other: str) -> float:
        """The rate of one pair."""
        return float(self.rates[self.names.index(one), self.names.index(other)])

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "rates": self.rates.tolist()}


def disagreement(predictions: Mapping[str, Tensor], labels: Tensor) -> Disagreement:
    """Rates between the labels and every named prediction: logits [images, classes] or decisions [images].

    Of equal logits the lower class number wins. Raises `ValueError` where predictions are not of the same images.

    >>> disagreement({"a": torch.tensor([0, 1]), "b": torch.tensor([0, 0])}, torch.tensor([0, 1])).rates.tolist()
    [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.5, 0.5, 0.0]]
    """
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise ValueError(
            f"labels of shape {list(labels.shape)} are not class numbers [images]; decisions are compared where each "
            "image has one label"
        )
    if LABELS in predictions:
        raise ValueError(f"no prediction may be called {LABELS!r}: that is the first row")
    rows = [labels.detach().cpu().long()]
    for name, said in predictions.items():
        if said.ndim not in (1, 2) or len(said) != len(labels) or (said.ndim == 1 and said.is_floating_point()):
            raise ValueError(
                f"the prediction {name!r} has shape {list(said.shape)}: logits [images, classes] or class numbers "
                f"[images] of the same {len(labels)} images are needed"
            )
        rows.append(_decisions(said.detach().cpu(), name))
    said = torch.stack(rows)
    different = (said[:, None] != said[None]).sum(-1).double()
    return Disagreement((LABELS, *predictions), different / len(labels))


def _decisions(said: Tensor, name: str) -> Tensor:
    if said.ndim == 1:
        return said.long()
    if said.isnan().any():
        raise ValueError(f"the prediction {name!r} has logits that are no numbers")
    return said.argmax(1)


EXACT_UP_TO = 16  # values whose signs are all tried, 2^15 ways; beyond that they are drawn
DRAWS = 10_000
LEAST = 1e-12  # rounding of the exact sum; no smaller p is ever told
AT_ONCE = 2**22  # numbers of a draw held in memory

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


def sign_flip_p(differences: Sequence[float] | Floats, *, draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: how often flipped signs give a mean as far from zero as this one.

    `differences` has one value a pair (a seed). Exact up to 16 pairs, by trying all signs; drawn beyond that. With n
    pairs no p is below 2 / 2^n, so five seeds can never be significant at 5 %, and six can.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    values = np.asarray(differences, np.float64)
    _refuse_empty(values)
    observed = abs(values.sum())
    slack = 1e-12 * np.abs(values).sum()  # sums in another order differ by rounding
    if len(values) <= EXACT_UP_TO:
        ways = np.arange(2 ** (len(values) - 1))[:, None]  # the last sign stays: the other half mirrors this one
        signs = 1.0 - 2.0 * ((ways >> np.arange(len(values))) & 1)
        return float((np.abs(signs @ values) >= observed - slack).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(values)))
    return float((1 + (np.abs(signs @ values) >= observed - slack).sum()) / (1 + draws))


def sign_flip_p_whole(differences: Sequence[int] | Whole) -> float:
    """The same test for whole numbers, exact for any number of pairs (images).

    Sums of +-v have the characteristic function prod cos(v t); its inverse transform is their whole distribution. With
    values of -1, 0 and 1 this is McNemar's exact test. Values below 1e-12 are given as 1e-12.

    >>> sign_flip_p_whole([1, 2, 3])
    0.25
    """
    values = np.asarray(differences)
    _refuse_empty(values)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"whole numbers are needed, not {values.dtype}; sign_flip_p takes any")
    observed, reach = int(abs(values.sum())), int(np.abs(values).sum())
    if observed == 0:
        return 1.0
    size = 2 ** (2 * reach + 1).bit_length()  # sums from -reach to reach, without overlap
    angle = 2 * np.pi * np.arange(size // 2 + 1) / size
    wave = np.ones_like(angle)
    for value, count in zip(*np.unique(np.abs(values[values != 0]), return_counts=True), strict=True):
        wave *= np.cos(angle * value) ** int(count)
    chances = np.fft.irfft(wave, size)
    return float(np.clip(2 * chances[observed : reach + 1].sum(), LEAST, 1.0))


def paired_interval(
    difference: NDArray[np.int64] | Floats, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of the mean of `difference` [seeds, images], seeds and images both drawn anew.

    `difference` is what one model got right minus what the other did. Whole rows and whole columns are drawn with
    replacement, because one seed meets all images and one image all seeds. With one seed only images are drawn: the
    interval then says nothing of training again. What seeds differ by is widened by sqrt(n / (n - 1)), for resamples of
    n things vary less than they do: by half with two seeds.
    """
    values = np.asarray(difference)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(
            f"differences have shape {list(values.shape)}: [seeds, images] is needed, one of each at least"
        )
    seeds, images = values.shape
    # Images on which all seeds differ alike are one kind; how many of a kind are drawn is all that matters.
    kinds, counts = np.unique(values, axis=1, return_counts=True)
    share = counts / images
    widen = (seeds / (seeds - 1)) ** 0.5 if seeds > 1 else 1.0
    generator = np.random.default_rng(seed)
    means = []
    step = max(1, AT_ONCE // kinds.shape[1])
    for start in range(0, draws, step):
        count = min(step, draws - start)
        per_seed = generator.multinomial(images, share, count) @ kinds.T / images  # [draws, seeds]
        weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), count) / seeds
        centre = per_seed.mean(1)
        means.append(centre + widen * ((per_seed * weights).sum(1) - centre))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """p-values raised so that the chance of any false one among them stays what each alone claims (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    raised = [0.0] * len(values)
    most = 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, (len(values) - rank) * values[place]))
        raised[place] = most
    return raised


def _refuse_empty(values: NDArray) -> None:
    if values.ndim != 1 or not len(values):
        raise ValueError(f"differences have shape {list(values.shape)}: one value a pair is needed, at least one")


@dataclass(frozen=True)
class Member:
    """One finished run of a variant. Its figures are those of the last weights, never of the best ones."""

    variant: str
    seed: int
    path: str
    figures: Mapping[str, float]  # on `split`, as the run itself measured them at its end
    split: str
    data: str = ""
    classes: tuple[str, ...] = ()
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    predictions: StoredPredictions | None = None
    elsewhere: Mapping[str, float] = field(default_factory=dict)  # the same figure on further test sets, by URI

    @property
    def seconds(self) -> float | None:
        """Of training steps, looks at val not counted."""
        found = [float(line["seconds"]) for line in self.history if line.get("split") == "train" and "seconds" in line]
        return sum(found) if found else None

    @property
    def epochs(self) -> float | None:
        return float(self.history[-1]["epoch"]) if self.history else None

    def course(self, figure: str, split: str = "val") -> dict[float, float]:
        """Epoch -> figure, as recorded while training; what was not a number is left out."""
        lines = [line for line in self.history if line.get("split") == split and not line.get("final")]
        return {float(line["epoch"]): float(line[figure]) for line in lines if line.get(figure) is not None}


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, and why."""

    variant: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Price:
    """What a variant costs."""

    parameters: int
    macs: int  # of one image, forward
    image_size: int
    images_per_second: float | None = None  # of inference; none: not measured
    peak_memory: int | None = None  # bytes of inference; none: not known here
    seconds: float | None = None  # of training, mean over seeds
    epochs: float | None = None


@dataclass(frozen=True)
class Against:
    """A variant against the baseline, on the seeds that both have."""

    seeds: int
    difference: float  # mean over pairs
    interval: tuple[float, float] | None  # 95 %, over seeds and images; none without predictions of the same images
    p_seeds: float | None  # none with one pair, of which nothing can be said
    p_images: float | None
    holm_seeds: float | None = None  # the same, raised for the number of variants
    holm_images: float | None = None

    @property
    def chances(self) -> tuple[tuple[float | None, float | None], ...]:
        """p as it is and as raised: over seeds, over images."""
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
    spread: Spread | None  # of the chosen figure; none where no run finished
    means: Mapping[str, float]  # of every other figure
    price: Price | None = None
    against: Against | None = None  # none for the baseline itself
    length: str = ""  # how long it trained, and why so long
    front: bool = False  # nothing is both cheaper (in MACs) and better


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison found."""

    name: str
    figure: str  # top1, or map where several labels hold
    baseline: str
    split: str
    rows: tuple[StudyRow, ...]
    disagreement: Floats | None = None  # [variants, variants], in the order of `judged`
    judged: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    class_scores: Mapping[str, Floats] = field(default_factory=dict)  # variant -> [classes], mean over seeds
    seed_study: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: str = ""  # under which speed and memory were measured
    budget: str = ""
    notes: tuple[str, ...] = ()

    def row(self, variant: str) -> StudyRow:
        return next(row for row in self.rows if row.variant == variant)

    @property
    def failures(self) -> list[Failure]:
        return [failure for row in self.rows for failure in row.failures]

    def further(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Figures that evaluators found beside classification: name -> variant -> mean and std over seeds."""
        usual = STANDARD[self.figure]
        names = dict.fromkeys(n for row in self.rows for m in row.members for n in m.figures if n not in usual)
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for name in names:
            for row in self.rows:
                values = [m.figures[name] for m in row.members if name in m.figures]
                if values:
                    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
                    found.setdefault(name, {})[row.variant] = (float(np.mean(values)), spread)
        return found

    def class_gains(self, variant: str) -> Floats | None:
        """[classes] score minus the baseline's; none where either is not known."""
        if variant not in self.class_scores or self.baseline not in self.class_scores:
            return None
        return self.class_scores[variant] - self.class_scores[self.baseline]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; fractions, not percent; what is undefined is null."""
        return {
            "name": self.name,
            "figure": self.figure,
            "baseline": self.baseline,
            "split": self.split,
            "budget": self.budget,
            "conditions": self.conditions,
            "rows": [_row_json(row, self.figure) for row in self.rows],
            "disagreement": None
            if self.disagreement is None
            else {"variants": list(self.judged), "rates": plain(self.disagreement)},
            "classes": list(self.classes),
            "class_gains": {
                row.variant: plain(self.class_gains(row.variant))
                for row in self.rows
                if row.variant != self.baseline and self.class_gains(row.variant) is not None
            },
            "seeds": plain(self.seed_study),
            "notes": list(self.notes),
        }


def pareto(cost: Sequence[float], value: Sequence[float]) -> list[bool]:
    """Which points no other beats: none is at most as dear and at least as good, and better in one of the two.

    >>> pareto([1, 2, 3, 3], [0.5, 0.4, 0.9, 0.8])
    [True, False, True, False]
    """
    points = list(zip(cost, value, strict=True))
    return [not any(c <= a and v >= b and (c, v) != (a, b) for c, v in points) for a, b in points]


def plain(value: Any) -> Any:
    """Lists, dicts and numbers; NaN becomes none."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_json(row: StudyRow, figure: str) -> dict[str, Any]:
    against = None if row.against is None else {**asdict(row.against), "clear": row.against.clear}
    return {
        "variant": row.variant,
        "runs": [
            {"seed": m.seed, "path": m.path, figure: float(m.figures[figure]), **({"elsewhere": dict(m.elsewhere)})}
            for m in row.members
        ],
        "failures": [{"seed": f.seed, "reason": f.reason} for f in row.failures],
        figure: None if row.spread is None else row.spread.to_json(),
        "means": plain(row.means),
        "against": plain(against),
        "price": None if row.price is None else plain(asdict(row.price)),
        "length": row.length,
        "front": row.front,
    }
