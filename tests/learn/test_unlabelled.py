"""Images that nobody labelled: what learns from them does, what cannot says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig
from vitrail.data.preprocess import Preprocess
from vitrail.learn.selfsupervised import spread_and_rank
from vitrail.recipes import RECIPES, recipe, with_values

SMALL = {
    **{"data.batch": 12, "data.workers": 0, "optim.steps": 3, "engine.device": "cpu", "model.image_size": 32},
    **{"objective.bank": 24, "data.check": "off"},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for i in range(60):
        Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def config(name: str, photos: Path, out: Path, **more: object) -> RunConfig:
    known = {k: v for k, v in SMALL.items() if k != "objective.bank" or hasattr(recipe(name).objective, "bank")}
    return with_values(recipe(name), {**known, "data.uri": str(photos), "out": str(out), **more})


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(config("small-msf", photos, tmp_path_factory.mktemp("run") / "msf"), quiet=True).path


def test_a_folder_without_class_folders_is_read_and_divided(photos: Path) -> None:
    data = vitrail.open_data(str(photos))
    assert data.unlabelled
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 48, "val": 6, "test": 6}
    assert any("no labels" in note for note in data.notes)


def test_figures_of_a_run_speak_of_embeddings_alone(run: Path, photos: Path) -> None:
    final = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"spread", "rank"} <= set(final)
    assert not {"top1", "loss", "knn"} & set(final)
    model, test = vitrail.load(run), vitrail.open_data(str(photos))["test"]
    pixels = [Preprocess(model.preprocess)(test.read(i)) for i in range(len(test))]
    seen = torch.stack([torch.as_tensor(p) for p in pixels])
    with torch.no_grad():
        spread, rank = spread_and_rank(model.eval().outputs(seen).representation)
    assert final["spread"] == pytest.approx(float(spread), rel=1e-4)
    assert final["rank"] == pytest.approx(float(rank), rel=1e-4)
    assert "have no labels" in (run / "report.html").read_text(encoding="utf-8")


def test_packed_images_stay_without_labels(photos: Path, tmp_path: Path) -> None:
    assert command(["pack", str(photos), str(tmp_path / "packed")]) == 0
    assert vitrail.open_data(str(tmp_path / "packed")).unlabelled


def test_autoencoders_learn_from_them(photos: Path, tmp_path: Path) -> None:
    made = config("small-mae", photos, tmp_path / "mae", **{"model.trunk": {"depth": 1, "width": 48, "heads": 3}})
    assert vitrail.train(made, quiet=True).figures.count == 6


@pytest.mark.parametrize("name", ["small-deit", "small-supcon", "small-livt", "small-gramian"])
def test_what_needs_labels_is_refused_before_anything_is_written(name: str, photos: Path, tmp_path: Path) -> None:
    chosen = with_values(recipe(name), {"data.uri": str(photos), "out": str(tmp_path / "run"), "model.weights": "none"})
    with pytest.raises(ValueError, match=r"no labels, and .* learns from labels"):
        vitrail.train(chosen, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_views_and_masks_alone_learn_without_labels(name: str) -> None:
    """By the names of their families; students learn from a teacher."""
    kinds = ("byol", "moco", "isd", "msf", "dino", "mae-pretrain", "small-mae", "livt-pretrain", "unisiam", "simreg")
    kinds += ("compres", "reg", "cluster", "crd")
    expected = any(kind in name for kind in kinds) and not any(w in name for w in ("semi", "sup", "regnet"))
    assert recipe(name).objective.needs_labels() != expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "RUN", "PHOTO"], "knows no classes"),
        (["evaluate", "RUN", "--data", "PHOTOS", "--protocol", "knn"], "no labels to evaluate with"),
        (["compare", "RUN", "RUN2"], "without labels"),
    ],
)
def test_what_cannot_be_said_is_refused(
    words: list[str], said: str, run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "RUN2" in words:
        shutil.copytree(run, tmp_path / "two")
    places = {"RUN": run, "RUN2": tmp_path / "two", "PHOTO": photos / "1.png", "PHOTOS": photos}
    assert command([str(places.get(word, word)) for word in words]) != 0
    assert said in capsys.readouterr().err
