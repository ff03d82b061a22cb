"""Data sets: splits of labelled examples that are read one at a time, and how they are held out and drawn.

A `Split` holds labels and names in memory and reads pixels on demand through a small picklable reader, so that it can
travel to worker processes. Rows are positions in the split; `index` is the stable number of an image in its source,
which stays the same whatever is held out or left out, and which seeds its augmentation.

Validation and test are held out, and fewer training images drawn, with every class in proportion. Which images depends
on their stable indices, their labels and the seed, and on nothing else: each image has a random number of its own (a
function of seed and index), and the smallest numbers of a class are drawn; so fewer shots are a subset of more shots.
Multi-label images are stratified approximately: each counts for the rarest of its labels (images without a label form
a class of their own), so that rare labels are divided in proportion and frequent ones nearly so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.counter import bits, uniform
from vitrail.schema import near


class BadImage(Exception):
    """An image that cannot be decoded: which one, and why."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


_OPTIONAL = ("levels", "boxes", "generated", "groups", "values")  # columns of a split
UNLABELLED = "unlabelled"
"""The one class of images that have none."""


@dataclass(frozen=True)
class Split:
    """An ordered list of labelled images."""

    name: str  # train, val or test
    reader: Callable[[int], Image.Image]  # stable index -> RGB image; raises BadImage. Picklable.
    index: NDArray[np.int64]  # [images] stable index of each row
    keys: Sequence[str]  # what names a row to a person: its path, or a number
    labels: NDArray[np.int64]  # [images] class, or [images, classes] of 0/1 where several may hold
    levels: NDArray[np.int64] | None = None  # [images, levels] class at each of `DataSet.levels`
    boxes: NDArray[np.int64] | None = None  # [images, 4] left, top, right, bottom of the object
    generated: NDArray[np.bool_] | None = None  # [images] made by a model, no photograph; none: all are real
    groups: NDArray[np.str_] | None = None  # [images] name of the group that each is counted with
    values: NDArray[np.float32] | None = None  # [images] value to predict; classes then mean nothing

    def __len__(self) -> int:
        return len(self.index)

    @property
    def targets(self) -> NDArray[Any]:
        """What is learned: labels, or values."""
        return self.labels if self.values is None else self.values

    def read(self, row: int) -> Image.Image:
        """The image of a row, as RGB, upright. Raises `BadImage`; `ValueError` where the data set is of texts."""
        image = self.reader(int(self.index[row]))
        if not isinstance(image, Image.Image):
            raise ValueError(f"{self.name} holds texts, and this is for images only")
        return image

    def take(self, rows: NDArray[np.int64] | Sequence[int], name: str | None = None) -> Split:
        """The split made of these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            name=name or self.name,
            index=self.index[rows],
            keys=[self.keys[int(r)] for r in rows],
            labels=self.labels[rows],
            **{name: column[rows] for name in _OPTIONAL if (column := getattr(self, name)) is not None},
        )

    def divide(self, rows: Mapping[str, NDArray[np.int64] | Sequence[int]]) -> dict[str, Split]:
        """The splits made of the rows of each."""
        return {name: self.take(chosen, name) for name, chosen in rows.items()}


@dataclass(frozen=True)
class Level:
    """One level of a taxonomy."""

    name: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """Images with class names, in splits `train`, `val` and, where there is one, `test`."""

    uri: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    levels: tuple[Level, ...] = ()  # of a taxonomy, finest first; none where labels have one level only
    multilabel: bool = False
    notes: tuple[str, ...] = field(default=())  # what a person should know: held-out splits, ignored files
    contents: tuple[str, ...] = ()  # digests of the training images of a run

    @property
    def unlabelled(self) -> bool:
        """Whether the images have no labels."""
        return self.classes == (UNLABELLED,)

    @property
    def things(self) -> str:
        """What a person calls the examples: `images`, unless a reader that gives something else says what."""
        return next((str(s.reader.things) for s in self.splits.values() if hasattr(s.reader, "things")), "images")

    @property
    def numeric(self) -> bool:
        """Whether images have values to predict, and no classes."""
        return any(split.values is not None for split in self.splits.values())

    @property
    def holds_texts(self) -> bool:
        """Whether the examples are texts; all others are images."""
        return self.things == "texts"

    @property
    def holds_completions(self) -> bool:
        """Whether the examples are prompts and completions, which have no classes."""
        return any(getattr(s.reader, "completions", False) for s in self.splits.values())

    def label_text(self, label: NDArray[np.int64], empty: str = "no label") -> str:
        """The class of a label, or classes joined by |."""
        chosen = np.flatnonzero(label).tolist() if np.ndim(label) else [int(label)]
        return "|".join(self.classes[c] for c in chosen if 0 <= c < len(self.classes)) or empty

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise KeyError(f"{self.uri} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]


class Location(NamedTuple):
    """A URI, taken apart."""

    uri: str
    scheme: str  # empty: the URI is a path
    path: Path  # that exists; for a scheme what follows it
    options: Mapping[str, str]  # after `?`

    @property
    def suffix(self) -> str:
        """Of a file that the URI names without a scheme."""
        return "" if self.scheme else self.path.suffix.lower()

    @property
    def is_dir(self) -> bool:
        """Whether the URI names a folder without a scheme."""
        return not self.scheme and self.path.is_dir()

    def reject_unknown(self, known: Collection[str]) -> None:
        """Raise `ValueError` for an option that is not known."""
        for name in self.options:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{self.uri}: no option {name!r} ({has}){near(name, known)}")

    def whole_numbers(self, defaults: Mapping[str, int]) -> dict[str, int]:
        """Options that are whole numbers, in the order of their defaults. Raises `ValueError` where one is not."""
        for name in defaults:
            if not self.options.get(name, "0").isdecimal():
                raise ValueError(f"{self.uri}: {name} must be a whole number, not {self.options[name]!r}")
        return {name: int(self.options.get(name, default)) for name, default in defaults.items()}


class Source(NamedTuple):
    """A kind of data: which locations it opens, and how. Registered by name, which is also its scheme.

    Sources that were registered last are asked first. One that has no `opens` is found by its scheme alone.
    """

    forms: Mapping[str, str]  # how such data are named, with a line about each: the rows of `vitrail list data`
    open: Callable[[Location], DataSet]
    opens: Callable[[Location], bool] = lambda location: bool(location.scheme)
    options: Collection[str] | None = ()  # that it knows; none: it checks them itself
    paths: bool = False  # what follows its scheme is a path


UNDIVIDED = "all"  # name of the only split of a source that is not divided
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
Key = tuple[int, int]  # seed, which draw
_TEST, _VAL, _LIMIT, SHOTS, LONG_TAIL, NOISE, _FOLD = range(1, 8)  # which draw: an image has another number in each


def split_called(name: str) -> str | None:
    """`val` for `valid` or `Validation`, and so on; none for a name that means no split."""
    return next((split for split, names in SPLIT_NAMES.items() if name.strip().lower() in names), None)


def split_rows(names: Sequence[str | None]) -> dict[str, NDArray[np.int64]]:
    """The rows of each split, given the name of every row's split, in the usual order of splits."""
    array = np.array(names)
    return {name: np.flatnonzero(array == name) for name in (*SPLIT_NAMES, UNDIVIDED) if name in names}


