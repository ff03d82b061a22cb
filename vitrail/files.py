"""Writing files so that a kill or a full disk leaves either the old file or the new one, whatever names they hold.

Names of files and classes may be any bytes. In Python they are text in which a byte that is no UTF-8 is a surrogate
(`os.fsdecode`); JSON and YAML keep that as an escape and give the same name back, and wherever such text is written,
drawn or printed for a person, `readable` shows the byte as `\\xe9`.
"""

from __future__ import annotations

import codecs
import json
import os
import platform
import re
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_UMASK = os.umask(0)  # it can only be read by setting it
os.umask(_UMASK)


FORMAT_VERSION = 1  # of what is stored: models, adapters, patches, checkpoints, runs, packed data, results of studies


class LaterVersion(ValueError):
    """A file of a later version of vitrail."""


def reject_later(path: object, stored: Any, layout: int = FORMAT_VERSION) -> None:
    """Raises `LaterVersion` where `format_version`, or a file's own `format`, is above what is read.

    Earlier versions wrote no `format_version`.
    """
    for name, newest in (("format_version", FORMAT_VERSION), ("format", layout)):
        version = stored.get(name) if isinstance(stored, dict) else None
        if isinstance(version, int) and version > newest:
            raise LaterVersion(
                f"{path} was written by a later version of vitrail (format {version}, this one reads up to {newest}); "
                "update vitrail"
            )


def readable(name: str) -> str:
    """A name as it is shown: bytes that are no UTF-8, control characters and changes of direction are escaped.

    >>> readable("caf\\udce9 a\\nb"), readable("crème brûlée")
    ('caf\\\\xe9 a\\\\nb', 'crème brûlée')
    """
    return "".join(c if c.isprintable() or c in _KEPT else _escaped(c) for c in name)


_KEPT = "\u00a0\u200c\u200d"  # a space, and joiners of emoji and of Persian words


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()


def _encoded(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_escaped, error.object[error.start : error.end])), error.end


codecs.register_error("readable", _encoded)  # for open(..., errors="readable")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; flushed and renamed over it when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent not in _CLEANED:
        remove_leftovers(path.parent.glob(".*.tmp"))
        _CLEANED.add(path.parent)
    name = os.fsdecode(os.fsencode(path.name)[:200])  # of at most 255 bytes
    temporary = path.with_name(f".{name}.{HOST}-{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_UMASK)  # some libraries write files that no other user may read
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


LEFTOVER = re.compile(r"\..+?\.(?:([0-9a-f]{8})-)?(\d+)\.tmp", re.DOTALL)  # of `replacing`: name, host, process
HOST = f"{zlib.crc32(platform.node().encode()):08x}"
_CLEANED: set[Path] = set()  # folders in which this process has written


def remove_leftovers(paths: Iterable[Path], locked: bool = False) -> None:
    """Remove temporary files of processes that were killed while they wrote; of other machines, only where a lock
    says that none of them writes there."""
    for path in paths:
        match = LEFTOVER.fullmatch(path.name)
        if match and not (alive(int(match[2])) if match[1] in (None, HOST) else not locked):
            path.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Whether another process of this machine runs under this number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return process != os.getpid()


def write_text(path: Path, text: str) -> None:
    """Write a small file, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="readable")


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(2**22):
            value = zlib.crc32(block, value)
    return value


def cache_folder() -> Path:
    """Where this user's caches are: below $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vitrail"


def file_size(path: Path) -> int:
    """Bytes of a file, or -1 where it is not there."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1


def odd_kind(path: str | Path) -> str:
    """What a path is that is neither a file nor a folder (a link to one is what it leads to); empty for these, and for
    what is not there. Opening a pipe or a device may wait for ever."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return ""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "")


def json_text(value: Any, **options: Any) -> str:
    """JSON as a person reads it, in UTF-8; escaped where names are no UTF-8, so that they come back as they were."""
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, **options)
    return text


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `JSONDecodeError`, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def reject_unwritable(path: str | Path, remedy: str = "choose another --out", *, file: bool = False) -> None:
    """Raises `OSError`, one sentence with `remedy`, where no folder (or `file`) can be written at `path`.

    A folder is made in the nearest one that exists, and taken away again: modes alone do not tell of disks that are
    read-only and of shares that refuse.
    """
    path = Path(path)
    if file and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and a file is to be written; {remedy}")
    existing = path
    try:
        existing = next((one for one in (path, *path.parents)[file:] if one.exists()), Path())
        Path(tempfile.mkdtemp(prefix=".vitrail-", dir=existing)).rmdir()
    except NotADirectoryError:
        raise NotADirectoryError(f"nothing can be written to {path}: {existing} is a file; {remedy}") from None
    except OSError as error:
        raise OSError(
            f"nothing can be written to {path}: {error.strerror or error} (in {existing}); {remedy}"
        ) from None
