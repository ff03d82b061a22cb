"""Image folders: CLASS/*.jpg, or train, val and test folders of such; images without any folder have no labels.

Decoding every image once before training, and remembering which are unreadable.

What was found is kept in the user's cache folder, by path, size and time of change, so that a second run reads only
what is new. Images inside larger files (tar, Parquet) are decoded every time: pack them. Sources made of arrays have
nothing to decode and are not scanned.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from vitrail.data.dataset import UNDIVIDED, UNLABELLED, BadImage, DataSet, Split
from vitrail.data.decode import MAX_PIXELS, decode

SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .bmp .gif .tif .tiff .webp .avif .ppm .pgm .pbm .pnm .jp2 .tga".split()  # noqa: SIM905
)
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class FileReader:
    """Reads image number i from `root / names[i]`. `at_least` is that of `decode`."""

    root: str
    names: tuple[str, ...]
    at_least: int | None = None

    def path(self, index: int) -> Path:
        return Path(self.root) / self.names[index]

    def __call__(self, index: int) -> Image.Image:
        return decode(self.path(index), self.names[index], at_least=self.at_least)


def split_called(name: str) -> str | None:
    """`val` for `valid` or `Validation`, and so on; none for a name that means no split."""
    return next((split for split, names in SPLIT_NAMES.items() if name.strip().lower() in names), None)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which `image2` comes before `image10`, and names that differ only in zeros or case stay apart."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return (*((0, int(n), "") if n else (1, 0, t) for n, t in parts), (2, 0, name))


def image_files(folder: str | Path) -> list[Path]:
    """Every image file below a folder, hidden ones left out, in natural order."""
    names = _Walk(Path(folder)).images(".")
    return [Path(folder) / name for name in sorted(names, key=natural)]


def open_folder(root: Path, uri: str) -> DataSet:
    """The images below a folder; a class is named by its folder, in natural order. Without class folders: unlabelled.

    Everything below a class folder belongs to the class. Natural order differs from torchvision's plain order where
    names hold numbers of different lengths. Raises `ValueError` for a folder that holds no classes.
    """
    top = _folders(root)
    named = {name: split for name in top if (split := split_called(name))}
    walk = _Walk(root)
    notes: list[str] = []
    if _is_divided(root, named):
        found = _divided(root, named, uri, walk, notes)
        others = [name for name in top if name not in named]
        if others:
            notes.append(f"ignored beside the splits: {_some(others)}")
    else:
        found = {UNDIVIDED: {name: list(walk.images(name)) for name in top}}
    loose = [f for f in _files(root) if _is_image(f)]
    populated = {split: {c: files for c, files in classes.items() if files} for split, classes in found.items()}
    if loose and not any(populated.values()):
        notes.append("the images have no labels (no class folders): only objectives without labels learn from them")
        return _assemble(root, uri, {UNDIVIDED: {UNLABELLED: loose}}, [*notes, *walk.notes()])
    _refuse_unusable(root, populated)
    if loose:
        notes.append(f"ignored {len(loose)} images outside class folders, e.g. {loose[0]}")
    empty = sorted({c for split in found.values() for c, files in split.items() if not files})
    if empty:
        notes.append(f"ignored folders without images: {_some(empty)}")
    return _assemble(root, uri, populated, [*notes, *walk.notes()])


def _is_divided(root: Path, named: dict[str, str]) -> bool:
    """Whether `train` means a split. It may be a class of its own: car, bus, train."""
    train = [name for name, split in named.items() if split == "train"]
    if not train:
        return bool(named) and len(named) == len(_folders(root)) and all(_folders(root / name) for name in named)
    if not _folders(root / train[0]):
        return False
    return len(named) > 1 or not any(_is_image(f) for f in _files(root / train[0]))


def _divided(
    root: Path, named: dict[str, str], uri: str, walk: _Walk, notes: list[str]
) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for split in SPLIT_NAMES:
        folders = [name for name, meant in named.items() if meant == split]
        if len(folders) > 1:
            raise ValueError(f"{uri} has several {split} folders ({', '.join(sorted(folders))}); keep one")
        if not folders:
            continue
        classes = {c: list(walk.images(f"{folders[0]}/{c}")) for c in _folders(root / folders[0])}
        loose = sum(_is_image(f) for f in _files(root / folders[0]))
        if loose:
            notes.append(f"ignored {loose} images in {folders[0]}/ that are in no class folder")
        if any(classes.values()):
            found[split] = classes
        else:
            notes.append(f"ignored {folders[0]}/, which has no class folders with images")
    if "train" not in found:
        raise ValueError(
            f"{uri} has {' and '.join(found) or 'splits'} but no train folder of class folders; add train/CLASS/"
        )
    return found


def _refuse_unusable(root: Path, found: dict[str, dict[str, list[str]]]) -> None:
    train = found.get("train", found.get(UNDIVIDED, {}))
    if not train:
        raise ValueError(f"{root} holds no images in class folders; expected {root}/CLASS/*.jpg (or .png, ...)")
    for split in ("val", "test"):
        unknown = sorted(set(found.get(split, {})) - set(train), key=natural)
        if unknown:
            raise ValueError(
                f"{root}: {len(unknown)} classes of {split} are not in train ({_some(unknown)}); "
                "add training images, or remove or rename those folders"
            )


def _assemble(root: Path, uri: str, found: dict[str, dict[str, list[str]]], notes: list[str]) -> DataSet:
    classes = sorted({c for split in found.values() for c in split}, key=natural)
    number = {name: i for i, name in enumerate(classes)}
    names: list[str] = []
    labels: list[int] = []
    bounds = {}
    for split, members in found.items():
        start = len(names)
        for name in sorted(members, key=natural):
            names += sorted(members[name])  # the order of the disk must not matter
            labels += [number[name]] * len(members[name])
        bounds[split] = (start, len(names))
        missing = [c for c in classes if c not in members]
        if missing:
            notes.append(f"{split} has no images of {_some(missing)}")
    reader = FileReader(str(root.absolute()), tuple(names))
    splits = {
        split: Split(split, reader, np.arange(a, b), names[a:b], np.asarray(labels[a:b], np.int64))
        for split, (a, b) in bounds.items()
    }
    return DataSet(uri, tuple(classes), splits, notes=tuple(notes))


class _Walk:
    """Lists images below folders of a root, as paths relative to it, and counts what it leaves out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = 0
        self.others: Counter[str] = Counter()

    def images(self, folder: str) -> Iterator[str]:
        seen = set()
        for here, folders, files in os.walk(self.root / folder, followlinks=True):
            real = os.path.realpath(here)  # a link may lead back up
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [f for f in folders if not _is_hidden(f)]
            for name in files:
                if _is_hidden(name):
                    self.hidden += 1
                elif _is_image(name):
                    yield (Path(here) / name).relative_to(self.root).as_posix()
                else:
                    self.others[Path(name).suffix.lower() or name] += 1

    def notes(self) -> list[str]:
        notes = []
        if self.hidden:
            notes.append(f"ignored {self.hidden} hidden files")
        if self.others:
            kinds = _some([kind for kind, _ in self.others.most_common()])
            notes.append(f"ignored {self.others.total()} files that are not images ({kinds})")
        return notes


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_image(name: str) -> bool:
    return not _is_hidden(name) and Path(name).suffix.lower() in SUFFIXES


