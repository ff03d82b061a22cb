"""The checks of every run: images that cannot be decoded, and files that are in two splits.

Every image is decoded once. Results are kept in the user's cache folder, by path, size and time of change, so that a
second run reads only what is new. Images inside larger files (tar, Parquet) are decoded every time: pack them. Sources
made of arrays have nothing to decode and are not scanned. The bytes that are read are hashed on the way: by these
digests a resumed run notices images that were replaced. Copies are looked for among files alone, in the time that it
takes to ask for their sizes; `vitrail check` compares decoded pixels and finds near copies as well.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import PIL
from numpy.typing import NDArray

from vitrail.data.counter import uniform
from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.decode import MAX_PIXELS, NO_HEIF, NO_MEMORY, decode
from vitrail.data.sources.folder import FileReader
from vitrail.data.stack import NO_TIFFFILE
from vitrail.files import cache_folder, parse_json

Bad = tuple[str, str]  # key, reason
Digests = dict[tuple[str, int], str]  # split, stable index -> digest of the encoded image
Seen = dict[str, tuple[int, int, str, str]]
"""Path -> size, time of change in nanoseconds, reason ("" for a good image), digest ("" where it was not taken)."""

Progress = Callable[[int, int], None]  # done, total
T = TypeVar("T")
R = TypeVar("R")

_BLOCK = 64  # images per task: large enough to hide the cost of handing over
MOST_HASHED = 100_000  # files of a split; of more a sample is hashed
_OF_NOW = (NO_MEMORY, NO_HEIF, NO_TIFFFILE)  # reasons that are not remembered
_AT_LEAST = 32  # all bytes of a JPEG are read at any size; only the last, cheap step is done at this one


def scan(
    splits: Split | DataSet | Iterable[Split],
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Bad]:
    """(key, reason) of every image that cannot be decoded, in the order of the splits.

    Pillow decodes outside the interpreter lock, so threads are enough. `progress(done, total)` is called from time to
    time, counting images that are not remembered from an earlier scan.
    """
    return examine(splits, workers, progress)[0]


def examine(
    splits: Split | DataSet | Iterable[Split], workers: int | None = None, progress: Progress | None = None
) -> tuple[list[Bad], Digests]:
    """What `scan` gives, and digests of the encoded images; of more than `MOST_HASHED` files those of a sample."""
    if isinstance(splits, Split):
        splits = [splits]
    elif isinstance(splits, DataSet):
        splits = splits.splits.values()
    splits = list(splits)
    listed = [(s, s.reader) for s in splits if isinstance(s.reader, FileReader)]
    inside = [(s, row) for s in splits if hasattr(s.reader, "stored") for row in range(len(s))]
    bad: list[Bad] = []
    digests: Digests = {}
    for (split, row), (reason, digest) in zip(inside, read_all(_read_row, inside, workers, progress), strict=True):
        bad += [(split.keys[row], reason)] if reason else []
        digests[split.name, int(split.index[row])] = digest
    for root, form in dict.fromkeys((reader.root, reader.form) for _, reader in listed):
        rows = [
            (split, row, reader.path(int(split.index[row])), hashed)
            for split, reader in listed
            if (reader.root, reader.form) == (root, form)
            for row, hashed in enumerate(sampled(split.index, MOST_HASHED).tolist())
        ]
        hashed_paths = {str(path) for _, _, path, hashed in rows if hashed}
        cache = cache_file(root if form is None else f"{root}?{form.channels}x{form.bits}")
        read = partial(_read_file, FileReader(root, (), form=form))
        facts = _facts(cache, read, [path for _, _, path, _ in rows], hashed_paths, workers, progress)
        for split, row, path, hashed in rows:
            _, _, reason, digest = facts[str(path)]
            bad += [(split.keys[row], reason)] if reason else []
            if hashed:
                digests[split.name, int(split.index[row])] = digest
    return bad, digests


def sampled(index: NDArray[np.int64], most: float) -> NDArray[np.bool_]:
    """Which images of a split, given by stable index, are in a fixed random sample of about `most` of them."""
    return uniform(0, index) * len(index) < most


def drop_bad(data: DataSet, bad: Sequence[Bad]) -> DataSet:
    """The data set without these images; every other image keeps its stable index. Classes stay as they are."""
    keys = {key for key, _ in bad}
    if not keys:
        return data
    kept = {name: np.flatnonzero([key not in keys for key in split.keys]) for name, split in data.splits.items()}
    splits = {name: split.take(kept[name]) for name, split in data.splits.items()}
    dropped = sum(map(len, data.splits.values())) - sum(map(len, splits.values()))
    return replace(data, splits=splits, notes=(*data.notes, f"left out {dropped} unreadable images"))


def reject_if_too_many(bad: Sequence[Bad], total: int, limit: float, uri: str) -> None:
    """Raise `ValueError` where more than the share `limit` of `total` images is unreadable."""
    if len(bad) <= limit * total:
        return
    listed = "".join(f"\n  {key}: {reason}" for key, reason in bad[:20])
    more = f"\n  and {len(bad) - 20} more" if len(bad) > 20 else ""
    raise ValueError(
        f"{uri}: {len(bad)} of {total} images ({100 * len(bad) / total:.1f} %) cannot be read, more than "
        f"data.bad_limit {limit:g} allows; fix or remove them, or raise --data.bad_limit:{listed}{more}"
    )


def cache_file(root: str) -> Path:
    """Where results for a root are remembered."""
    name = hashlib.blake2b(str(Path(root).resolve()).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    return cache_folder() / f"scan-{name}.json.gz"


def read_all(read: Callable[[T], R], items: Sequence[T], workers: int | None, progress: Progress | None) -> Iterator[R]:
    """`read` of every item, in order, by threads: Pillow decodes and resizes outside the interpreter lock."""
    blocks = [items[i : i + _BLOCK] for i in range(0, len(items), _BLOCK)]
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        try:
            for done, results in enumerate(pool.map(lambda block: [read(item) for item in block], blocks), 1):
                yield from results
                if progress is not None:
                    progress(min(len(items), done * _BLOCK), len(items))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a million images
            raise


def _facts(
    cache: Path,
    read: Callable[[tuple[Path, bool]], tuple[str, str]],
    paths: Sequence[Path],
    hashed: Collection[str],
    workers: int | None,
    progress: Progress | None,
) -> Seen:
    seen = _remembered(cache)
    stamped = [(path, *_stamp(path)) for path in paths]
    facts: Seen = {str(p): seen[str(p)] for p, *stamp in stamped if seen.get(str(p), ())[:2] == tuple(stamp)}
    facts = {p: fact for p, fact in facts.items() if fact[2] or fact[3] or p not in hashed}
    new = [(path, size, changed) for path, size, changed in stamped if str(path) not in facts]
    known = len(facts)
    try:
        results = read_all(read, [(path, str(path) in hashed) for path, _, _ in new], workers, progress)
        for (path, size, changed), result in zip(new, results, strict=True):
            facts[str(path)] = (size, changed, *result)
    finally:
        if len(facts) > known:
            _remember(cache, {p: fact for p, fact in (seen | facts).items() if fact[2] not in _OF_NOW})
    return facts


def _read_row(row: tuple[Split, int]) -> tuple[str, str]:
    """Why an image cannot be decoded, if so, and its digest."""
    split, number = row
    try:
        stored = split.reader.stored(int(split.index[number]))  # type: ignore[attr-defined]
        decode(stored, split.keys[number])
    except BadImage as bad:
        return bad.reason, ""
    return "", hashlib.blake2b(stored, digest_size=8).hexdigest()


def _read_file(reader: FileReader, file: tuple[Path, bool]) -> tuple[str, str]:
    path, hashed = file
    digest = hashlib.blake2b(digest_size=8) if hashed else None
    try:
        reader.decoded(path, str(path), _AT_LEAST, digest)
    except BadImage as bad:
        return bad.reason, ""
    return "", digest.hexdigest() if digest else ""


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _rules() -> str:
    """What a result depends on besides the file; results by other rules are forgotten."""
    return f"1 pillow {PIL.__version__} {MAX_PIXELS}"


def _remembered(cache: Path) -> Seen:
    try:
        with gzip.open(cache, "rt", encoding="ascii") as stream:
            stored = parse_json(stream.read())
        if stored["rules"] != _rules():
            return {}
        return {
            str(p): (int(size), int(changed), str(reason), str(*digest))  # earlier versions took no digest
            for p, (size, changed, reason, *digest) in stored["images"].items()
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


_END = 4096  # bytes at the end of a file that are compared: compressed pixels, and not a camera's header


def copied_files(data: DataSet) -> dict[str, list[tuple[str, str]]]:
    """(key in train, key in the other split) of files with equal size and end, by that other split.

    Sources that are no files, and files that cannot be read, are passed over.
    """
    sizes: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for size, key, path in _files(data["train"]):
        sizes[size].append((key, path))
    ends: dict[Path, bytes] = {}
    copied: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in data.splits.keys() - {"train"}:
        for size, key, path in _files(data[name]):
            twin = next((k for k, p in sizes.get(size, ()) if _end(p, size, ends) == _end(path, size, ends)), None)
            if twin is not None:
                copied[name].append((twin, key))
    return {name: copied[name] for name in data.splits if name in copied}


def leak_notes(data: DataSet) -> tuple[str, ...]:
    """A sentence for each split that holds copies of training images."""
    return tuple(
        f"warning: {len(pairs):,} of {len(data[name]):,} {name} images are copies of training images "
        f"({pairs[0][1]} is {pairs[0][0]}), so their metrics will be too good; remove them from one of the two splits "
        f"(`vitrail check {data.uri}` lists copies)"
        for name, pairs in copied_files(data).items()
    )


def _files(split: Split) -> list[tuple[int, str, Path]]:
    if not isinstance(split.reader, FileReader):
        return []
    files = []
    for key, index in zip(split.keys, split.index, strict=True):
        path = split.reader.path(int(index))
        with suppress(OSError):
            if path.is_file():
                files.append((path.stat().st_size, key, path))
    return files


def _end(path: Path, size: int, known: dict[Path, bytes]) -> bytes:
    if path not in known:
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, size - _END))
                known[path] = hashlib.blake2b(stream.read(), digest_size=16).digest()
        except OSError:
            known[path] = str(path).encode()  # like no other
    return known[path]
