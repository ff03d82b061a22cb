"""Batches: the rows that make one, what a worker collates, and what training steps and evaluations receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class BatchIndices(NamedTuple):
    """Which rows make a batch: what a sampler yields."""

    step: int
    place: int  # of the first draw in the global batch
    draws: NDArray[np.int64]  # [rows, 3]: row, epoch, repeat

    @classmethod
    def once(cls, place: int, rows: Sequence[int]) -> BatchIndices:
        """Each of these rows as it is: no epoch, no repeat."""
        draws = np.zeros((len(rows), 3), dtype=np.int64)
        draws[:, 0] = rows
        return cls(0, place, draws)


@dataclass
class CollatedBatch:
    """A batch in bytes, as a worker collates it, without the rows that could not be read."""

    indices: BatchIndices
    views: tuple[Tensor, ...]  # each [rows, 3, size, size] uint8; none where no row could be read
    label: Tensor  # [rows], or [rows, classes]
    index: Tensor  # [rows]
    levels: Tensor | None  # [rows, levels]
    places: NDArray[np.int64]  # [rows] in the global batch
    skipped: list[tuple[str, str]]  # key, reason

    def changed(self, change: Callable[[Tensor], Tensor]) -> CollatedBatch:
        """The batch with every tensor changed."""
        levels = None if self.levels is None else change(self.levels)
        views = tuple(change(view) for view in self.views)
        return replace(self, views=views, label=change(self.label), index=change(self.index), levels=levels)

    def pin_memory(self) -> CollatedBatch:
        """Called by torch's DataLoader."""
        return self.changed(Tensor.pin_memory)


@dataclass
class Batch:
    """Images on the device, in training augmented and mixed."""

    views: tuple[Tensor, ...]  # each [batch, 3, height, width]: bytes, which a model normalises, or normalised floats
    label: Tensor  # [batch] class, or [batch, classes] of 0/1 where several may hold
    target: Tensor  # what is learned: as `label`, or [batch, classes] of weights once images are mixed
    index: Tensor  # [batch] stable index of each image in its source
    levels: Tensor | None = None  # [batch, levels] class at each level of the taxonomy, finest first
    step: int = 0  # optimiser step the batch belongs to
    share: float = 1.0  # of the global batch, in units of an equal share: its weight in the mean of the step
    missing: int = 0  # images that could not be read; always 0 where the batch is the global one

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor changed."""
        return replace(
            self,
            views=tuple(change(view) for view in self.views),
            label=change(self.label),
            target=change(self.target),
            index=change(self.index),
            levels=None if self.levels is None else change(self.levels),
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        levels = [] if self.levels is None else [self.levels]
        return [*self.views, self.label, self.target, self.index, *levels]

    @property
    def images(self) -> Tensor:
        """The first view."""
        return self.views[0]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class View:
    """How one view of an image is made."""

    weak: bool = False  # by `data.weak` instead of `data.augment`
    size: int | None = None  # side in pixels; none: the model's
    scale: tuple[float, float] | None = None  # share of the area that a random resized crop covers; none: as set


@dataclass(frozen=True)
class ViewSpec:
    """Which augmented views of each image a batch must carry."""

    views: int = 1
    each: tuple[View, ...] = ()  # how; empty: all alike

    @classmethod
    def of(cls, *each: View) -> ViewSpec:
        """These views, in this order."""
        return cls(len(each), each)

    def all(self) -> tuple[View, ...]:
        """How each of the views is made."""
        return self.each or (View(),) * self.views
