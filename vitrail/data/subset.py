"""Less to learn from, on purpose: few images a class, a share of all, a long tail of rare classes, wrong labels.

Only training images change, after val and test were carved off. As in `vitrail.data.split`, what happens to an image
depends on its stable index, its label and the seed; so fewer shots are a subset of more shots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vitrail.data.counter import uniform
from vitrail.data.levels import FINEST
from vitrail.data.source import DataSet
from vitrail.data.split import LONG_TAIL, NOISE, SHOTS, limit_train, smallest, stratum


def reduce_train(
    data: DataSet,
    *,
    seed: int,
    shots: int | None = None,
    fraction: float = 1.0,
    long_tail: float | None = None,
    limit: int | None = None,
) -> DataSet:
    """The data set with fewer training images; `limit` comes after the other three. Raises `ValueError`."""
    if sum((shots is not None, fraction < 1, long_tail is not None)) > 1:
        raise ValueError("data.shots, data.fraction and data.long_tail exclude one another; set one of them")
    if shots is not None:
        data = few_shots(data, shots, seed)
    if fraction < 1:
        count = len(data["train"])
        classes = len(np.unique(stratum(data["train"].labels)))
        data = limit_train(data, max(classes, round(fraction * count)), seed)
    if long_tail is not None:
        data = make_long_tail(data, long_tail, seed)
    return data if limit is None else limit_train(data, limit, seed)


def few_shots(data: DataSet, shots: int, seed: int) -> DataSet:
    """`shots` training images of every class that has any. Raises `ValueError` where a class has fewer."""
    sizes = _sizes(data, "shots")
    poorest = int(np.where(sizes > 0, sizes, np.iinfo(np.int64).max).argmin())
    if sizes[poorest] < shots:
        raise ValueError(
            f"data.shots: {data.classes[poorest]!r} has {sizes[poorest]} training {data.things} of the {shots} asked "
            f"for; use at most {sizes[poorest]}"
        )
    return _kept(data, np.minimum(sizes, shots), SHOTS, seed, f"{shots} {data.things} a class")


def make_long_tail(data: DataSet, factor: float, seed: int) -> DataSet:
    """Class c of C keeps floor(most * factor^(-c / (C - 1))) training images (Cui et al., 2019).

    Classes come in their own order, as in the published long-tailed sets, so the first is the most frequent and the
    last the rarest; `most` is the largest number for which every class has images enough. Raises `ValueError` where the
    rarest class would have none.
    """
    sizes = _sizes(data, "long_tail")
    present = np.flatnonzero(sizes)
    place = np.linspace(0, 1, len(present))
    profile = factor**-place
    tail = place < 1  # the last class needs one image, which it has
    largest = float((sizes[present][tail] ** (1 / (1 - place[tail]))).min())  # most * profile is then at least 1
    if not 1 <= factor <= largest:
        raise ValueError(
            f"data.long_tail: a factor of {factor:g} leaves a class without any {data.things}; use 1 to "
            f"{int(largest + 1e-6)}"
        )
    most = float((sizes[present] / profile).min())
    counts = np.zeros_like(sizes)
    counts[present] = np.floor(most * profile + 1e-9)  # 500 / 100 must be 5 in spite of rounding
    what = f"long tail of {counts[present[0]]} to {counts[present[-1]]} {data.things} a class, factor {factor:g}"
    return _kept(data, counts, LONG_TAIL, seed, what)


def add_label_noise(data: DataSet, share: float, seed: int, level: str = "") -> DataSet:
    """Each training label becomes, with probability `share`, one of the other classes, all as likely.

    Labels at the other levels of a taxonomy stay true, as do those of val and test. `level` names that of the labels.
    """
    if not share:
        return data
    train = data["train"]
    _sizes(data, "label_noise")
    classes = len(data.classes)
    hit = uniform(seed, NOISE, train.index, 0) < share
    away = 1 + np.floor(uniform(seed, NOISE, train.index, 1) * (classes - 1)).astype(np.int64)
    labels = np.where(hit, (train.labels + away) % classes, train.labels)
    levels = train.levels
    if levels is not None:
        levels = levels.copy()
        levels[:, [each.name for each in data.levels].index(level or FINEST)] = labels
    note = f"train: {int(hit.sum())} of {len(train)} labels replaced by another class ({share:g} wanted), seed {seed}"
    noisy = replace(train, labels=labels, levels=levels)
    return replace(data, splits={**data.splits, "train": noisy}, notes=(*data.notes, note))


def _sizes(data: DataSet, setting: str) -> NDArray[np.int64]:
    """[classes] training images of each."""
    labels = data["train"].labels
    if labels.ndim == 2:
        raise ValueError(
            f"data.{setting}: {data.things} of {data.uri} have several labels, and it counts by one; leave it out"
        )
    return np.bincount(labels, minlength=len(data.classes)).astype(np.int64)


def _kept(data: DataSet, counts: NDArray[np.int64], draw: int, seed: int, what: str) -> DataSet:
    train = data["train"]
    rows = smallest(train, np.ones(len(train), bool), counts, (seed, draw))
    note = f"train: {len(rows)} of {len(train)} {data.things} drawn, {what}, seed {seed}"
    return replace(data, splits={**data.splits, "train": train.take(rows)}, notes=(*data.notes, note))
