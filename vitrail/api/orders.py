"""A worker process (`vitrail.api.worker`) as whoever gives it orders sees it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PATIENCE = 10.0  # seconds that a worker without an order gets to end


class Worker:
    """Starts the process, which takes one order at a time."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`log` holds what is said before the first order."""
        with log.open("ab") as words:
            # In a session of its own: Ctrl-C reaches the process that gives orders alone, which then asks each run to
            # save, once.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vitrail.api.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=environment,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def order(self, words: Sequence[str], log: Path) -> None:
        """Begin the run that `vitrail train WORDS` makes. A worker that is no more says so as its answer."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> int | None:
        """The exit code of the run that was ordered, None while it goes on.

        A worker that died gives its own: below 0, the signal that killed it.
        """
        code = self.process.poll()  # first: what was answered before the end counts
        if code is not None:
            self._listener.join(1.0)  # no longer: a process that the run left behind may hold the pipe
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return code

    def stop(self) -> None:
        """Ask a run to save and to stop; as SIGTERM to `vitrail train`."""
        self.process.terminate()  # nothing happens where it is no more

    def end(self, patience: float | None = PATIENCE) -> None:
        """No more orders; returns when the process is gone. One that has none to carry out is killed if need be."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it died with an order unread
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
                self._answers.put(json.loads(line)["code"])
