"""Studies in which one run stands on another, protocols besides accuracy, and a limit on the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitrail.cli import run as command
from vitrail.compare.jobs import StudyStopped
from vitrail.compare.run import compare_study, part_of
from vitrail.compare.study import Study, plan, read_study, smoke, study_from_mapping
from vitrail.config import load_yaml
from vitrail.schema import ConfigError

SMALL: dict[str, Any] = {
    "recipe": "vit",
    "data": {"uri": "synthetic:shapes?n=60&size=28", "batch": 12, "workers": 0, "check": "off"},
    "model": {"name": "vit_micro_28", "trunk": {"depth": 1, "width": 16, "heads": 1}},
    "optim": {"steps": 2, "warmup": 0},
    "engine": {"device": "cpu", "evaluate_every": 0, "checkpoint_every": 0},
}
TAUGHT = {"objective": {"kind": "distillation", "teacher": "run:teacher"}}
CHAIN: dict[str, Any] = {
    "name": "chain",
    "base": SMALL,
    "first": {
        "teacher": {"model": {"weights": "run:grand:0"}, "optim": {"steps": 3}},
        "grand": {"optim": {"steps": 1}},
    },
    "variants": {"alone": {}, "taught": TAUGHT, "tuned": {"model": {"weights": "run:alone"}}},
    "seeds": [0, 1],
}


def chain(**changes: Any) -> Study:
    return study_from_mapping({**CHAIN, **changes})


def test_a_run_stands_on_the_run_of_the_same_seed_and_comes_after_it(tmp_path: Path) -> None:
    runs = {(p.variant, p.seed): p for p in plan(chain(), {}, tmp_path)}
    order = list(runs)
    assert len(runs) == 2 * 3 + 2 + 1  # three variants and a teacher for each of two seeds, one grand
    for seed in (0, 1):
        teacher, taught = runs["teacher", seed], runs["taught", seed]
        assert taught.config.objective.teacher == str(teacher.path)  # type: ignore[union-attr]
        assert taught.needs == (teacher.path,)
        assert teacher.needs == (runs["grand", 0].path,)
        assert runs["tuned", seed].config.model.weights == str(runs["alone", seed].path)
        assert order.index(("grand", 0)) < order.index(("teacher", seed)) < order.index(("taught", seed))
    assert not runs["alone", 0].needs


def test_names_of_runs_do_not_depend_on_where_studies_are(tmp_path: Path) -> None:
    here, there = (plan(chain(), {}, tmp_path / name) for name in ("here", "there/deeper"))
    assert [p.path.name for p in here] == [p.path.name for p in there]
    longer = plan(chain(first={**CHAIN["first"], "grand": {"optim": {"steps": 2}}}), {}, tmp_path / "here")
    changed = {(a.variant, a.seed) for a, b in zip(here, longer, strict=True) if a.path != b.path}
    assert changed == {("grand", 0), *((name, s) for name in ("teacher", "taught") for s in (0, 1))}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"variants": {"a": {"model": {"weights": "run:teecher"}}}}, "run:teecher is none of the runs"),
        ({"variants": {"alone": {}, "b": {"model": {"weights": "run:teacher"}}}, "first": {}}, "none of the runs"),
        ({"variants": {"alone": {}}}, "first.teacher: no run stands on it; name it as run:teacher"),
        ({"first": {"alone": {}, **CHAIN["first"]}}, "first.alone: a variant has that name, too"),
        ({"first": {"teacher": {"optim": {"lr": "much"}}}}, "first.teacher.optim.lr"),
        ({"first": 3}, "first: expected names with settings"),
        ({"evaluate": ["kmn"]}, "evaluate: no protocol 'kmn'; did you mean 'knn'"),
        ({"evaluate": 3}, "evaluate: expected names of protocols"),
        (
            {"first": {"teacher": {"model": {"weights": "run:grand"}}, "grand": {"model": {"weights": "run:teacher"}}}},
            "stand on one another in a circle",
        ),
    ],
)
def test_what_does_not_fit_together_is_said_before_anything_runs(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chain(**changes)
    assert any(problem in text for text in caught.value.problems), caught.value.problems


def test_a_variant_may_begin_from_another_recipe() -> None:
    study = chain(
        first={}, variants={"alone": {}, "other": {"recipe": "small-deit", "optim": {"epochs": 5}}}, budget="none"
    )
    other = study.configs["other"]
    assert (other.recipe, other.optim.epochs, other.data.augment.mixup) == ("small-deit", 5, 0.8)
    assert other.data.uri == study.base.data.uri
    assert other.engine == study.base.engine
    with pytest.raises(ConfigError, match=r"variants\.a\.recipe: no recipe 'small-deet'"):
        chain(first={}, variants={"a": {"recipe": "small-deet"}})


def test_a_single_run_has_no_other_to_stand_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train vit --data synthetic:shapes?n=60&size=28 --model.name vit_micro_28 --model.weights run:teacher"
    assert command([*words.split(), "--out", str(tmp_path / "run")]) == 2
    assert "run:teacher names a run of a study file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a finished study, and that of all studies."""
    root = tmp_path_factory.mktemp("studies")
    study = chain(seeds=[0], evaluate={"knn": None})
    comparison, folder = compare_study(study, root=root, jobs=1, seconds=0, quiet=True)
    assert not comparison.failures
    assert [row.variant for row in comparison.rows] == ["alone", "taught", "tuned"]
    assert set(comparison.further()["knn"]) == {"alone", "taught", "tuned"}
    return folder, root


