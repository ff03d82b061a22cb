"""Writing a packed data set: every image decoded once, shrunk, and stored as raw pixels. The format is in packed.py.

Shards are written one after the other, each under a temporary name, and a record of it after it: a shard with a record
was finished, and size and checksum tell whether it still is what it was. So a kill leaves whole shards, and the same
command goes on behind the last one. `pack.json` comes last of all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.decode import NO_MEMORY
from vitrail.data.preprocess import shorter_side
from vitrail.data.sources.folder import FileReader
from vitrail.data.sources.packed import (
    FORMAT,
    LISTING,
    UNFINISHED,
    Pack,
    PackedFile,
    PackedSplit,
    open_packed,
    read_pack,
)
from vitrail.files import FORMAT_VERSION, cache_folder, checksum, parse_json, replacing, write_text
from vitrail.schema import build
from vitrail.version import __version__

SHARD_BYTES = 256 * 2**20
UNUSED = 30 * 86400.0  # seconds after which a copy in the cache is removed
Box = tuple[int, int, int, int]  # left, top, right, bottom
Report = Callable[[int, int], None]  # done, total
_EVERY = 32  # images between calls of `progress`


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
    shard: PackedFile
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
        if bad.reason == NO_MEMORY:
            raise OSError(f"too little memory to decode {bad.key}; free some, or remove that image") from None
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
    heights, widths = (tuple(getattr(image, side) for image in written) for side in ("height", "width"))
    boxes = tuple(image.box for image in written if image.box is not None)
    skipped = tuple((start + i, image.reason) for i, image in enumerate(written) if image.reason)
    stored = PackedFile(path.name, size, crc)
    record = Record(start, start + len(written), stored, heights, widths, boxes, skipped)
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
            record = build(Record, parse_json(path.with_suffix(".json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return stops, good
        if record.start != row or not row < record.stop <= len(split) or len(record.heights) != record.stop - row:
            return stops, good
        if path.is_file() and path.stat().st_size == record.shard.bytes and checksum(path) == record.shard.crc32:
            good[number] = record
        stops.append(record.stop)


@dataclass(frozen=True)
class PackReport:
    """A packed folder, counted."""

    path: str
    images: int  # with pixels
    bytes: int  # of pixels
    shards: int
    skipped: tuple[tuple[str, str, str], ...]  # split, key, reason of each image that could not be read
    already: bool  # nothing was left to do

    def to_json(self) -> dict[str, Any]:
        names = ("split", "key", "reason")
        return {**asdict(self), "skipped": [dict(zip(names, bad, strict=True)) for bad in self.skipped]}


def pack(
    data: DataSet,
    out: Path,
    size: int = 256,
    workers: int | None = None,
    progress: Report | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> PackReport:
    """Store the images of a data set in the folder `out`, with their shorter side at most `size` (0: as they are).

    `data` should be what `open_source` gives, so that the packed set can be divided as its source. Where the same call
    was interrupted, shards whose size and checksum are right are kept. Pillow works outside the interpreter lock, so
    workers are threads. `progress(done, total)` counts the images of this call. Raises `ValueError` for a folder that
    holds anything else, and `OSError` where the disk is full; what is finished stays.
    """
    if size < 0 or (workers is not None and workers < 1):
        what = f"size {size} must be 0 (keep) or more" if size < 0 else f"workers {workers} must be at least 1"
        raise ValueError(f"{what}, see `vitrail pack --help`")
    if data.numeric:
        raise ValueError(f"{data.uri} has values to predict, and packed data hold classes; train on it as it is")
    data = replace(data, splits={name: replace(split, name=name) for name, split in data.splits.items()})
    plan = {"format": FORMAT, "format_version": FORMAT_VERSION, "source": data.uri}
    plan |= {"identity": _identity(data), "size": size}
    try:
        with _held(out):
            if _begun(out, plan):
                return _report(out, read_pack(out), already=True)
            return _report(out, _fill(data, out, plan, workers, progress, shard_bytes), already=False)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"no space left for {out}; free some and run the same command again, it will go on") from None


def shrunk_copy(split: Split, size: int) -> Split:
    """The split, read from a copy in the cache: its files decoded once, their shorter side at most `size`.

    A copy serves all runs on these files, whatever their labels; one that was not used for thirty days is removed.
    While another process makes it, this one waits. Raises `OSError` where there is no room.
    """
    assert isinstance(split.reader, FileReader)
    reader = replace(split.reader, at_least=size)  # a JPEG is decoded at an eighth of its size where that is enough
    rows = Split("images", reader, split.index, split.keys, np.zeros(len(split), np.int64))
    data = DataSet("images", ("",), {rows.name: rows})
    times = [reader.path(i).stat().st_mtime_ns for i in split.index.tolist()]
    name = hashlib.blake2b(f"{_identity(data)} {times}".encode(), digest_size=16).hexdigest()
    folder = cache_folder() / "shrunk" / f"{name}-{size}"
    while True:
        try:
            pack(data, folder, size)
            break
        except FileExistsError:  # another process packs these images
            time.sleep(0.5)
    os.utime(folder)
    for other in folder.parent.iterdir():
        if time.time() - other.stat().st_mtime > UNUSED:
            shutil.rmtree(other, ignore_errors=True)
    return replace(split, reader=open_packed(folder, str(folder)).splits[rows.name].reader)


def _fill(
    data: DataSet, out: Path, plan: dict[str, Any], workers: int | None, progress: Report | None, shard_bytes: int
) -> Pack:
    kept = {name: kept_shards(out, split) for name, split in data.splits.items()}
    total = sum(map(len, data.splits.values())) - sum(r.stop - r.start for _, rs in kept.values() for r in rs.values())
    done = 0

    def count(images: int) -> None:
        nonlocal done
        done += images
        if progress is not None and (images == 0 or done % _EVERY == 0 or done == total):
            progress(done, total)

    count(0)
    splits = []
    threads = workers or min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for name, split in data.splits.items():
                records: list[Record] = []
                stops, good = kept[name]
                while (number := len(records)) in good or (records[-1].stop if records else 0) < len(split):
                    if number in good:
                        records.append(good[number])
                        continue
                    start = records[-1].stop if records else 0
                    # A shard that is made again must end where it did: the next one begins there.
                    stop, limit = (stops[number], None) if number < len(stops) else (len(split), shard_bytes)
                    with closing(decoded(pool, split, range(start, stop), plan["size"], 4 * threads)) as images:
                        records.append(write_shard(out, split, number, start, images, limit, count))
                splits.append(_write_arrays(out, split, records))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for images that are not used
            raise
    if not any(shard.bytes for split in splits for shard in split.shards):
        bad = splits[0].skipped[0]
        raise ValueError(f"none of the images of {data.uri} could be read, the first being {bad[1]} ({bad[2]})")
    facts = {name: getattr(data, name) for name in ("classes", "levels", "multilabel", "notes")}
    finished = Pack(**plan, **facts, made_by=f"vitrail {__version__}", splits=tuple(splits))
    listing = {key: value for key, value in asdict(finished).items() if key != "coarse_classes"}
    write_text(out / LISTING, json.dumps(listing, indent=1))
    (out / UNFINISHED).unlink()
    return finished


def _write_arrays(out: Path, split: Split, records: Sequence[Record]) -> PackedSplit:
    heights = np.array([h for record in records for h in record.heights], np.int32)
    widths = np.array([w for record in records for w in record.widths], np.int32)
    offsets = np.cumsum([0, *(heights.astype(np.int64) * widths * 3)], dtype=np.int64)
    arrays: dict[str, NDArray[Any] | None] = {"offsets": offsets, "heights": heights, "widths": widths}
    arrays |= {name: getattr(split, name) for name in ("index", "labels", "levels", "generated")}
    if split.boxes is not None:
        arrays["boxes"] = np.array([box for r in records for box in r.boxes], np.int64).reshape(-1, 4)
    stored = []
    for what, array in arrays.items():
        if array is not None:
            path = out / f"{split.name}-{what}.npy"
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            stored.append(_stored(path))
    keys = out / f"{split.name}-keys.json"
    write_text(keys, "[\n" + ",\n".join(json.dumps(key) for key in split.keys) + "\n]\n")
    return PackedSplit(
        split.name,
        len(split),
        tuple(record.shard for record in records),
        (*stored, _stored(keys)),
        tuple((row, split.keys[row], reason) for record in records for row, reason in record.skipped),
    )


def _stored(path: Path) -> PackedFile:
    return PackedFile(path.name, path.stat().st_size, checksum(path))


def _identity(data: DataSet) -> str:
    """Changes with the source: its path, its rows, labels and class names, and the size of every file."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((data.classes, data.levels, data.multilabel)).encode("utf-8", "surrogateescape"))
    for name, split in data.splits.items():
        given = (split.index, split.labels, split.levels, split.boxes, split.generated)
        arrays = [a for a in given if a is not None]
        digest.update(json.dumps([name, list(split.keys), [a.shape for a in arrays]]).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(pickle.dumps(split.reader, protocol=4))  # by contract small, and all that pixels depend on
        if isinstance(split.reader, FileReader):
            digest.update(json.dumps(split.reader.stamps(split.index)).encode())
    return digest.hexdigest()


def _begun(out: Path, plan: dict[str, Any]) -> bool:
    """Whether `out` is finished already. Otherwise it is now begun; raises `ValueError` where it holds other things."""
    if (out / LISTING).is_file():
        pack = read_pack(out)
        _reject_other(out, asdict(pack), plan)
        try:
            open_packed(out, plan["source"])
            (out / UNFINISHED).unlink(missing_ok=True)  # left by a kill in the last moment
            return True
        except ValueError:  # a file is missing or cut short: make that one again
            pass
    elif (out / UNFINISHED).is_file():
        try:
            begun = parse_json((out / UNFINISHED).read_text(encoding="utf-8"))
        except ValueError:
            begun = {}
        _reject_other(out, begun if isinstance(begun, dict) else {}, plan)
    elif any(not path.name.startswith(".") for path in out.iterdir()):
        raise ValueError(f"{out} holds other files; name a new or an empty folder to pack into")
    write_text(out / UNFINISHED, json.dumps(plan, indent=1))
    (out / LISTING).unlink(missing_ok=True)
    for torn in out.glob(".*.tmp"):  # left by a kill: with the lock held, no process writes them
        torn.unlink()
    return False


def _reject_other(out: Path, begun: dict[str, Any], plan: dict[str, Any]) -> None:
    if all(begun.get(key) == plan[key] for key in ("identity", "size")):  # whatever the format: it can be read
        return
    if all(begun.get(key) == plan[key] for key in ("source", "size")):
        raise ValueError(f"{plan['source']} is not what it was when {out} was begun; pack into another folder")
    was, asked = (f"{p.get('source')} at size {p.get('size')}" for p in (begun, plan))
    raise ValueError(f"{out} holds {was}, not {asked}; pack into another folder, or delete that one")


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The folder, made where it is not there, with no other process packing into it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder to pack into")
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError:
            raise FileExistsError(f"another process is packing into {out}; wait for it") from None
        yield


def _report(out: Path, pack: Pack, already: bool) -> PackReport:
    shards = [shard for split in pack.splits for shard in split.shards]
    skipped = tuple((split.name, key, reason) for split in pack.splits for _, key, reason in split.skipped)
    images = sum(split.images for split in pack.splits) - len(skipped)
    return PackReport(str(out), images, sum(shard.bytes for shard in shards), len(shards), skipped, already)
