"""Models in the layout of the Hugging Face hub, with a card made from the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import vitrail
from vitrail.cli import run as command
from vitrail.engine.run_folder import RunFolder
from vitrail.recipes import recipe, with_values


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"data.limit": 120, "optim.steps": 2, "engine.device": "cpu", "model.trunk": {"depth": 1}}
    out = tmp_path_factory.mktemp("card") / "run"
    return vitrail.train(with_values(recipe("demo"), {**settings, "out": str(out)}), quiet=True).path


def test_an_exported_folder_loads_and_predicts_as_the_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["export", str(finished), "hf:me/fashion"]) == 0
    images = torch.randint(256, (3, 3, 28, 28), dtype=torch.uint8)
    assert torch.equal(vitrail.load("hf:me/fashion")(images), vitrail.load(finished)(images))


def test_a_card_has_data_metrics_with_intervals_cost_and_a_licence_to_fill_in(finished: Path, tmp_path: Path) -> None:
    assert command(["export", str(finished), f"hf:{tmp_path / 'model'}"]) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "vitrail"
    assert "license" in yaml.safe_load(front)
    final = next(line for line in RunFolder(finished).read_metrics() if line.get("final"))
    assert f"| top1 | {final['top1']:.4g} | {final['top1_low']:.4g} to {final['top1_high']:.4g} |" in text
    assert "embedded:fashion" in text
    assert "multiply-accumulates per image of 28 pixels" in text
    assert "Trouser" in text


def test_a_repository_comes_from_the_local_cache(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    where = tmp_path / "cache" / "models--me--fashion" / "snapshots" / "abc"
    assert command(["export", str(finished), f"hf:{where}"]) == 0
    assert vitrail.load("hf:me/fashion").classes == vitrail.load(finished).classes


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("hf:me/fashion", "HF_HUB_OFFLINE is set; copy its folder"), ("hf:./nowhere", "there is no such folder")],
)
def test_what_cannot_be_had_is_a_sentence(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=sentence):
        vitrail.load(name)


def test_uploads_need_a_repository(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(finished), f"hf:{tmp_path / 'model'}", "--upload"]) == 2
    assert "name it hf:OWNER/NAME" in capsys.readouterr().err
    assert command(["export", str(finished), str(tmp_path / "model.onnx"), "--upload"]) == 2
    assert "--upload is for the hub" in capsys.readouterr().err