def _folders(folder: Path) -> list[str]:
    return sorted((e.name for e in os.scandir(folder) if e.is_dir() and not _is_hidden(e.name)), key=natural)


def _files(folder: Path) -> list[str]:
    return sorted(e.name for e in os.scandir(folder) if e.is_file())


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


Bad = tuple[str, str]  # key, reason
Seen = dict[str, tuple[int, int, str]]  # path -> size, time of change in nanoseconds, reason ("" for a good image)

_BLOCK = 64  # images a task: large enough to hide the cost of handing over
_AT_LEAST = 32  # all bytes of a JPEG are read at any size; only the last, cheap step is done at this one


def scan(
    splits: Split | DataSet | Iterable[Split],
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Bad]:
    """(key, reason) of every image that cannot be decoded, in the order of the splits.

    Pillow decodes outside the interpreter lock, so threads are enough. `progress(done, total)` is called from time to
    time, counting images that are not remembered from an earlier scan.
    """
    if isinstance(splits, Split):
        splits = [splits]
    elif isinstance(splits, DataSet):
        splits = splits.splits.values()
    splits = list(splits)
    listed = [(s, s.reader) for s in splits if isinstance(s.reader, FileReader)]
    bad = _inside([s for s in splits if getattr(s.reader, "decodes", False)], workers, progress)
    for root in dict.fromkeys(reader.root for _, reader in listed):
        rows = [
            (key, reader.path(int(i)))
            for split, reader in listed
            if reader.root == root
            for key, i in zip(split.keys, split.index, strict=True)
        ]
        reasons = _reasons(cache_file(root), [path for _, path in rows], workers, progress)
        bad += [(key, reasons[str(path)]) for key, path in rows if reasons[str(path)]]
    return bad