def hold_out(data: DataSet, val_fraction: float, test_fraction: float, seed: int, fold: str = "") -> DataSet:
    """The data set with a val split, and with a test split where the source is one undivided tree.

    Shares of an undivided tree are shares of the whole tree; otherwise val is a share of train. A source with val but
    without test keeps it so. With a fold I/K, val is that one of K of train and val together. Raises `ValueError` where
    the shares leave nothing to train on, or nothing to hold out.
    """
    undivided = UNDIVIDED in data.splits
    if undivided and val_fraction + test_fraction >= 1:
        raise ValueError(
            f"val_fraction {val_fraction:g} and test_fraction {test_fraction:g} leave nothing to train on; "
            "their sum must be less than 1"
        )
    splits, notes = dict(data.splits), []
    source = splits.pop(UNDIVIDED) if undivided else splits["train"]
    if fold and (val := splits.pop("val", None)) is not None:
        if val.reader is not source.reader:
            raise ValueError(f"data.fold: train and val of {data.uri} are stored apart; name the data that were packed")
        columns = [column.name for column in fields(Split)[2:] if getattr(val, column.name) is not None]
        pooled: Any = {name: np.concatenate([getattr(source, name), getattr(val, name)]) for name in columns}
        source = replace(source, **pooled)
    wanted = [("test", test_fraction, _TEST)] if undivided else []
    wanted += [("val", val_fraction, _VAL)] if "val" not in splits and not fold else []
    rest, how = np.ones(len(source), bool), "" if data.numeric else ", stratified"
    for name, fraction, draw in wanted:
        if fraction >= 1:
            raise ValueError(f"val_fraction {val_fraction:g} leaves nothing to train on; it must be less than 1")
        if fraction > 0:
            place = data.uri if undivided else f"the training {data.things} of {data.uri}"
            rows = _share(source, rest, fraction, (seed, draw), f"{name} from {place}")
            rest[rows] = False
            splits[name] = source.take(rows, name)
            share = f"{fraction:.3g} of {'all' if undivided else 'train'}"
            notes.append(f"{name}: {len(rows)} {data.things} ({share}) held out{how}, seed {seed}")
    if fold:
        rows = _fold(source, rest, fold, seed)
        rest[rows] = False
        splits["val"] = source.take(rows, "val")
        notes.append(f"val: fold {fold} of train and val, {len(rows)} {data.things}{how}, seed {seed}")
    if undivided or not rest.all():
        splits["train"] = source.take(np.flatnonzero(rest), "train")
    if "val" not in splits:
        notes.append("no val split: nothing can be measured while training")
    if "test" not in splits and "val" in splits:
        notes.append("no test split: final metrics are on val")
    ordered = {name: splits[name] for name in SPLIT_NAMES if name in splits}
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
    return _drawn(data, counts, _LIMIT, seed, "stratified")


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
            f"cannot hold out {what}: no class has one to spare; add examples or that split, or set its fraction to 0"
        )
    counts = apportion(exact, np.zeros_like(room), room, max(1, round(float(exact.sum()))))
    return smallest(whole, free, counts, key)


