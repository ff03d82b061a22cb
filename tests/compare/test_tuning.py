"""Settings of a study that are chosen on val before its runs are trained, and several studies in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitrail.cli import run as command
from vitrail.compare.run import compare_study
from vitrail.compare.study import Study, read_study, smoke, study_from_mapping
from vitrail.compare.tuning import SettingsGrid
from vitrail.config import load_yaml
from vitrail.schema import ConfigError

SMALL: dict[str, Any] = {
    "recipe": "vit",
    "data": {"uri": "synthetic:shapes?n=60&size=28", "batch": 12, "workers": 0, "check": "off"},
    "model": {"name": "vit_micro_28", "trunk": {"depth": 1, "width": 16, "heads": 1}},
    "optim": {"steps": 3, "warmup": 0},
    "engine": {"device": "cpu", "evaluate_every": 0, "checkpoint_every": 0},
}
TUNED: dict[str, Any] = {
    "name": "tuned",
    "base": SMALL,
    "variants": {
        "plain": {},
        "flipped": {"data": {"augment": {"flip": 0.0}}},
    },
    "seeds": [4],
    "tune": {
        "by": "knn",
        "evaluate": "knn",
        "over": {"optim": {"steps": 2}},
        "grid": {"plain": {"optim.lr": [1e-4, 1e-2], "optim.clip": [2.0]}, "flipped": "plain"},
    },
}


def tuned(**changes: Any) -> Study:
    return study_from_mapping({**TUNED, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all studies, after a tuned one."""
    root = tmp_path_factory.mktemp("studies")
    compare_study(tuned(), root=root, jobs=1, seconds=0, quiet=True)
    return root


def best(root: Path, study: str, name: str) -> dict[str, Any]:
    """The settings of the candidate that was best by kNN on val, read from the table of the tuning study."""
    table = json.loads((root / study / "table.json").read_text())
    assert table["split"] == "val"
    rows = [row for row in table["rows"] if row["variant"].startswith(f"{name}-")]
    chosen = max(rows, key=lambda row: row["runs"][0]["metrics"]["knn"])
    assert [run["seed"] for run in chosen["runs"]] == [4]
    return load_yaml(root / study / "runs" / f"{chosen['variant']}-seed4")


