"""What commands print: tables, JSON, errors, progress with a rate."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def fail(text: str, code: int = 2) -> int:
    """Say what is wrong on the error stream; returns the exit code."""
    print(f"vitrail: {text}", file=sys.stderr)
    return code


@contextmanager
def rate(what: str, unit: str, scale: float = 1.0, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """For work that tells `(done, total)`: a bar from the first time it does, with the rate since then."""
    from vitrail.engine.progress import Progress

    with ExitStack() as stack:
        bars: list[tuple[Progress, float]] = []

        def told(done: int, total: int) -> None:
            if not bars:
                bars.append((stack.enter_context(Progress(what, total, quiet=quiet)), time.monotonic()))
            bar, began = bars[0]
            bar.advance(done - bar.done, f"{done / scale / max(time.monotonic() - began, 1e-3):.0f} {unit}")

        yield told


def show(thing: Any) -> None:
    """Print anything that rich can draw."""
    from rich.console import Console

    Console().print(thing)


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False))
