"""Regression: values of tables and arrays, their metrics, and runs that predict in the units of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping
from vitrail.data.augment.mixing import draw_mix, mix
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.data.open import open_data
from vitrail.learn.config import RegressionConfig
from vitrail.learn.regression import Regression
from vitrail.measure.evaluator import Loaders, Predictions
from vitrail.measure.parity import evaluate_regression, regression_figures
from vitrail.model.build import create_model
from vitrail.recipes import recipe, with_values
from vitrail.run.preflight import without_unfit
from vitrail.schema import ConfigError

TRUNK = {"depth": 1, "width": 32, "heads": 2}


def brightness(images: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Noise of another mean brightness for every image, and that brightness in other units."""
    random = np.random.default_rng(0)
    level = random.uniform(40, 200, images)
    pixels = np.clip(random.normal(level[:, None, None, None], 20, (images, 28, 28, 3)), 0, 255).astype(np.uint8)
    return pixels, 1000 + 5 * level


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, (pixels, values) = tmp_path_factory.mktemp("values") / "light.npz", brightness()
    np.savez(path, x_train=pixels[:240], y_train=values[:240], x_test=pixels[240:], y_test=values[240:])
    return path


def settings(data: Path, out: Path, **changes: Any) -> RunConfig:
    values = {"data.uri": str(data), "data.batch": 24, "data.workers": 0, "engine.device": "cpu", "out": str(out)}
    values |= {"model.trunk": TRUNK, "optim.epochs": 5, "objective": RegressionConfig()}
    return with_values(recipe("demo"), {**values, **changes})


@pytest.fixture(scope="module")
def run(arrays: Path, tmp_path_factory: pytest.TempPathFactory) -> vitrail.Run:
    return vitrail.train(settings(arrays, tmp_path_factory.mktemp("runs") / "light"), quiet=True)


def table(folder: Path, header: str = "path,value", cells: tuple[str, ...] = ("1.5", "-2", "3e2", "4")) -> Path:
    from PIL import Image

    for i in range(len(cells)):
        Image.new("RGB", (8, 8), (i, i, i)).save(folder / f"{i}.png")
    (folder / "t.csv").write_text("\n".join([header, *(f"{i}.png,{cell}" for i, cell in enumerate(cells))]) + "\n")
    return folder / "t.csv"


def whole(uri: str) -> Any:
    return open_data(uri, val_fraction=0.0, test_fraction=0.0)


def test_a_column_of_values_is_read_as_numbers(tmp_path: Path) -> None:
    data = whole(str(table(tmp_path)))
    assert data.numeric
    assert data["train"].values.tolist() == [1.5, -2.0, 300.0, 4.0]


def test_another_column_is_named_in_the_uri(tmp_path: Path) -> None:
    assert whole(f"{table(tmp_path, 'path,age')}?value=age")["train"].values.tolist() == [1.5, -2.0, 300.0, 4.0]


def test_a_label_next_to_a_value_stays_the_label_unless_the_uri_says_otherwise(tmp_path: Path) -> None:
    path = table(tmp_path, "path,label,value", ("a,1", "b,2", "a,3", "b,4"))
    assert not whole(str(path)).numeric
    assert whole(f"{path}?value=value")["train"].values.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_cells_that_are_no_finite_numbers_are_listed_with_their_lines(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)2 faults.*line 3: value 'nan'.*line 4: value 'tall' is no finite number"
    ):
        whole(str(table(tmp_path, cells=("1", "nan", "tall", "4"))))


