"""One shard of a packed data set: written whole or not at all, with a record of what is in it.

The record is written after its shard, so a shard with a record was finished; size and checksum tell whether it still is
what it was.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data.packed import Stored, checksum
from vitrail.data.preprocess import shorter_side
from vitrail.data.source import BadImage, Split
from vitrail.files import replacing, write_text
from vitrail.schema import build

Box = tuple[int, int, int, int]  # left, top, right, bottom


class Decoded(NamedTuple):
    """One image, or why there is none."""

    height: int
    width: int
    pixels: bytes
    box: Box | None
    reason: str


@dataclass(frozen=True)
class Record:
    """What is known of a finished shard: rows `start` to `stop`, one entry for each."""

    start: int
    stop: int
    shard: Stored
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    boxes: tuple[Box, ...]  # none, where the source has none
    skipped: tuple[tuple[int, str], ...]  # row, reason


def shrunk(image: Image.Image, size: int) -> Image.Image:
    """The image with its shorter side at most `size`, antialiased; itself where it is no larger or `size` is 0."""
    if not size or min(image.size) <= size:
        return image
    return image.resize(shorter_side(*image.size, size), Image.Resampling.BICUBIC)


def decoded(
    pool: ThreadPoolExecutor, split: Split, rows: Sequence[int], size: int, ahead: int
) -> Generator[Decoded, None, None]:
    """Images of rows, in order, never more than `ahead` of them in memory."""
    waiting: deque[Future[Decoded]] = deque()
    try:
        for row in rows:
            waiting.append(pool.submit(_decode, split, row, size))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _decode(split: Split, row: int, size: int) -> Decoded:
    box: Box | None = None if split.boxes is None else tuple(split.boxes[row].tolist())
    try:
        whole = split.read(row)
    except BadImage as bad:
        return Decoded(0, 0, b"", box, bad.reason)
    image = shrunk(whole, size)
    if box is not None:
        box = _scaled(box, whole.size, image.size)
    return Decoded(image.height, image.width, image.tobytes(), box, "")


def _scaled(box: Box, old: tuple[int, int], new: tuple[int, int]) -> Box:
    """A box after resizing from `old` to `new` (width, height), rounded outwards so that it still holds its object."""
    low = [edge * after // before for edge, after, before in zip(box[:2], new, old, strict=True)]
    high = [-(-edge * after // before) for edge, after, before in zip(box[2:], new, old, strict=True)]
    return low[0], low[1], high[0], high[1]


def write_shard(
    out: Path,
    split: Split,
    number: int,
    start: int,
    images: Iterator[Decoded],
    limit: int | None,
    count: Callable[[int], None],
) -> Record:
    """Write images until `limit` bytes are reached or none is left, then the record of them."""
    path = out / f"{split.name}-{number:05d}.bin"
    size = crc = 0
    written: list[Decoded] = []
    with replacing(path) as temporary, temporary.open("wb") as file:
        for image in images:
            file.write(image.pixels)
            crc = zlib.crc32(image.pixels, crc)
            size += len(image.pixels)
            written.append(image._replace(pixels=b""))
            count(1)
            if limit is not None and size >= limit:
                break
    record = Record(
        start,
        start + len(written),
        Stored(path.name, size, crc),
        tuple(image.height for image in written),
        tuple(image.width for image in written),
        tuple(image.box for image in written if image.box is not None),
        tuple((start + i, image.reason) for i, image in enumerate(written) if image.reason),
    )
    write_text(path.with_suffix(".json"), json.dumps(asdict(record)))
    return record


def kept_shards(out: Path, split: Split) -> tuple[list[int], dict[int, Record]]:
    """Where each shard that an earlier call recorded ends, and by number the records of those that are still whole."""
    stops: list[int] = []
    good: dict[int, Record] = {}
    while True:
        number, row = len(stops), stops[-1] if stops else 0
        path = out / f"{split.name}-{number:05d}.bin"
        try:
            record = build(Record, json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return stops, good
        if record.start != row or not row < record.stop <= len(split) or len(record.heights) != record.stop - row:
            return stops, good
        if path.is_file() and path.stat().st_size == record.shard.bytes and checksum(path) == record.shard.crc32:
            good[number] = record
        stops.append(record.stop)
