"""What is cited can be read by anybody: papers, not notes outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNREADABLE = ("§", "efficiency-1", "efficiency-2", "architectures-and-training", "attention-transfer §", "../shared")
FILES = [
    path
    for pattern in ("vitrail/**/*.py", "studies/*.py", "studies/*.yaml", "benchmarks/*.py", "docs/**/*.md", "*.md")
    for path in sorted(ROOT.glob(pattern))
]


def test_there_are_files_to_look_at() -> None:
    assert len(FILES) > 300


@pytest.mark.parametrize("words", UNREADABLE)
def test_no_file_cites_a_document_that_readers_do_not_have(words: str) -> None:
    assert [str(path.relative_to(ROOT)) for path in FILES if words in path.read_text(encoding="utf-8")] == []
