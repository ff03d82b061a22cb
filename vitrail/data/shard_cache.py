"""Shards of remote data in a folder of this machine, which all its processes share and which stays within a bound.

    NAME.tar        a whole shard; its name is a digest of URL, length and ETag, so that a changed object is another file
    NAME.json       index of a shard: where each image begins, its length, its name and its label
    NAME.lock       a process fetches or indexes this shard; others wait for it
    .NAME.tar.*.tmp a shard that is being fetched, from the beginning as long as it will be

To make room, the shards that were used longest ago are removed; one that is being read stays readable until its reader
closes it. A lock is a file that only one process can create, so any file system will do. It saves work and guards the
bound, but the content of shards does not depend on it: they are renamed when they are complete.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.remote import RemoteObject, read_range, without_secrets
from vitrail.files import HOST, alive, file_size, remove_leftovers, replacing
from vitrail.quantities import memory

BLOCK = 2**26  # bytes of a request
ABANDONED = 600.0  # seconds without a sign of life after which a lock of another machine counts no more
_WAIT = 0.05  # seconds between two looks at a lock
_USED = 1.0  # seconds within which a shard is not marked as used again
_HELD: set[Path] = set()  # locks of this process


@dataclass(frozen=True)
class ShardCache:
    """At most `bound` bytes of shards in a folder."""

    folder: Path
    bound: int

    def file(self, remote: RemoteObject, suffix: str) -> Path:
        """Where the shard (.tar) or its index (.json) is kept."""
        identity = f"{without_secrets(remote.url)}\n{remote.size}\n{remote.tag}"
        return self.folder / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}{suffix}"

    def holds(self, remote: RemoteObject) -> bool:
        """Whether the whole shard is there; if so, it counts as used now."""
        path = self.file(remote, ".tar")
        try:
            status = path.stat()
            if time.time() - status.st_mtime > _USED:
                os.utime(path)
        except FileNotFoundError:  # never there, or removed by another process
            return False
        return status.st_size == remote.size

    def fetch(self, remote: RemoteObject) -> Path:
        """The file of a shard, downloaded unless it is there. Raises as `read_range`, and `OSError` of a full disk."""
        path = self.file(remote, ".tar")
        if self.holds(remote):
            return path
        with self.locked(path.stem) as lock, ExitStack() as stack:
            if self.holds(remote):  # fetched by another process meanwhile
                return path
            while (temporary := self._reserve(path, remote.size, stack)) is None:
                time.sleep(_WAIT)
            try:
                with temporary.open("r+b") as stream:
                    for start in range(0, remote.size, BLOCK):
                        stream.write(read_range(remote, start, min(start + BLOCK, remote.size)))
                        lock.touch()
            except OSError as error:
                if error.filename is None and error.errno is None:  # of the network, in a sentence already
                    raise
                raise OSError(
                    f"{without_secrets(remote.url)} cannot be kept in {self.folder}: {error.strerror}; free some space, "
                    "set XDG_CACHE_HOME to another disk, or use ?read=ranged"
                ) from None
        return path

    @contextmanager
    def locked(self, name: str) -> Iterator[Path]:
        """Wait until no other process or thread has the lock of this name, and hold it."""
        lock = self.folder / f"{name}.lock"
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                with lock.open("x") as stream:
                    _HELD.add(lock)
                    stream.write(f"{HOST}-{os.getpid()}")
                break
            except (FileExistsError, PermissionError):  # the latter on Windows, where it is being removed
                if _abandoned(lock):
                    lock.unlink(missing_ok=True)
                time.sleep(_WAIT)
        try:
            yield lock
        finally:
            lock.unlink(missing_ok=True)
            _HELD.discard(lock)

    def _reserve(self, path: Path, size: int, stack: ExitStack) -> Path | None:
        """A temporary file of this size for `replacing`; none while shards that others fetch leave no room."""
        with self.locked("room"):
            torn = [p for p in self.folder.glob(".*.tmp") if not p.name.endswith(f"-{os.getpid()}.tmp")]
            remove_leftovers(torn)
            fetched = sum(max(0, file_size(p)) for p in self.folder.glob(".*.tar.*.tmp"))
            kept = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob("*.tar"))
            used = fetched + sum(length for _, length, _ in kept)
            for _, length, oldest in kept:
                if used + size <= self.bound:
                    break
                with suppress(PermissionError):  # on Windows, where a file that is open cannot be removed
                    oldest.unlink()
                    used -= length
            if used + size <= self.bound:
                temporary = stack.enter_context(replacing(path))
                with temporary.open("wb") as stream:
                    stream.truncate(size)
                return temporary
        if not fetched:
            raise OSError(
                f"{self.folder} has no room for a shard of {memory(size)} within {memory(self.bound)}; raise ?cache=, or "
                "use ?read=ranged"
            )
        return None


def _abandoned(lock: Path) -> bool:
    """Whether the process that held a lock was killed."""
    try:
        host, _, process = lock.read_text().partition("-")
        silent = time.time() - lock.stat().st_mtime
    except OSError:
        return False  # released meanwhile
    if host == HOST and process.isdecimal():
        return lock not in _HELD if int(process) == os.getpid() else not alive(int(process))
    return silent > ABANDONED