def _fold(whole: Split, free: NDArray[np.bool_], fold: str, seed: int) -> NDArray[np.int64]:
    """Rows of fold I of K: of every class, and of all images, each fold has as many as another or one more."""
    part, _, count = fold.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count) != 1):
        raise ValueError(f"data.fold: {fold!r} is not I/K, as in 1/5, the first of five folds")
    rows = np.flatnonzero(free)
    order = np.lexsort((whole.index[rows], bits(seed, _FOLD, whole.index[rows]), stratum(whole.labels)[rows]))
    return np.sort(rows[order[int(part) - 1 :: int(count)]])


def smallest(split: Split, free: NDArray[np.bool_], counts: NDArray[np.int64], key: Key) -> NDArray[np.int64]:
    """Rows, in order, of the `counts[c]` free images of each class c with the smallest random numbers."""
    rows, strata = np.flatnonzero(free), stratum(split.labels)
    index = split.index[rows]
    order = rows[np.lexsort((index, bits(*key, index), strata[rows]))]
    sizes = np.bincount(strata[order], minlength=len(counts))
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[place < counts[strata[order]]])


FINEST = "fine"  # name of the level that `labels` of a source are on


def with_finest(
    classes: tuple[str, ...], multilabel: bool, coarser: Mapping[str, tuple[str, ...]]
) -> tuple[Level, ...]:
    """All levels, finest first, given the classes of the coarser ones in order; none where there are no coarser ones.

    Images with several labels have no single class at the finest level, so there it is left out.
    """
    if not coarser:
        return ()
    finest = () if multilabel else (Level(FINEST, classes),)
    return (*finest, *(Level(name, names) for name, names in coarser.items()))


def stacked(labels: NDArray[np.int64], coarser: list[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """[images, levels] of labels [images] (or [images, classes], left out as in `with_finest`) and the coarser ones."""
    if not coarser:
        return None
    columns = [labels, *coarser] if labels.ndim == 1 else coarser
    return np.stack(columns, 1).astype(np.int64)


def choose_level(data: DataSet, name: str) -> DataSet:
    """The data set whose labels and classes are those of a level (empty: as they are); `levels` keeps all of them.

    Raises `ValueError` for a level that is not there.
    """
    if not name:
        return data
    names = [level.name for level in data.levels]
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "it has one level of labels only; leave this empty"
        raise ValueError(f"data.level: {data.uri} has no level {name!r} ({has}){near(name, names)}")
    if name == FINEST:
        return data
    column = names.index(name)
    splits = {}
    for key, split in data.splits.items():
        if split.levels is None:
            raise ValueError(f"data.level: split {key} of {data.uri} has no labels of level {name!r}; add them to it")
        splits[key] = replace(split, labels=np.ascontiguousarray(split.levels[:, column]))
    level = data.levels[column]
    if len(level.classes) < 2:
        raise ValueError(f"data.level: level {name!r} of {data.uri} has only one class ({', '.join(level.classes)})")
    note = f"labels are of level {name}: {len(level.classes)} classes, {len(data.classes)} at the finest"
    return replace(data, classes=level.classes, splits=splits, multilabel=False, notes=(*data.notes, note))


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
    return _drawn(data, np.minimum(sizes, shots), SHOTS, seed, f"{shots} {data.things} per class")


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
    what = f"long tail of {counts[present[0]]} to {counts[present[-1]]} {data.things} per class, factor {factor:g}"
    return _drawn(data, counts, LONG_TAIL, seed, what)


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
        levels[:, [known.name for known in data.levels].index(level or FINEST)] = labels
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


def _drawn(data: DataSet, counts: NDArray[np.int64], draw: int, seed: int, what: str) -> DataSet:
    train = data["train"]
    rows = smallest(train, np.ones(len(train), bool), counts, (seed, draw))
    note = f"train: {len(rows)} of {len(train)} {data.things} drawn, {what}, seed {seed}"
    return replace(data, splits={**data.splits, "train": train.take(rows)}, notes=(*data.notes, note))


def drop_unreadable(data: DataSet) -> DataSet:
    """The data set without the rows of packed splits that have no pixels; all others keep their stable indices."""
    splits = dict(data.splits)
    for name, split in splits.items():
        unreadable = getattr(split.reader, "unreadable", ())
        if len(unreadable):
            splits[name] = split.take(np.flatnonzero(~np.isin(split.index, unreadable)))
    dropped = sum(map(len, data.splits.values())) - sum(map(len, splits.values()))
    if not dropped:
        return data
    note = f"left out {dropped} images that could not be read when they were packed"
    return replace(data, splits=splits, notes=(*data.notes, note))
