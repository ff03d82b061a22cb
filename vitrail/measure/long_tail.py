"""Accuracy of frequent and of rare classes: Many, Med and Few by their number of training images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrail.measure.classification import Figures, SingleLabelFigures
from vitrail.measure.config import CLASS_COUNTS, LongTailConfig
from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, evaluate, evaluator
from vitrail.quantities import percent
from vitrail.schema import ConfigError, check

GROUPS = ("many", "med", "few")


@dataclass(frozen=True)
class FrequencyGroup:
    """The classes of one group, or all."""

    classes: int
    fewest: int  # training images of its rarest class
    most: int
    images: int  # that are evaluated
    accuracy: float | None  # share of these that are right; none without images
    balanced: float | None  # mean over its classes of their own shares

    def to_json(self) -> dict[str, Any]:
        sizes = {"classes": self.classes, "training": [self.fewest, self.most], "images": self.images}
        return {**sizes, "accuracy": self.accuracy, "balanced": self.balanced}


@dataclass(frozen=True)
class LongTail:
    """Accuracy by group; a group without classes is absent, `all` is always there."""

    groups: dict[str, FrequencyGroup]

    @property
    def several(self) -> bool:
        """Whether there is more than one group to tell apart."""
        return len(self.groups) > 2

    def to_json(self) -> dict[str, Any]:
        return {name: group.to_json() for name, group in self.groups.items()}


def class_groups(counts: ArrayLike, config: LongTailConfig | None = None) -> NDArray[np.int64]:
    """[classes] index in `GROUPS` of each class with `counts` [classes] training images.

    `counts`: Many have more than `config.many`, Few fewer than `config.few`, Med the rest, both bounds among them.
    `thirds`: by rank, the larger parts first; of equally frequent classes the earlier counts as the more frequent.
    Raises `ConfigError` where the bounds cross.

    >>> class_groups([500, 101, 100, 20, 19]).tolist()
    [0, 0, 1, 1, 2]
    >>> class_groups([9, 8, 7, 6], LongTailConfig(groups="thirds")).tolist()
    [0, 0, 1, 2]
    """
    config = config or LongTailConfig()
    problems = check(config)
    if not problems and config.few > config.many + 1:
        problems = [f"few: classes with fewer than {config.few} and more than {config.many} images overlap"]
    if problems:
        raise ConfigError(problems)
    known = np.asarray(counts, np.int64)
    if config.groups == "counts":
        return np.where(known > config.many, 0, np.where(known < config.few, 2, 1))
    groups = np.zeros(len(known), np.int64)
    for number, members in enumerate(np.array_split(np.argsort(-known, kind="stable"), len(GROUPS))):
        groups[members] = number
    return groups


def group_of(images: int, config: LongTailConfig | None = None) -> str:
    """Whether a class of so many training images is many, med or few; 100 and 20 are med.

    >>> [group_of(n) for n in (101, 100, 20, 19)]
    ['many', 'med', 'med', 'few']
    """
    return GROUPS[int(class_groups([images], config)[0])]


def long_tail(figures: Figures, counts: ArrayLike, config: LongTailConfig | None = None) -> LongTail:
    """Accuracy of each group, from metrics on any images of the same classes. Raises `ValueError` where that fails."""
    known = np.asarray(counts, np.int64)
    if not isinstance(figures, SingleLabelFigures):
        raise ValueError("Many, Med and Few are of data with one label per image; these have several")
    if len(known) != len(figures.classes):
        raise ValueError(f"there are {len(figures.classes)} classes, but training counts of {len(known)}")
    number = class_groups(known, config)
    groups = {name: number == i for i, name in enumerate(GROUPS)} | {"all": np.ones(len(known), bool)}
    return LongTail({name: _group(figures, known, inside) for name, inside in groups.items() if inside.any()})


def training_counts(model: Any) -> list[int] | None:
    """Real training images of each class of a trained model, where it knows them."""
    counts: list[int] | None = getattr(model, "stated", {}).get(CLASS_COUNTS)
    return counts


def long_tail_table(groups: Mapping[str, Any]) -> ResultTable:
    """Accuracy of Many, Med and Few classes, and of all."""
    rows = []
    for name, group in groups.items():
        low, high = group["training"]
        images = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        shares = ("" if share is None else percent(share) for share in (group["accuracy"], group["balanced"]))
        rows.append((name, f"{group['classes']:,}", images, f"{group['images']:,}", *shares))
    columns = ("group", "classes", "training images", "images", "top-1", "class mean")
    return ResultTable("by training images of the class", columns, rows)


@evaluator(table=long_tail_table)
def evaluate_long_tail(
    model: Model, data: Loaders, config: LongTailConfig | None = None, **where: Unpack[Where]
) -> Findings:
    """Top-1 of Many, Med and Few classes, by the images that the model was trained on."""
    config = config or LongTailConfig()
    counts: Sequence[int] | None = training_counts(model)
    if counts is None:
        raise ValueError(
            "Many, Med and Few need to know how many images of each class the model was trained on, and this model "
            "does not say; train it with vitrail train on data with one label per image"
        )
    result = long_tail(evaluate(model, data.loaders[data.split], data.classes, **where), counts, config)
    third = "_third" if config.groups == "thirds" else ""
    shares = {f"{name}{third}": group.accuracy for name, group in result.groups.items() if name != "all"}
    numbers = {name: share for name, share in shares.items() if share is not None}
    return {"numbers": numbers, "tables": {"long_tail": result.to_json()}, "pictures": {}}


@evaluator(table=long_tail_table)
def evaluate_thirds(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """The same with equally many classes in each group, for small data."""
    return evaluate_long_tail(model, data, **where, config=LongTailConfig(groups="thirds"))


def _group(figures: SingleLabelFigures, counts: NDArray[np.int64], inside: NDArray[np.bool_]) -> FrequencyGroup:
    support, right = figures.support[inside], figures.right[inside]
    has = support > 0
    accuracy = float(right.sum() / support.sum()) if has.any() else None
    balanced = float((right[has] / support[has]).mean()) if has.any() else None
    fewest, most = int(counts[inside].min()), int(counts[inside].max())
    return FrequencyGroup(int(inside.sum()), fewest, most, int(support.sum()), accuracy, balanced)
