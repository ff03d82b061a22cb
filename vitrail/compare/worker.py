"""A process that trains one run after the other, so that what the first one compiled serves the next: both of its ends.

`Worker` starts the process (`python -m vitrail.compare.worker`) and sends it requests on its stdin, one JSON object per
line: `{"arguments": [... of vitrail train], "log": FILE}`. Each is answered on its stdout with `{"code": EXIT CODE}`.
Output of a run, C code included, goes to its log. The end of stdin ends the process.

A run must not depend on the one before it: `vitrail.engine.device.prepare` sets global state both ways, and between
runs everything they held is freed. cuBLAS and torch read some settings once per process, and other code needs other
graphs: so a worker is meant for runs that differ in nothing but their seed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import runpy
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE = 10.0  # seconds that an idle worker gets to end


class Worker:
    """The parent's end: starts the process, which takes one request at a time."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`log` holds what is printed before the first request."""
        with log.open("ab") as file:
            # In a session of its own: Ctrl-C reaches the parent alone, which then asks each run to save, once.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vitrail.compare.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self._codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def submit(self, arguments: Sequence[str], log: Path) -> None:
        """Begin the run of `vitrail train ARGUMENTS`. `exit_code` also tells where the process is dead."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")
            self.process.stdin.flush()

    def exit_code(self) -> int | None:
        """The exit code of the run that was submitted, None while it goes on.

        A worker that died gives that of the process: below 0, the signal that killed it.
        """
        code = self.process.poll()  # first: what was answered before the end counts
        if code is not None:
            self._listener.join(1.0)  # no longer: a process that the run left behind may hold the pipe
        try:
            return self._codes.get_nowait()
        except queue.Empty:
            return code

    def stop(self) -> None:
        """Ask a run to save and to stop; as SIGTERM to `vitrail train`."""
        self.process.terminate()  # nothing happens where it is dead

    def end(self, patience: float | None = PATIENCE) -> None:
        """No more requests; returns when the process is gone. An idle one is killed if need be."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it died with a request unread
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._codes.put(json.loads(line)["code"])


def main() -> None:
    """The process's end: carry out requests until there are no more."""
    # Duplicates, which programs that a run starts do not inherit; a run itself finds nothing on stdin.
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with os.fdopen(requests, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            code = train_run(request["arguments"], Path(request["log"]))
            try:
                os.write(answers, json.dumps({"code": code}).encode() + b"\n")
            except BrokenPipeError:  # the parent died; this run was finished all the same
                return


def train_run(arguments: Sequence[str], log: Path) -> int:
    """As `vitrail train ARGUMENTS` in a process of its own; returns its exit code. Output goes to `log`."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    before, sys.argv = sys.argv, ["vitrail", "train", *arguments]
    try:
        with warnings.catch_warnings():  # show warnings again for each run
            runpy.run_module("vitrail", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.argv = before
    gc.collect()  # also frees reference cycles (the reader of a packed data set is one)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    sys.stdout.flush()  # nothing of this run may come out in the log of the next
    sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what C code printed
    return code


if __name__ == "__main__":
    main()
