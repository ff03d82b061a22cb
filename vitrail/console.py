"""Output of commands: help, tables, JSON, errors, progress with its rate."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from vitrail.files import json_text
from vitrail.schema import Positional, Setting, bare, kind_of, plain, settings

EXAMPLE = "Example: "
METAVARS = {str: "TEXT", Path: "PATH", int: "INT", float: "FLOAT", bool: "true|false"}


def fail(text: str, code: int = 2) -> int:
    """Print what is wrong on the error stream; returns the exit code."""
    print(f"vitrail: {text}", file=sys.stderr)
    return code


def out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a device was out: libraries below torch report it in words of their own."""
    words = ("out of memory", "can't alloc", "alloc_failed", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def aligned(rows: Iterable[tuple[str, str]], left: int | None = None) -> str:
    """Names and their texts in two columns of the terminal; the text of a name wider than `left` stands below it."""
    rows, width = list(rows), min(shutil.get_terminal_size().columns, 100)
    left = left or min(max(len(name) for name, _ in rows), width // 2 - 4)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, width - left - 4, break_on_hyphens=False)
        first = wrapped.pop(0) if wrapped and len(name) <= left else ""
        lines.append(f"  {name:<{left}}  {first}".rstrip())
        lines += [f"{'':<{left + 4}}{line}" for line in wrapped]
    return "\n".join(lines)


def paragraph(text: str) -> str:
    """One paragraph, wrapped to the terminal."""
    return textwrap.fill(text, min(shutil.get_terminal_size().columns, 100), break_on_hyphens=False)


def command_help(name: str, cls: type) -> str:
    """`--help` of a command: its docstring (paragraphs, then lines of examples), usage, arguments, flags."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    examples = [f"  {line.removeprefix(EXAMPLE)}" for line in lines if line.startswith(EXAMPLE)]
    prose = "\n".join(line for line in lines if not line.startswith(EXAMPLE)).strip()
    fields = list(settings(cls))
    arguments = [
        s.metavar if s.default is dataclasses.MISSING else f"[{s.metavar}]"
        for s in fields
        if isinstance(s.metavar, Positional)
    ]
    parts = [*map(paragraph, prose.split("\n\n")), "\n".join(["examples:", *examples])]
    parts += [f"usage: {' '.join(['vitrail', name, *arguments])} [--flag value ...]", settings_help(fields, cls)]
    return "\n\n".join(parts)


def settings_help(fields: Iterable[Setting], command: type | None = None) -> str:
    """Name, type or choices, text and default of settings by the dataclass that has them; of a `command` its flags."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for setting in fields:
        prefix, cls = setting.group
        heading = " ".join((cls.__doc__ or "").split())
        if cls is command:
            heading = "arguments:" if isinstance(setting.metavar, Positional) else "options:"
        elif command is not None:
            heading = heading.replace(".", ":")
        elif prefix:
            heading = f"{prefix[:-1]}: {heading}"
        groups.setdefault(heading, []).append(_row(setting, switch=command is not None))
    left = min(26, max(len(flag) for rows in groups.values() for flag, _ in rows))
    return "\n\n".join(f"{paragraph(heading)}\n{aligned(rows, left)}" for heading, rows in groups.items())


def _row(setting: Setting, switch: bool) -> tuple[str, str]:
    """The flag with its type, and its text with the default where that says something."""
    value, text = setting.default, setting.text
    switch = switch and isinstance(value, bool)
    kinds = tuple(filter(dataclasses.is_dataclass, setting.kinds))
    metavar = setting.metavar or "|".join(map(kind_of, kinds) if kinds else map(_type, setting.kinds))
    if kinds or len(metavar) > 40:
        choices, metavar = metavar.replace("|", ", "), "KIND"
        text = f"{text.rstrip('.')}{'; ' if text else ''}one of {choices}"
    if not switch and value not in (None, (), "", {}, dataclasses.MISSING):
        shown = kind_of(value) if dataclasses.is_dataclass(value) else plain(value)
        shown = " ".join(map(_value, shown)) if isinstance(shown, list) else _value(shown)
        text = f"{text.rstrip('.')} (default: {shown})".strip()
    if isinstance(setting.metavar, Positional) or setting.metavar.startswith("--"):
        return setting.metavar, text
    negation = "no_" if switch and value else ""
    return f"--{negation}{setting.name} {'' if switch else metavar}".rstrip(), text


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _type(hint: Any) -> str:
    kind = bare(hint)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return " ".join("..." if inner is Ellipsis else _type(inner) for inner in get_args(kind))
    return METAVARS.get(kind, str(kind))


@contextmanager
def progress(what: str, unit: str = "", scale: float = 1.0, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A function of `(done, total, note)` that shows a bar from its first call on: with the rate, if it has a unit."""
    from vitrail.engine.progress import Progress

    with ExitStack() as stack:
        bars: list[tuple[Progress, float]] = []

        def report(done: int, total: int, note: str = "") -> None:
            if not bars:
                bars.append((stack.enter_context(Progress(what, total, quiet=quiet)), time.monotonic()))
            bar, began = bars[0]
            rate = done / scale / max(time.monotonic() - began, 1e-3)
            bar.advance(done - bar.done, f"{rate:.0f} {unit}" if unit else note)

        yield report


def show(renderable: Any) -> None:
    """Print anything that rich can draw."""
    from rich.console import Console

    Console().print(renderable)


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json_text(value))


def output(as_json: bool, value: Any, *parts: Any) -> int:
    """The result of a command, as one JSON value or as tables and lines for people; returns exit code 0."""
    if as_json:
        print_json(value)
    for part in () if as_json else parts:
        print(part) if isinstance(part, str) else show(part)
    return 0
