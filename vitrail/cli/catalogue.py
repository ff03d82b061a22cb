"""`vitrail list` and `vitrail show`."""

from __future__ import annotations

from typing import Literal

import tyro

from vitrail.cli.say import fail, print_json
from vitrail.cli.say import show as draw
from vitrail.schema import near


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
    from vitrail.show import catalogue

    rows = catalogue.rows(what, pattern)
    if json:
        print_json(rows)
    elif rows:
        draw(catalogue.table(what, rows))
    else:
        return fail(f"no {what} match {pattern!r}{near(pattern, catalogue.names(what))}")
    return 0


def show(name: tyro.conf.Positional[str], /, json: bool = False) -> int:
    """One model, recipe, head, mixer or adapter in full; or the adapter of a file or run.

    Example: vitrail show deit_small
    Example: vitrail show runs/birds        (what its adapter trained and stores, and on which base)

    Args:
        name: a name that `vitrail list` gives, an adapter file, or the run folder of one
        json: print one JSON object
    """
    from vitrail.show import catalogue

    found = catalogue.describe(name)
    if json:
        print_json(found)
    else:
        print(catalogue.text(found))
    return 0
