"""Decoding every image once before training, and remembering which are unreadable.

What was found is kept in the user's cache folder, by path, size and time of change, so that a second run reads only
what is new. Images inside larger files (tar, Parquet) are decoded every time: pack them. Sources made of arrays have
nothing to decode and are not scanned.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL

from vitrail.data.decode import MAX_PIXELS, decode
from vitrail.data.folder import FileReader
from vitrail.data.source import BadImage, DataSet, Split

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
