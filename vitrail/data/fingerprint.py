"""A few facts about every image, gathered in one pass: enough to find copies, oddities and strangers among them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.decode import stored_mode
from vitrail.data.folder import FileReader
from vitrail.data.source import BadImage, DataSet, Split

SIDE = 16  # of the thumbnails
_BLOCK = 32  # images a task


@dataclass(frozen=True)
class Fingerprints:
    """One row an image, through all splits in order."""

    splits: tuple[str, ...]
    split: NDArray[np.int64]  # [images] position in `splits`
    row: NDArray[np.int64]  # [images] row in its split
    keys: list[str]
    labels: NDArray[np.int64]  # [images] or [images, classes]
    reason: list[str]  # why it is unreadable; empty for a good image
    mode: list[str]  # how its file stores colours; empty where there is no file
    size: NDArray[np.int64]  # [images, 2] width, height
    digest: NDArray[np.uint64]  # [images] of the decoded pixels: equal for equal pictures
    outline: NDArray[np.uint64]  # [images] difference hash: a few bits apart for similar pictures
    thumbnail: NDArray[np.uint8]  # [images, SIDE, SIDE, 3]

    @property
    def good(self) -> NDArray[np.bool_]:
        """[images] whether it could be read"""
        return np.array([not reason for reason in self.reason], bool)

    def name(self, image: int) -> str:
        """`train: cats/3.jpg`"""
        return f"{self.splits[self.split[image]]}: {self.keys[image]}"


def take_fingerprints(
    data: DataSet, workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Fingerprints:
    """Read every image once, in threads (Pillow decodes and resizes outside the interpreter lock)."""
    places = [(split, row) for split in data.splits.values() for row in range(len(split))]
    blocks = [places[i : i + _BLOCK] for i in range(0, len(places), _BLOCK)]
    facts: list[_Facts] = []
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        try:
            for found in pool.map(_look_at, blocks):
                facts += found
                if progress is not None:
                    progress(len(facts), len(places))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    names = tuple(data.splits)
    sizes = [len(data.splits[name]) for name in names]
    return Fingerprints(
        splits=names,
        split=np.repeat(np.arange(len(names)), sizes),
        row=np.concatenate([np.arange(size) for size in sizes]),
        keys=[key for split in data.splits.values() for key in split.keys],
        labels=np.concatenate([split.labels for split in data.splits.values()]),
        reason=[f.reason for f in facts],
        mode=[f.mode for f in facts],
        size=np.array([f.size for f in facts], np.int64).reshape(-1, 2),
        digest=np.array([f.digest for f in facts], np.uint64),
        outline=np.array([f.outline for f in facts], np.uint64),
        thumbnail=np.stack([f.thumbnail for f in facts]) if facts else np.zeros((0, SIDE, SIDE, 3), np.uint8),
    )


@dataclass(frozen=True)
class _Facts:
    reason: str
    mode: str
    size: tuple[int, int]
    digest: int
    outline: int
    thumbnail: NDArray[np.uint8]


def _look_at(block: Sequence[tuple[Split, int]]) -> list[_Facts]:
    return [_facts(split, row) for split, row in block]


def _facts(split: Split, row: int) -> _Facts:
    mode = ""
    if isinstance(split.reader, FileReader):
        mode = stored_mode(split.reader.path(int(split.index[row])))
    try:
        image = split.read(row)
    except BadImage as bad:
        return _Facts(bad.reason, mode, (0, 0), 0, 0, np.zeros((SIDE, SIDE, 3), np.uint8))
    digest = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=8).digest()
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    return _Facts(
        "", mode, image.size, int.from_bytes(digest, "little"), difference_hash(image), np.asarray(small, np.uint8)
    )


def difference_hash(image: Image.Image) -> int:
    """64 bits: is each of 8 x 8 places brighter than its right neighbour, in a grey picture shrunk to 9 x 8."""
    tiny = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    return int.from_bytes(np.packbits(tiny[:, :-1] > tiny[:, 1:]).tobytes(), "big")
