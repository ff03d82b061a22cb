"""Metrics as tables for the terminal; each fits 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from vitrail.measure.classification import Figures, MultiLabelFigures, SingleLabelFigures
from vitrail.measure.language import LanguageFigures
from vitrail.measure.unlabelled import UnlabelledFigures
from vitrail.show.quantities import number, percent, shorten

LONGEST_NAME = 28


def headline(figures: Figures, title: str = "") -> Table:
    """The figures that are one number each."""
    table = _table(title or f"{figures.count:,} images", "figure", "value")
    scalars = figures.scalars()
    if isinstance(figures, UnlabelledFigures):
        table.add_row("spread of embeddings", f"{number(figures.spread, 3)}  (0: all images alike; 1: everywhere)")
        table.add_row("their effective rank", number(figures.rank, 3))
        return table
    if isinstance(figures, SingleLabelFigures):
        low, high = figures.top1_interval
        table.add_row("top-1", f"{percent(figures.top1)}  (95 % interval {percent(low)} to {percent(high)})")
        table.add_row("top-5", percent(figures.top5))
        table.add_row("balanced accuracy", percent(scalars["balanced_accuracy"]))
        table.add_row("macro F1", percent(scalars["macro_f1"]))
        if len(figures.classes) == 2:
            table.add_row("Matthews", number(scalars["matthews"], 4))
        table.add_row("calibration error", percent(figures.ece))
    elif isinstance(figures, LanguageFigures):
        table.add_row("perplexity", f"{number(figures.perplexity, 4)}  (over {figures.tokens:,} tokens)")
        if figures.bleu is not None:
            table.add_row("BLEU", f"{percent(figures.bleu)}  (of {len(figures.written):,} prompts)")
        if figures.sequence_accuracy is not None:
            table.add_row("sequence accuracy", f"{percent(figures.sequence_accuracy)}  (right word for word)")
    else:
        table.add_row("mean average precision", percent(scalars["map"]))
        table.add_row("micro F1", percent(scalars["micro_f1"]))
        table.add_row("macro F1", percent(scalars["macro_f1"]))
        table.add_row("all labels right", percent(scalars["subset_accuracy"]))
    table.add_row("loss", number(figures.loss, 4))
    return table


def per_class(figures: Figures, most: int | None = None) -> Table:
    """One row a class, weakest first where only `most` of them are shown."""
    multilabel = isinstance(figures, MultiLabelFigures)
    score = figures.average_precision if isinstance(figures, MultiLabelFigures) else figures.f1
    rows = range(len(figures.classes))
    if most is not None and most < len(rows):
        rows = np.argsort(np.nan_to_num(score, nan=np.inf), kind="stable")[:most]  # type: ignore[assignment]
    title = "classes" if len(rows) == len(figures.classes) else f"weakest {len(rows)} of {len(figures.classes)} classes"
    columns = ["class", "images", "precision", "recall", "F1"] + (["AP"] if multilabel else [])
    table = _table(title, *columns)
    for i in rows:
        cells = [percent(v[i]) for v in (figures.precision, figures.recall, figures.f1)]
        cells += [percent(score[i])] if multilabel else []
        table.add_row(_name(figures.classes[i]), f"{figures.support[i]:,}", *cells)
    return table


def confused(figures: SingleLabelFigures, most: int = 10) -> Table:
    """The pairs of classes that are taken for each other most often."""
    table = _table("most confused", "true", "taken for", "images", "of the class")
    for true, guess, images in figures.confused_pairs(most):
        share = percent(images / figures.support[true])
        table.add_row(_name(figures.classes[true]), _name(figures.classes[guess]), f"{images:,}", share)
    return table


def long_tail(groups: Mapping[str, Any], title: str = "by training images of the class") -> Table:
    """Accuracy of Many, Med and Few classes, and of all."""
    table = _table(title, "group", "classes", "training images", "images", "top-1", "class mean")
    for name, group in groups.items():
        low, high = group["training"]
        each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        shares = ("" if share is None else percent(share) for share in (group["accuracy"], group["balanced"]))
        table.add_row(name, f"{group['classes']:,}", each, f"{group['images']:,}", *shares)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, width=None)
    table.add_column(first, no_wrap=True)
    for name in others:
        left = name in ("value", "taken for")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table


def _name(name: str) -> Text:
    # Text, because a class called "[red]" is a name and no colour.
    return Text(shorten(" ".join(name.split()), LONGEST_NAME), no_wrap=True, overflow="ellipsis")
