"""Output of commands: tables, JSON, errors, progress with a rate."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def fail(text: str, code: int = 2) -> int:
    """Say what is wrong on the error stream; returns the exit code."""
    print(f"vitrail: {text}", file=sys.stderr)
    return code


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, in two columns of the terminal; what is said of a long name stands below it."""
    rows, width = list(rows), min(shutil.get_terminal_size().columns, 100)
    left = min(max(len(name) for name, _ in rows), width // 2 - 4)
    lines = []
    for name, about in rows:
        said = textwrap.wrap(about, width - left - 4, break_on_hyphens=False)
        beside = said.pop(0) if said and len(name) <= left else ""
        lines.append(f"  {name:<{left}}  {beside}".rstrip())
        lines += [f"{'':<{left + 4}}{line}" for line in said]
    return "\n".join(lines)


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
