"""Plans of generated images: how many, from which sources, for which classes (as in GeNIe, arXiv 2312.02548).

A plan is a table of whole numbers: it can be stored, inspected, and followed in any order. Everything in it
follows from a seed and from what each row is made of, so a part of a plan makes the same images as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.data.counter import seed_of

Policy = Literal["all", "random", "confused"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Images to be made, one a row. Places are rows of the training split."""

    source: Ints  # [rows] place of an image of another class
    own: Ints  # [rows] place of an image of the target class
    target: Ints  # [rows] class
    seeds: Ints  # [rows]

    def __len__(self) -> int:
        return len(self.target)

    def counts(self, classes: int) -> Ints:
        """Images for each class."""
        return np.bincount(self.target, minlength=classes).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("source", "own", "target", "seeds")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Raises `ValueError` for what is no plan."""
        try:
            parts = [np.asarray(values[name], np.int64) for name in ("source", "own", "target", "seeds")]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no plan of images to be made ({type(error).__name__}: {error})") from None
        if len({part.shape for part in parts}) != 1 or parts[0].ndim != 1:
            raise ValueError("this is no plan of images to be made: its columns have different lengths")
        return cls(*parts)


def make_plan(
    labels: Ints,
    classes: Sequence[str],
    *,
    each: int | None = None,
    up_to: int | None = None,
    below: int | None = None,
    only: Sequence[int] | None = None,
    policy: Policy = "all",
    confusion: Ints | None = None,
    top: int = 4,
    seed: int = 0,
) -> Plan:
    """A plan for a training split with `labels` [images].

    `each` new images a class, or as many as bring it `up_to` so many; only for classes with fewer than `below` images
    (none: all), or for those named by `only`. Sources: images of `all` other classes in turn, of other classes drawn at
    `random`, or of the `top` classes that `confusion` [true, said] mixes up with the target most, in either direction.
    Raises `ValueError` where nothing is left to do, or nothing can be made.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if (each is None) == (up_to is None):
        raise ValueError("say how many images: each (new ones a class) or up_to (in all)")
    wanted = _wanted(counts, each, up_to, below, only)
    if not wanted.any():
        raise ValueError("the plan is empty: no class needs images; raise each, up_to or below")
    empty = [classes[c] for c in np.flatnonzero(wanted).tolist() if not counts[c]]
    if empty:
        raise ValueError(f"class {empty[0]} has no training image; every class that gets new ones needs one")
    if policy not in get_args(Policy):
        raise ValueError(f"no policy {policy!r}; there are {', '.join(get_args(Policy))}")
    if policy == "confused" and (confusion is None or confusion.shape != (len(classes), len(classes))):
        raise ValueError(f"the policy confused needs a confusion matrix of {len(classes)} classes")
    places = [np.flatnonzero(labels == c) for c in range(len(classes))]
    rows: list[tuple[int, int, int, int]] = []
    for target in np.flatnonzero(wanted).tolist():
        others = _others(target, places, policy, confusion, top)
        if not len(others):
            raise ValueError(f"class {classes[target]} has no other class to be made from")
        for number in range(int(wanted[target])):
            if policy == "random":
                source = int(others[seed_of("augment", seed, target, number, 0) % len(others)])
            else:
                source = _in_turn(others, labels, number, seed, target)
            own = int(places[target][number % len(places[target])])
            rows.append((source, own, target, seed_of("genie", seed, source, target, number) >> 1))
    return Plan(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def _wanted(
    counts: Ints, each: int | None, up_to: int | None, below: int | None, only: Sequence[int] | None
) -> NDArray[np.int64]:
    for name, value in (("each", each), ("up_to", up_to), ("below", below)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is a number of images and must be at least 1, not {value}")
    wanted = np.full(len(counts), each) if each is not None else np.maximum(0, int(up_to or 0) - counts)
    if below is not None:
        wanted = np.where(counts < below, wanted, 0)
    if only is not None:
        wanted = np.where(np.isin(np.arange(len(counts)), list(only)), wanted, 0)
    return np.asarray(wanted, np.int64)


def _others(target: int, places: Sequence[Ints], policy: str, confusion: Ints | None, top: int) -> Ints:
    """Places of images that the target's may be made from; of the most confused classes first."""
    kinds = [c for c in range(len(places)) if c != target and len(places[c])]
    if policy == "confused":
        assert confusion is not None
        mixed = confusion[target] + confusion[:, target]
        kinds = sorted(kinds, key=lambda c: (-int(mixed[c]), c))[:top]
    return np.concatenate([places[c] for c in kinds]) if kinds else np.zeros(0, np.int64)


def _in_turn(others: Ints, labels: Ints, number: int, seed: int, target: int) -> int:
    """An image of the classes of `others` in turn, drawn by seed."""
    order = list(dict.fromkeys(labels[others].tolist()))
    of = others[labels[others] == order[number % len(order)]]
    return int(of[seed_of("augment", seed, target, number, 1) % len(of)])
