"""Arrays of images in one .npz file: x_train, y_train, x_test, y_test and the like, never more in memory than is read.

Images are uint8 [images, height, width], [images, height, width, 1] or [images, height, width, 3], or with
`data.channels` any number of channels of uint8 or uint16; labels are whole numbers [images], or 0/1 [images, classes]
where several may hold, or floats [images], values to predict. `classes`, `coarse_*` and `coarse_classes` may be given,
and for a taxonomy of more levels `level_NAME_*` and `level_NAME_classes`, stored from fine to coarse. An image's
stable index counts through train, val and test in that order.
"""

from __future__ import annotations

import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import FINEST, SPLIT_NAMES, DataSet, Location, Source, Split, stacked, with_finest
from vitrail.data.sources.table import repeated
from vitrail.data.stack import StackForm, form_of

MOST_LABEL = 1000  # above ten times the number of images, from which on a label is taken for a mistake
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, RuntimeError, tokenize.TokenError, SyntaxError)
"""What damaged archives raise: RuntimeError for encrypted members and unknown methods, the last two for headers."""


class ArrayReader:
    """Reads image number i from consecutive arrays of a .npz; only their place travels to other processes."""

    def __init__(self, path: str, members: tuple[str, ...], starts: tuple[int, ...]) -> None:
        self.path, self.members, self.starts = path, members, starts
        self.form: StackForm | None = None  # channels and depth that images keep; none: RGB of eight bits
        self._arrays: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}}

    def pixels(self, index: int) -> NDArray[Any]:
        """[height, width] or [height, width, channels]"""
        which = int(np.searchsorted(self.starts, index, side="right")) - 1
        member = self.members[which]
        if member not in self._arrays:
            self._arrays[member] = mapped(Path(self.path), member)
        pixels = np.asarray(self._arrays[member][index - self.starts[which]])
        return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels

    def __call__(self, index: int) -> Image.Image:
        pixels = self.pixels(index)
        channels, bits = form_of(pixels, str(index))
        if self.form is None and (channels not in (1, 3) or bits != 8):
            how = f"--data.channels {channels}" + (f" --data.maximum {2**bits - 1}" if channels == 3 else "")
            raise ValueError(f"{self.path} has images of {channels} channels of {bits} bits; read them with {how}")
        return Image.fromarray(pixels).convert("RGB") if self.form is None else self.form.image(pixels, str(index))

    raw = pixels

    def formed(self, form: StackForm) -> ArrayReader:
        """A reader of the same arrays that keeps their channels and depth."""
        reader = ArrayReader(self.path, self.members, self.starts)
        reader.form = form
        return reader


