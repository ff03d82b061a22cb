"""The order of training images.

The training stream is one endless line: epoch 0's rows, epoch 1's rows, and so on, each in an order drawn from (seed,
epoch). Step s takes places s * batch to (s + 1) * batch of that line, across the ends of epochs, so every batch is full
and any step can be computed without having seen the ones before.

Repeated augmentation (Hoffer et al., 2020; DeiT) puts every drawn row `repeats` times into the line, side by side, with
a `repeat` that gives each copy its own augmentation. An epoch stays as long, so it shows 1 / repeats of the rows. What
a batch holds is thereby what DeiT's sampler gives to all its processes together; but its places are then dealt anew,
because mixup and CutMix mix place i with place i ^ 1, and copies side by side would be mixed with themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.counter import seed_of

_CACHED_EPOCHS = 2  # a batch may straddle two; more would only cost memory


class Draw(NamedTuple):
    """One place of the stream."""

    row: int
    epoch: int
    repeat: int  # how often the row came before in the same epoch


class BatchSampler:
    """The training stream over `rows` images, in batches.

    `shuffle`: every row once per epoch. `balanced`: an epoch is as long, but each place takes a class at random, all
    classes with equal probability, and then the next row of that class, cycling through a permutation drawn for the
    epoch. Where several labels may hold (`labels` [rows, classes] of 0/1) a row is drawn, with replacement, in
    proportion to the mean over its labels of 1 / (rows with that label); rows without a label count as one more class.

    With `repeats` the first rows / repeats places of such an epoch are drawn, each that many times (the last one fewer
    times where they do not divide). Raises `ValueError` for more repeats than rows or than places in a batch.
    """

    def __init__(
        self,
        rows: int,
        batch: int,
        seed: int,
        sampling: Literal["shuffle", "balanced"] = "shuffle",
        labels: NDArray[np.int64] | None = None,
        repeats: int = 1,
    ) -> None:
        if rows < 1:
            raise ValueError("there is nothing to train on; check the data with `vitrail check`")
        if batch < 1:
            raise ValueError(f"data.batch: {batch} must be at least 1")
        if sampling not in ("shuffle", "balanced"):
            raise ValueError(f"data.sampling: {sampling!r} is not one of shuffle, balanced")
        if not 1 <= repeats <= min(rows, batch):
            raise ValueError(
                f"data.repeats: {repeats} copies of an image do not go with {rows} images in batches of {batch}; "
                f"use 1 to {min(rows, batch)}"
            )
        self.rows, self.batch, self.seed, self.sampling, self.repeats = rows, batch, seed, sampling, repeats
        self._epochs: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64] | None]] = OrderedDict()
        self._labels: NDArray[np.integer] | None = None
        self._probability: NDArray[np.float64] | None = None
        if sampling == "balanced":
            if labels is None or len(labels) != rows:
                raise ValueError(f"balanced sampling needs one label for each of the {rows} examples")
            if labels.ndim == 2:
                self._probability = _multilabel_probability(labels)
            else:
                # Classes without rows drop out; the narrowest type lets numpy sort by radix.
                dense = np.unique(labels, return_inverse=True)[1]
                self._labels = dense.astype(np.min_scalar_type(int(dense.max())))

    def draws(self, step: int, first: int = 0, count: int | None = None) -> list[Draw]:
        """Places `first` to `first + count` (by default: all) of the batch of `step`."""
        return list(map(Draw._make, self.table(step, first, count).tolist()))

    def table(self, step: int, first: int = 0, count: int | None = None) -> NDArray[np.int64]:
        """The same as an array [places, 3] of row, epoch and repeat."""
        count = self.batch - first if count is None else count
        if step < 0 or first < 0 or count < 0 or first + count > self.batch:
            raise ValueError(f"step {step} has no places {first} to {first + count}; a batch has {self.batch}")
        start = step * self.batch
        if self.repeats == 1:
            return self._line(start + first, start + first + count)
        whole = self._line(start, start + self.batch)  # copies are dealt over the batch: its parts need all of it
        return whole[_dealt(whole[:, 0], whole[:, 2] % self.repeats)[first : first + count]]

    def _line(self, start: int, end: int) -> NDArray[np.int64]:
        """Places of the endless line, across the ends of epochs."""
        drawn: list[NDArray[np.int64]] = []
        while start < end:
            epoch, begin = divmod(start, self.rows)
            stop = min(self.rows, begin + end - start)
            rows, earlier = self._epoch(epoch)
            which, copy = np.divmod(np.arange(begin, stop), self.repeats)
            part = np.empty((stop - begin, 3), dtype=np.int64)
            part[:, 0], part[:, 1], part[:, 2] = rows[which], epoch, copy
            if earlier is not None:
                part[:, 2] += earlier[which] * self.repeats
            drawn.append(part)
            start += stop - begin
        return np.concatenate(drawn) if drawn else np.zeros((0, 3), dtype=np.int64)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Rows of an epoch in order, and how often each came before in it (none: never)."""
        if epoch in self._epochs:
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]
        while len(self._epochs) >= _CACHED_EPOCHS:
            self._epochs.popitem(last=False)
        generator = np.random.Generator(np.random.PCG64(seed_of("order", self.seed, epoch)))
        if self._labels is not None:
            self._epochs[epoch] = _balanced(generator, self._labels)
        elif self._probability is not None:
            rows = generator.choice(self.rows, size=self.rows, p=self._probability)
            self._epochs[epoch] = rows, _earlier(rows)
        else:
            self._epochs[epoch] = generator.permutation(self.rows), None
        return self._epochs[epoch]


