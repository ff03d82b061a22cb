"""The process with limits: what a case may not do is reported with the case, and the next one is served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from limited import Limited


def use(folder: Path, how: str) -> bool:
    """Behave as inputs of all kinds make a program behave."""
    (folder / "written").write_text(how)
    if how == "waits":
        time.sleep(60)
    elif how == "ends":
        os._exit(7)
    elif how == "grows":
        bytearray(8 * 2**30)
    elif how == "fails":
        raise TypeError("no sentence")
    elif how == "silent":
        raise ValueError(" ")
    elif how == "sentence":
        raise ValueError("what, where, what to do")
    return how != "no"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    child = Limited(tmp_path_factory.mktemp("limited"), seconds=3)
    yield child
    child.close()


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("yes", "accepted", ""),
        ("no", "rejected", ""),
        ("sentence", "rejected", "what, where, what to do"),
        ("silent", "traceback", "0 characters"),
        ("fails", "traceback", "TypeError: no sentence"),
        ("grows", "traceback", "MemoryError"),
        ("ends", "died", "exit code 7"),
        ("waits", "hang", "in use"),
    ],
)
def test_every_end_is_told_from_the_others_and_the_next_case_is_served(
    how: str, kind: str, text: str, limited: Limited
) -> None:
    outcome = limited(use, {"how": how})
    assert outcome.kind == kind
    assert text in outcome.text
    assert limited(use, {"how": "yes"}).kind == "accepted"
