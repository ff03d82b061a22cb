"""`--help` of a command: its docstring wrapped to the terminal, one example per line, and informative defaults.

A docstring of a command is paragraphs, then lines that begin with `Example: `, then its arguments.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

EXAMPLE = "Example: "
NAMES: dict[Any, str] = {str: "TEXT", Path: "PATH", int: "INT", float: "FLOAT"}


def description(function: Callable[..., Any]) -> str:
    """The docstring down to its arguments, in paragraphs as wide as the terminal, and the examples."""
    text = inspect.getdoc(function) or ""
    lines = text.partition("\nArgs:\n")[0].splitlines()
    examples = [line.removeprefix(EXAMPLE) for line in lines if line.startswith(EXAMPLE)]
    said = "\n".join(line for line in lines if not line.startswith(EXAMPLE)).strip()
    width = min(shutil.get_terminal_size().columns, 100)
    parts = ["\n".join(textwrap.wrap(part, width, break_on_hyphens=False)) for part in said.split("\n\n")]
    if examples:
        parts.append("\n".join(["examples:", *(f"  {each}" for each in examples)]))
    return "\n\n".join(parts)


def quiet_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same command for tyro, whose help names no default where that is nothing (none, empty) or a flag's.

    What such an argument does when it is left out is in its own text.
    """
    from tyro.conf import arg

    hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function)
    for name, parameter in signature.parameters.items():
        several = parameter.default is parameter.empty and get_origin(_bare(hints[name])) is tuple  # or none, to tyro
        flag = isinstance(parameter.default, bool)  # --this, or --no-this where it is on
        if parameter.default in (None, (), "") or flag or several:
            quiet = arg(help_behavior_hint="", metavar=_metavar(hints[name]))
            hints[name] = Annotated[hints[name], quiet]

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    del called.__wrapped__  # or tyro looks at that
    parameters = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = hints
    return called


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _metavar(hint: Any) -> str | None:
    """What stands for the value of an argument that may be none; nothing where the command names it, or tyro can."""
    if get_origin(hint) is Annotated:
        return None
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) not in (Union, UnionType) or len(kinds) != 1:
        return None
    if get_origin(kinds[0]) is Literal:
        return "{" + ",".join(map(str, get_args(kinds[0]))) + "}"
    return NAMES.get(kinds[0])