def share_of_batch(
    batch: int, world: int, accumulate: int, rank: int, piece: int, *, pairs: bool = False, things: str = "images"
) -> tuple[int, int]:
    """First place and number of places of a piece of a process in the global batch, which all pieces cover in order.

    Shares differ by at most one example, or with `pairs` by at most one pair: places i and i ^ 1 are then in one piece,
    and the last place of an odd batch goes to the last piece. Raises `ValueError` where a piece would be empty.

    >>> [share_of_batch(11, 2, 2, rank, piece, pairs=True) for rank in range(2) for piece in range(2)]
    [(0, 4), (4, 2), (6, 2), (8, 3)]
    """
    unit, pieces, number = 1 + pairs, world * accumulate, rank * accumulate + piece
    each, extra = divmod(batch // unit, pieces)
    if not each:
        kind = f"{batch // 2} pairs of {things} to mix" if pairs else f"{batch} {things}"
        raise ValueError(
            f"data.batch: {kind} cannot be cut into {world} processes x {accumulate} accumulation pieces; use a batch "
            f"of at least {unit * pieces}"
        )
    first = unit * (number * each + min(number, extra))
    return first, batch - first if number == pieces - 1 else unit * (each + (number < extra))


def _balanced(
    generator: np.random.Generator, labels: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    sizes = np.bincount(labels)
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]  # each class's rows together, in random order
    begins = np.cumsum(sizes) - sizes
    classes = generator.integers(len(sizes), size=len(labels)).astype(labels.dtype)
    turn = _earlier(classes)
    size = sizes[classes]
    return by_class[begins[classes] + turn % size], turn // size


def _dealt(rows: NDArray[np.int64], copy: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order of a batch in which places i and i ^ 1 hold different rows, and copies of a row different partners.

    The first half, its copies number 0 first, goes to the even places; the second half, as it comes, to the odd ones.
    Where a row meets itself (a copy on either side of the middle, in a small batch) the second half is turned until
    none does; in a batch of hardly more than one row that may not be possible.
    """
    half = len(rows) // 2
    first = np.argsort(copy[:half], kind="stable")
    second = np.arange(half, 2 * half)
    turns = (turned for shift in range(half) if (rows[first] != rows[turned := np.roll(second, -shift)]).all())
    order = np.arange(len(rows))  # the last place of an odd batch has no partner and stays
    order[0 : 2 * half : 2], order[1 : 2 * half : 2] = first, next(turns, second)
    return order


def _earlier(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """For each place, how many earlier places hold the same value."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    places = np.arange(len(values))
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    counts = np.empty(len(values), dtype=np.int64)
    counts[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return counts


def _multilabel_probability(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    held = np.concatenate([labels > 0, ~(labels > 0).any(1, keepdims=True)], axis=1)
    inverse = 1 / np.maximum(held.sum(0), 1)
    weight = (held @ inverse) / held.sum(1)
    probability: NDArray[np.float64] = weight / weight.sum()
    return probability
