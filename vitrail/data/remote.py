"""Objects behind URLs, through fsspec: their length and ETag, and reads of ranges of bytes that are verified.

Each answer must have the length that was asked for and come from the object that was identified: S3 and HTTP send the
ETag (or the time of change) with every range, other file systems are asked for it again every few seconds. What may
pass (no connection, no answer for `TIMEOUT` seconds, a body cut short, 408, 425, 429 and 5xx) is tried `TRIES` times in
all, after waits of about 0.5, 1, 2 and 4 s; a missing object, a missing permission and a changed object end at once.
Credentials are those of fsspec and its file systems, from their environment. Messages hold no user name, password or
query of a URL, since these may be secret.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

from vitrail.quantities import shorten

TRIES = 5
FIRST_WAIT = 0.5  # seconds, doubled after each try and multiplied by 0.5 to 1.5 at random
TIMEOUT = 30.0  # seconds without a byte
AGAIN = 5.0  # seconds after which an object is identified again where ranges come without an ETag
_TAGS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "LastModified", "last_modified", "mtime")
_PASSING = {408, 425, 429}  # and 500 to 599
_JITTER = random.Random()  # of its own: waiting must not change what a run draws
_VERIFIED: dict[str, float] = {}  # URL -> when
T = TypeVar("T")


class RemoteObject(NamedTuple):
    """An object as it was identified: later reads must be of the same one."""

    url: str
    size: int  # bytes
    tag: str  # ETag, or what else changes with the object; empty where nothing is known


class _Answer(NamedTuple):
    data: bytes
    size: int  # of the whole object
    tag: str


def without_secrets(url: str) -> str:
    """A URL as it may be shown and stored.

    >>> without_secrets("https://me:word@host/a.tar?sig=x")
    'https://host/a.tar'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def identify(url: str) -> RemoteObject:
    """Length and ETag of an object. Raises `FileNotFoundError`, `PermissionError` or `ConnectionError`."""
    return RemoteObject(url, *_tried(url, lambda system: _identified(system, url)))


def read_range(wanted: RemoteObject, start: int, end: int) -> bytes:
    """Bytes `start` to `end` (exclusive) of an object. Raises as `identify`; `ValueError` where it has changed."""
    if start >= end:
        return b""
    return _tried(wanted.url, lambda system: _verified(system, wanted, start, end))


def list_tars(url: str) -> list[str]:
    """URLs of the .tar files in a folder and in its folders. Raises as `identify`."""
    found: list[str] = _tried(url, lambda system: [system.unstrip_protocol(p) for p in system.find(url, maxdepth=2)])
    return [path for path in found if path.endswith(".tar")]


def _tried(url: str, work: Callable[[Any], T]) -> T:
    shown, reason = without_secrets(url), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1) * _JITTER.uniform(0.5, 1.5))
        try:
            return work(filesystem(url))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {shown}; correct the URL, or put the object there") from None
        except PermissionError as error:
            _reject(shown, error)
        except ValueError as error:  # a changed object, or a URL that is none
            raise ValueError(str(error).replace(url, shown)) from None
        except (TypeError, AttributeError, ImportError):
            raise
        except Exception as error:  # of sockets, aiohttp and botocore
            if "Credentials" in type(error).__name__:
                _reject(shown, error)
            text = re.sub(r"\S*://\S*", "", " ".join(str(error).split()))
            reason = shorten(f"{type(error).__name__} {text}".strip(), 120)
    raise ConnectionError(f"{shown} could not be read in {TRIES} tries, the last ended with {reason}; try again later")


def _reject(shown: str, error: Exception) -> NoReturn:
    reason = "401 or 403" if isinstance(error, PermissionError) else type(error).__name__
    raise PermissionError(
        f"no permission to read {shown} ({reason}); set its credentials in the environment, or sign the URL again"
    ) from None


