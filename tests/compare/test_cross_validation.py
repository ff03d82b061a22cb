"""A study with folds: every variant on every fold, paired by fold, judged on the fold and never on test."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import vitrail
from vitrail.compare.comparison import Comparison, Member, compare_members
from vitrail.compare.page import comparison_tables
from vitrail.compare.run import compare_study
from vitrail.compare.statistics import paired_interval
from vitrail.compare.study import Study, plan, read_study, study_from_mapping
from vitrail.config import RunConfig, from_mapping
from vitrail.data.open import open_data
from vitrail.engine.run_folder import RunFolder
from vitrail.measure.evaluator import StoredPredictions, read_predictions
from vitrail.recipes import recipe
from vitrail.run.protocols import evaluate_protocols
from vitrail.schema import ConfigError

URI = "synthetic:shapes?n=60&size=28&classes=3"


def base() -> RunConfig:
    settings = {
        "data": {"uri": URI, "batch": 16, "workers": 0, "check": "off"},
        "model": {"trunk": {"depth": 1, "width": 32, "heads": 2}},
        "optim": {"steps": 2, "warmup": 0},
        "engine": {"ema": 0, "evaluate_every": 0, "checkpoint_every": 0, "device": "cpu"},
    }
    return from_mapping(settings, recipe("demo"))


def study_of(folds: int = 3, seeds: tuple[int, ...] = (0, 1)) -> Study:
    variants = {"plain": {}, "wide": {"model": {"trunk": {"width": 48}}}}
    return Study("folded", base(), variants, seeds=seeds, folds=folds, evaluate={"knn": None})


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    place, study = tmp_path_factory.mktemp("studies"), study_of()
    for planned in plan(study, {}, place):
        vitrail.train(replace(planned.config, out=str(planned.path)), quiet=True)
    return compare_study(study, root=place, seconds=0, quiet=True)


def test_every_variant_is_trained_on_every_fold_with_every_seed(tmp_path: Path) -> None:
    planned = plan(study_of(), {}, tmp_path)
    assert [p.name for p in planned[:4]] == [f"{v}-seed0-fold{i}" for i in (1, 2) for v in ("plain", "wide")]
    assert len({p.path for p in planned}) == 12
    assert {(p.config.data.fold, p.config.data.judge) for p in planned} == {(f"{i}/3", "val") for i in (1, 2, 3)}


def test_without_folds_runs_are_what_they_were(tmp_path: Path) -> None:
    (planned,) = plan(Study("one", base(), {"plain": {}}, seeds=(0,)), {}, tmp_path)
    assert (planned.name, planned.config.data.fold, planned.config.data.judge) == ("plain-seed0", "", "test")


def test_runs_that_others_stand_on_learn_from_the_same_fold(tmp_path: Path) -> None:
    weights = {"model": {"weights": "run:start"}}
    study = Study("chain", base(), {"tuned": weights}, seeds=(0,), first={"start": {}}, folds=2)
    planned = {p.name: p for p in plan(study, {}, tmp_path)}
    assert planned["tuned-seed0-fold2"].needs == (planned["start-seed0-fold2"].path,)
    assert planned["start-seed0-fold2"].config.data.fold == "2/2"


def test_all_images_of_train_and_val_are_judged_once_and_none_of_test(folded: tuple[Comparison, Path]) -> None:
    data = open_data(URI)
    pooled = np.sort(np.concatenate([data["train"].index, data["val"].index]))
    members = folded[0].row("plain").members
    assert folded[0].split == "val"
    for seed in (0, 1):
        stored = [read_predictions(Path(m.path)) for m in members if m.seed == seed]
        judged = np.concatenate([s.index.numpy() for s in stored if s is not None])
        assert np.array_equal(np.sort(judged), pooled)
    for member in members:
        splits = {line["split"] for line in RunFolder(Path(member.path)).read_metrics()}
        assert "test" not in splits


def test_the_table_has_the_spread_over_folds_and_over_seeds(folded: tuple[Comparison, Path]) -> None:
    comparison, _ = folded
    row = comparison.row("plain")
    values = {(m.seed, m.fold): m.metrics["top1"] for m in row.members}
    assert row.spread is not None
    assert row.spread.mean == pytest.approx(np.mean(list(values.values())))
    table = np.array([[values[seed, f"{i}/3"] for i in (1, 2, 3)] for seed in (0, 1)])
    sets = comparison.to_json()["seeds"]["plain"]["sets"]
    assert sets["over folds"]["std"] == pytest.approx(table.mean(0).std(ddof=1))
    assert sets["over seeds"]["std"] == pytest.approx(table.mean(1).std(ddof=1))
    assert "knn" in row.means
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(comparison_tables(comparison))
    text = " ".join(console.export_text().split())
    assert "mean ± std runs points" in text
    assert "the mean of 6 runs" in text
    assert "plain over folds 3 " in text
    assert "plain over seeds 2 " in text
    assert any("folds share training images" in note for note in comparison.notes)


def test_protocols_are_evaluated_on_the_fold_too(folded: tuple[Comparison, Path]) -> None:
    member = folded[0].row("plain").members[0]
    on_fold, on_test = (
        evaluate_protocols(member.path, URI, ["knn"], split=split)[0]["knn"] for split in ("val", "test")
    )
    assert on_fold["numbers"]["knn"] != on_test["numbers"]["knn"]
    assert member.metrics["knn"] == on_fold["numbers"]["knn"]


def test_runs_are_paired_by_seed_and_fold(folded: tuple[Comparison, Path]) -> None:
    comparison, _ = folded
    rows = [{(m.seed, m.fold): m for m in comparison.row(name).members} for name in ("plain", "wide")]
    gains = [rows[1][key].metrics["top1"] - rows[0][key].metrics["top1"] for key in rows[0]]
    against = comparison.row("wide").against
    assert against is not None
    assert (against.seeds, against.difference) == (6, pytest.approx(np.mean(gains)))
    hits = []
    for seed in (0, 1):  # over the images of all folds
        pairs = [(rows[1][seed, f"{i}/3"].predictions, rows[0][seed, f"{i}/3"].predictions) for i in (1, 2, 3)]
        hits.append(np.concatenate([b.right.numpy().astype(int) - a.right.numpy().astype(int) for b, a in pairs]))
    assert against.interval == pytest.approx(paired_interval(np.stack(hits)))


def test_a_fold_whose_run_failed_leaves_no_interval() -> None:
    def member(variant: str, seed: int, fold: str) -> Member:
        index = torch.arange(4) + 4 * int(fold[0])
        stored = StoredPredictions(index, torch.zeros(4, dtype=torch.int64), index % 3, torch.eye(4, 3))
        return Member(variant, seed, f"{variant}{seed}{fold}", {"top1": 0.5}, "val", "d", fold=fold, predictions=stored)

    whole = [member(v, s, f) for v in ("a", "b") for s in (0, 1) for f in ("1/2", "2/2")]
    assert compare_members("x", whole, "a").row("b").against.interval is not None
    assert compare_members("x", whole[:-1], "a").row("b").against.interval is None


@pytest.mark.parametrize("folds", [1, -1, 2.5, True, "five"])
def test_what_is_no_number_of_folds_is_one_sentence(folds: object) -> None:
    with pytest.raises(ConfigError, match="is no number of folds"):
        study_from_mapping({"base": "demo", "variants": {"a": {}}, "folds": folds})


def test_folds_stand_in_the_file_of_a_study(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("base: demo\nvariants: {a: {}}\nfolds: 5\n")
    assert read_study(tmp_path / "s.yaml").folds == 5
    assert study_from_mapping(read_study(tmp_path / "s.yaml").to_mapping()).folds == 5
