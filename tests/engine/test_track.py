"""What a tracker is shown is what `metrics.jsonl` says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig
from vitrail.engine.trackers import FOLDER, TRACKERS, MlflowTracker, TensorBoard
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


Shown = list[tuple[str, float, int]]


def fake_mlflow(shown: Shown, calls: list[Any]) -> ModuleType:
    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            calls.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return "1"

        def create_run(self, experiment: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
            shown.append((key, value, step))

        def set_terminated(self, run_id: str) -> None:
            calls.append("closed")

    module = ModuleType("mlflow")
    module.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    return module


def fake_wandb(shown: Shown, calls: list[Any]) -> ModuleType:
    def log(values: dict[str, float]) -> None:
        step = int(values.pop("trainer/step"))
        shown.extend((name, value, step) for name, value in values.items())

    def init(**options: Any) -> Any:
        assert options["mode"] == "offline"
        calls.append(options["dir"])
        return SimpleNamespace(log=log, finish=lambda: calls.append("closed"))

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    return module


def fake_tensorboard(shown: Shown, calls: list[Any]) -> ModuleType:
    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            shown.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    return module


FAKES: dict[str, tuple[str, Callable[[Shown, list[Any]], ModuleType]]] = {
    "tensorboard": ("torch.utils.tensorboard", fake_tensorboard),
    "mlflow": ("mlflow", fake_mlflow),
    "wandb": ("wandb", fake_wandb),
}
LINES = [
    {"step": 2, "epoch": 0.5, "split": "train", "loss": 1.5, "lr": 0.1},
    {"step": 2, "epoch": 0.5, "split": "val", "top1": 0.25, "final": True, "name": "x"},
]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_is_shown_every_number_in_the_run_folder_and_closed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: Shown = []
    calls: list[Any] = []
    module, fake = FAKES[name]
    monkeypatch.setitem(sys.modules, module, fake(shown, calls))
    tracker = TRACKERS[name](tmp_path, 0)
    for line in LINES:
        tracker.write(line)
    tracker.close()
    assert shown == [("train/loss", 1.5, 2), ("train/lr", 0.1, 2), ("val/top1", 0.25, 2)]
    assert str(tmp_path) in calls[0]
    assert calls[-1] == "closed"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_an_installed_tracker_writes_into_the_run_folder(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    tracker = TRACKERS[name](tmp_path, 0)
    for line in LINES:
        tracker.write(line)
    tracker.close()
    assert any(path.is_file() for path in (tmp_path / name).rglob("*"))


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "track"), ("mlflow", "mlflow"), ("wandb", "wandb")])
def test_without_its_package_a_run_is_refused_before_anything_is_written(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitrail.engine.trackers.find_spec", lambda package: None)
    words = ["--data", "synthetic:shapes?n=60&size=32", "--engine.track", name, "--out", str(tmp_path / "run")]
    assert command(["train", "demo", *words]) == 2
    assert f"{name} is not installed; pip install vitrail[{extra}]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("named", ["", "http://tracker:5000"])
def test_mlflow_logs_to_the_server_of_the_environment_else_to_files_of_the_run(named, tmp_path, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow([], calls))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MlflowTracker(tmp_path / "run", 0)
    assert calls == [named or (tmp_path / "run" / "mlflow").as_uri()]


@pytest.mark.slow
def test_the_packages_themselves_take_what_is_logged(tmp_path, monkeypatch):
    """Where they are installed: their interfaces change."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("mlflow", "wandb"):
        pytest.importorskip(name)
        tracker = TRACKERS[name](tmp_path, 0)
        for line in LINES:
            tracker.write(line)
        tracker.close()
        assert any((tmp_path / name).rglob("*"))