@lru_cache(maxsize=64)
def _filesystem(process: int, root: str) -> Any:
    shown, scheme = without_secrets(root), urlsplit(root).scheme
    try:
        import fsspec

        return fsspec.core.url_to_fs(f"{root}/x")[0]
    except ImportError as error:
        known = scheme in ("http", "https", "s3") or error.name in (None, "fsspec")
        remedy = "pip install 'vitrail[cloud]'" if known else f"install the package that fsspec names: {error}"
        raise ValueError(f"{shown}: data behind URLs need more packages; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{shown}: fsspec cannot open such URLs ({error})") from None


def filesystem(url: str) -> Any:
    """The file system of a URL, one for each process: their connections do not survive a fork."""
    parts = urlsplit(url)
    return _filesystem(os.getpid(), f"{parts.scheme}://{parts.netloc}")


def _identified(system: Any, url: str) -> tuple[int, str]:
    if urlsplit(url).scheme in ("http", "https"):  # one byte: a URL that is signed for GET allows no HEAD
        answer = _ranged(system, url, 0, 1)
        return answer.size, answer.tag
    system.invalidate_cache()
    info = system.info(url)
    if info.get("type") == "directory" or info.get("size") is None:
        raise FileNotFoundError(url)
    return int(info["size"]), next((str(info[name]) for name in _TAGS if info.get(name)), "")


def _verified(system: Any, wanted: RemoteObject, start: int, end: int) -> bytes:
    answer = _ranged(system, wanted.url, start, end)
    if answer is None:
        answer = _Answer(system.cat_file(wanted.url, start, end), wanted.size, wanted.tag)
        if time.monotonic() - _VERIFIED.get(wanted.url, -AGAIN) >= AGAIN:
            answer = _Answer(answer.data, *_identified(system, wanted.url))
            _VERIFIED[wanted.url] = time.monotonic()
    if (answer.size, answer.tag) != wanted[1:]:
        raise ValueError(
            f"{without_secrets(wanted.url)} has changed since it was indexed ({wanted.size} bytes, ETag "
            f"{wanted.tag or 'unknown'}; now {answer.size}, {answer.tag or 'unknown'}); put the old object back and "
            "resume, or begin another run"
        )
    if len(answer.data) != end - start:
        raise EOFError(f"{len(answer.data)} bytes instead of {end - start}")
    return answer.data


def _ranged(system: Any, url: str, start: int, end: int) -> Any:
    """An `_Answer`; none where the file system has no ETag for a range."""
    from fsspec.asyn import sync

    scheme = urlsplit(url).scheme
    call = _by_http if scheme in ("http", "https") else _by_s3 if scheme in ("s3", "s3a") else None
    return call and sync(system.loop, call, system, url, start, end)


async def _by_s3(system: Any, url: str, start: int, end: int) -> _Answer:
    bucket, key, _ = system.split_path(url)
    answer = await system._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
    async with answer["Body"] as body:
        return _Answer(await body.read(), int(answer["ContentRange"].rpartition("/")[2]), answer["ETag"])


async def _by_http(system: Any, url: str, start: int, end: int) -> _Answer:
    from aiohttp import ClientTimeout

    session = await system.set_session()
    asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    options = {"timeout": ClientTimeout(total=None, connect=TIMEOUT, sock_read=TIMEOUT), **system.kwargs}
    options["headers"] = {**options.get("headers", {}), **asked}
    async with session.get(system.encode_url(url), **options) as answer:
        status, headers = answer.status, answer.headers
        if status in (401, 403):
            raise PermissionError(status)
        if status in (404, 410):
            raise FileNotFoundError(status)
        if status in _PASSING or status >= 500:
            raise ConnectionError(f"status {status}")
        size = (headers.get("Content-Range") or headers.get("Content-Length", "")).rpartition("/")[2]
        if status not in (200, 206, 416) or not size.isdecimal():
            raise ValueError(f"{without_secrets(url)}: status {status} and no length; serve it as a plain file")
        tag = headers.get("ETag") or headers.get("Last-Modified", "")
        if status == 200 and (start, end) != (0, int(size)) and end > 1:
            raise ValueError(
                f"{without_secrets(url)}: the server ignores ranges; use one that does not, or download the shards"
            )
        identified = status == 416 or (status == 200 and end == 1 < int(size))
        return _Answer(b"" if identified else await answer.read(), int(size), tag)
