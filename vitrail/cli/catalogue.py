"""`vitrail list` and `vitrail show`."""

from __future__ import annotations

from typing import Literal

import tyro

from vitrail.cli.say import fail, print_json
from vitrail.cli.say import show as draw
from vitrail.cli.verb_help import description
from vitrail.schema import near, parse_flags


def list_(
    what: tyro.conf.Positional[Literal["models", "heads", "mixers", "adapters", "recipes", "data"]] = "models",
    pattern: tyro.conf.Positional[str] = "*",
    /,
    json: bool = False,
) -> int:
    """Names of what there is.

    Example: vitrail list models "deit*" --json

    Args:
        what: models, heads, mixers, adapters, recipes or data
        pattern: only names that match this shell pattern
        json: print one JSON list
    """
    from vitrail import catalogue

    rows = catalogue.rows(what, pattern)
    if json:
        print_json(rows)
    elif rows:
        draw(catalogue.table(what, rows))
    else:
        return fail(f"no {what} match {pattern!r}{near(pattern, catalogue.names(what))}")
    return 0


def show(words: list[str]) -> int:
    """One model, recipe, head, mixer or adapter in full; or the adapter of a file or run.

    A recipe takes any setting of `train` and is shown as that run would have it: values that depend on the model's size
    follow --model.name. --json prints one JSON object.

    Example: vitrail show deit_small
    Example: vitrail show deit3-1k-400 --model.name deit3_large
    Example: vitrail show runs/birds        (what its adapter trained and stores, and on which base)
    """
    from vitrail import catalogue

    if "-h" in words or "--help" in words:
        print(f"{description(show)}\n\nusage: vitrail show NAME [--json] [--section.name value ...]")
        return 0
    positional, values = parse_flags([word for word in words if word != "--json"])
    if len(positional) != 1:
        return fail(f"show takes one name, got {', '.join(positional) or 'none'}; `vitrail list` gives them")
    found = catalogue.describe(positional[0], values)
    if "--json" in words:
        print_json(found)
    else:
        print(catalogue.text(found))
    return 0
