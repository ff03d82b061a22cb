"""Images of val and test that are training images, too: a look at files before a run, without decoding any.

`vitrail check` compares decoded pixels and finds near copies as well; this finds copied files, in the time that it
takes to ask for their sizes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

from vitrail.data.folder import FileReader
from vitrail.data.source import DataSet, Split

_END = 4096  # bytes at the end of a file that are compared: compressed pixels, and not a camera's header


def copied_files(data: DataSet) -> dict[str, list[tuple[str, str]]]:
    """(key in train, key in the other split) of files with equal size and end, by that other split.

    Sources that are no files, and files that cannot be read, are passed over.
    """
    sizes: dict[int, list[tuple[str, Path]]] = defaultdict(list)
    for size, key, path in _files(data["train"]):
        sizes[size].append((key, path))
    ends: dict[Path, bytes] = {}
    found: dict[str, list[tuple[str, str]]] = {}
    for name, split in data.splits.items():
        if name == "train":
            continue
        pairs = []
        for size, key, path in _files(split):
            twin = next((k for k, p in sizes.get(size, ()) if _end(p, size, ends) == _end(path, size, ends)), None)
            if twin is not None:
                pairs.append((twin, key))
        if pairs:
            found[name] = pairs
    return found


def leak_notes(data: DataSet) -> tuple[str, ...]:
    """A sentence for each split that holds copies of training images."""
    return tuple(
        f"warning: {len(pairs):,} of {len(data[name]):,} {name} images are copies of training images "
        f"({pairs[0][1]} is {pairs[0][0]}), so their figures will be too good; remove them from one of the two splits "
        f"(`vitrail check {data.uri}` lists copies)"
        for name, pairs in copied_files(data).items()
    )


def _files(split: Split) -> list[tuple[int, str, Path]]:
    if not isinstance(split.reader, FileReader):
        return []
    found = []
    for key, index in zip(split.keys, split.index, strict=True):
        path = split.reader.path(int(index))
        try:
            found.append((path.stat().st_size, key, path))
        except OSError:
            continue
    return found


def _end(path: Path, size: int, known: dict[Path, bytes]) -> bytes:
    if path not in known:
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, size - _END))
                known[path] = hashlib.blake2b(stream.read(), digest_size=16).digest()
        except OSError:
            known[path] = str(path).encode()  # like no other
    return known[path]
