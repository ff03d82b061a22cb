"""Tar shards behind URLs (WebDataset's layout), read in any order: `s3://`, `https://` and whatever fsspec opens.

    s3://BUCKET/train-{000..999}.tar            shards by number; {train,val}-{00..09}.tar by name, too
    https://HOST/shards/train-{000..009}.tar    a server of plain files that knows ranges
    s3://BUCKET/shards/                         every .tar in the folder, where the file system can list it

Each shard is indexed once: offset, length, name and label of every image. The index stays in the cache folder together
with length and ETag; a later run asks for these and no more. Images come from whole shards in a bounded cache
(`?read=whole`, `?cache=50GB`) or one by one (`?read=ranged`). A run draws images of all shards from its first batch on,
so shards are cached where all of them fit, else images are read one by one; `file://` is always read in place. With
`whole`, shards that do not all fit are worth their download in their own order only, as `vitrail pack` reads them.
"""

from __future__ import annotations

import io
import re
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import PurePosixPath
from threading import Thread
from typing import IO, Any
from urllib.parse import parse_qsl, urlsplit

from vitrail.data.dataset import DataSet, Location, Source
from vitrail.data.remote import RemoteObject, filesystem, identify, list_tars, read_range, without_secrets
from vitrail.data.shard_cache import ShardCache
from vitrail.data.sources.folder import natural
from vitrail.data.sources.table import repeated
from vitrail.data.sources.webdataset import (
    LONGEST_LABEL,
    Member,
    TarReader,
    all_numbers,
    assemble_tars,
    name_classes,
    reject_unlabelled,
    tar_members,
)
from vitrail.files import cache_folder, json_text, parse_json, write_text
from vitrail.quantities import memory

OPTIONS = ("cache", "read")
CACHE = "50GB"  # unless the URI says otherwise
READS = ("whole", "ranged")
AHEAD = 2  # shards that are fetched in the background when one is read that was not there
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FETCHING = 4  # shards at a time
_ASKING = 16  # objects that are identified at a time
_INDEXED = 2**22  # bytes of a request for an index: more than most images, so they are read and not skipped
MOST_SHARDS = 100_000


@dataclass(frozen=True, eq=False)
class StreamReader(TarReader):
    """Reads image number i from the cached shard, or by a range of bytes of the remote one."""

    shards: tuple[RemoteObject, ...]
    cache: ShardCache
    whole: bool

    def stored(self, index: int) -> bytes:
        """The encoded image. Raises `OSError` where it cannot be fetched, `ValueError` where its shard has changed."""
        place, start, size = (int(column[index]) for column in (self.place, self.start, self.size))
        shard = self.shards[place]
        if not self.whole:
            return read_range(shard, start, start + size)
        while True:
            if not self.cache.holds(shard):
                self.prefetch(self.shards[place + 1 : place + 1 + AHEAD], threads=1)
            with suppress(FileNotFoundError), self.cache.fetch(shard).open("rb") as stream:  # removed meanwhile
                stream.seek(start)
                return stream.read(size)

    def prefetch(self, shards: Iterable[RemoteObject], threads: int = _FETCHING) -> None:
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
    """Every text that a pattern with braces stands for. Raises `ValueError` for braces that stand for nothing.

    >>> expand("{train-{08..10},val}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val.tar']
    """
    first, depth = pattern.find("{"), 0
    if first < 0:
        return [pattern]
    cuts = [first]
    for at, character in enumerate(pattern[first:], first):
        depth += (character == "{") - (character == "}")
        if depth == 0 or (depth == 1 and character == ","):
            cuts.append(at)
        if depth == 0:
            break
    choices = [pattern[a + 1 : b] for a, b in pairwise(cuts)]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", choices[0] if len(choices) == 1 else ""):
        low, high = int(numbers[1]), int(numbers[2])
        if not 0 <= high - low < MOST_SHARDS:
            raise ValueError(f"{{{choices[0]}}} stands for no shards, or too many; write {{000..999}}, the lower first")
        choices = [str(number).zfill(len(numbers[1])) for number in range(low, high + 1)]
    elif depth or len(choices) < 2 or "" in choices:
        raise ValueError(f"{pattern[first:]} is no range of shards; write {{000..999}}, or {{train,val}}")
    rest = expand(pattern[cuts[-1] + 1 :])
    return [pattern[:first] + chosen + end for choice in choices for chosen in expand(choice) for end in rest]


