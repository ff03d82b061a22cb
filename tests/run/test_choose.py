"""The recipe that is chosen for data without one, and warnings for settings with which small data are not learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.cli import run as command
from vitrail.config import RunConfig
from vitrail.recipes import recipe, with_values
from vitrail.run.choose import choose_run
from vitrail.run.preflight import warnings_before
from vitrail.run.run_data import open_run


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.run.choose.choose_device", lambda name: torch.device("cuda"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of ten images of 96 x 120 pixels."""
    root, noise = tmp_path_factory.mktemp("large"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for i in range(10):
            Image.fromarray(noise.integers(0, 255, (96, 120, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


CPU = {"engine": {"device": "cpu"}}


def test_photographs_on_a_cpu_without_weights_get_a_small_network_from_scratch(large: Path) -> None:
    config, lines = choose_run(str(large), CPU)
    assert (config.recipe, config.model.name, config.model.weights) == ("scratch", "timm:resnet18", "none")
    assert config.data.uri == str(large)
    assert lines[0] == (
        "found: 20 photographs (shorter side 96 pixels), 2 classes, CPU; no published weights without a network"
    )
    assert lines[1].startswith("chosen: recipe scratch: timm:resnet18 at 64 pixels, 100 epochs; choose otherwise: ")


@pytest.mark.usefixtures("accelerator")
def test_photographs_on_an_accelerator_without_weights_get_the_recipe_as_it_is(large: Path) -> None:
    config, _ = choose_run(str(large), {})
    assert with_values(config, {"data.uri": ""}) == recipe("scratch")


@pytest.mark.usefixtures("accelerator")
def test_reachable_weights_are_fine_tuned(large: Path, hub_answers: None) -> None:
    config, lines = choose_run(str(large), {})
    assert with_values(config, {"data.uri": ""}) == recipe("finetune")
    assert "the weights of deit_small are to be downloaded" in lines[0]


def test_a_cpu_fine_tunes_a_smaller_model(large: Path, hub_answers: None) -> None:
    config, _ = choose_run(str(large), CPU)
    assert (config.recipe, config.model.name, config.model.weights) == ("finetune", "deit_tiny", "timm")


def test_small_images_get_a_small_transformer_at_about_their_size(photos: Path) -> None:
    config, lines = choose_run(str(photos), CPU)  # 40 x 48 pixels
    assert (config.recipe, config.model.name, config.model.image_size) == ("demo", "vit_micro_28", 42)
    assert "60 small images (shorter side 40 pixels), 3 classes" in lines[0]


def test_a_cpu_with_twice_the_cores_gets_twice_the_epochs(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.run.choose.CORE_SPEED", 5e8)
    few = choose_run(str(large), CPU)[0].optim.epochs
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert choose_run(str(large), CPU)[0].optim.epochs == pytest.approx(2 * few, abs=1)


def test_settings_win_over_what_is_chosen(large: Path) -> None:
    values = {**CPU, "model": {"name": "timm:resnet10t"}, "optim": {"epochs": 3, "lr": 0.5}}
    config, _ = choose_run(str(large), values)
    assert (config.model.name, config.optim.epochs, config.optim.lr) == ("timm:resnet10t", 3, 0.5)


def test_texts_want_a_recipe_by_name() -> None:
    with pytest.raises(ValueError, match=r"holds texts: name a recipe"):
        choose_run("synthetic:grammar?n=20", {})


@pytest.mark.parametrize("words", [["DATA"], ["--data", "DATA"], ["--data", "DATA", "--data.workers", "0"]])
def test_train_with_data_alone_says_what_it_chose(
    words: list[str], photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(config: RunConfig, **_: object) -> None:
        raise ValueError(f"begun {config.recipe} on {config.data.uri}")

    monkeypatch.setattr("vitrail.run.train.train", begun)
    assert command(["train", *(str(photos) if word == "DATA" else word for word in words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["found", "chosen"]
    assert lines[2] == f"vitrail: begun demo on {photos}"


def test_a_misspelt_recipe_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "finetun"]) == 2
    assert "no recipe 'finetun'; did you mean 'finetune'" in capsys.readouterr().err


def test_data_that_are_named_twice_are_an_error(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", str(photos), "--data", "embedded:fashion"]) == 2
    assert "data are named twice" in capsys.readouterr().err


def notes(photos: Path, parameters: int, **changes: object) -> str:
    config = with_values(recipe("vit"), {"data.uri": str(photos), "data.check": "off", **changes})
    lr, batch, scaled_to = config.optim.lr, config.data.batch, config.optim.lr_batch
    peak = lr * batch / scaled_to if scaled_to else lr
    return "\n".join(warnings_before(config, open_run(config.data), parameters, parameters, peak))


def test_few_images_are_warned_about_for_every_model_from_scratch(photos: Path) -> None:
    assert "images are few for 61,000 parameters from scratch" in notes(photos, 61_000)
    assert "images are few for 5.5 M parameters from scratch" in notes(photos, 5_500_000)
    assert "are few" not in notes(photos, 61_000, **{"model.weights": "timm"})


def test_a_rate_that_scaling_makes_too_low_is_warned_about(photos: Path) -> None:
    low = "a learning rate of 3.125e-05 (0.0005 scaled to a batch of 32) is low for adamw from scratch; 0.001 is usual"
    assert low in notes(photos, 1, **{"data.batch": 32})
    assert "is low" not in notes(photos, 1, **{"data.batch": 256})
    assert "is low" not in notes(photos, 1, **{"data.batch": 32, "model.weights": "timm"})


@pytest.mark.parametrize("name", ["demo", "scratch", "vit", "small-deit", "speedrun-cifar10"])
def test_recipes_from_scratch_have_no_rate_that_would_be_warned_about(name: str, photos: Path) -> None:
    config = recipe(name)
    assert "is low" not in notes(photos, 1, **{"optim": config.optim, "data.batch": config.data.batch})
