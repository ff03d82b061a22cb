"""Writing files so that a kill or a full disk leaves either the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UMASK = os.umask(0)  # it can only be read by setting it
os.umask(_UMASK)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; flushed and renamed over it when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_UMASK)  # some libraries write files that nobody else may read
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
