"""Tar shards behind URLs (WebDataset's layout), read in any order: `s3://`, `https://` and whatever fsspec opens.

    s3://BUCKET/train-{000..999}.tar        also {train-{000..999},val-{00..09}}.tar
    https://HOST/train-{000..009}.tar       a server of plain files that knows ranges
    https://HOST/FOLDER/pack.json           a folder of `vitrail pack`: mirrored into the cache whole, then mapped

Each shard is indexed once: offset, length, name and label of every image. A later run asks for length and ETag and uses
the index again. A run draws images of all shards from its first batch on, so shards are fetched whole into a bounded
cache where all of them fit (`?read=whole`, `?cache=50GB`); else, and from `file://`, images are read one by one
(`?read=ranged`). A cache for fewer shards suits only a reader that goes through them in order, as `vitrail pack`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

from vitrail.data.dataset import DataSet, Location, Source
from vitrail.data.remote import RemoteObject, filesystem, identify, read_range, without_secrets
from vitrail.data.shard_cache import BLOCK, ShardCache
from vitrail.data.sources import webdataset
from vitrail.data.sources.folder import natural
from vitrail.data.sources.packed import LISTING, PackedFile, open_packed, read_pack
from vitrail.files import cache_folder, checksum, file_size, json_text, parse_json, replacing, write_text
from vitrail.quantities import memory

CACHE = "50GB"  # unless the URI says otherwise
AHEAD = 2  # shards that are fetched in the background when one is read that was not there
MOST_SHARDS = 2**20
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FETCHED, _IDENTIFIED = 4, 16  # shards at a time
_INDEXED = 2**22  # bytes of a request for an index: more than most images, so they are read and not skipped


@dataclass(frozen=True, eq=False)
class StreamReader(webdataset.TarReader):
    """Reads image number i from a shard that is cached as one of `files`, or by a range of bytes of the remote one."""

    shards: tuple[RemoteObject, ...]
    cache: ShardCache
    whole: bool

    def stored(self, index: int) -> bytes:
        """The encoded image. Raises `OSError` where it cannot be fetched, `ValueError` where its shard has changed."""
        place, start, size = (int(column[index]) for column in (self.place, self.start, self.size))
        if not self.whole:
            return read_range(self.shards[place], start, start + size)
        while True:
            with suppress(FileNotFoundError), open(self.files[place], "rb") as stream:  # noqa: PTH123 (a Path is slower)
                os.utime(self.files[place])  # used now
                stream.seek(start)
                return stream.read(size)
            self.prefetch(self.shards[place + 1 : place + 1 + AHEAD], threads=1)
            self.cache.fetch(self.shards[place])

    def prefetch(self, shards: Iterable[RemoteObject], threads: int = _FETCHED) -> None:
        """Fetch shards in the background. What fails there is reported when the shard is read."""
        missing = deque(shard for shard in shards if not self.cache.holds(shard))

        def work() -> None:
            with suppress(IndexError, OSError, ValueError):
                while True:
                    self.cache.fetch(missing.popleft())

        for _ in range(min(threads, len(missing))):
            Thread(target=work, name="vitrail-prefetch", daemon=True).start()


class _RangedFile(io.RawIOBase):
    """A remote object as a file, for `io.BufferedReader`."""

    def __init__(self, remote: RemoteObject) -> None:
        self.remote, self.at = remote, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.remote.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        data = read_range(self.remote, self.at, min(self.at + len(buffer), self.remote.size))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def expand(pattern: str) -> list[str]:
    """Every text that a pattern with braces stands for, once. Raises `ValueError` for braces that stand for nothing.

    >>> sorted(expand("{train-{08..10},val}.tar"))
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val.tar']
    """
    patterns = [pattern]
    while patterns and (group := re.search(r"\{([^{}]*)\}", patterns[0])):
        if not re.fullmatch(r"\d+\.\.\d+|[^,]+(,[^,]+)+", group[1]):
            break
        patterns = list(dict.fromkeys(islice(chain.from_iterable(map(_chosen, patterns)), MOST_SHARDS)))
    if not 0 < len(patterns) < MOST_SHARDS or set("{}") & set(patterns[0]):
        raise ValueError(f"{pattern} stands for no shards, or too many; write {{000..999}}, or {{train,val}}")
    return patterns


def _chosen(pattern: str) -> Iterator[str]:
    before, group, after = re.split(r"\{([^{}]*)\}", pattern, maxsplit=1)
    low, _, high = group.partition("..")
    numbers = (str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)) if high else group.split(",")
    return (before + choice + after for choice in numbers)


def open_stream(location: Location) -> DataSet:
    """The labelled images of remote shards. Raises `ValueError` or `OSError` in a sentence without secrets."""
    uri, urls, bound, read = _taken_apart(location.uri)
    filesystem(urls[0])  # whose packages may be missing
    if urls[0].partition("?")[0].endswith(f"/{LISTING}"):
        return _open_pack(uri, urls[0], bound)
    with ThreadPoolExecutor(_IDENTIFIED) as pool:
        shards = tuple(pool.map(identify, sorted(urls, key=lambda url: natural(without_secrets(url)))))
    cache, total = ShardCache(cache_folder() / "streams", bound), sum(shard.size for shard in shards)
    if read == "whole" and (largest := max(shard.size for shard in shards)) > bound:
        raise ValueError(
            f"{uri}: a shard has {memory(largest)}, more than the cache; raise ?cache=, or use read=ranged"
        )
    place = next(folder for folder in (cache.folder, *cache.folder.parents) if folder.is_dir())
    missing = sum(shard.size for shard in shards if not cache.holds(shard))
    fits = total <= bound and missing <= shutil.disk_usage(place).free
    whole = read == "whole" or (not read and fits and not uri.startswith(("file:", "local:")))
    names = [PurePosixPath(without_secrets(shard.url)) for shard in shards]
    index = partial(_indexed, cache, uri, whole and fits)
    members = [index(shards[0])]
    webdataset.reject_unlabelled(uri, names[:1], members)  # before all others are read
    with ThreadPoolExecutor(_FETCHED) as pool:
        members += pool.map(index, shards[1:])
    address = shards[0].url.partition("?")[0]
    beside = f"{address.rpartition('/')[0]}/classes.txt"
    members = webdataset.name_classes(
        members, lambda: _text(beside + shards[0].url[len(address) :]), without_secrets(beside)
    )
    reader = partial(
        StreamReader, tuple(str(cache.file(s, ".tar")) for s in shards), shards=shards, cache=cache, whole=whole
    )
    data = webdataset.assemble_tars(uri, names, members, reader)
    if whole and fits:
        next(iter(data.splits.values())).reader.prefetch(shards)  # type: ignore[attr-defined]
    how = f"cached in {cache.folder}, at most {memory(bound)}" if whole else "images are read by ranges"
    return replace(data, notes=(*data.notes, f"{len(shards)} remote shards, {memory(total)}; {how}"))


SOURCE = Source(
    {"URL/train-{000..999}.tar": "WebDataset behind s3://, https:// or any URL of fsspec; ?cache=50GB&read=ranged"},
    open_stream,
    lambda location: "://" in location.uri,
    options=None,
)


def _taken_apart(text: str) -> tuple[str, list[str], int, str]:
    """The URI without secrets, the URLs of its shards, bytes of the cache, and how to read, if it says so."""
    address, _, query = text.partition("?")
    ours = [part for part in query.split("&") if part.startswith(("cache=", "read="))]
    rest = "&".join(part for part in query.split("&") if part not in ours)
    options = {"cache": CACHE, "read": "", **dict(part.split("=", 1) for part in ours)}
    size = re.fullmatch(r"(\d*[1-9]\d*)([KMGT]?)B?", options["cache"].upper())
    try:
        if rest and not address.startswith("http"):  # where it may be a signature
            raise ValueError(f"no option {rest.partition('=')[0]!r} (it has cache, read)")
        if size is None:
            raise ValueError(f"cache is a size such as 50GB, not {options['cache']!r}")
        if options["read"] not in ("", "whole", "ranged"):
            raise ValueError(f"read is whole or ranged, not {options['read']!r}")
        if not address.endswith((".tar", f"/{LISTING}")):
            raise ValueError(f"it names no .tar file; write .../train-{{000..999}}.tar, or .../{LISTING}")
        urls = [path + f"?{rest}" * bool(rest) for path in expand(address)]
    except ValueError as error:
        raise ValueError(f"{without_secrets(address)}: {error}") from None
    uri = "?".join([without_secrets(address), "&".join(ours)][: 1 + bool(ours)])
    return uri, urls, int(size[1]) * _UNITS[size[2]], options["read"]


def _open_pack(uri: str, url: str, bound: int) -> DataSet:
    """A packed folder, every file of which is fetched unless it is there, and compared with its checksum."""
    listing, cache = identify(url), ShardCache(cache_folder() / "streams", bound)
    folder = cache.file(listing, "-packed")
    address, mark, query = url.partition("?")

    def fetch(stored: PackedFile) -> None:
        remote = identify(f"{address.rpartition('/')[0]}/{stored.file}{mark}{query}")
        with replacing(folder / stored.file) as temporary:
            with temporary.open("wb") as stream:
                for start in range(0, remote.size, BLOCK):
                    stream.write(read_range(remote, start, min(start + BLOCK, remote.size)))
            if checksum(temporary) != stored.crc32:
                fault = f"has other bytes than {LISTING} lists"
                raise ValueError(f"{without_secrets(remote.url)} {fault}; upload the packed folder again")

    with cache.locked(folder.name) as lock, ThreadPoolExecutor(_FETCHED) as pool:
        if not (folder / LISTING).is_file():
            write_text(folder / LISTING, read_range(listing, 0, listing.size).decode("utf-8"))
        files = [file for split in read_pack(folder).splits for file in (*split.shards, *split.arrays)]
        if (total := sum(file.bytes for file in files)) > bound:
            raise ValueError(f"{uri}: the packed folder has {memory(total)}, more than the cache; raise ?cache=")
        for _ in pool.map(fetch, [file for file in files if file_size(folder / file.file) != file.bytes]):
            lock.touch()
    return open_packed(folder, uri)


def _indexed(cache: ShardCache, uri: str, whole: bool, shard: RemoteObject) -> list[webdataset.Member]:
    """The images of a shard, from its index in the cache, which is made where it is not there."""
    file = cache.file(shard, ".json")
    if (known := _read_index(file, shard.size)) is not None:
        return known
    with cache.locked(f"{file.stem}-index"):
        if (known := _read_index(file, shard.size)) is not None:  # made by another process meanwhile
            return known
        opened = cache.fetch(shard).open("rb") if whole else io.BufferedReader(_RangedFile(shard), _INDEXED)
        with opened as stream:
            members = webdataset.tar_members(stream, shard.size, PurePosixPath(without_secrets(shard.url)).name, uri)
        stored = {"format_version": 1, "url": without_secrets(shard.url), "size": shard.size, "tag": shard.tag}
        write_text(file, json_text({**stored, "members": members}))
    return members


def _read_index(file: Path, size: int) -> list[webdataset.Member] | None:
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))["members"]
        members = [(str(key), int(start), int(length), str(label)) for key, start, length, label in stored]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: it is made again
    return members if all(0 <= start <= start + length <= size for _, start, length, _ in members) else None


def _text(url: str) -> str | None:
    try:
        remote = identify(url)
        return read_range(remote, 0, remote.size).decode("utf-8")
    except (FileNotFoundError, PermissionError):  # S3 answers 403 for what is missing where listing is not allowed
        return None
