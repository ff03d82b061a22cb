"""Parts of a comparison of finished runs: runs, rows, costs, and their summary as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.measure.classification import STANDARD
from vitrail.measure.predictions import StoredPredictions
from vitrail.measure.seeds import Spread

Floats = NDArray[np.float64]


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
class Row:
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
    rows: tuple[Row, ...]
    disagreement: Floats | None = None  # [variants, variants], in the order of `judged`
    judged: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    class_scores: Mapping[str, Floats] = field(default_factory=dict)  # variant -> [classes], mean over seeds
    seed_study: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: str = ""  # under which speed and memory were measured
    budget: str = ""
    notes: tuple[str, ...] = ()

    def row(self, variant: str) -> Row:
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


def _row_json(row: Row, figure: str) -> dict[str, Any]:
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
