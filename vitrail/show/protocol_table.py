"""Results of protocols and ensembles, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from vitrail.measure.averaging import Together
from vitrail.measure.evaluate import Findings
from vitrail.show.quantities import number, percent, shorten
from vitrail.show.tables import long_tail

COUNTS = frozenset({"median_rank"})  # every other figure between 0 and 1 is a share


def protocol_tables(found: Mapping[str, Findings], title: str) -> Iterator[Table]:
    """All figures in one table; then what is more than one number a protocol."""
    table = _table(title, "protocol", "figure", "value")
    for protocol, findings in found.items():
        for place, (name, value) in enumerate(findings["numbers"].items()):
            share = name not in COUNTS and -1 <= value <= 1 and name not in ("loss", "strength", "correlation")
            table.add_row(protocol if not place else "", name, percent(value) if share else number(value))
    yield table
    if "corruptions" in found:
        yield _corruptions(found["corruptions"]["tables"]["corruptions"])
    if "few" in found:
        yield _few(found["few"]["tables"]["few"])
    if "episodes" in found:
        yield _episodes(found["episodes"]["tables"]["episodes"])
    for name in ("long_tail", "long_tail_thirds"):
        if name in found:
            yield long_tail(found[name]["tables"]["long_tail"])
    if "linear" in found and found["linear"]["tables"]["linear"]["tried"]:
        yield _linear(found["linear"]["tables"]["linear"])


def ensemble_table(made: Together, title: str) -> Table:
    """One row a member, then the ensemble and what it gains over its best member."""
    keys = [key for key in ("top1", "map", "top5", "ece", "loss") if key in made.ensemble.scalars()]
    table = _table(title, "model", *keys, "gain")
    for name, figures in (*made.members.items(), ("ensemble", made.ensemble)):
        scores = figures.scalars()
        cells = [number(scores[key], 4) if key == "loss" else percent(scores[key], 2) for key in keys]
        last = figures is made.ensemble
        gain = f"{100 * made.gain:+.2f}" if last else ""
        label = Text(shorten(name, 34), no_wrap=True)
        table.add_row(label, *cells, gain, style="bold" if last else "")
    return table


def _corruptions(kinds: Mapping[str, Any]) -> Table:
    table = _table("top-1 by severity", "corruption", "1", "2", "3", "4", "5", "mean", "of clean")
    for kind, found in kinds.items():
        table.add_row(kind, *map(percent, found["severities"]), percent(found["mean"]), percent(found["relative"]))
    return table


def _few(rows: Mapping[str, Any]) -> Table:
    table = _table("few labels, mean and deviation over draws", "labelled", "images", "1-NN", "20-NN", "linear")
    for name, row in rows.items():
        cells = []
        for key in ("knn1", "knn20", "linear"):
            std = row[key]["std"]
            cells.append(percent(row[key]["mean"]) + ("" if std is None else f" ± {100 * std:.1f}"))
        table.add_row(name, f"{row['images']:,}", *cells)
    return table


def _episodes(found: Mapping[str, Any]) -> Table:
    title = f"{found['episodes']} episodes, {found['way']}-way {found['shot']}-shot, {found['queries']} queries a class"
    if found["left_out"]:
        title += f"\n{len(found['left_out'])} classes with too few images are left out"
    table = _table(title, "classifier", "accuracy", "95 % interval", "std over episodes")
    for name, row in found["classifiers"].items():
        table.add_row(name, percent(row["mean"]), f"± {100 * row['interval']:.1f}", f"{100 * row['std']:.1f}")
    return table


def _linear(found: Mapping[str, Any], most: int = 5) -> Table:
    table = _table("best points of the linear probe on val", "learning rate", "weight decay", "val top-1")
    for point in sorted(found["tried"], key=lambda point: -point["val"])[:most]:
        table.add_row(f"{point['learning_rate']:.3g}", f"{point['weight_decay']:g}", percent(point["val"]))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    return table
