"""Recipes for ImageNet-21k with as many classes, on a small trunk: trained, resumed, evaluated, compared, inspected."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitrail.cli import run as command
from vitrail.data.dataset import DataSet, Split
from vitrail.data.open import open_data
from vitrail.measure.evaluator import Predictions, only_classes, read_predictions
from vitrail.run.evaluate import _with_classes_of
from vitrail.run.protocols import counted_as

CLASSES = 21_841
TRUNK = {"depth": 1, "width": 48, "heads": 3, "patch": 8}
SETTINGS = {
    **{f"model.trunk.{name}": value for name, value in TRUNK.items()},
    **{"model.image_size": 32, "data.workers": 0, "data.batch": 16},
    **{"optim.warmup": 0, "optim.steps": 1, "engine.device": "cpu"},
}
QUICK = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def write_arrays(path: Path, count: int, **named: np.ndarray) -> Path:
    rng, counts = np.random.default_rng(0), {"train": 96, "val": 24, "test": 40}
    arrays = {f"x_{s}": rng.integers(0, 256, (n, 8, 8, 3), np.uint8) for s, n in counts.items()}
    labels = {f"y_{s}": rng.integers(0, count, n) for s, n in counts.items()}
    np.savez(path, **arrays, **labels, **named)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and with a run of either recipe."""
    folder = tmp_path_factory.mktemp("many")
    names = np.array([f"n{i:08d}" for i in range(CLASSES)])
    data = write_arrays(folder / "many.npz", CLASSES, classes=names)
    for name in ("deit3-21k-90", "deit3-21k-240"):
        assert command(["train", name, *QUICK, "--data", str(data), "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", ["deit3-21k-90", "deit3-21k-240"])
def test_a_run_of_21841_classes_is_small_on_disk(name: str, runs: Path) -> None:
    stored = read_predictions(runs / name)
    assert stored is not None
    assert stored.logits.shape == (40, 10)
    sizes = {path.name: path.stat().st_size for path in (runs / name).iterdir()}
    assert sizes["predictions.safetensors"] < 200 * 40
    assert sizes["report.html"] < 2_000_000
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert {line["split"] for line in lines} >= {"val", "test"}


def test_a_finished_run_is_resumed_with_the_same_predictions(runs: Path) -> None:
    run = runs / "deit3-21k-90"
    before = (run / "predictions.safetensors").read_bytes()
    (run / "predictions.safetensors").unlink()
    assert command(["train", "--resume", str(run)]) == 0
    assert (run / "predictions.safetensors").read_bytes() == before


def test_metrics_in_json_are_linear_in_classes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert command(["evaluate", str(runs / "deit3-21k-90"), "--json"]) == 0
    text = capsys.readouterr().out
    assert len(text) < 100 * CLASSES
    metrics = json.loads(text)
    assert len(metrics["recall"]) == len(metrics["classes"]) == CLASSES
    assert sum(images for *_, images in metrics["cells"]) == metrics["count"] == 40
    final = [json.loads(line) for line in (runs / "deit3-21k-90" / "metrics.jsonl").read_text().splitlines()][-1]
    assert metrics["loss"] == pytest.approx(final["loss"], rel=1e-5)


def test_two_runs_are_compared_and_averaged(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [str(runs / name) for name in ("deit3-21k-90", "deit3-21k-240")]
    assert command(["compare", *both, "--out", str(runs / "compared"), "--seconds", "0"]) == 0
    table = json.loads((runs / "compared" / "table.json").read_text())
    assert len(table["disagreement"]["rates"]) == 2
    assert (runs / "compared" / "table.json").stat().st_size < 100 * CLASSES
    capsys.readouterr()
    assert command(["evaluate", *both, "--ensemble", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["members"]) == 2


def test_a_choice_of_classes_is_evaluated(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = open_data(runs / "many.npz")
    present = [data.classes[c] for c in data["test"].labels[:3]]
    capsys.readouterr()
    assert command(["evaluate", str(runs / "deit3-21k-90"), "--classes", *present, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 37


def test_weights_of_21k_classes_are_fine_tuned_on_others(runs: Path) -> None:
    data = write_arrays(runs / "few.npz", 7)
    words = [*QUICK, "--data", str(data), "--model.weights", str(runs / "deit3-21k-90")]
    assert command(["train", "deit3-21k-to-1k", *words, "--out", str(runs / "to-1k")]) == 0
    stored = read_predictions(runs / "to-1k")
    assert stored is not None
    assert stored.top is None
    assert stored.logits.shape == (40, 7)
    assert stored.logits.dtype == torch.float16


def test_a_model_of_21841_classes_is_inspected(runs: Path) -> None:
    assert command(["inspect", str(runs / "deit3-21k-90"), "--out", str(runs / "inspected")]) == 0
    assert (runs / "inspected" / "inspect.html").stat().st_size < 5_000_000


def test_a_split_may_have_few_images_of_many_classes(tmp_path: Path) -> None:
    x, y = np.zeros((CLASSES, 1, 1, 3), np.uint8), np.arange(CLASSES)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_val=x[:2], y_val=y[-2:])
    assert len(open_data(tmp_path / "a.npz").classes) == CLASSES


class CountedName(str):
    """A class name that counts how often any is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_classes_are_matched_by_name_without_comparing_all_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 400
    names = [CountedName(i) for i in range(count)]
    index, logits = torch.arange(count), torch.eye(count)
    predictions = Predictions(index, index, logits)
    model = SimpleNamespace(multilabel=False, regression=False, classes=tuple(names))
    split = Split("test", None, index.numpy(), [""] * count, index.numpy())  # type: ignore[arg-type]
    data = DataSet("", tuple(reversed(names)), {"test": split})
    monkeypatch.setattr(CountedName, "comparisons", 0)
    assert counted_as(predictions, names, names[::-1], "run").target.equal(index.flip(0))
    assert only_classes(predictions, names, names[::-1]).target.equal(index.flip(0))
    assert _with_classes_of(model, data)["test"].labels.tolist() == list(range(count))[::-1]  # type: ignore[arg-type]
    assert CountedName.comparisons < 10 * count