def test_float_labels_of_arrays_are_values(arrays: Path) -> None:
    data = open_data(arrays)
    order = data["train"].index
    np.testing.assert_allclose(data["train"].values, brightness()[1][order], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_those_of_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    true = random.normal(50, 9, 200)
    predicted = true + random.normal(0, 4, 200)
    tensors = torch.arange(200), torch.from_numpy(true), torch.from_numpy(predicted)[:, None]
    numbers = regression_figures(Predictions(*tensors)).scalars()
    assert numbers["mae"] == pytest.approx(mean_absolute_error(true, predicted), abs=1e-6)
    assert numbers["rmse"] == pytest.approx(mean_squared_error(true, predicted) ** 0.5, abs=1e-6)
    assert numbers["r2"] == pytest.approx(r2_score(true, predicted), abs=1e-6)


def test_intervals_are_about_as_wide_as_theory_says() -> None:
    error = np.random.default_rng(0).normal(0, 1, 2000)
    zeros = torch.from_numpy(np.linspace(0, 1, 2000))
    figures = regression_figures(
        Predictions(torch.arange(2000), zeros, zeros[:, None] + torch.from_numpy(error)[:, None])
    )
    numbers = figures.scalars()
    half = 1.96 * np.abs(error).std() / 2000**0.5
    assert numbers["mae_high"] - numbers["mae_low"] == pytest.approx(2 * half, rel=0.15)


def test_the_evaluator_gives_metrics_in_the_units_of_the_data() -> None:
    values, images = np.array([3.0, 5.0, 10.0], np.float32), torch.rand(3, 3, 28, 28)
    model = create_model("vit_micro_28", classes=["value"], **TRUNK).eval()
    Regression(model, RegressionConfig(), values)
    target = torch.from_numpy(values)
    batch = Batch((images,), target, target, torch.arange(3))
    numbers = evaluate_regression(model, Loaders(["value"], {"val": [batch]}))["numbers"]
    with torch.inference_mode():
        predicted = model(images)[:, 0].numpy() * values.std() + values.mean()
    assert numbers["mae"] == pytest.approx(mean_absolute_error(values, predicted), rel=1e-5)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_the_loss_is_of_standardised_values(loss: str) -> None:
    values = np.array([10.0, 14.0, 18.0, 30.0], np.float32)
    model = create_model("vit_micro_28", classes=["value"], **TRUNK).eval()
    objective = Regression(model, RegressionConfig(loss=loss), values)  # type: ignore[arg-type]
    images, target = torch.rand(4, 3, 28, 28), torch.from_numpy(values)
    standard = torch.from_numpy((values - values.mean()) / values.std())
    wanted = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}[loss](model(images)[:, 0], standard)
    given = objective(Batch((images,), target, target, torch.arange(4)))["loss"]
    torch.testing.assert_close(given, wanted)


def test_predictions_are_in_the_units_of_the_data() -> None:
    values = np.array([10.0, 14.0, 18.0, 30.0], np.float32)
    model = create_model("vit_micro_28", classes=["value"], **TRUNK).eval()
    Regression(model, RegressionConfig(), values)
    image = np.random.default_rng(0).integers(0, 256, (28, 28, 3)).astype(np.uint8)
    output = float(model(torch.from_numpy(image).permute(2, 0, 1)[None].contiguous()).detach())
    (prediction,) = model.predict(image)
    assert prediction.value == pytest.approx(output * float(values.std()) + 18.0, rel=1e-5)
    assert prediction.to_json() == {"value": prediction.value}


def test_mixup_mixes_values_as_it_mixes_images() -> None:
    config, values = AugmentConfig(mixup=1.0), torch.tensor([0.0, 10.0, 20.0, 40.0])
    images = values.view(4, 1, 1, 1).expand(4, 3, 2, 2)
    mixed, target = mix(images, values, classes=1, config=config, seed=0, step=5)
    drawn = draw_mix(config, 0, 5, 2, 2)
    assert drawn is not None
    assert 0 < drawn.share < 1
    torch.testing.assert_close(target[:, 0], mixed[:, 0, 0, 0])


@pytest.mark.slow
def test_brightness_is_learned_in_seconds(run: vitrail.Run) -> None:
    assert run.split == "test"
    assert run.figures.scalars()["r2"] > 0.8


@pytest.mark.slow
def test_a_saved_model_predicts_the_values_of_its_images(run: vitrail.Run) -> None:
    pixels, values = brightness()
    predicted = [p.value for p in vitrail.load(run.path).predict(pixels[240:])]
    assert r2_score(values[240:], predicted) == pytest.approx(run.figures.scalars()["r2"], abs=1e-4)