def open_stream(location: Location) -> DataSet:
    """The labelled images of remote shards. Raises `ValueError` or `OSError` in a sentence without secrets."""
    address, query, options = _taken_apart(location.uri)
    uri = without_secrets(address) + ("?" + "&".join(f"{k}={v}" for k, v in options.items()) if options else "")
    try:
        bound, urls = _bytes(options.get("cache", CACHE)), [url + query for url in expand(address)]
    except ValueError as error:
        raise ValueError(f"{uri}: {error}") from None
    if options.get("read", "whole") not in READS:
        raise ValueError(f"{uri}: read is whole or ranged, not {options['read']!r}")
    if twice := repeated(urls):
        raise ValueError(f"{uri}: {without_secrets(twice[0])} is there twice; name each shard once")
    if len(urls) == 1 and not address.endswith(".tar"):
        urls = list_tars(urls[0])
    if not urls or not all(urlsplit(url).path.endswith(".tar") for url in urls):
        raise ValueError(f"{uri} names no .tar files; write a folder that holds some, or .../train-{{000..999}}.tar")
    filesystem(urls[0])  # whose packages may be missing
    with ThreadPoolExecutor(_ASKING) as pool:
        shards = tuple(pool.map(identify, sorted(urls, key=lambda url: natural(urlsplit(url).path))))
    cache = ShardCache(cache_folder() / "streams", bound)
    whole = _is_whole(uri, options.get("read", ""), cache, shards)
    names = [PurePosixPath(urlsplit(shard.url).path) for shard in shards]
    index = partial(_indexed, cache, uri, whole and sum(shard.size for shard in shards) <= bound)
    members = [index(shards[0])]
    reject_unlabelled(uri, names[:1], members)  # before all others are read
    with ThreadPoolExecutor(_FETCHING) as pool:
        members += pool.map(index, shards[1:])
    listed, notes = _named(shards[0].url, query, members)
    reader = partial(StreamReader, tuple(map(str, names)), shards=shards, cache=cache, whole=whole)
    data = assemble_tars(uri, names, listed, reader)
    total = sum(shard.size for shard in shards)
    how = f"cached in {cache.folder}, at most {memory(bound)}" if whole else "images are read by ranges"
    if whole and total <= bound:
        next(iter(data.splits.values())).reader.prefetch(shards)  # type: ignore[attr-defined]
    return replace(data, notes=(*data.notes, f"{len(shards)} remote shards, {memory(total)}; {how}", *notes))


SOURCE = Source(
    {"URL/train-{000..999}.tar": "WebDataset behind s3://, https:// or any URL of fsspec; ?cache=50GB&read=ranged"},
    open_stream,
    lambda location: "://" in location.uri,
    options=None,
)


def _taken_apart(uri: str) -> tuple[str, str, dict[str, str]]:
    """Address, what of the query belongs to it (with its question mark), and our options."""
    address, _, query = uri.partition("?")
    parts = [part for part in query.split("&") if part]
    ours = [part for part in parts if part.partition("=")[0] in OPTIONS]
    rest = "&".join(part for part in parts if part not in ours)
    if rest and not address.startswith(("http://", "https://")):
        name = rest.partition("=")[0]
        raise ValueError(f"{without_secrets(address)}: no option {name!r} (it has {', '.join(OPTIONS)})")
    options = dict(parse_qsl("&".join(ours), keep_blank_values=True))
    if len(options) < len(ours):
        raise ValueError(f"{without_secrets(address)}: an option is given twice")
    return address, f"?{rest}" if rest else "", options


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B?)", text.strip().upper())
    unit = match[2].rstrip("B") + "B" if match and match[2].rstrip("B") else ""
    if match is None or not (size := int(float(match[1]) * _UNITS[unit])):
        raise ValueError(f"cache is a size such as 50GB or 500MB, not {text!r}")
    return size


def _is_whole(uri: str, read: str, cache: ShardCache, shards: Sequence[RemoteObject]) -> bool:
    largest, total = max(shard.size for shard in shards), sum(shard.size for shard in shards)
    if read == "whole" and largest > cache.bound:
        raise ValueError(f"{uri}: a shard has {memory(largest)}, more than the cache; raise ?cache=, or use read=ranged")
    if read or urlsplit(uri).scheme in ("file", "local"):
        return read == "whole"
    place = next(folder for folder in (cache.folder, *cache.folder.parents) if folder.is_dir())
    missing = sum(shard.size for shard in shards if not cache.holds(shard))
    return total <= cache.bound and missing <= shutil.disk_usage(place).free


def _indexed(cache: ShardCache, uri: str, whole: bool, shard: RemoteObject) -> list[Member]:
    """The images of a shard, from its index in the cache, which is made where it is not there."""
    file = cache.file(shard, ".json")
    if (known := _read_index(file, shard)) is not None:
        return known
    with cache.locked(f"{file.stem}-index"):
        if (known := _read_index(file, shard)) is not None:  # made by another process meanwhile
            return known
        stream: IO[bytes]
        with cache.fetch(shard).open("rb") if whole else io.BufferedReader(_RangedFile(shard), _INDEXED) as stream:
            members = tar_members(stream, shard.size, PurePosixPath(urlsplit(shard.url).path).name, uri)
        stored = {"format_version": 1, "url": without_secrets(shard.url), "size": shard.size, "tag": shard.tag}
        write_text(file, json_text({**stored, "members": members}))
    return members


def _read_index(file: Any, shard: RemoteObject) -> list[Member] | None:
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
        members = [(str(key), int(start), int(size), str(label)) for key, start, size, label in stored["members"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: it is made again
    fits = all(0 <= start <= start + size <= shard.size for _, start, size, _ in members)
    return members if fits and stored.get("tag") == shard.tag else None


def _named(url: str, query: str, members: list[list[Member]]) -> tuple[list[list[Member]], list[str]]:
    """Members with the class names of a `classes.txt` beside the shards, where there is one, and a note."""
    file = without_secrets(url).rpartition("/")[0] + "/classes.txt"
    if not all_numbers(members):
        return members, []
    try:
        remote = identify(urlsplit(url)._replace(path=urlsplit(file).path, query="").geturl() + query)
        text = read_range(remote, 0, min(remote.size, LONGEST_LABEL)).decode("utf-8")
    except FileNotFoundError:
        return members, []
    except PermissionError:  # what S3 answers for a missing object where listing is not allowed
        return members, [f"{file} is missing or may not be read: classes keep their numbers"]
    return name_classes(members, text, file), []
