"""How tests call a study of rows, and read what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import run_script

STUDIES = Path(__file__).parents[1] / "studies"


def call(script: Path, *words: str) -> str:
    """What a script prints on a CPU with one thread; it must end well."""
    done = run_script(script, *words, environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.err
    return done.out


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]


def found_in(folder: Path, tables: Any) -> dict[str, dict[str, list[str]]]:
    """Rows of these tables by table and subject, in order; none of the study may have failed."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows(folder):
        assert "failed" not in row
        if row["table"] in tables:
            found.setdefault(row["table"], {}).setdefault(row["subject"], []).append(row["what"])
    return found
