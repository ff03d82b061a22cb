"""Dividing labelled images: validation and test carved off, and fewer images drawn, with every class in proportion.

Which images are drawn depends on their stable indices, their labels and the seed, and on nothing else: each image has a
random number of its own (a function of seed and index), and the smallest numbers of a class are drawn. Nothing is ever
cut off as a slice of an ordered list.

Multi-label images are stratified approximately: each counts for the rarest of its labels (images without a label form
a class of their own), so that rare labels are divided in proportion and frequent ones nearly so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vitrail.data.counter import bits
from vitrail.data.source import DataSet, Split

UNDIVIDED = "all"  # name of the only split of a source that is not divided
Key = tuple[int, int]  # seed, which draw
_TEST, _VAL, _LIMIT, SHOTS, LONG_TAIL, NOISE = range(1, 7)  # which draw: an image has an independent number in each


def carve(data: DataSet, val_fraction: float, test_fraction: float, seed: int) -> DataSet:
    """The data set with a val split, and with a test split where the source is one undivided tree.

    Shares of an undivided tree are shares of the whole tree; otherwise val is a share of train. A source with val but
    without test keeps it so. Raises `ValueError` where the shares leave nothing to train on, or nothing to carve.
    """
    if UNDIVIDED in data.splits:
        if val_fraction + test_fraction >= 1:
            raise ValueError(
                f"val_fraction {val_fraction:g} and test_fraction {test_fraction:g} leave nothing to train on; "
                "their sum must be less than 1"
            )
        whole, notes = data.splits[UNDIVIDED], []
        splits, rest = {}, np.ones(len(whole), bool)
        for name, fraction, draw in (("test", test_fraction, _TEST), ("val", val_fraction, _VAL)):
            if fraction > 0:
                rows = _share(whole, rest, fraction, (seed, draw), f"{name} from {data.uri}")
                rest[rows] = False
                splits[name] = whole.take(rows, name)
                carved = f"{len(rows)} {data.things} ({fraction:.3g} of all) carved off, stratified, seed {seed}"
                notes.append(f"{name}: {carved}")
        splits["train"] = whole.take(np.flatnonzero(rest), "train")
    else:
        splits, notes = dict(data.splits), []
        if "val" not in splits and val_fraction > 0:
            if val_fraction >= 1:
                raise ValueError(f"val_fraction {val_fraction:g} leaves nothing to train on; it must be less than 1")
            train, rest = splits["train"], np.ones(len(splits["train"]), bool)
            rows = _share(train, rest, val_fraction, (seed, _VAL), f"val from the training {data.things} of {data.uri}")
            rest[rows] = False
            splits |= {"train": train.take(np.flatnonzero(rest)), "val": train.take(rows, "val")}
            carved = f"{len(rows)} {data.things} ({val_fraction:.3g} of train) carved off, stratified, seed {seed}"
            notes.append(f"val: {carved}")
    if "val" not in splits:
        notes.append("no val split: nothing can be measured while training")
    if "test" not in splits and "val" in splits:
        notes.append("no test split: final figures are on val")
    ordered: dict[str, Split] = {name: splits[name] for name in ("train", "val", "test") if name in splits}
    return replace(data, splits=ordered, notes=(*data.notes, *notes))


def limit_train(data: DataSet, limit: int, seed: int) -> DataSet:
    """At most `limit` training images, every class in proportion and, where `limit` allows, at least one of each."""
    train = data["train"]
    if limit >= len(train):
        return data
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    sizes = np.bincount(stratum(train.labels))
    least = np.minimum(sizes, 1) if limit >= np.count_nonzero(sizes) else np.zeros_like(sizes)
    counts = apportion(sizes.astype(np.float64) * (limit / len(train)), least, sizes, limit)
    rows = smallest(train, np.ones(len(train), bool), counts, (seed, _LIMIT))
    note = f"train: {limit} of {len(train)} {data.things} drawn, stratified, seed {seed}"
    return replace(data, splits={**data.splits, "train": train.take(rows)}, notes=(*data.notes, note))


def stratum(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """[images] the class by which an image is stratified: its label, or the rarest of its labels."""
    if labels.ndim == 1:
        return labels
    classes = labels.shape[1]
    rarity = np.where(labels > 0, labels.sum(0, keepdims=True), np.iinfo(np.int64).max)
    return np.where(labels.any(1), rarity.argmin(1), classes)


def apportion(
    exact: NDArray[np.float64], least: NDArray[np.int64], most: NDArray[np.int64], total: int
) -> NDArray[np.int64]:
    """Whole numbers near `exact` that add up to `total`, by largest remainder, as far as `least` and `most` allow.

    >>> apportion(np.array([2.5, 1.3, 0.2]), np.zeros(3, int), np.full(3, 9), 4).tolist()
    [3, 1, 0]
    """
    counts = np.clip(np.floor(exact).astype(np.int64), least, most)
    for step in (1, -1):
        while (missing := step * (total - int(counts.sum()))) > 0:
            can_move = counts < most if step == 1 else counts > least
            if not can_move.any():
                break
            wish = np.where(can_move, step * (exact - counts), -np.inf)
            chosen = np.argsort(-wish, kind="stable")[: min(missing, int(can_move.sum()))]
            counts[chosen] += step
    return counts


def _share(whole: Split, free: NDArray[np.bool_], fraction: float, key: Key, what: str) -> NDArray[np.int64]:
    strata = stratum(whole.labels)
    exact = np.bincount(strata).astype(np.float64) * fraction
    room = np.maximum(np.bincount(strata, free, len(exact)).astype(np.int64) - 1, 0)  # one of each class stays in train
    if not room.any():
        raise ValueError(
            f"cannot carve {what}: no class has one to spare; add examples or that split, or set its fraction to 0"
        )
    counts = apportion(exact, np.zeros_like(room), room, max(1, round(float(exact.sum()))))
    return smallest(whole, free, counts, key)


def smallest(split: Split, free: NDArray[np.bool_], counts: NDArray[np.int64], key: Key) -> NDArray[np.int64]:
    """Rows, in order, of the `counts[c]` free images of each class c with the smallest random numbers."""
    rows, strata = np.flatnonzero(free), stratum(split.labels)
    index = split.index[rows]
    order = rows[np.lexsort((index, bits(*key, index), strata[rows]))]
    sizes = np.bincount(strata[order], minlength=len(counts))
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[place < counts[strata[order]]])
