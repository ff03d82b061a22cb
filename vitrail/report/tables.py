"""Metrics, results of protocols and ensembles, and sweeps as tables for the terminal; each fits 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.table import Table
from rich.text import Text

from vitrail.measure.classification import Figures, MultiLabelFigures, SingleLabelFigures
from vitrail.measure.evaluator import Findings, ResultTable, UnlabelledFigures
from vitrail.quantities import MISSING, number, percent, shorten
from vitrail.registry import part

if TYPE_CHECKING:
    from vitrail.measure.ensembles import Together
    from vitrail.measure.language import LanguageFigures
    from vitrail.measure.parity import RegressionFigures

LONGEST_NAME = 28
NO_IMAGES = "no images"  # in place of a recall


def headline(figures: Figures, title: str = "") -> Table:
    """The metrics that are one number each."""
    table = _table(title or f"{figures.count:,} images", "metric", "value", left="value")
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
    elif hasattr(figures, "parity"):
        for name, value, low, high in cast("RegressionFigures", figures).rows():
            table.add_row(name, f"{number(value, 4)}  (95 % interval {number(low, 4)} to {number(high, 4)})")
        return table
    elif hasattr(figures, "perplexity"):
        language = cast("LanguageFigures", figures)
        table.add_row("perplexity", f"{number(language.perplexity, 4)}  (over {language.tokens:,} tokens)")
        if language.bleu is not None:
            table.add_row("BLEU", f"{percent(language.bleu)}  (of {len(language.written):,} prompts)")
        if language.sequence_accuracy is not None:
            table.add_row("sequence accuracy", f"{percent(language.sequence_accuracy)}  (right word for word)")
    else:
        table.add_row("mean average precision", percent(scalars["map"]))
        table.add_row("micro F1", percent(scalars["micro_f1"]))
        table.add_row("macro F1", percent(scalars["macro_f1"]))
        table.add_row("all labels right", percent(scalars["subset_accuracy"]))
    table.add_row("loss", number(figures.loss, 4))
    return table


CALIBRATION: dict[str, tuple[str, Callable[[float], str]]] = {
    "ece": ("ECE", percent),
    "adaptive_ece": ("adaptive ECE", percent),
    "brier": ("Brier score", number),
    "loss": ("log loss", number),
}


def trust_table(trust: Mapping[str, Any]) -> list[Table | str]:
    """What was fitted on val (`measure.trust.Fitted.facts`) and what it gives."""
    what = "vector scaling" if trust["kind"] == "vector" else f"temperature {number(trust['temperature'])}"
    table = _table(f"{trust['split']}: {what}, fitted on {trust['images']:,} val images", "metric", "before", "after")
    for name, (title, tell) in CALIBRATION.items():
        if "after" in trust:
            table.add_row(title, tell(trust["before"][name]), tell(trust["after"][name]))
    sets = _table("prediction sets", "asked", "coverage", "mean size", "one class")
    for row in trust.get("sets", ()):
        shares = percent(row["asked"], 0), percent(row["coverage"]), number(row["mean_size"]), percent(row["single"])
        sets.add_row(*shares)
    told = ", ".join(f"{kind.replace('_', ' ')} {number(area)}" for kind, area in trust["reject"]["auroc"].items())
    score = f"images of no known class are rejected by {trust['reject']['kind'].replace('_', ' ')}"
    return [table, *([sets] if "sets" in trust else []), f"{score}{f' (AUROC: {told})' if told else ''}"]


def per_class(figures: Figures, most: int | None = None) -> Table:
    """One row per class, weakest first where only `most` of them are shown."""
    multilabel = isinstance(figures, MultiLabelFigures)
    score = figures.average_precision if isinstance(figures, MultiLabelFigures) else figures.f1
    rows = range(len(figures.classes))
    if most is not None and most < len(rows):
        rows = np.argsort(np.nan_to_num(score, nan=np.inf), kind="stable")[:most]  # type: ignore[assignment]
    title = "classes" if len(rows) == len(figures.classes) else f"weakest {len(rows)} of {len(figures.classes)} classes"
    columns = ["class", "images", "precision", "recall", "F1"] + (["AP"] if multilabel else [])
    table = _table(title, *columns)
    for i in rows:
        there = [percent(figures.recall[i]), percent(figures.f1[i])] if figures.support[i] else [NO_IMAGES, MISSING]
        cells = [percent(figures.precision[i]), *there]
        cells += [percent(score[i])] if multilabel else []
        table.add_row(_name(figures.classes[i]), f"{figures.support[i]:,}", *cells)
    return table


def confused(figures: SingleLabelFigures, most: int = 10) -> Table:
    """The pairs of classes that are confused most often."""
    table = _table("most confused", "true", "predicted", "images", "of the class", left="predicted")
    for true, guess, images in figures.confused_pairs(most):
        share = percent(images / figures.support[true])
        table.add_row(_name(figures.classes[true]), _name(figures.classes[guess]), f"{images:,}", share)
    return table


def _table(title: str | None, first: str, *others: str, left: str = "metric") -> Table:
    table = Table(title=title and Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name == left else "right", no_wrap=True)
    return table


def _name(name: str) -> Text:
    # Text, because a class called "[red]" is a name and no colour.
    return Text(shorten(" ".join(name.split()), LONGEST_NAME), no_wrap=True, overflow="ellipsis")


COUNTS = frozenset({"median_rank"})  # every other figure between 0 and 1 is a share


def protocol_tables(results: Mapping[str, Findings], title: str) -> Iterator[Table]:
    """All metrics in one table; then the tables of single protocols."""
    table = _table(title, "protocol", "metric", "value")
    for protocol, findings in results.items():
        for row, (name, value) in enumerate(findings["numbers"].items()):
            share = name not in COUNTS and -1 <= value <= 1 and name not in ("loss", "strength", "correlation")
            table.add_row(protocol if not row else "", name, percent(value) if share else number(value))
    yield table
    for protocol, findings in results.items():
        show, tables = getattr(part("evaluator", protocol), "table", None), findings["tables"]
        if show is not None and (rows := show(next(iter(tables.values())))) is not None:
            yield result_table(rows)


def result_table(results: ResultTable) -> Table:
    """A table of an evaluator."""
    table = _table(results.title, *results.columns)
    for row in results.rows:
        table.add_row(*row)
    return table


def ensemble_table(ensembles: Together, title: str) -> Table:
    """One row per member, then the ensemble and what it gains over its best member."""
    keys = [key for key in ("top1", "map", "top5", "ece", "loss") if key in ensembles.ensemble.scalars()]
    table = _table(title, "model", *keys, "gain")
    for name, figures in (*ensembles.members.items(), ("ensemble", ensembles.ensemble)):
        scores = figures.scalars()
        cells = [number(scores[key], 4) if key == "loss" else percent(scores[key], 2) for key in keys]
        last = figures is ensembles.ensemble
        gain = f"{100 * ensembles.gain:+.2f}" if last else ""
        label = Text(shorten(name, 34), no_wrap=True)
        table.add_row(label, *cells, gain, style="bold" if last else "")
    return table


NAMES = {
    **{"top1": "top-1", "top5": "top-5", "map": "mAP", "macro_f1": "macro F1", "ece": "ECE"},
    **{"bleu": "BLEU", "sequence_accuracy": "seq. acc.", "perplexity": "perplexity"},  # of language models
    "loss": "loss",
    **{"r2": "R2", "mae": "MAE", "rmse": "RMSE"},
}
NO_SHARE = ("perplexity", "loss", "mae", "rmse")  # numbers of which less is better


def sweep_table(rows: Sequence[Any]) -> Table:
    """One row per combination of data, split, image size and crop ratio; the best of each data set is bold."""
    keys = [key for key in NAMES if key in rows[0].figures.scalars()]
    best: dict[str, float] = {}
    for row in rows:
        best[row.data] = max(best.get(row.data, -math.inf), _merit(row, keys[0]))
    table = _table(None, "data", "split", "px", "crop", *(NAMES[key] for key in keys), left="split")
    for row in rows:
        scores = row.figures.scalars()
        cells = [number(scores[k], 4) if k in (*NO_SHARE, "r2") else percent(scores[k]) for k in keys]
        style = "bold" if _merit(row, keys[0]) == best[row.data] else ""
        source = Text(shorten(row.data, 26), no_wrap=True, overflow="ellipsis")
        table.add_row(source, row.split, f"{row.image_size}", f"{row.crop_ratio:g}", *cells, style=style)
    return table


def published_tables(rows: Sequence[Any]) -> Iterator[Table]:
    """Measured and published accuracy of models, a table for each data set and metric."""
    names = {"top1": "top-1", "v2": "ImageNet-V2 top-1", "real": "ReaL top-1"}
    for title in dict.fromkeys((row.metric, row.split, row.data) for row in rows):
        heads = ("px", "crop", "published", "measured", "diff.", "in 95 %", "images/s")
        table = _table(f"{names[title[0]]}, {title[1]} of {title[2]}", "model", *heads)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
        for row in (row for row in rows if (row.metric, row.split, row.data) == title):
            known = row.published is not None
            difference = f"{100 * row.difference:+.2f}" if known else ""
            inside = ("no", "yes")[row.within] if known else ""
            cells = (percent(row.published, 2), percent(row.top1, 2), difference, inside)
            table.add_row(Text(row.model), f"{row.image_size}", f"{row.crop_ratio:g}", *cells, number(row.images_per_s))
        yield table


def _merit(row: Any, key: str) -> float:
    return row.figures.scalars()[key] * (-1 if key in NO_SHARE else 1)
