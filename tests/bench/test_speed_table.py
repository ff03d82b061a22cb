"""The page on speed is what the history of benchmarks says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from study_calls import script_module

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield script_module(BENCHMARKS / "speed_table.py")


def test_the_page_and_the_readme_are_what_the_history_says(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speed_table.py", "--check"])
    assert speed.main() == 0, capsys.readouterr().out


def test_a_table_is_of_the_newest_call_that_has_all_its_figures(speed: ModuleType) -> None:
    whole = {f"{work}, {who}, images/s": 100.0 for work in speed.WORKS for who in ("ours", "timm compiled")}
    calls = [
        speed.Call("1", "gpu.py", "NVIDIA A", {**whole, "DeiT-S training, ours, images/s": 150.0}),
        speed.Call("2", "gpu.py", "NVIDIA B", {**whole, "DeiT-S training, ours, images/s": 1_250.0}),
        speed.Call("3", "gpu.py", "NVIDIA C", {"DeiT-S training, ours, images/s": 900.0}),
        speed.Call("4", "jpeg.py", "NVIDIA D", whole),
    ]
    text = "\n".join(speed.gpu_table(calls))
    assert "| DeiT-S training |  | 100 | 1,250 | **12.50** |" in text
    assert "NVIDIA B, 2." in text
    assert speed.gpu_table(calls[2:]) == ["Not measured yet."]


def test_a_latency_row_names_the_fastest_of_what_was_measured(speed: ModuleType) -> None:
    ours, theirs = ("model DeiT-Ti, batch 1, ours, p50 ms", "model DeiT-Ti, batch 1, timm, p50 ms")
    calls = [speed.Call("1", "latency.py", "cpu, 2 threads", {ours: 11.94, theirs: 9.5})]
    rows = speed.latency_table(calls, "cpu", ("ours", "onnxruntime", "timm"))
    assert rows[2] == "| DeiT-Ti | 1 | 11.9 |  | 9.5 | timm |"


def test_shares_of_loaders_are_of_the_input_of_their_own_call(speed: ModuleType) -> None:
    both = {"synthetic, images/s": 200.0, "host, 16 cores, images/s": 50.0, "timm, 16 cores, images/s": 40.0}
    calls = [
        speed.Call("1", "jpeg.py", "NVIDIA A", both),
        speed.Call("2", "jpeg.py", "NVIDIA A", {"synthetic, images/s": 100.0, "jpeg, two cores, images/s": 80.0}),
    ]
    text = "\n".join(speed.jpeg_table(calls))
    assert "| two | 80 | 0.80 |" in text
    assert "| 16 | 50 | 0.25 |" in text


def test_text_goes_between_markers_and_nowhere_else(speed: ModuleType) -> None:
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert speed.filled(text, "a", ["new"]) == "before\n<!-- a -->\nnew\n<!-- /a -->\nafter\n"
    with pytest.raises(ValueError, match="no markers <!-- b -->"):
        speed.filled(text, "b", ["new"])