def drop_bad(data: DataSet, bad: Sequence[Bad]) -> DataSet:
    """The data set without these images; every other image keeps its stable index. Classes stay as they are."""
    keys = {key for key, _ in bad}
    if not keys:
        return data
    splits = {
        name: split.take(np.flatnonzero([key not in keys for key in split.keys])) for name, split in data.splits.items()
    }
    dropped = sum(map(len, data.splits.values())) - sum(map(len, splits.values()))
    return replace(data, splits=splits, notes=(*data.notes, f"left out {dropped} unreadable images"))


def refuse_if_too_many(bad: Sequence[Bad], total: int, limit: float, uri: str) -> None:
    """Raise `ValueError` where more than the share `limit` of `total` images is unreadable."""
    if len(bad) <= limit * total:
        return
    listed = "".join(f"\n  {key}: {reason}" for key, reason in bad[:20])
    more = f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""
    raise ValueError(
        f"{uri}: {len(bad)} of {total} images ({len(bad) / total:.1%}) cannot be read, more than data.bad_limit "
        f"{limit:g} allows; mend or remove them, or raise --data.bad_limit:{listed}{more}"
    )


def cache_file(root: str) -> Path:
    """Where findings for a root are remembered: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    name = hashlib.blake2b(str(Path(root).resolve()).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    return Path(base) / "vitrail" / f"scan-{name}.json.gz"


def _reasons(
    cache: Path, paths: Sequence[Path], workers: int | None, progress: Callable[[int, int], None] | None
) -> dict[str, str]:
    seen = _remembered(cache)
    found: Seen = {}
    new: list[tuple[Path, int, int]] = []
    for path in paths:
        size, changed = _stamp(path)
        known = seen.get(str(path))
        if known is not None and known[:2] == (size, changed):
            found[str(path)] = known
        else:
            new.append((path, size, changed))
    done = 0
    try:
        with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
            blocks = [new[i : i + _BLOCK] for i in range(0, len(new), _BLOCK)]
            try:
                for block, reasons in zip(blocks, pool.map(_read, blocks), strict=True):
                    for (path, size, changed), reason in zip(block, reasons, strict=True):
                        found[str(path)] = (size, changed, reason)
                    done += len(block)
                    if progress is not None:
                        progress(done, len(new))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a million images
                raise
    finally:
        if done:
            _remember(cache, {**seen, **found})
    return {path: reason for path, (_, _, reason) in found.items()}


def _inside(splits: Sequence[Split], workers: int | None, progress: Callable[[int, int], None] | None) -> list[Bad]:
    """(key, reason) of every image inside a larger file that cannot be decoded."""
    rows = [(split, row) for split in splits for row in range(len(split))]
    blocks = [rows[i : i + _BLOCK] for i in range(0, len(rows), _BLOCK)]
    bad: list[Bad] = []
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        try:
            for done, found in enumerate(pool.map(_read_inside, blocks)):
                bad += found
                if progress is not None:
                    progress(min(len(rows), (done + 1) * _BLOCK), len(rows))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return bad


def _read_inside(block: Sequence[tuple[Split, int]]) -> list[Bad]:
    bad = []
    for split, row in block:
        try:
            split.read(row)
        except BadImage as error:
            bad.append((split.keys[row], error.reason))
    return bad


def _read(block: Sequence[tuple[Path, int, int]]) -> list[str]:
    return [_read_one(path) for path, _, _ in block]


def _read_one(path: Path) -> str:
    try:
        decode(path, str(path), at_least=_AT_LEAST)
    except BadImage as bad:
        return bad.reason
    return ""


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _rules() -> str:
    """What a finding depends on besides the file; findings made by other rules are forgotten."""
    return f"1 pillow {PIL.__version__} {MAX_PIXELS}"


def _remembered(cache: Path) -> Seen:
    try:
        with gzip.open(cache, "rt", encoding="ascii") as stream:
            stored = json.load(stream)
        if stored["rules"] != _rules():
            return {}
        return {
            str(p): (int(size), int(changed), str(reason)) for p, (size, changed, reason) in stored["images"].items()
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # absent, torn or foreign: scan again


def _remember(cache: Path, seen: Seen) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", 3, encoding="ascii") as stream:
                json.dump({"rules": _rules(), "images": seen}, stream)
            Path(temporary).replace(cache)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return  # a read-only or full home only means that the next run scans again
