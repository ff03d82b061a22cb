"""Runs on 16-bit TIFF stacks of five channels, from training to an exported file; stems adapted from RGB weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig
from vitrail.engine.loop import Stopped
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.store import write_tensors
from vitrail.model.timm_weights import load_weights
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.run.evaluate import evaluate
from vitrail.run.preflight import without_unfit
from vitrail.schema import ConfigError


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that differ in the last two channels, by less than the lowest of the upper eight bits."""
    root, random = tmp_path_factory.mktemp("cells"), np.random.default_rng(0)
    for number, name in enumerate(("a", "b")):
        (root / name).mkdir()
        for i in range(24):
            pixels = random.integers(0, 100, (5, 28, 28)).astype(np.uint16)
            pixels[3 + number, 7:21, 7:21] += 120
            pages = [Image.fromarray(page) for page in pixels]
            pages[0].save(root / name / f"{i}.tif", save_all=True, append_images=pages[1:])
    return root


def settings(cells: Path, out: Path, **changes: Any) -> RunConfig:
    values = {
        "data.uri": str(cells),
        "data.channels": 5,
        "data.batch": 12,
        "data.workers": 0,
        "model.trunk": {"depth": 2, "width": 32, "heads": 2},
        "optim.epochs": 2,
        "engine.device": "cpu",
        "engine.checkpoint_every": 1.0,
        "out": str(out),
    }
    return with_values(recipe("demo"), {**values, **changes})