def mapped(path: Path, member: str) -> NDArray[Any]:
    """An array of a .npz, mapped from disk where it is stored uncompressed (`np.savez`), otherwise read into memory."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{member}.npy")
        if entry.compress_type == zipfile.ZIP_STORED:
            with path.open("rb") as stream:
                stream.seek(entry.header_offset + 26)
                name, extra = np.frombuffer(stream.read(4), "<u2")
                stream.seek(entry.header_offset + 30 + int(name) + int(extra))
                shape, fortran, dtype = _header(stream)
                if not dtype.hasobject and np.prod(shape) > 0:
                    return np.memmap(path, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
        with archive.open(entry) as packed:
            shape, _, dtype = _header(packed)
            size = math.prod(shape) * dtype.itemsize
            if size > entry.file_size:
                raise ValueError(f"the header of {member} claims {size} bytes, and there are {entry.file_size}")
    with np.load(path, allow_pickle=False) as arrays:
        return np.asarray(arrays[member])


def open_arrays(location: Location) -> DataSet:
    """The data set in a .npz. Raises `ValueError` that names every array that does not fit."""
    path, uri = location.path, location.uri
    try:
        with zipfile.ZipFile(path) as archive:
            members = [n[:-4] for n in archive.namelist() if n.endswith(".npy")]
        levels = _levels(members)
        stems = ("x", "y", *levels.values())
        known = {"classes", *(f"{stem}_{part}" for stem in stems for part in (*SPLIT_NAMES, "classes"))}
        arrays = {name: mapped(path, name) for name in members if name in known}
    except (*DAMAGED, OSError, ValueError) as error:
        raise ValueError(f"{uri} cannot be read as plain arrays ({error}); write it again with numpy.savez") from None
    if "x_train" not in arrays or "y_train" not in arrays:
        raise ValueError(f"{uri} needs the arrays x_train and y_train; it has {', '.join(members) or 'none'}")
    present = tuple(s for s in SPLIT_NAMES if f"x_{s}" in arrays)
    given = {s: np.asarray(arrays[f"y_{s}"]) for s in SPLIT_NAMES if f"y_{s}" in arrays}
    numeric = all(y.dtype.kind == "f" and y.ndim == 1 and np.isfinite(y).all() for y in given.values())
    labels = {s: np.zeros(len(y), np.int64) for s, y in given.items()} if numeric else given
    arrays |= {f"y_{s}": y for s, y in labels.items()}
    classes = ("value",) if numeric else _names(arrays.get("classes"), labels, f"{uri}: y")
    coarser = {}
    for name, stem in levels.items():
        coarse = {s: np.asarray(arrays[f"{stem}_{s}"]) for s in present if f"{stem}_{s}" in arrays}
        coarser[name] = _names(arrays.get(f"{stem}_classes"), coarse, f"{uri}: {stem}")
    counts = {"y": len(classes)} | {stem: len(coarser[name]) for name, stem in levels.items()}
    problems = [p for s in SPLIT_NAMES for p in _misfits(s, arrays, counts)]
    problems += [f"classes has {name!r} twice" for name in repeated(classes)]
    problems += [f"level_{FINEST}_* would be the level of y_*; leave it out"] * (FINEST in levels)
    if len({y.ndim for y in labels.values()}) > 1:
        problems.append("y_*: single labels in one split, several in another")
    if problems:
        raise ValueError(f"{uri} does not fit together: {'; '.join(problems)}")
    starts = np.cumsum([0, *(len(arrays[f"x_{s}"]) for s in present)]).tolist()
    reader = ArrayReader(str(path.resolve()), tuple(f"x_{s}" for s in present), tuple(starts[:-1]))
    splits = {}
    for s, a, b in zip(present, starts[:-1], starts[1:], strict=True):
        at_levels = [np.asarray(arrays[f"{stem}_{s}"]) for stem in levels.values() if f"{stem}_{s}" in arrays]
        stack = stacked(labels[s], at_levels) if len(at_levels) == len(levels) else None
        keys = [f"{s}/{i}" for i in range(b - a)]
        values = given[s].astype(np.float32) if numeric else None
        splits[s] = Split(s, reader, np.arange(a, b), keys, labels[s].astype(np.int64), stack, values=values)
    multilabel = labels["train"].ndim == 2
    return DataSet(uri, classes, splits, with_finest(classes, multilabel, coarser), multilabel)


SOURCE = Source(
    {"ARRAYS.npz": "x_train, y_train, x_test, y_test, classes (and coarse_*, level_NAME_*)"},
    open_arrays,
    lambda location: location.suffix == ".npz",
)


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return tuple(shape), bool(fortran), dtype


def _levels(members: Iterable[str]) -> dict[str, str]:
    """Names of the coarser levels, in the order in which they are stored, and how the names of their arrays begin."""
    matches = [re.fullmatch(rf"(coarse|level_(.+))_(?:{'|'.join(SPLIT_NAMES)})", member) for member in members]
    return {match[2] or match[1]: match[1] for match in matches if match}


def _names(given: NDArray[Any] | None, labels: Mapping[str, NDArray[Any]], what: str) -> tuple[str, ...]:
    """The names of classes: those given, or numbers up to the largest label."""
    if given is not None:
        return tuple(str(name) for name in np.asarray(given).ravel())
    count, images = 0, sum(len(y) for y in labels.values() if y.ndim)
    for split, y in labels.items():
        if y.dtype.kind in "iub" and y.size and y.ndim:
            most = y.shape[1] - 1 if y.ndim == 2 else int(y.max())
            if most > MOST_LABEL + 10 * images:
                row = int(y.argmax())
                raise ValueError(f"{what}_{split}[{row}] is {most}, for {images} images; labels count classes from 0")
            count = max(count, most + 1)
    return tuple(str(i) for i in range(count))


def _rows(array: NDArray[Any] | None) -> bool:
    return array is None or array.ndim > 0


def _misfits(split: str, arrays: dict[str, NDArray[Any]], counts: Mapping[str, int]) -> list[str]:
    """What is wrong with a split; `counts` are the classes of labels by how the names of their arrays begin."""
    x, y = arrays.get(f"x_{split}"), arrays.get(f"y_{split}")
    if x is None or y is None:
        return [] if x is y else [f"x_{split} and y_{split} must come together"]
    if flat := [
        name for name in (f"x_{split}", *(f"{stem}_{split}" for stem in counts)) if not _rows(arrays.get(name))
    ]:
        return [f"{name} must have a row per image, and is a single value" for name in flat]
    problems = []
    if x.dtype not in (np.uint8, np.uint16):
        problems.append(f"x_{split} must be uint8 or uint16, not {x.dtype}")
    if x.ndim not in (3, 4):
        shape = "x".join(map(str, x.shape))
        problems.append(f"x_{split} must be [images, height, width] with channels or none at the end, not {shape}")
    if x.size == 0:
        problems.append(f"x_{split} is empty" if len(x) == 0 else f"x_{split} has images without pixels, {x.shape[1:]}")
    for stem, count in counts.items():
        name, values = f"{stem}_{split}", arrays.get(f"{stem}_{split}")
        if values is None:
            continue
        if len(values) != len(x):
            problems.append(f"x_{split} has {len(x)} images but {name} has {len(values)} labels")
        if values.dtype.kind not in "iub" or values.ndim > (2 if stem == "y" else 1):
            problems.append(f"{name} must be whole numbers [images]")
        elif values.ndim == 2 and (values.shape[1] != count or not np.isin(values, (0, 1)).all()):
            problems.append(f"{name} must be 0 or 1 [images, {count} classes]")
        elif values.ndim == 1 and len(values) and not 0 <= int(values.min()) <= int(values.max()) < count:
            problems.append(f"{name} has labels {int(values.min())}..{int(values.max())} for {count} classes")
    return problems
