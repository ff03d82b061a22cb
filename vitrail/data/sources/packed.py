"""A data set decoded once, as `vitrail pack` leaves it: raw pixels in shards that are mapped, not read.

    pack.json                   source, size, classes; of each split its shards and arrays with bytes and checksums
    train-00000.bin ...         images of consecutive rows, each uint8 [height, width, 3], one after the other
    train-00000.json ...        the writer's record of a shard, by which a damaged one is made again
    train-offsets.npy           [images + 1] where each image begins in the shards laid end to end
    train-heights.npy, -widths  [images]; 0 for an image that could not be read
    train-index.npy, -labels, -levels, -boxes, -generated, train-keys.json      as in `Split`

Rows without pixels stay in the arrays, because val is held out by labels and stable indices: with every row of the
source there, a packed set is divided exactly as its source. `drop_unreadable` takes them out after that.

Format 1 had one coarser level at most: `coarse_classes` in the listing, and train-coarse.npy [images].
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import BadImage, DataSet, Level, Source, Split, stacked, with_finest
from vitrail.files import LaterVersion, cache_folder, checksum, parse_json, reject_later
from vitrail.schema import build

FORMAT = 2
LISTING = "pack.json"
UNFINISHED = "pack-unfinished.json"
FAR_MORE, SAMPLES, MOST_BYTES = 2.0, 16, 8 * 2**30  # of copies: sides of files per side; files looked at; size
SHARPEST, STEP = 2.0, 128  # sides of an image per side of a crop, at most; pixels that copies differ by

_MOST_MAPS = 256  # a mapped file counts as an open one, and many systems allow a process only 1024


@dataclass(frozen=True)
class PackedFile:
    """A file, its size and its checksum."""

    file: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class PackedSplit:
    """One split in `pack.json`."""

    name: str
    images: int  # rows, those without pixels included
    shards: tuple[PackedFile, ...]
    arrays: tuple[PackedFile, ...]
    skipped: tuple[tuple[int, str, str], ...]  # row, key, reason

    def array(self, what: str) -> str | None:
        """File name of an array of the split, where it has that one."""
        return next((a.file for a in self.arrays if a.file == f"{self.name}-{what}"), None)


@dataclass(frozen=True)
class Pack:
    """The content of `pack.json`."""

    format: int
    made_by: str
    source: str  # the URI that was packed
    identity: str  # digest of everything but the pixels
    size: int  # maximum length of the shorter side; 0: images as they were
    classes: tuple[str, ...]
    multilabel: bool
    notes: tuple[str, ...]
    splits: tuple[PackedSplit, ...]
    format_version: int = 0  # earlier versions wrote none
    levels: tuple[Level, ...] = ()
    coarse_classes: tuple[str, ...] = ()  # of format 1


def is_packed(folder: Path) -> bool:
    """Whether a folder was made by `vitrail pack`, finished or not."""
    return (folder / LISTING).is_file() or (folder / UNFINISHED).is_file()


def read_pack(folder: Path) -> Pack:
    """The listing of a packed folder. Raises `ValueError` where it is unfinished, foreign or of a later format."""
    if not (folder / LISTING).is_file():
        if (folder / UNFINISHED).is_file():
            raise ValueError(f"{folder} was not packed to its end; run the same `vitrail pack` again to finish it")
        raise FileNotFoundError(f"{folder} is no packed data set (it has no {LISTING}); make one with `vitrail pack`")
    try:
        stored = parse_json((folder / LISTING).read_text(encoding="utf-8"))
        reject_later(folder / LISTING, stored, FORMAT)
        pack = _with_levels(build(Pack, stored))
        names = [file.file for split in pack.splits for file in (*split.shards, *split.arrays)]
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files outside its folder")
    except LaterVersion:
        raise
    except ValueError as error:
        raise ValueError(f"{folder / LISTING} cannot be used: {'; '.join(str(error).splitlines())}") from None
    return pack


def open_packed(path: Path, uri: str) -> DataSet:
    """The data set in a packed folder. Raises `ValueError` that names a file which is missing, cut short or foreign.

    Sizes of all files are compared and all arrays checked; `verify` compares checksums as well.
    """
    pack = read_pack(path)
    for split in pack.splits:
        for stored in (*split.shards, *split.arrays):
            _reject_faulty(path, stored)
    splits = {split.name: _open_split(path, pack, split) for split in pack.splits}
    how = f"shorter side at most {pack.size}" if pack.size else "at full size"
    notes = (*pack.notes, f"packed from {pack.source}, {how}")
    return DataSet(uri, pack.classes, splits, pack.levels, pack.multilabel, notes)


SOURCE = Source(
    {"PACKED": "a folder that `vitrail pack` made: decoded, memory-mapped, quick to read"},
    lambda location: open_packed(location.path, location.uri),
    lambda location: location.is_dir and is_packed(location.path),
)


def verify(path: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Compare every byte with its checksum: one sentence for each file that differs, none where all is well.

    `progress(done, total)` counts bytes. Raises as `read_pack`.
    """
    files = [stored for split in read_pack(path).splits for stored in (*split.shards, *split.arrays)]
    total, done = sum(stored.bytes for stored in files), 0
    faults = []
    for stored in files:
        fault = _fault(path, stored)
        if not fault and checksum(path / stored.file) != stored.crc32:
            fault = "has other bytes than were written"
        if fault:
            faults.append(f"{path / stored.file} {fault}; delete it and run the same `vitrail pack` again")
        done += stored.bytes
        if progress is not None:
            progress(done, total)
    return faults


