"""Rows that a script measures: kept in a JSON file as they come, made once, printed as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from vitrail.files import write_text

Row = dict[str, Any]  # column -> number; what is no number is kept and not printed


class Rows:
    """Rows by table, name and seed; what is in the file (none: rows are only printed) is not made again."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        kept = path is not None and path.is_file()
        self.tables: dict[str, dict[str, dict[str, Row]]] = json.loads(path.read_text()) if kept else {}

    def row(self, table: str, name: str, seed: int, make: Callable[[], Row]) -> Row:
        rows = self.tables.setdefault(table, {}).setdefault(name, {})
        if str(seed) not in rows:
            rows[str(seed)] = make()
            if self.path is not None:
                write_text(self.path, json.dumps(self.tables, indent=1))
        return rows[str(seed)]

    def markdown(self) -> str:
        """Every table, mean and standard deviation over seeds."""
        parts = []
        for table, made in self.tables.items():
            every = [row for rows in made.values() for row in rows.values()]
            columns = list(dict.fromkeys(k for row in every for k, v in row.items() if isinstance(v, int | float)))
            lines = [f"### {table}", "", f"| | {' | '.join(columns)} | seeds |", "|---" * (len(columns) + 2) + "|"]
            for name, rows in made.items():
                cells = [_over([row[column] for row in rows.values() if column in row]) for column in columns]
                lines.append(f"| {name} | {' | '.join(cells)} | {len(rows)} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


def _over(values: list[float]) -> str:
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{fmean(values):.4g}{spread}" if values else ""
