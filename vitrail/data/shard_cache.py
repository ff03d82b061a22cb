"""Shards of remote data in a folder of this machine, within a bound, shared by all of its processes.

    NAME.tar, NAME.json     a shard and its index; the name is a digest of URL, length and ETag
    NAME.lock               a process fetches or indexes it, others wait
    .NAME.tar.*.tmp         being fetched, and from the beginning as long as it will be

Room is made by removing what was used longest ago; a shard that is open can still be read to its end. Locks are files
that one process alone can create. They save work and guard the bound; that shards are whole does not depend on them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.remote import RemoteObject, read_range, without_secrets
from vitrail.files import HOST, alive, file_size, remove_leftovers, replacing

BLOCK = 2**26  # bytes of a request
ABANDONED = 600.0  # seconds without a sign of life after which a lock of another machine counts no more
_WAIT = 0.005  # seconds between two looks at a lock
_THREADS: dict[tuple[int, Path], threading.Lock] = {}  # process, lock file -> among its threads


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
        with suppress(FileNotFoundError):
            os.utime(path)
            return path.stat().st_size == remote.size
        return False

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
                if error.errno is None:  # of the network, a sentence already
                    raise
                remedy = "free some space, set XDG_CACHE_HOME to another disk, or use ?read=ranged"
                raise OSError(f"no shard can be kept in {self.folder}: {error.strerror}; {remedy}") from None
        return path

    @contextmanager
    def locked(self, name: str) -> Iterator[Path]:
        """Wait until no other process or thread has the lock of this name, and hold it."""
        lock = self.folder / f"{name}.lock"
        self.folder.mkdir(parents=True, exist_ok=True)
        with _THREADS.setdefault((os.getpid(), lock), threading.Lock()):  # not that of a parent, which may be taken
            while True:
                try:
                    with lock.open("x") as stream:
                        stream.write(f"{HOST}-{os.getpid()}")
                    break
                except FileExistsError:
                    if _abandoned(lock):
                        lock.unlink(missing_ok=True)
                    time.sleep(_WAIT)
            try:
                yield lock
            finally:
                lock.unlink(missing_ok=True)

    def _reserve(self, path: Path, size: int, stack: ExitStack) -> Path | None:
        """A temporary file of this size for `replacing`; none while shards that others fetch leave no room."""
        with self.locked("room"):
            remove_leftovers(p for p in self.folder.glob(".*.tmp") if not p.name.endswith(f"-{os.getpid()}.tmp"))
            # Before the others: one that gets its name meanwhile is counted twice, not left out.
            used = sum(max(0, file_size(p)) for p in self.folder.glob(".*.tar.*.tmp"))
            kept = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob("*.tar"))
            used += sum(length for _, length, _ in kept)
            while kept and used + size > self.bound:
                _, length, oldest = kept.pop(0)
                with suppress(PermissionError):  # a system on which a file that is open cannot be removed
                    oldest.unlink()
                    used -= length
            if used + size > self.bound:
                return None
            temporary = stack.enter_context(replacing(path))
            with temporary.open("wb") as stream:
                stream.truncate(size)
            return temporary


def _abandoned(lock: Path) -> bool:
    """Whether the process that held a lock was killed."""
    try:
        host, _, process = lock.read_text().partition("-")
        silent = time.time() - lock.stat().st_mtime
    except OSError:
        return False  # released meanwhile
    if host == HOST and process.isdecimal():
        return not alive(int(process))
    return silent > ABANDONED
