"""How tests call a study of rows, and read what it found."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from processes import run_script

STUDIES = Path(__file__).parents[1] / "studies"


def call(script: Path, *words: str) -> str:
    """What a script prints on a CPU with one thread; it must end well."""
    done = run_script(script, *words, environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.err
    return done.out


def script_module(path: Path, name: str = "") -> ModuleType:
    """A script as a module."""
    specification = importlib.util.spec_from_file_location(name or path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


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
