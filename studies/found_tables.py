"""What a study found, as Markdown: mean and standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from found import key, read_rows

Values = dict[str, list[float]]  # figure -> its values, one a seed
Row = dict[str, Any]
Forms = Mapping[str, tuple[str, Callable[[float], str]]]  # figure -> head of its column, how it is written
Layout = Sequence[tuple[str, str, Sequence[str]]]  # rows of a table, its title, its columns


def all_tables(folder: Path, forms: Forms, layout: Layout, derive: Callable[[list[Row]], list[Row]] = list) -> str:
    """All tables that have rows, and what failed. Raises `SystemExit` where there is nothing.

    `derive` may add figures to rows, given all of them.
    """
    rows = read_rows(folder)
    if not rows:
        raise SystemExit(f"nothing was found in {folder}: it has no found.jsonl with rows")
    done = derive(list({key(row): row for row in rows if "failed" not in row}.values()))
    parts = [
        f"Data {row['subject']}; {row['what']}.{' A smoke run: figures mean nothing.' * row['smoke']}"
        for row in done
        if row["table"] == "about"
    ]
    for name, title, columns in layout:
        made = grouped((row for row in done if row["table"] == name), forms)
        if made:
            parts.append(f"### {title}\n\n{markdown(made, columns, forms)}")
    finished = {key(row) for row in done}
    failed = {key(row): row["failed"] for row in rows if "failed" in row and key(row) not in finished}
    if failed:
        parts.append("Failed:\n\n" + "\n".join(f"- {' / '.join(map(str, k))}: {why}" for k, why in failed.items()))
    return "\n\n".join(parts)


def grouped(rows: Iterable[Row], forms: Forms) -> dict[tuple[str, str], Values]:
    """(subject, what) -> figures of all seeds, in the order in which subjects and then rows first came."""
    found: dict[str, dict[str, Values]] = {}
    for row in rows:
        values = found.setdefault(row["subject"], {}).setdefault(row["what"], {})
        for figure in forms:
            if row.get(figure) is not None:
                values.setdefault(figure, []).append(row[figure])
        values.setdefault("seeds", []).append(row["seed"])
    return {(subject, what): values for subject, each in found.items() for what, values in each.items()}


def markdown(rows: Mapping[tuple[str, str], Values], columns: Sequence[str], forms: Forms) -> str:
    """A table of the columns that any row has."""
    columns = [c for c in columns if any(c in values for values in rows.values())]
    lines = [
        "| | | " + " | ".join(forms[c][0] for c in columns) + " | seeds |",
        "|---|---|" + "---|" * len(columns) + "---|",
    ]
    for (subject, what), values in rows.items():
        cells = [said(values[c], forms[c][1]) if c in values else "" for c in columns]
        lines.append(f"| {subject} | {what} | " + " | ".join(cells) + f" | {len(values['seeds'])} |")
    return "\n".join(lines)


def said(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Mean and, of several, standard deviation; of what is no number, what the form says of that.

    >>> said([0.5, 0.7], lambda v: f"{v:.2f}")
    '0.60 ± 0.14'
    """
    if any(math.isnan(v) for v in values):
        return form(math.nan)
    mean = form(statistics.mean(values))
    return mean if len(values) < 2 else f"{mean} ± {form(statistics.stdev(values))}"
