"""What the study of attention transfer found, as Markdown, with the share of the gap that each way recovers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from found_tables import Forms, Layout, Row, all_tables


def _percent(v: float) -> str:
    return f"{100 * v:.1f}"


FORMS: Forms = {
    "top1": ("top-1, %", _percent),
    "recovered": ("gap recovered, %", lambda v: "not measurable" if math.isnan(v) else f"{100 * v:.0f}"),
    "val_top1": ("val, %", _percent),
    "clean": ("clean, %", _percent),
    "corrupted": ("corrupted, %", _percent),
    "relative": ("corrupted / clean, %", _percent),
    "best": ("better member, %", _percent),
    "gain": ("gain over it, points", lambda v: f"{100 * v:.2f}"),
    "mean_iou": ("mean IoU, %", _percent),
    "iou_50": ("IoU at least one half, %", _percent),
    "early": ("first third", lambda v: f"{v:.3f}"),
    "middle": ("second third", lambda v: f"{v:.3f}"),
    "late": ("last third", lambda v: f"{v:.3f}"),
    "seconds": ("seconds", lambda v: f"{v:.1f}"),
}
GAIN = ("top1", "recovered", "val_top1")
TABLES: Layout = (
    ("main", "Who gives attention to whom", GAIN),
    ("targets", "Other targets than maps", GAIN),
    ("averages", "Averaged maps", GAIN),
    ("layers", "Some layers (copies of all, distillation of three quarters: first table)", GAIN),
    ("heads", "Some heads (all: first table)", GAIN),
    ("weights", "Weight of the distillation loss (1: first table)", GAIN),
    ("other", "A teacher from other data", GAIN),
    ("mix", "Mix and match: students that begin as an autoencoder", GAIN),
    ("shift", "Ten corruptions at severities 1, 3 and 5", ("clean", "corrupted", "relative")),
    ("ensemble", "Mean probabilities of two models", ("top1", "best", "gain")),
    ("boxes", "Boxes of shapes", ("mean_iou", "recovered", "iou_50")),
    ("cka", "Likeness of layers (linear CKA) to those of the fine-tuned model", ("early", "middle", "late")),
    ("jsd", "Divergence of attention maps from the autoencoder's, nats", ("early", "middle", "late")),
    ("choice", "Learning rates, on validation images", ("top1",)),
    ("training", "Training", ("seconds",)),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    return all_tables(folder, FORMS, TABLES, with_recovered)


def with_recovered(rows: list[Row]) -> list[Row]:
    """Every row with (x - scratch) / (tune - scratch), of means over seeds; NaN where that gap cannot be measured."""
    ends = {
        figure: [_values(rows, table, subject, figure) for subject in ("scratch", "fine-tune")]
        for table, figure in (("main", "top1"), ("boxes", "mean_iou"))
    }
    judged = {name for name, _, columns in TABLES if "recovered" in columns}

    def more(row: Row) -> Row:
        figure = "mean_iou" if row["table"] == "boxes" else "top1"
        return {**row, "recovered": recovered(row[figure], *ends[figure])} if row["table"] in judged else row

    return [more(row) for row in rows]


def recovered(value: float, scratch: Sequence[float], tune: Sequence[float]) -> float:
    """Where a value lies between scratch (0) and tune (1); NaN where their means are not two spreads apart.

    A spread is the larger of the two standard deviations; of one seed none is known.

    >>> recovered(0.5, [0.25, 0.25], [0.75, 0.75])
    0.5
    >>> recovered(0.5, [0.25, 0.5], [0.5, 0.75])
    nan
    """
    if min(len(scratch), len(tune)) < 2:
        return math.nan
    low, gap = statistics.mean(scratch), statistics.mean(tune) - statistics.mean(scratch)
    if gap <= 0 or gap < 2 * max(statistics.stdev(scratch), statistics.stdev(tune)):
        return math.nan
    return (value - low) / gap


def _values(rows: Sequence[Row], table: str, subject: str, figure: str) -> list[float]:
    return [row[figure] for row in rows if row["table"] == table and row["subject"] == subject and figure in row]