def test_a_chained_study_trains_in_order_and_compares_its_variants(made: tuple[Path, Path]) -> None:
    folder, root = made
    assert len(list(root.glob("run-*"))) == 5
    taught, teacher = (folder / "runs" / f"{name}-seed0" for name in ("taught", "teacher"))
    assert Path(load_yaml(taught)["objective"]["teacher"]).name == teacher.resolve().name
    assert set(json.loads((folder / "protocols.json").read_text())) == {
        str((folder / "runs" / f"{name}-seed0").resolve()) for name in CHAIN["variants"]
    }


def test_a_finished_study_is_read_again_and_repeats_nothing(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = made
    stamps = {p: p.stat().st_mtime_ns for p in root.glob("run-*/model/*")}
    monkeypatch.setattr("vitrail.compare.run.evaluate_protocols", None)  # kept, not evaluated again
    again = read_study(folder)
    assert again.first == CHAIN["first"]
    compare_study(again, root=root, jobs=1, seconds=0, quiet=True)
    assert stamps == {p: p.stat().st_mtime_ns for p in root.glob("run-*/model/*")}


def test_what_stands_on_a_failed_run_fails_with_its_reason(tmp_path: Path) -> None:
    lost = {"data": {"uri": str(tmp_path / "gone.npz")}}
    study = chain(seeds=[0], first={"teacher": lost}, variants={"alone": {}, "taught": TAUGHT})
    with pytest.raises(FileNotFoundError, match=r"gone\.npz"):  # known before anything runs
        compare_study(study, root=tmp_path, jobs=1, seconds=0, quiet=True)
    broken = {"optim": {"lr": 1e17, "steps": 40}, "data": {"augment": {"mixup": 0}}}
    study = chain(seeds=[0], first={"teacher": broken}, variants={"alone": {}, "taught": TAUGHT})
    comparison, _ = compare_study(study, root=tmp_path, jobs=1, seconds=0, quiet=True)
    (failure,) = comparison.failures
    assert failure.variant == "taught"
    assert "which failed: " in failure.reason


def test_a_study_stops_after_its_minutes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StudyStopped):
        compare_study(chain(), root=tmp_path / "python", minutes=0, seconds=0, quiet=True)
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**CHAIN, "seeds": [0]}))
    assert command(["compare", str(path), "--out", str(tmp_path), "--minutes", "0", "--seconds", "0"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_smoke_run_of_a_chain_is_a_chain(tmp_path: Path) -> None:
    small = smoke(chain())
    assert {p.variant for p in plan(small, {}, tmp_path)} == {"grand", "teacher", "alone", "taught", "tuned"}
    assert {p.config.optim.steps for p in plan(small, {}, tmp_path)} == {2}


def test_a_part_of_a_study_plans_the_same_runs_and_what_they_stand_on(tmp_path: Path) -> None:
    whole = {(p.variant, p.seed): p.path for p in plan(chain(baseline="taught"), {}, tmp_path)}
    part = part_of(chain(baseline="taught"), ["tuned"], [1])
    runs = {(p.variant, p.seed): p.path for p in plan(part, {}, tmp_path)}
    assert runs == {key: whole[key] for key in [("alone", 1), ("tuned", 1)]}
    assert (part.name, part.baseline, tuple(part.variants), tuple(part.first)) == (
        "chain-tuned-seed1",
        "tuned",
        ("tuned",),
        ("alone",),
    )
    both = part_of(chain(baseline="taught"), ["taught", "alone"])
    assert (both.baseline, tuple(both.variants), tuple(both.seeds)) == ("taught", ("alone", "taught"), (0, 1))
    further = part_of(chain(), seeds=[7])
    assert {p.seed for p in plan(further, {}, tmp_path)} == {7, 0}  # run:grand:0
    assert tuple(further.variants) == ("alone", "taught", "tuned")


@pytest.mark.parametrize(
    ("changes", "only", "problem"),
    [
        ({}, ["taugth"], "only: 'taugth' is none of the variants (alone, taught, tuned); did you mean 'taught'?"),
        (
            {"tune": {"grid": {"alone": {"optim.lr": [1e-3]}, "taught": "alone"}}},
            ["taught"],
            "only: taught takes the settings that are chosen for alone; name that, too",
        ),
        (
            {"budget": "macs", "first": {}, "variants": {"alone": {}, "wide": {"model": {"trunk": {"width": 32}}}}},
            ["wide"],
            "only: lengths follow from the cost of the baseline, alone; name it, too",
        ),
    ],
)
def test_a_part_that_cannot_stand_alone_is_one_sentence(changes: Any, only: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        part_of(chain(**changes), only)
    assert raised.value.problems == [problem]


def test_the_command_trains_a_part_and_the_whole_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "chain.yaml", ["--out", str(tmp_path / "runs"), "--seconds", "0", "--json"]
    file.write_text(yaml.safe_dump(CHAIN))
    assert command(["compare", str(file), "--only", "tuned", "--seeds", "0", *out]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "chain-tuned-seed0"
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("run-*/metrics.jsonl")}
    assert len(made) == 2
    assert command(["compare", str(file), "--seeds", "0", *out]) == 0
    capsys.readouterr()
    assert len(list((tmp_path / "runs").glob("run-*/metrics.jsonl"))) == 5
    assert made == {path: path.stat().st_mtime_ns for path in made}  # not trained again
