"""Metrics of one model on several data sets, crop ratios or image sizes, as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text

from vitrail.measure.classification import Figures
from vitrail.show.quantities import number, percent, shorten

NAMES = {
    **{"top1": "top-1", "top5": "top-5", "map": "mAP", "macro_f1": "macro F1", "ece": "ECE"},
    **{"bleu": "BLEU", "sequence_accuracy": "seq. acc.", "perplexity": "perplexity"},  # of language models
    "loss": "loss",
}
NO_SHARE = ("perplexity", "loss")  # numbers of which less is better


class Combination(Protocol):
    """What a row needs to know."""

    @property
    def data(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def image_size(self) -> int: ...
    @property
    def crop_ratio(self) -> float: ...
    @property
    def figures(self) -> Figures: ...


def sweep_table(rows: Sequence[Combination]) -> Table:
    """One row a combination; the best of each data set in its first figure is bold. Fits 80 columns."""
    keys = [key for key in NAMES if key in rows[0].figures.scalars()]
    best: dict[str, float] = {}
    for row in rows:
        best[row.data] = max(best.get(row.data, -math.inf), _merit(row, keys[0]))
    table = Table(box=None, pad_edge=False)
    table.add_column("data", no_wrap=True)
    for name in ("split", "px", "crop", *(NAMES[key] for key in keys)):
        table.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    for row in rows:
        scores = row.figures.scalars()
        cells = [number(scores[k], 4) if k in NO_SHARE else percent(scores[k]) for k in keys]
        style = "bold" if _merit(row, keys[0]) == best[row.data] else ""
        source = Text(shorten(row.data, 26), no_wrap=True, overflow="ellipsis")
        table.add_row(source, row.split, f"{row.image_size}", f"{row.crop_ratio:g}", *cells, style=style)
    return table


def _merit(row: Combination, key: str) -> float:
    return row.figures.scalars()[key] * (-1 if key in NO_SHARE else 1)
