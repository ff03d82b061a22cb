"""Objects behind URLs, through fsspec: their length and ETag, and verified reads of ranges of bytes.

Every range must have its length and come from the object that was identified. What may pass (no connection, no byte
for `TIMEOUT` seconds, a body cut short, 408, 425, 429, 5xx) is tried `TRIES` times, after waits of about 0.5, 1, 2 and
4 s. Messages hold no password or query of a URL, which may be secret.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from vitrail.quantities import shorten

TRIES = 5
FIRST_WAIT = 0.5  # seconds, doubled after each try and multiplied by 0.5 to 1.5 at random
TIMEOUT = 30.0  # seconds without a byte
_TAGS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "LastModified", "last_modified", "mtime")
_JITTER = random.Random()  # of its own: waiting must not change what a run draws
_FAILED = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}
_PASSING = (408, 425, 429)  # and 500 to 599
Answer = tuple[bytes, int, str]  # a range; length and ETag of the whole object
T = TypeVar("T")


class RemoteObject(NamedTuple):
    """An object as it was identified; later reads must be of the same one."""

    url: str
    size: int  # bytes
    tag: str  # ETag, or what else changes with the object; empty where nothing is known


def without_secrets(url: str) -> str:
    """
    >>> without_secrets("https://me:word@host/a.tar?sig=x")
    'https://host/a.tar'
    """
    return re.sub(r"//[^/?]*@", "//", url).partition("?")[0]


def filesystem(url: str) -> Any:
    """That of fsspec, one for each process, since connections do not survive a fork. Raises `ValueError`."""
    return _filesystem(os.getpid(), url.partition("://")[0], urlsplit(url).netloc)


def identify(url: str) -> RemoteObject:
    """Length and ETag of an object. Raises `FileNotFoundError`, `PermissionError` or `ConnectionError`."""
    return RemoteObject(url, *_tried(url, partial(_identified, url)))


def read_range(wanted: RemoteObject, start: int, end: int) -> bytes:
    """Bytes `start` to `end` (exclusive) of an object. Raises as `identify`; `ValueError` where it has changed."""
    return _tried(wanted.url, partial(_verified, wanted, start, end)) if start < end else b""


def _tried(url: str, work: Callable[[Any], T]) -> T:
    shown, reason = without_secrets(url), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1) * _JITTER.uniform(0.5, 1.5))
        try:
            return work(filesystem(url))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {shown}; correct the URL, or put the object there") from None
        except ValueError as error:  # a changed object, a missing package, or a URL that is none
            raise ValueError(str(error).replace(url, shown)) from None
        except Exception as error:  # of sockets, aiohttp and botocore
            if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                remedy = "set its credentials in the environment, or sign the URL again"
                raise PermissionError(f"no permission to read {shown}; {remedy}") from None
            text = re.sub(r"\S*://\S*", "", " ".join(str(error).split()))
            reason = shorten(f"{type(error).__name__} {text}".strip(), 120)
    raise ConnectionError(f"{shown} could not be read in {TRIES} tries, the last ended with {reason}; try again later")


@lru_cache(maxsize=64)
def _filesystem(process: int, scheme: str, host: str) -> Any:
    try:
        import fsspec

        return fsspec.core.url_to_fs(f"{scheme}://{host}/x")[0]
    except ImportError as error:
        ours = scheme in ("http", "https", "s3") or error.name == "fsspec"
        remedy = "pip install 'vitrail[cloud]'" if ours else str(error)
        raise ValueError(f"{scheme}:// needs packages that are not installed; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{scheme}:// is no kind of URL that fsspec opens ({error})") from None


def _identified(url: str, system: Any) -> tuple[int, str]:
    if url.startswith("http"):  # by one byte: what is signed for GET allows no HEAD
        _, size, tag = _ranged(url, 0, 1, system)
        return size, tag
    system.invalidate_cache()
    info = system.info(url)
    return int(info["size"] or 0), next((str(info[name]) for name in _TAGS if info.get(name)), "")


def _verified(wanted: RemoteObject, start: int, end: int, system: Any) -> bytes:
    url = wanted.url
    if url.startswith(("http", "s3")):
        data, size, tag = _ranged(url, start, end, system)
    else:
        data, (size, tag) = system.cat_file(url, start, end), _identified(url, system)
    if (size, tag) != wanted[1:]:
        raise ValueError(
            f"{without_secrets(url)} has changed since it was indexed ({wanted.size} bytes, ETag {wanted.tag}; now "
            f"{size}, {tag}); put the old object back and resume, or begin another run"
        )
    if len(data) != end - start:
        raise EOFError(f"{len(data)} bytes instead of {end - start}")
    return data


def _ranged(url: str, start: int, end: int, system: Any) -> Answer:
    from fsspec.asyn import sync

    call = _by_http if url.startswith("http") else _by_s3
    answer: Answer = sync(system.loop, call, url, start, end, system)
    return answer


async def _by_s3(url: str, start: int, end: int, system: Any) -> Answer:
    bucket, key, _ = system.split_path(url)
    answer = await system._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
    async with answer["Body"] as body:
        return await body.read(), int(answer["ContentRange"].rpartition("/")[2]), answer["ETag"]


async def _by_http(url: str, start: int, end: int, system: Any) -> Answer:
    from aiohttp import ClientTimeout

    session = await system.set_session()
    options = {"timeout": ClientTimeout(total=None, connect=TIMEOUT, sock_read=TIMEOUT), **system.kwargs}
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    options["headers"] = {**options.get("headers", {}), **headers}
    async with session.get(system.encode_url(url), **options) as answer:
        status, headers = answer.status, answer.headers
        if status in (*_FAILED, *_PASSING) or status >= 500:
            raise _FAILED.get(status, ConnectionError)(f"status {status}")
        length = (headers.get("Content-Range") or headers.get("Content-Length", "")).rpartition("/")[2]
        whole = status == 200 and (start, end) != (0, int(length or -1))  # though a range was asked for
        if status not in (200, 206, 416) or not length.isdecimal() or (whole and end > 1):
            raise ValueError(f"{without_secrets(url)}: status {status}, not a range; use a server of plain files")
        data = b"" if whole or status == 416 else await answer.read()
        return data, int(length), headers.get("ETag") or headers.get("Last-Modified", "")