@pytest.fixture(scope="module")
def run(cells: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(settings(cells, tmp_path_factory.mktemp("runs") / "five"), quiet=True).path


@pytest.mark.slow
def test_a_run_on_stacks_stores_what_it_measured_of_each_channel(run: Path) -> None:
    preprocess = vitrail.load(run).preprocess
    assert preprocess.maximum == 65535
    assert len(preprocess.mean) == len(preprocess.std) == 5
    assert preprocess.mean[0] == pytest.approx(49.5 / 65535, rel=0.02)


@pytest.mark.slow
def test_differences_in_the_low_byte_are_learned(run: Path, cells: Path) -> None:
    figures, _, split = evaluate(run, str(cells), device="cpu", workers=0)
    assert split == "test"
    assert figures.scalars()["top1"] == 1.0


@pytest.mark.slow
def test_an_interrupted_run_on_stacks_equals_an_uninterrupted_one(
    run: Path, cells: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.engine.loop import Loop

    evaluate_once = Loop._evaluate

    def stop(self: Loop, bar: Any) -> None:
        evaluate_once(self, bar)
        raise Stopped(self.step, self.folder.path)

    config = settings(cells, tmp_path / "again")
    monkeypatch.setattr(Loop, "_evaluate", stop)
    with pytest.raises(Stopped):
        vitrail.train(
            replace(config, engine=replace(config.engine, evaluate_every=1.0, checkpoint_every=0.3)), quiet=True
        )
    monkeypatch.undo()
    assert list((tmp_path / "again" / "checkpoint").iterdir())
    again = vitrail.resume(tmp_path / "again", quiet=True).model.state_dict()
    for name, tensor in vitrail.load(run).state_dict().items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.slow
def test_predict_takes_files_and_arrays_of_the_channels(run: Path, cells: Path) -> None:
    model = vitrail.load(run)
    with Image.open(cells / "b" / "3.tif") as image:
        pages = []
        for page in range(5):
            image.seek(page)
            pages.append(np.asarray(image))
    by_file, by_array = model.predict(cells / "b" / "3.tif"), model.predict(np.stack(pages, -1))
    assert by_file[0].label == "b"
    assert by_file == by_array


@pytest.mark.slow
def test_predict_reports_a_file_of_other_channels(run: Path, tmp_path: Path) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "rgb.png")
    (prediction,) = vitrail.load(run).predict(tmp_path / "rgb.png", errors="return")
    assert prediction.error is not None
    assert "3 channels of 8 bits, not 5 of 16 bits" in prediction.error


@pytest.mark.slow
def test_the_onnx_file_takes_sixteen_bits_and_gives_equal_logits(run: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from vitrail.model.export import to_onnx

    model = vitrail.load(run)
    to_onnx(model, tmp_path / "m.onnx", output="logits")
    images = np.random.default_rng(1).integers(0, 400, (3, 5, 28, 28)).astype(np.uint16)
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    assert session.get_inputs()[0].shape[1:] == [5, 28, 28]
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_predict_script_of_an_export_is_rejected_in_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["export", str(run), str(tmp_path / "m.onnx"), "--with_predict"]) != 0
    assert "--with_predict: it reads RGB of eight bits" in capsys.readouterr().err


@pytest.mark.slow
def test_inspect_shows_composites(run: Path, tmp_path: Path) -> None:
    assert (
        command(["inspect", str(run), "--count", "2", "--over", "4", "--judge", "1", "--out", str(tmp_path / "i")]) == 0
    )
    assert (tmp_path / "i" / "inspect.html").is_file()


def test_colours_of_a_recipe_are_left_out_and_those_of_the_user_rejected(cells: Path, tmp_path: Path) -> None:
    named = next(recipe(name) for name in RECIPES if recipe(name).data.augment.three)
    config = with_values(named, {"data.uri": str(cells), "data.channels": 5, "out": str(tmp_path / "x")})
    assert config.data.augment.three
    fit, notes = without_unfit(config)
    assert not fit.data.augment.three
    assert any(note.startswith("data.augment.three: False in place of True") for note in notes)
    with pytest.raises(ConfigError, match=r"data.augment.grey: 0.2 does not go with this run"):
        without_unfit(with_values(config, {"data.augment.grey": 0.2}))


def test_an_objective_for_rgb_is_rejected_before_the_run(cells: Path) -> None:
    from vitrail.config import validate

    config = with_values(recipe("small-msf"), {"data.uri": str(cells), "data.channels": 5})
    assert [p for p in validate(config) if p.startswith("data.channels: msf takes RGB of eight bits")]


def test_a_loader_for_rgb_is_rejected(cells: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.loader: device keeps RGB of eight bits; set host"):
        vitrail.train(settings(cells, tmp_path / "x", **{"data.loader": "device"}), quiet=True)


def first_conv(model: Classifier) -> torch.Tensor:
    return next(t for name, t in model.state_dict().items() if t.ndim == 4)


MODELS = {
    "vit_micro_28": {"depth": 1, "width": 32, "heads": 2},
    "xcit_t12_32": {"depth": 1, "width": 32, "heads": 2},
    "sot_7_32": {"depth": 1, "width": 32, "heads": 2},
    "cifar_resnet20": {},
    "timm:resnet18_32": {},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("channels", [1, 5])
def test_weights_for_rgb_are_adapted_to_other_channels(name: str, channels: int) -> None:
    options = MODELS[name]
    key = "in_chans" if name.startswith("timm:") else "channels"
    rgb, other = create_model(name, classes=2, **options), create_model(name, classes=2, **options, **{key: channels})
    notes = load_weights(other, rgb.state_dict())
    assert any(f"adapted from 3 to {channels} channels" in note for note in notes)
    kernel = first_conv(rgb).numpy()
    expected = kernel.sum(1, keepdims=True)
    if channels == 5:
        expected = kernel[:, [0, 1, 2, 0, 1]] * (3 / 5)
    np.testing.assert_allclose(first_conv(other).numpy(), expected, rtol=1e-6)
    size = other.preprocess.size
    assert other.eval()(torch.rand(2, channels, size, size)).shape == (2, 2)


def test_the_report_on_loaded_weights_names_the_adapted_convolution(cells: Path, tmp_path: Path) -> None:
    trunk = {"depth": 2, "width": 32, "heads": 2}
    write_tensors(tmp_path / "rgb.safetensors", create_model("vit_micro_28", classes=2, **trunk).state_dict())
    model = create_model("vit_micro_28", classes=2, weights=str(tmp_path / "rgb.safetensors"), channels=4, **trunk)
    told = "the first convolution adapted from 3 to 4 channels (repeated and scaled by 3/4)"
    assert told in model.stated["weights"]["loaded"]


@pytest.mark.slow
def test_twelve_bits_are_scaled_by_the_stated_maximum(cells: Path, tmp_path: Path) -> None:
    config = settings(cells, tmp_path / "x", **{"data.maximum": 4095.0, "optim.epochs": 1})
    model = vitrail.train(config, quiet=True).model
    assert model.preprocess.maximum == 4095
    assert model.preprocess.mean[0] == pytest.approx(49.5 / 4095, rel=0.02)


def test_check_of_the_command_line_reports_channels_and_depth(cells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["check", str(cells), "--channels", "5", "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("5 channels of 16 bits" in note for note in notes)


def test_a_model_of_other_channels_is_handed_to_timm_with_equal_logits() -> None:
    from vitrail.model.timm_weights import to_timm

    model = create_model("vit_micro_28", classes=2, channels=4, head="class_token", **MODELS["vit_micro_28"]).eval()
    images = torch.rand(2, 4, 28, 28)
    torch.testing.assert_close(to_timm(model)(images), model(images), rtol=1e-5, atol=1e-6)