@pytest.mark.slow
def test_the_report_has_a_parity_plot_in_place_of_a_confusion_matrix(run: vitrail.Run) -> None:
    page = run.report.read_text(encoding="utf-8")
    assert 'id="parity-plot"' in page
    assert page.count('class="spot v0"') == 60
    assert "onfusion matrix" not in page.partition("<body>")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "RUN", "--calibrate"],
        ["evaluate", "RUN", "--protocol", "knn"],
        ["evaluate", "RUN", "RUN", "--ensemble"],
        ["evaluate", "RUN", "--classes", "a", "b"],
        ["predict", "RUN", "IMAGE", "--coverage", "0.9"],
        ["inspect", "RUN"],
        ["export", "RUN", "OUT.onnx", "--int8"],
        ["export", "RUN", "OUT.onnx", "--with_predict"],
        ["export", "RUN", "hf:OUT"],
    ],
)
def test_commands_of_classes_reject_the_run_in_one_sentence(
    run: vitrail.Run, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (28, 28)).save(tmp_path / "i.png")
    names = {"RUN": str(run.path), "IMAGE": str(tmp_path / "i.png")}
    call = [names.get(word, word.replace("OUT", str(tmp_path / "out"))) for word in words]
    assert command(call) != 0
    error = capsys.readouterr().err.strip()
    assert "it needs classes, and this model predicts values" in error
    assert "\n" not in error


@pytest.mark.slow
def test_evaluate_and_predict_print_values(
    run: vitrail.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.fromarray(brightness()[0][250]).save(tmp_path / "i.png")
    assert command(["predict", str(run.path), str(tmp_path / "i.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == pytest.approx(brightness()[1][250], abs=150)
    assert command(["evaluate", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mae"] == pytest.approx(run.figures.scalars()["mae"], rel=1e-4)


def test_values_without_regression_are_one_sentence(arrays: Path, tmp_path: Path) -> None:
    config = settings(arrays, tmp_path / "x", objective=RunConfig().objective)
    with pytest.raises(ValueError, match=r"has values to predict, and no classes; set --objective\.kind regression"):
        vitrail.train(config, quiet=True)


def test_regression_without_values_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="regression needs values, and synthetic:shapes has classes"):
        vitrail.train(settings(Path("synthetic:shapes"), tmp_path / "x"), quiet=True)


def test_settings_of_classes_are_rejected_by_name(arrays: Path, tmp_path: Path) -> None:
    changes = {"data.sampling": "balanced", "data.augment.cutmix": 0.7, "evaluators": ("knn",)}
    with pytest.raises(ConfigError) as raised:
        without_unfit(settings(arrays, tmp_path / "x", **changes))
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "data.sampling",
        "data.augment.cutmix",
        "evaluators",
    ]


def test_label_smoothing_is_no_setting_of_regression() -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        from_mapping({"objective": {"kind": "regression", "smoothing": 0.1}})


def test_a_head_of_several_classifiers_is_rejected() -> None:
    model = create_model("vit_micro_28", classes=["value"], head="distilled", **TRUNK)
    with pytest.raises(ValueError, match="regression needs a head with one classifier"):
        Regression(model, RegressionConfig(), np.arange(4.0))


def test_train_with_such_data_alone_chooses_regression(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.run.choose import choose_run

    config, (found, _) = choose_run(str(arrays), {})
    assert config.objective == RegressionConfig()
    assert "values to predict" in found
    assert choose_run(str(arrays), {"objective": {"loss": "l1"}})[0].objective == RegressionConfig(loss="l1")
    command(["check", str(arrays)])
    assert "images, values: " in capsys.readouterr().out


def test_values_are_not_packed(arrays: Path, tmp_path: Path) -> None:
    from vitrail.data.open import open_source
    from vitrail.data.pack import pack

    with pytest.raises(ValueError, match="has values to predict, and packed data hold classes"):
        pack(open_source(str(arrays)), tmp_path / "packed")


@pytest.mark.slow
def test_the_onnx_file_gives_values_in_the_units_of_the_data(run: vitrail.Run, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert command(["export", str(run.path), str(tmp_path / "m.onnx")]) == 0
    pixels = brightness()[0][240:244]
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    values = session.run(["values"], {"images": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))})[0]
    wanted = [p.value for p in vitrail.load(run.path).predict(pixels)]
    np.testing.assert_allclose(values[:, 0], wanted, rtol=1e-4)
