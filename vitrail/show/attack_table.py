"""Metrics of a model under attack, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table

from vitrail.measure.compute import Spent
from vitrail.show.quantities import amount, number, percent


class Row(Protocol):
    """What a row needs to know."""

    @property
    def attack(self) -> str: ...
    @property
    def figures(self) -> Spent: ...
    @property
    def success(self) -> float | None: ...


def attack_table(rows: Sequence[Row], most: float, title: str) -> Table:
    """One row an attack, the worst case last. MACs: an image, mean; in brackets, of an image with the mean counts."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("attack", "top-1", "MACs", "(of mean)", "costliest", "tokens", "success"):
        table.add_column(name, justify="left" if name == "attack" else "right", no_wrap=True)
    for row in rows:
        made = row.figures
        tokens = number(sum(made.tokens) / len(made.tokens))
        cells = [amount(value) for value in (made.macs, made.macs_of_mean, made.costliest)]
        table.add_row(row.attack, percent(made.top1), *cells, tokens, percent(row.success))
    table.add_row("worst case", "", amount(most), "", "", "", "", style="dim")
    return table
