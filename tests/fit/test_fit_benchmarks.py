"""The benchmarks that compare a finished `vitrail fit` with a grid and with a plain timm script, on a few images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from study_calls import script_module

from vitrail.data.open import open_data
from vitrail.fit import pictures, search
from vitrail.fit import run as fitting
from vitrail.fit.candidates import Candidate
from vitrail.fit.limits import Budget

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NETWORKS = [Candidate("vit_micro_28", 28), Candidate("timm:test_efficientnet", 28)]


@pytest.fixture(scope="module", autouse=True)
def short_search() -> Iterator[None]:
    """A few steps per training, no second seed, short measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FEWEST_STEPS", 3)
        patch.setattr(search, "CLOSE", 0.0)
        patch.setattr(pictures, "SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: script_module(BENCHMARKS / f"{name}.py") for name in ("fit_grid", "fit_timm")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a search over two networks, and its data: small pictures of three classes."""
    folder = tmp_path_factory.mktemp("benchmarks")
    rows = open_data("embedded:fashion")["train"]
    chosen = [i for i in range(len(rows)) if rows.labels[i] < 3][:180]
    pixels, labels = np.stack([np.asarray(rows.read(i)) for i in chosen]), rows.labels[chosen]
    parts = {"x_train": pixels[:140], "y_train": labels[:140], "x_test": pixels[140:], "y_test": labels[140:]}
    data = str(folder / "clothes.npz")
    np.savez(data, **parts, classes=np.array(["a", "b", "c"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "candidates_for", lambda _: NETWORKS)
        patch.setattr(fitting, "TEACHERS", {"small": "vit_micro_28"})
        patch.setattr(fitting, "ENOUGH_IMAGES", 0.01)
        fitting.fit(data, Budget(0.5), folder / "fit", minutes=0.02, weights="none", say=lambda _: None, quiet=True)
    return folder / "fit", data


def printed(script: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(script.__file__), *words, "--json"])
        script.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_the_grid_trains_every_form_of_every_candidate_once_and_keeps_the_best_on_val(
    scripts: dict[str, ModuleType],
    finished: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, data = finished
    monkeypatch.setattr(fitting, "TEACHERS", {"small": "vit_micro_28"})
    monkeypatch.setattr(fitting, "candidates_for", lambda _: NETWORKS)
    monkeypatch.setattr(fitting, "ENOUGH_IMAGES", 0.01)
    result = printed(scripts["fit_grid"], [str(folder), "--data", data], capsys)
    plain = ["vit_micro_28-28", "test_efficientnet-28"]
    expected = [*plain, "test_efficientnet-28-distilled", *(f"{name}-attention_pool" for name in plain)]
    assert sorted(trial["name"] for trial in result["trials"]) == sorted(expected)
    ours, grid = result["rows"]
    assert grid["val"] == max(trial["val"] for trial in result["trials"])
    assert ours["test"] == pytest.approx(json.loads((folder / "result.json").read_text())["top1"])
    assert result["difference"]["points"] == pytest.approx(100 * (ours["test"] - grid["test"]))
    assert result["difference"]["ratio"] == pytest.approx(ours["seconds"] / grid["seconds"])
    runs = sorted((folder / "studies").glob("run-*/metrics.jsonl"))
    texts = [run.read_text() for run in runs]
    assert printed(scripts["fit_grid"], [str(folder), "--data", data], capsys)["rows"][1] == grid
    assert [run.read_text() for run in sorted((folder / "studies").glob("run-*/metrics.jsonl"))] == texts


@pytest.mark.slow
def test_the_timm_script_trains_the_timm_networks_within_the_budget_and_compares_on_test(
    scripts: dict[str, ModuleType], finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = finished
    words = [str(folder), "--data", data, "--minutes", "0.05", "--batch", "20", "--workers", "0", "--device", "cpu"]
    result = printed(scripts["fit_timm"], words, capsys)
    assert [trial["name"] for trial in result["trials"]] == ["test_efficientnet-28"]
    assert result["trials"][0]["epochs"] > 0
    ours, plain = result["rows"]
    assert (ours["images"], plain["images"]) == (40, 40)
    assert result["difference"]["points"] == pytest.approx(100 * (ours["test"] - plain["test"]))


def test_a_difference_is_in_points_and_its_interval_holds_it(scripts: dict[str, ModuleType]) -> None:
    found = scripts["fit_grid"].difference([True] * 60 + [False] * 40, [True] * 50 + [False] * 50)
    assert found["points"] == pytest.approx(10.0)
    low, high = found["interval"]
    # 10 of 100 images differ: the standard error is 3 points.
    assert (low, high) == pytest.approx((10 - 5.9, 10 + 5.9), abs=1.2)


def test_a_folder_without_a_finished_search_gets_one_sentence(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name the folder of a finished search"):
        scripts["fit_grid"].read_fit(tmp_path)


@pytest.mark.parametrize("text", ["resnet18", "resnet18:", ":32", "resnet18:wide"])
def test_a_network_without_a_size_is_rejected_with_an_example(scripts: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(ValueError, match="use NAME:SIZE, as in resnet18:32"):
        scripts["fit_timm"].named(text)
