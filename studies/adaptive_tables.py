"""What the study of adaptive computation found, as Markdown: mean and standard deviation over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adaptive_models import key, read_rows

Values = dict[str, list[float]]  # figure -> its values, one a seed

FORMS: dict[str, tuple[str, Callable[[float], str]]] = {  # figure -> head of its column, how it is written
    "top1": ("top-1, %", lambda v: f"{100 * v:.1f}"),
    "macs": ("MMACs", lambda v: f"{v / 1e6:.0f}"),
    "share": ("of the whole, %", lambda v: f"{100 * v:.0f}"),
    "tokens": ("tokens a block", lambda v: f"{v:.1f}"),
    "success": ("success, %", lambda v: f"{100 * v:.0f}"),
    "train_success": ("on training images, %", lambda v: f"{100 * v:.0f}"),
    "attended": ("tokens attended to", lambda v: f"{v:.1f}"),
    "sampled_images_per_second": ("img/s", lambda v: f"{v:,.0f}"),
    "dense_images_per_second": ("dense img/s", lambda v: f"{v:,.0f}"),
    "gain": ("times dense", lambda v: f"{v:.2f}"),
    "points": ("points (up to 1: share)", lambda v: f"{v:.2f}"),
    "gate_scale": ("scale", lambda v: f"{v:.2f}"),
    "gate_center": ("centre", lambda v: f"{v:.2f}"),
    "halting": ("halting before the last block, %", lambda v: f"{100 * v:.1f}"),
    "seconds": ("seconds", lambda v: f"{v:.0f}"),
}
TABLES: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # rows, title, columns
    ("base", "The plain model", ("top1", "macs")),
    ("ats", "Token sampling: accuracy against cost", ("top1", "macs", "share", "tokens")),
    ("speed", "Token sampling: speed", ("sampled_images_per_second", "dense_images_per_second", "gain")),
    ("ablation", "Ways of sampling at about equal cost, without training", ("top1", "macs", "share", "points")),
    (
        "choice",
        "Choices for A-ViT, on validation images",
        ("top1", "share", "gate_scale", "gate_center", "halting"),
    ),
    ("victims", "Adaptive models", ("top1", "macs", "share", "tokens")),
    ("attacks", "Attacks", ("top1", "macs", "success", "train_success", "attended")),
    ("transfer", "Patches on other victims", ("top1", "macs", "success")),
    ("defence", "A-ViT defended, and trained as long without patches", ("top1", "macs", "share", "success")),
    ("training", "Training", ("seconds",)),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    rows = read_rows(folder)
    if not rows:
        raise SystemExit(f"nothing was found in {folder}: it has no found.jsonl with rows")
    done = list({key(row): row for row in rows if "failed" not in row}.values())
    parts = [
        f"Data {row['subject']}; {row['what']}.{' A smoke run: figures mean nothing.' * row['smoke']}"
        for row in done
        if row["table"] == "about"
    ]
    for name, title, columns in TABLES:
        made = grouped(row for row in done if row["table"] == name)
        if made:
            parts.append(f"### {title}\n\n{markdown(made, columns)}")
    finished = {key(row) for row in done}
    failed = {key(row): row["failed"] for row in rows if "failed" in row and key(row) not in finished}
    if failed:
        parts.append("Failed:\n\n" + "\n".join(f"- {' / '.join(map(str, k))}: {why}" for k, why in failed.items()))
    return "\n\n".join(parts)


def grouped(rows: Any) -> dict[tuple[str, str], Values]:
    """(subject, what) -> figures of all seeds, in the order in which subjects and then rows first came."""
    found: dict[str, dict[str, Values]] = {}
    for row in rows:
        values = found.setdefault(row["subject"], {}).setdefault(row["what"], {})
        for figure in FORMS:
            if row.get(figure) is not None:
                values.setdefault(figure, []).append(row[figure])
        values.setdefault("seeds", []).append(row["seed"])
    return {(subject, what): values for subject, each in found.items() for what, values in each.items()}


def markdown(rows: dict[tuple[str, str], Values], columns: Sequence[str]) -> str:
    """A table of the columns that any row has."""
    columns = [c for c in columns if any(c in values for values in rows.values())]
    lines = [
        "| | | " + " | ".join(FORMS[c][0] for c in columns) + " | seeds |",
        "|---|---|" + "---|" * len(columns) + "---|",
    ]
    for (subject, what), values in rows.items():
        cells = [said(values[c], FORMS[c][1]) if c in values else "" for c in columns]
        lines.append(f"| {subject} | {what} | " + " | ".join(cells) + f" | {len(values['seeds'])} |")
    return "\n".join(lines)


def said(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Mean and, of several, standard deviation.

    >>> said([0.5, 0.7], lambda v: f"{v:.2f}")
    '0.60 ± 0.14'
    """
    mean = form(statistics.mean(values))
    return mean if len(values) < 2 else f"{mean} ± {form(statistics.stdev(values))}"
