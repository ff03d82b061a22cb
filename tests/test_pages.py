"""Files and commands that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vitrail.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-zA-Z0-9_-]+\.(?:py|yaml|jsonl?|md))", page.read_text(encoding="utf-8")))
    gone = [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "vitrail", page.parent))]
    assert [path for path in gone if not path.startswith("runs/")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    shown = set(re.findall(r"(?:^|`| )vitrail ([a-z]+) ", page.read_text(encoding="utf-8"), re.MULTILINE))
    words = {"is", "turns", "can", "has", "and", "command", "or", "on", "to", "in", "was", "version"}
    assert shown - words - COMMANDS.keys() == set()
