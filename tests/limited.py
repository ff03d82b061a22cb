"""Cases in a process with limits on memory and time, forked from a server that has imported the package."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import resource
import shutil
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from processes import start

from vitrail.data.dataset import BadImage

MEMORY = 3 * 2**30  # bytes above those of a child at its start
SECONDS = 60.0  # of one case, on a busy machine too
RENEWED = 400  # cases of one child: what libraries keep must not add up
LONGEST = 20_000  # characters of a message
SENTENCES = (ValueError, OSError, BadImage)  # what commands turn into a sentence; ConfigError is a ValueError


class Outcome(NamedTuple):
    """What came of a case: `accepted`, `rejected` in a sentence, `traceback`, `hang` or `died`; and the text of it."""

    kind: str
    text: str

    @property
    def good(self) -> bool:
        return self.kind in ("accepted", "rejected")


class Limited:
    """A child process that is started once, serves many cases, and is replaced when one of them takes it down.

    Calling it with a function of a module and a case runs `function(folder, **case)` there, in an empty folder. A
    function that returns False, or raises one of `SENTENCES`, has rejected the case.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.folder, self.seconds, self.memory = folder, seconds, memory
        self._child: BaseProcess | None = None
        self._pipe: Connection
        self._served = 0

    def __call__(self, function: Callable[..., object], case: Mapping[str, Any]) -> Outcome:
        if self._child is None or self._served >= RENEWED:
            self.close()
            self._pipe, theirs = multiprocessing.Pipe()
            self._child, self._served = start(_serve, theirs, self.folder, self.seconds, self.memory), 0
            theirs.close()
        self._served += 1
        try:
            self._pipe.send((function.__module__, function.__name__, dict(case)))
            if self._pipe.poll(self.seconds):
                return Outcome(*self._pipe.recv())
            kind = "hang"
        except (EOFError, ConnectionError):
            self._child.join()
            kind = "died"
        return Outcome(kind, f"exit code {self.close()}\n{(self.folder / 'log').read_text(errors='replace')[-4000:]}")

    def close(self) -> int | None:
        """End the child; returns its exit code."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        self._pipe.close()
        child.kill()
        child.join()
        return child.exitcode


def _serve(pipe: Connection, folder: Path, seconds: float, memory: int) -> None:
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    faulthandler.enable(log)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    place = folder / "case"
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    while True:
        try:
            module, name, case = pipe.recv()
        except EOFError:
            return
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.chdir(place)
        faulthandler.dump_traceback_later(0.9 * seconds, file=log)  # for the report of a hang
        pipe.send(_outcome(getattr(import_module(module), name), place, case))
        faulthandler.cancel_dump_traceback_later()


def _outcome(function: Callable[..., object], place: Path, case: Mapping[str, Any]) -> tuple[str, str]:
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            accepted = function(place, **case) is not False
    except SENTENCES as error:
        sentence = str(error).strip()
        return ("rejected", sentence) if 0 < len(sentence) < LONGEST else ("traceback", f"{len(sentence)} characters")
    except BaseException:
        return "traceback", f"{printed.getvalue()[-1000:]}{traceback.format_exc()}"[-6000:]
    return "accepted" if accepted else "rejected", printed.getvalue()[-1000:]
