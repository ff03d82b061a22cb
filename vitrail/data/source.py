"""The interface of image sources: splits of labelled images that can be read one at a time.

A `Split` holds labels and names in memory and reads pixels on demand through a small picklable reader, so that it can
travel to worker processes. Rows are positions in the split; `index` is the stable number of an image in its source,
which stays the same whatever is held out or left out, and which seeds its augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class BadImage(Exception):
    """An image that cannot be decoded: which one, and why."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


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

    def __len__(self) -> int:
        return len(self.index)

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
            levels=None if self.levels is None else self.levels[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
            generated=None if self.generated is None else self.generated[rows],
        )


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
    notes: tuple[str, ...] = field(default=())  # what a person should know: carved splits, ignored files

    @property
    def unlabelled(self) -> bool:
        """Whether nobody said what is on the images."""
        return self.classes == (UNLABELLED,)

    @property
    def things(self) -> str:
        """What a person calls the examples: `images`, unless a reader that gives something else says what."""
        return next((str(s.reader.things) for s in self.splits.values() if hasattr(s.reader, "things")), "images")

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise KeyError(f"{self.uri} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]
