"""What TensorBoard is shown is what `metrics.jsonl` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig
from vitrail.engine.run_folder import FOLDER, TensorBoard
from vitrail.recipes import recipe, with_values

SMALL = {
    **{"data.uri": "synthetic:shapes?n=60&size=32", "data.batch": 12, "data.workers": 0, "data.check": "off"},
    **{"model.name": "vit_tiny_32", "model.trunk": {"depth": 1, "width": 48, "heads": 3}, "model.image_size": 32},
    **{"optim.steps": 4, "engine.device": "cpu", "engine.log_every": 2, "engine.track": "tensorboard"},
}


def config(out: Path) -> RunConfig:
    return with_values(recipe("vit"), {**SMALL, "out": str(out)})


def test_every_number_of_every_line_is_a_point_of_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs vitrail[track]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = vitrail.train(config(tmp_path / "run"), quiet=True)
    expected = {}
    for line in map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name not in ("step", "epoch") and type(value) in (int, float):
                expected[f"{line['split']}/{name}", line["step"]] = value
    events = EventAccumulator(str(run.path / FOLDER)).Reload()
    shown = {(tag, one.step): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}
    assert shown == pytest.approx(expected, rel=1e-6)  # float32 there
    assert {tag.split("/")[0] for tag, _ in shown} == {"train", "val", "test"}


def test_a_resumed_run_takes_back_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs vitrail[track]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path, 0)
    for step in (2, 4, 6):
        first.write({"step": step, "split": "train", "loss": float(step)})
    first.close()
    again = TensorBoard(tmp_path, 4)
    again.write({"step": 6, "split": "train", "loss": 60.0, "final": True})
    again.close()
    events = EventAccumulator(str(tmp_path / FOLDER)).Reload()
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(2, 2.0), (4, 4.0), (6, 60.0)]


def test_without_tensorboard_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    real = importlib.util.find_spec

    def gone(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", gone)
    words = ["--data", "synthetic:shapes?n=60&size=32", "--engine.track", "tensorboard", "--out", str(tmp_path / "run")]
    assert command(["train", "demo", *words]) != 0
    assert "pip install vitrail[track]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
