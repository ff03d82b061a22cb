"""Progress of long tasks: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


def on_terminal() -> bool:
    return sys.stderr.isatty()


def duration(seconds: float) -> str:
    """`75.2` -> `1:15`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Progress:
    """A rich bar with rate and time left on a terminal; off it, a line every few seconds at most."""

    def __init__(self, what: str, total: int, *, quiet: bool = False, every: float = 10.0) -> None:
        self.what, self.total, self.quiet, self.every = what, total, quiet, every
        self.done = 0
        self._began = self._spoke = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and on_terminal():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, by: int = 1, note: str = "") -> None:
        """Say that more is done; `note` stands beside the bar (rate, loss)."""
        self.done += by
        if self._bar is not None:
            self._bar.update(self._task, advance=by, **({"note": note} if note else {}))
            return
        now = time.monotonic()
        if self.quiet or not note or now - self._spoke < self.every:
            return
        self._spoke = now
        left = (now - self._began) / max(1, self.done) * (self.total - self.done)
        print(f"{self.what} {self.done}/{self.total}  {note}  {duration(left)} left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
