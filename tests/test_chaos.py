"""The tool that breaks commands on purpose: what it calls a failure, and a minute of it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from study_calls import script_module

TOOL = Path(__file__).parents[1] / "tools" / "chaos.py"
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults are injected by means of Linux")


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    return script_module(TOOL)


def test_a_result_that_differs_and_a_file_that_stays_are_failures(chaos: ModuleType, tmp_path: Path) -> None:
    place = chaos.Place(chaos.COMMANDS["pack"], tmp_path, {}, random.Random(0))
    place.out.mkdir()
    (place.out / "shard").write_bytes(b"pixels")
    place.expected = chaos.files(place.out)
    chaos.compare(place)
    (place.out / "shard").write_bytes(b"pixelz")
    with pytest.raises(chaos.Failed, match=r"1 results differ \(shard\)"):
        chaos.compare(place)
    (place.out / ".shard.1.tmp").touch()
    with pytest.raises(chaos.Failed, match="1 temporary files stay"):
        chaos.compare(place)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("pass", None),
        ("raise SystemExit(2)", "exit code 2"),
        ("1 / 0", "traceback"),
        ("import time; time.sleep(60)", "hangs"),
    ],
)
def test_a_traceback_a_hang_and_an_odd_exit_code_are_failures(
    program: str, found: str | None, chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stderr=log, process_group=0)
    child = chaos.Child(process.pid, tmp_path / "log")
    monkeypatch.setattr(chaos.Child.wait, "__defaults__", (5.0,))
    if found is None:
        assert chaos.ended(child, (0,)) == 0
    else:
        with pytest.raises(chaos.Failed, match=found):
            chaos.ended(child, (0, 1))
    process.returncode = 0  # the tool has waited for it


def test_the_page_has_a_row_for_every_fault(chaos: ModuleType) -> None:
    text = chaos.table({name: Counter(finished=2, continued=1) for name in chaos.FAULTS}, {})
    assert "| **all** | | " + f"{3 * len(chaos.FAULTS)} | {2 * len(chaos.FAULTS)} | {len(chaos.FAULTS)} | 0 |" in text
    rows = re.findall(r"^\| ([a-z -]+) \|", PAGE.read_text().split(chaos.BEGIN)[1], re.MULTILINE)
    assert rows == ["fault", *chaos.FAULTS]


@pytest.mark.slow
def test_commands_survive_a_minute_of_faults(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOL), "--minutes", "1.2", "--seed", "7", "--commands", "pack", "train"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) trials of", done.stdout)[0]) >= 5