def test_the_settings_that_are_best_on_val_are_trained(made: Path) -> None:
    rows = json.loads((made / "tuned-tuning" / "table.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["plain-lr=0.0001-clip=2.0", "plain-lr=0.01-clip=2.0"]
    chosen = best(made, "tuned-tuning", "plain")
    assert (chosen["optim"]["steps"], chosen["data"]["judge"]) == (2, "val")
    for name in ("plain", "flipped"):  # flipped takes the choice of plain
        trained = load_yaml(made / "tuned" / "runs" / f"{name}-seed4")
        assert [trained["optim"][k] for k in ("lr", "clip")] == [chosen["optim"]["lr"], 2.0]
        assert (trained["optim"]["steps"], trained["data"]["judge"]) == (3, "test")


def test_every_combination_of_a_grid_is_a_candidate() -> None:
    tuning = SettingsGrid(grid={"a": {"optim.lr": [0.1, 1], "optim.name": ["adam", "a:b"], "seed": [0]}})
    assert list(tuning.candidates("a").items())[-1] == (
        "a-lr=1-name=a_b-seed=0",
        {"optim": {"lr": 1, "name": "a:b"}, "seed": 0},
    )
    assert len(tuning.candidates("a")) == 4


@pytest.mark.slow
def test_what_stands_on_a_tuned_run_is_tuned_after_it(tmp_path: Path) -> None:
    taught = {"objective": {"kind": "distillation", "teacher": "run:plain:0"}}
    grid = {"plain": {"optim.lr": [1e-4, 1e-2]}, "taught": {"objective.temperature": [1.0, 3.0]}}
    study = tuned(variants={"plain": {}, "taught": taught}, tune={**TUNED["tune"], "grid": grid})
    compare_study(study, root=tmp_path, jobs=1, seconds=0, quiet=True)
    chosen = best(tmp_path, "tuned-tuning-2", "taught")
    teacher = (tmp_path / "tuned-tuning-2" / "runs" / "plain-seed0").resolve().name
    assert Path(chosen["objective"]["teacher"]).name == teacher
    assert load_yaml(tmp_path / teacher)["optim"]["lr"] == best(tmp_path, "tuned-tuning", "plain")["optim"]["lr"]
    trained = load_yaml(tmp_path / "tuned" / "runs" / "taught-seed4")
    assert trained["objective"]["temperature"] == chosen["objective"]["temperature"]


def test_the_table_names_the_choices_and_the_study_is_read_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = json.loads((made / "tuned" / "table.json").read_text())["notes"]
    assert any(n.startswith("plain-lr=") and "chosen from 2 by knn on val" in n for n in notes)
    again = read_study(made / "tuned")
    assert again.tune == tuned().tune
    before = {path: path.stat().st_mtime_ns for path in made.glob("run-*/model/*")}
    monkeypatch.setattr("vitrail.compare.run.evaluate_protocols", None)  # kept, not evaluated again
    compare_study(again, root=made, jobs=1, seconds=0, quiet=True)
    assert before == {path: path.stat().st_mtime_ns for path in made.glob("run-*/model/*")}


def test_a_smoke_run_tries_two_values_of_each_setting() -> None:
    grid = {"plain": {"optim.lr": [1e-4, 1e-3, 1e-2]}, "flipped": "plain"}
    small = smoke(tuned(tune={"grid": grid}))
    assert small.tune.grid == {"plain": {"optim.lr": [1e-4, 1e-3]}, "flipped": "plain"}


@pytest.mark.parametrize(
    ("tune", "problem"),
    [
        ({"grid": {"plane": {"optim.lr": [1]}}}, "tune.grid.plane: none of the runs (plain, flipped)"),
        ({"grid": {"plain": {"optim.rl": [1]}}}, "tune.grid.plain-rl=1.optim.rl"),
        ({"grid": {"plain": {"optim.lr": 1}}}, "tune.grid.plain: expected settings with a list of values each"),
        ({"grid": {"plain": "flipped"}}, "tune.grid.plain: nothing is tried for 'flipped'"),
        ({"grid": 3}, "tune.grid: expected settings, got 3"),
        ({"over": 3}, "tune.over: expected settings, got 3"),
        ({"gird": {}}, "tune.gird: no such setting; did you mean 'grid'"),
        ({"evaluate": ["kmn"]}, "tune.evaluate: no protocol 'kmn'; did you mean 'knn'"),
        (3, "tune.grid: expected settings, got 3"),
    ],
)
def test_a_tuning_that_does_not_fit_is_rejected_before_anything_runs(tune: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tuned(tune=tune)
    assert any(problem in text for text in caught.value.problems), caught.value.problems


def test_where_nothing_can_be_chosen_the_reason_is_given(tmp_path: Path) -> None:
    only: dict[str, Any] = {"variants": {"plain": {}}, "seeds": [0]}
    study = tuned(**only, tune={"by": "knm", "grid": {"plain": {"optim.lr": [1e-4]}}})
    with pytest.raises(ValueError, match=r"tune\.grid\.plain: no run has 'knm' on val"):
        compare_study(study, root=tmp_path, jobs=1, seconds=0, quiet=True)


@pytest.mark.slow
def test_a_candidate_that_diverges_loses(tmp_path: Path) -> None:
    tune = {"over": {"optim": {"steps": 40}}, "grid": {"plain": {"optim.lr": [1e17, 1e-3]}}}
    study = tuned(variants={"plain": {"data": {"augment": {"mixup": 0}}}}, tune=tune)
    comparison, folder = compare_study(study, root=tmp_path, jobs=1, seconds=0, quiet=True)
    assert not comparison.failures
    assert load_yaml(folder / "runs" / "plain-seed4")["optim"]["lr"] == 1e-3


def test_several_study_files_run_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, flip in (("first", 0.0), ("second", 0.5)):
        variants = {"plain": {}, "other": {"data": {"augment": {"flip": flip}}, "optim": {"lr": 1e-5}}}
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump({"base": SMALL, "variants": variants, "seeds": [0]}))
    flags = ["--out", str(tmp_path), "--jobs", "1", "--seconds", "0"]
    assert command(["compare", *map(str, paths), *flags]) == 0
    reports = [line for line in capsys.readouterr().out.splitlines() if line.startswith("report: ")]
    assert reports == [f"report: {tmp_path / name / 'report.html'}" for name in ("first", "second")]
    assert len(list(tmp_path.glob("run-*"))) == 3  # plain is shared


def test_no_study_is_run_where_another_file_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text(yaml.safe_dump({"base": SMALL, "variants": {"plain": {}}, "seeds": [0]}))
    wrong.write_text(yaml.safe_dump({"base": SMALL, "variants": {"plain": {"optim": {"rl": 1}}}}))
    assert command(["compare", str(right), str(wrong), "--out", str(tmp_path), "--seconds", "0"]) == 2
    assert "variants.plain.optim.rl" in capsys.readouterr().err
    assert not list(tmp_path.glob("run-*"))
