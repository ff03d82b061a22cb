"""How tests call a study of rows, and read what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).parents[1] / "studies"


def call(script: Path, *words: str) -> str:
    """What a script prints on a CPU with one thread; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