def side_needed(augments: Sequence[AugmentConfig], preprocess: PreprocessConfig) -> int:
    """Shorter side of an image of which no crop is enlarged (but `SHARPEST` times at most), in steps of `STEP`.

    >>> side_needed([AugmentConfig(scale=(0.35, 1.0))], PreprocessConfig(size=64))
    128
    """
    shares = [augment.scale[0] for augment in augments if augment.crop == "resized"]
    side = preprocess.size * max(1 / preprocess.crop_ratio, min(SHARPEST, min(shares, default=1.0) ** -0.5))
    return math.ceil(side / STEP) * STEP


def of_files(split: Split) -> bool:
    """Whether its images are files, which become RGB of eight bits, without boxes in them."""
    return hasattr(split.reader, "at_least") and not getattr(split.reader, "form", None) and split.boxes is None


def pays_to_shrink(split: Split, size: int) -> bool:
    """Whether files hold far more than a copy of this size, which is no large part of the disk."""
    sides = []
    for index in split.index[np.linspace(0, len(split) - 1, SAMPLES).astype(int)].tolist():
        with suppress(OSError, ValueError), Image.open(split.reader.path(index)) as image:  # type: ignore[attr-defined]
            sides.append(min(image.size))  # without decoding it
    if not sides or statistics.median(sides) < FAR_MORE * size:
        return False
    place = next(folder for folder in (cache_folder(), *cache_folder().parents) if folder.is_dir())
    return 4 * size * size * len(split) < min(MOST_BYTES, shutil.disk_usage(place).free / 2)  # 4:3, three colours


class PackedReader:
    """Reads image number i of a packed split; only its place travels to other processes, each maps files as it reads.

    Besides Pillow images it gives what a loader on an accelerator wants: `dense`, all pixels as arrays, and `rows`.
    """

    def __init__(self, folder: str, split: str) -> None:
        self.folder, self.split = folder, split
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "split": self.split, "_opened": None}

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            self._opened = _Opened(Path(self.folder), self.split)
        return self._opened

    def __call__(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels(index))

    def pixels(self, index: int) -> NDArray[np.uint8]:
        """[height, width, 3] of an image, mapped and read-only. Raises `BadImage` where it was unreadable."""
        opened = self._open
        row = opened.row(index)
        height, width = int(opened.heights[row]), int(opened.widths[row])
        if not height:
            raise BadImage(*opened.skipped[row])
        begin = int(opened.offsets[row])
        shard = bisect_right(opened.starts, begin) - 1
        begin -= opened.starts[shard]
        return opened.shard(shard)[begin : begin + height * width * 3].reshape(height, width, 3)

    def dense(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Where all images have one size: the shards as mapped arrays [images, height, width, 3], in order of rows.

        Rows without pixels are not there; `rows` tells where an image is. None where sizes differ.
        """
        opened = self._open
        readable = opened.heights > 0
        sizes = np.unique(np.stack([opened.heights[readable], opened.widths[readable]], -1), axis=0)
        if len(sizes) != 1:
            return None
        filled = [i for i, stored in enumerate(opened.listed.shards) if stored.bytes]
        return tuple(opened.shard(i).reshape(-1, int(sizes[0, 0]), int(sizes[0, 1]), 3) for i in filled)

    def rows(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in `dense`, its arrays laid end to end, of images given by stable index. Raises `BadImage`."""
        opened = self._open
        rows = opened.rows(np.asarray(index))
        readable = opened.heights > 0
        if not readable[rows].all():
            raise BadImage(*opened.skipped[int(rows[~readable[rows]][0])])
        places: NDArray[np.int64] = (np.cumsum(readable) - 1)[rows]
        return places

    def stamps(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The listed checksum of the shard of each image."""
        opened = self._open
        shards = np.searchsorted(opened.starts, opened.offsets[opened.rows(index)], side="right") - 1
        return np.array([shard.crc32 for shard in opened.listed.shards], np.int64)[shards]

    @property
    def unreadable(self) -> NDArray[np.int64]:
        """Stable indices of images without pixels."""
        return np.asarray(self._open.index[self._open.heights == 0], np.int64)


class _Opened:
    """The mapped files of one split."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.listed = next(split for split in read_pack(folder).splits if split.name == name)
        # Plain arrays over the mapping: taking one number out of a numpy.memmap costs ten times as much.
        self.offsets, self.heights, self.widths, self.index = (
            np.asarray(_array(folder, self.listed, what, mapped=True))
            for what in ("offsets", "heights", "widths", "index")
        )
        self.skipped = {row: (key, reason) for row, key, reason in self.listed.skipped}
        self.starts: list[int] = np.cumsum([0, *(shard.bytes for shard in self.listed.shards)])[:-1].tolist()
        self.shard = lru_cache(_MOST_MAPS)(self._shard)  # safe under threads
        self._first = int(self.index[0]) if len(self.index) else 0
        self._order: NDArray[np.int64] | None = None
        if not np.array_equal(self.index, np.arange(self._first, self._first + len(self.index))):
            self._order = np.argsort(self.index, kind="stable")

    def row(self, index: int) -> int:
        """The row with a stable index."""
        row = index - self._first
        if self._order is None and 0 <= row < len(self.index):
            return row
        return int(self.rows(np.array([index]))[0])

    def rows(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows with these stable indices. Raises `IndexError`."""
        order = np.arange(len(self.index)) if self._order is None else self._order
        places = np.minimum(np.searchsorted(self.index, index, sorter=order), len(order) - 1)
        rows = order[places]
        if not np.array_equal(self.index[rows], index):
            strange = int(index[self.index[rows] != index][0])
            raise IndexError(f"{self.folder} has no image number {strange} in {self.listed.name}")
        return rows

    def _shard(self, number: int) -> NDArray[np.uint8]:
        """[bytes] of a shard."""
        stored = self.listed.shards[number]
        _reject_faulty(self.folder, stored)  # again: it may have changed since the set was opened
        return np.asarray(np.memmap(self.folder / stored.file, np.uint8, "r"))


def _fault(folder: Path, stored: PackedFile) -> str:
    """What is wrong with a file as far as its size tells; empty where nothing is."""
    try:
        size = os.stat(folder / stored.file).st_size  # noqa: PTH116
    except FileNotFoundError:
        return "is missing"
    return "" if size == stored.bytes else f"has {size} bytes instead of {stored.bytes}"


def _reject_faulty(folder: Path, stored: PackedFile) -> None:
    if fault := _fault(folder, stored):
        raise ValueError(f"{folder / stored.file} {fault}; run the same `vitrail pack` again to make it anew")


def _array(folder: Path, split: PackedSplit, what: str, mapped: bool = False) -> NDArray[Any]:
    path = folder / f"{split.name}-{what}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r" if mapped and split.images else None, allow_pickle=False))
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, TokenError) as error:  # of its header
        raise ValueError(f"{path} is no plain array ({' '.join(str(error).split())}); pack again") from None


def _with_levels(pack: Pack) -> Pack:
    """A listing of format 1 in the terms of now."""
    if not pack.coarse_classes:
        return pack
    return replace(pack, levels=with_finest(pack.classes, pack.multilabel, {"coarse": pack.coarse_classes}))


def _open_split(folder: Path, pack: Pack, listed: PackedSplit) -> Split:
    given = ("offsets", "heights", "widths", "index", "labels", "levels", "coarse", "boxes", "generated")
    arrays = {what: _array(folder, listed, what) for what in given if listed.array(f"{what}.npy")}
    try:
        keys = parse_json((folder / f"{listed.name}-keys.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        keys = None
    for what, fits in _expected(pack, listed, arrays, keys).items():
        if not fits:
            raise ValueError(f"{folder}: {listed.name}-{what} does not fit the rest of the packed set; pack again")
    reader = PackedReader(str(folder.absolute()), listed.name)
    index, labels = arrays["index"].astype(np.int64), arrays["labels"].astype(np.int64)
    levels, boxes = (arrays[what].astype(np.int64) if what in arrays else None for what in ("levels", "boxes"))
    if "coarse" in arrays:  # format 1
        levels = stacked(labels, [arrays["coarse"]])
    return Split(listed.name, reader, index, keys, labels, levels, boxes, arrays.get("generated"))


def _expected(pack: Pack, listed: PackedSplit, arrays: dict[str, NDArray[Any]], keys: Any) -> dict[str, bool]:
    """For each part of a split whether it fits, so that no later read can leave its shard or its classes."""
    n = listed.images
    if missing := {"offsets", "heights", "widths", "index", "labels"} - set(arrays):
        return {f"{what}.npy": False for what in sorted(missing)}
    whole = {
        f"{what}.npy": a.dtype.kind == ("b" if what == "generated" else "i") and len(a) == n + (what == "offsets")
        for what, a in arrays.items()
    }
    if not all(whole.values()):
        return whole
    heights, widths, offsets, labels = (arrays[what] for what in ("heights", "widths", "offsets", "labels"))
    bounds = np.cumsum([0, *(shard.bytes for shard in listed.shards)])
    bytes_each = heights.astype(np.int64) * widths * 3
    unread = np.zeros(n, bool)
    unread[[row for row, _, _ in listed.skipped if 0 <= row < n]] = True
    return {
        "heights.npy": bool((heights >= 0).all() and np.array_equal(heights == 0, unread)),
        "widths.npy": bool((widths >= 0).all() and np.array_equal(widths == 0, unread)),
        "offsets.npy": bool(
            offsets[0] == 0
            and offsets[-1] == bounds[-1]
            and np.array_equal(np.diff(offsets), bytes_each)
            and np.isin(bounds, offsets).all()
        ),
        "labels.npy": labels.shape[1:] == ((len(pack.classes),) if pack.multilabel else ())
        and _within(labels, 2 if pack.multilabel else len(pack.classes)),
        "levels.npy": "levels" not in arrays or _fit_levels(arrays["levels"], pack.levels),
        "coarse.npy": "coarse" not in arrays or _within(arrays["coarse"], len(pack.coarse_classes)),
        "boxes.npy": "boxes" not in arrays or arrays["boxes"].shape == (n, 4),
        "generated.npy": "generated" not in arrays or arrays["generated"].shape == (n,),
        "keys.json": isinstance(keys, list) and len(keys) == n and all(isinstance(key, str) for key in keys),
    }


def _fit_levels(values: NDArray[Any], levels: tuple[Level, ...]) -> bool:
    if values.ndim != 2 or values.shape[1] != len(levels):
        return False
    return all(_within(column, len(level.classes)) for column, level in zip(values.T, levels, strict=True))


def _within(values: NDArray[Any], count: int) -> bool:
    return not values.size or bool(values.min() >= 0 and values.max() < count)
