"""Studies: what is missing is run, nothing is run twice, what fails is a row; reports; sweeps of evaluate."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import field, fields, make_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

import vitrail
from vitrail.cli import run as vitrail_command
from vitrail.compare import budgets
from vitrail.compare.comparison import Comparison, Failure, Member, Price, compare_members
from vitrail.compare.jobs import failure_reason
from vitrail.compare.page import comparison_tables, disagreement_chart, gains_chart, render_comparison, verdict
from vitrail.compare.run import compare_runs, compare_study
from vitrail.compare.study import Study, plan, read_study, run_folder, run_hash, study_from_mapping
from vitrail.config import ConfigError, RunConfig, from_mapping
from vitrail.engine.run_folder import RunFolder
from vitrail.files import write_text
from vitrail.measure.evaluator import StoredPredictions, read_predictions
from vitrail.recipes import recipe
from vitrail.report.charts import curves_chart
from vitrail.report.pareto import Point, pareto_chart
from vitrail.run.evaluate import sweep
from vitrail.schema import plain

TINY = {
    "recipe": "demo",
    "data": {"uri": "synthetic:shapes?n=120&size=28&classes=3", "batch": 16, "workers": 0, "check": "off"},
    "model": {"trunk": {"depth": 1, "width": 32, "heads": 2}},
    "optim": {"steps": 4, "warmup": 0},
    "engine": {"ema": 0, "evaluate_every": 0.2, "log_every": 1, "device": "cpu"},
}
WIDER = {"model": {"trunk": {"width": 48}}}


def base() -> RunConfig:
    return from_mapping(TINY, recipe("demo"))


def state(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a run."""
    files = [p for p in run.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


# A real study, killed and continued

BEGIN = """
import sys
from vitrail.compare.run import compare_study
compare_study(sys.argv[1], root=sys.argv[2], jobs=2, seconds=0)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, Path]:
    """A study of 2 variants x 2 seeds whose runs are there already, made in this process to save time."""
    place = tmp_path_factory.mktemp("studies")
    study = Study("tiny", base(), {"plain": {}, "wide": WIDER}, seeds=(0, 1))
    for one in plan(study, {}, place):
        vitrail.train(replace(one.config, out=str(one.path)), quiet=True)
    found, folder = compare_study(study, root=place, seconds=0, quiet=True)
    return found, folder, place


@pytest.mark.slow
def test_a_killed_study_goes_on_without_repeating_what_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({"base": TINY, "variants": {"plain": {}, "wide": WIDER}, "seeds": 2}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, str(file), str(tmp_path)], env=environment, stderr=subprocess.DEVNULL
    )
    patience = time.monotonic() + 240
    done: list[Path] = []
    while not done and time.monotonic() < patience and process.poll() is None:
        done = [p for p in tmp_path.glob("run-*") if RunFolder(p).finished]
        time.sleep(0.05)
    process.kill()  # its children go on by themselves, and are waited for
    process.wait()
    assert 1 <= len(done) < 4
    while any(RunFolder(p).busy for p in done):  # nobody writes there any more
        time.sleep(0.05)
    before = {p: state(p) for p in done}
    found, folder = compare_study(file, root=tmp_path, jobs=2, seconds=0, quiet=True)
    assert {p: state(p) for p in done} == before
    assert [(row.variant, [m.seed for m in row.members]) for row in found.rows] == [("plain", [0, 1]), ("wide", [0, 1])]
    assert found.failures == []
    assert len(list(tmp_path.glob("run-*"))) == 4
    assert {p.name for p in folder.iterdir()} >= {"study.yaml", "table.json", "report.html", "runs"}


def test_a_finished_study_runs_nothing(finished) -> None:
    _, folder, place = finished
    before = {p.name: state(p) for p in place.glob("run-*")}
    again, _ = compare_study(folder, root=place, seconds=0, quiet=True)  # by its own folder
    assert {p.name: state(p) for p in place.glob("run-*")} == before
    assert again.name == "tiny"


def test_links_lead_to_runs_by_name(finished) -> None:
    found, folder, place = finished
    for row in found.rows:
        for one in row.members:
            link = folder / "runs" / f"{row.variant}-seed{one.seed}"
            assert link.resolve() == (place / Path(one.path).name).resolve()


def test_a_second_study_shares_runs_and_a_failing_variant_is_a_row(finished) -> None:
    _, _, place = finished
    before = {p.name: state(p) for p in place.glob("run-*")}
    broken = {"model": {"trunk": {"mixer": "linear_patches"}}}  # cannot carry the class token
    study = Study("other", base(), {"plain": {}, "broken": broken}, seeds=(1,))
    found, folder = compare_study(study, root=place, seconds=0, quiet=True)
    assert {p.name: state(p) for p in place.glob("run-*")} == before
    assert found.row("plain").spread.count == 1
    (failure,) = found.failures
    assert (failure.variant, failure.seed) == ("broken", 1)
    assert "a class token would learn nothing" in failure.reason
    assert "a class token would learn nothing" in (folder / "report.html").read_text()
    assert verdict(found).endswith("1 run failed.")


def test_the_table_is_json_with_figures_of_the_runs_themselves(finished) -> None:
    _, folder, place = finished
    told = json.loads((folder / "table.json").read_text())
    assert told["baseline"] == "plain"
    assert told["figure"] == "top1"
    for row in told["rows"]:
        assert row["price"]["macs"] > 0
        for run in row["runs"]:
            lines = [json.loads(t) for t in (place / Path(run["path"]).name / "metrics.jsonl").read_text().splitlines()]
            assert run["top1"] == lines[-1]["top1"]
            assert lines[-1]["final"]
    assert told["disagreement"]["variants"] == ["plain", "wide"]
    assert set(told["class_gains"]) == {"wide"}
    assert set(told["rows"][1]["against"]) >= {"difference", "interval", "p_seeds", "p_images", "clear"}


def test_stored_predictions_are_those_of_the_stored_model(finished) -> None:
    found, _, _ = finished
    path = Path(found.rows[0].members[0].path)
    stored = read_predictions(path)
    _, again, _ = vitrail.evaluate(path, TINY["data"]["uri"], device="cpu")
    assert stored.index.tolist() == again.index.tolist()
    assert stored.guess.tolist() == again.logits.argmax(1).tolist()
    # Half precision has eleven bits.
    torch.testing.assert_close(stored.logits.float(), again.logits, rtol=2**-10, atol=1e-4)


def test_finished_runs_are_compared_and_seeds_of_one_recipe_are_one_row(finished, tmp_path: Path) -> None:
    found, _, _ = finished
    paths = [m.path for row in found.rows for m in row.members]
    made, folder = compare_runs(paths, out=tmp_path / "c", baseline=paths[2], seconds=0, quiet=True)
    assert [len(row.members) for row in made.rows] == [2, 2]
    assert made.baseline == made.rows[1].variant
    assert made.rows[0].spread == found.rows[0].spread
    assert (folder / "report.html").is_file()


def test_further_test_sets_are_judged_once(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, _ = finished
    paths = [m.path for m in found.rows[0].members]
    other = "synthetic:shapes?n=60&size=28&classes=3&seed=1"
    made, _ = compare_runs(paths, out=tmp_path / "c", test_sets=[other], seconds=0, quiet=True)
    figures, _, _ = vitrail.evaluate(paths[0], other)
    assert made.rows[0].members[0].elsewhere == {other: figures.scalars()["top1"]}
    assert set(next(iter(made.seed_study.values()))["sets"]) == {"test", "val", other}
    monkeypatch.setattr("vitrail.compare.run.evaluate", None)  # nothing is evaluated again
    compare_runs(paths, out=tmp_path / "c", test_sets=[other], seconds=0, quiet=True)


def test_the_command_compares_runs_as_table_and_as_json(
    finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, _ = finished
    paths = [row.members[0].path for row in found.rows]
    words = [*paths, "--out", str(tmp_path / "c"), "--seconds", "0"]
    assert vitrail_command(["compare", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(tmp_path / "c" / "report.html")
    assert [len(row["runs"]) for row in told["rows"]] == [1, 1]
    assert vitrail_command(["compare", *words]) == 0
    out = capsys.readouterr().out
    assert "95 % interval" in out
    assert "With one seed" in out
    assert max(map(len, out.splitlines())) <= 80 or str(tmp_path) in max(out.splitlines(), key=len)


def test_the_command_takes_the_folder_of_a_study(finished, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, place = finished
    words = [str(folder), "--seconds", "0", "--json"]
    assert vitrail_command(["compare", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(folder)
    assert {Path(run["path"]).parent for row in told["rows"] for run in row["runs"]} == {place}


def test_an_unfinished_run_is_refused_with_what_to_do(finished, tmp_path: Path) -> None:
    found, _, _ = finished
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_text("seed: 1")
    with pytest.raises(FileNotFoundError, match="has not finished; continue it with"):
        compare_runs([found.rows[0].members[0].path, tmp_path / "half"], seconds=0)
    with pytest.raises(ValueError, match="at least two finished runs"):
        compare_runs([tmp_path / "half"])


# What a study is


def test_a_name_depends_on_what_counts_and_not_on_the_machine() -> None:
    config = base()
    same = from_mapping(
        {"out": "x", "data": {"workers": 3}, "engine": {"device": "cuda:1", "keep": 5, "checkpoint_every": 0}}, config
    )
    assert run_hash(same) == run_hash(config)
    for change in ({"seed": 1}, {"optim": {"lr": 0.5}}, {"data": {"augment": {"flip": 0.1}}}, {"engine": {"ema": 0.5}}):
        assert run_hash(from_mapping(change, config)) != run_hash(config)
    assert run_hash(replace(config, seed=7), seed=False) == run_hash(config, seed=False)


def test_a_setting_that_is_added_later_renames_no_run() -> None:
    later = make_dataclass("Later", [("novelty", int, field(default=3))], bases=(RunConfig,), frozen=True)
    same = {one.name: getattr(base(), one.name) for one in fields(RunConfig)}
    assert run_hash(later(**same)) == run_hash(base())
    assert run_hash(later(**same, novelty=4)) != run_hash(base())


def test_a_name_is_made_of_choices_alone() -> None:
    chosen = {
        "seed": 3,
        "data": {"augment": {"flip": 0.25}},
        "model": {"name": "deit_small", "trunk": {"depth": 2}},
        "objective": {"kind": "distillation", "teacher": "timm:resnet18"},
    }
    text = json.dumps(chosen, sort_keys=True)
    assert run_hash(from_mapping(chosen)) == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert run_hash(RunConfig()) == hashlib.sha256(b"{}").hexdigest()[:12]


def test_a_run_of_other_defaults_is_not_shared(tmp_path: Path) -> None:
    config = base()
    first = run_folder(config, tmp_path)
    stored = plain(replace(config, out="elsewhere"))
    del stored["optim"]["clip"]  # the run is older than this setting
    stored["data"] |= {"workers": 5, "loader": "host"}  # of its machine; what auto became there
    write_text(first / "config.yaml", yaml.safe_dump(stored))
    assert run_folder(config, tmp_path) == first
    stored["optim"]["betas"] = [0.5, 0.6]  # what was the default then
    write_text(first / "config.yaml", yaml.safe_dump(stored))
    assert run_folder(config, tmp_path) == first.with_name(f"{first.name}-2")


def test_a_variant_keeps_what_the_base_overrides() -> None:
    study = Study("s", base(), {"wide": WIDER}, seeds=(0,))
    assert study.configs["wide"].model.trunk == {"depth": 1, "width": 48, "heads": 2}


def test_a_study_survives_its_own_file(tmp_path: Path) -> None:
    from vitrail.compare.study import write_study

    study = Study("s", base(), {"plain": {}, "wide": WIDER}, seeds=(3, 5), budget="macs", baseline="wide")
    again = read_study(write_study(study, tmp_path))
    assert again == study
    assert [p.path for p in plan(again, {}, tmp_path)] == [p.path for p in plan(study, {}, tmp_path)]


def test_a_study_made_in_python_is_named_by_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_study.py").write_text(
        "from vitrail.compare.study import Study\nfrom vitrail.recipes import recipe\n"
        "study = Study('mine', recipe('demo'), {'a': {}}, seeds=(0,))\nother = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert read_study("my_study:study").name == "mine"
    for source, sentence in (
        ("my_study:other", "no vitrail.compare.study.Study"),
        ("my_study:none", "has no 'none'"),
        ("no_such_module:study", "cannot import"),
        (str(tmp_path / "my_study.py"), "a study file is YAML"),
        (str(tmp_path / "absent.yaml"), "no study at"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(sentence)):
            read_study(source)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"variants": {"a": {"optim": {"epoch": 3}}}},
            "variants.a.optim.epoch: no such setting; did you mean 'epochs'",
        ),
        ({"variants": {"a": {}, "b": 3}}, "variants.b: expected settings"),
        ({"variants": {"a": {"seed": 3}}}, "variants.a.seed: a study sets it"),
        ({"variants": {"a": {}, "b": {"data": {"workers": 2}}}}, "variants.b: the same runs as a"),
        ({"variants": {"a/b": {}}}, "becomes a file name"),
        ({"variants": {}}, "name at least one"),
        ({"variants": {"a": {}, "b": {"optim": {"steps": 9}}}}, "use none to let variants differ"),
        ({"budget": "macs", "variants": {"a": {}, "b": {"optim": {"epochs": 9}}}}, "budget macs sets it"),
        ({"budget": "tme"}, "did you mean 'time'"),
        ({"seeds": 0}, "at least one is needed"),
        ({"seeds": [1, 1]}, "given twice"),
        ({"seeds": [-1]}, "no whole number"),
        ({"baseline": "plan"}, "baseline: 'plan' is none of the variants (plain); did you mean 'plain'"),
        ({"name": "run-x"}, "becomes a folder"),
        ({"seed": 3}, "seed: no such setting of a study; did you mean 'seeds'"),
        ({"base": "demoo"}, "did you mean 'demo'"),
        ({"base": {"optim": {"lr": -1}}}, "base.optim.lr"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_in_words(changes, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        study_from_mapping({"name": "s", "base": TINY, "variants": {"plain": {}}, "seeds": 2} | changes)
    assert any(sentence in problem for problem in error.value.problems), error.value.problems


def test_all_problems_of_a_study_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        study_from_mapping({"base": TINY, "variants": {"a": {"optim": {"lr": -1}}}, "seeds": 0, "baseline": "b"})
    assert len(error.value.problems) == 3


# Budgets


def test_equal_macs_spend_the_same(tmp_path: Path) -> None:
    study = Study("s", base(), {"plain": {}, "wide": {"model": {"trunk": {"width": 64}}}}, seeds=(0,), budget="macs")
    lengths, said = budgets.lengths_of(study, tmp_path)
    options = {"classes": 3, "depth": 1, "heads": 2}
    narrow, wide = (vitrail.cost(vitrail.create_model("vit_micro_28", width=w, **options)).macs for w in (32, 64))
    assert lengths == {"wide": {"steps": round(4 * narrow / wide)}}
    assert said["plain"] == "4 steps"
    assert plan(study, lengths, tmp_path)[1].config.optim.steps == lengths["wide"]["steps"]


def test_equal_time_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(base(), optim=replace(base().optim, steps=None, epochs=6.0))
    study = Study("s", config, {"plain": {}, "wide": WIDER}, seeds=(0,), budget="time")
    rates = {32: 300.0, 48: 100.0}
    monkeypatch.setattr(budgets, "probe", lambda c: rates[c.model.trunk["width"]])
    lengths, said = budgets.lengths_of(study, tmp_path)
    assert lengths == {"wide": {"epochs": 2.0}}  # a third of the speed, a third of the epochs
    assert said["wide"] == "2 epochs (0.333 x)"
    monkeypatch.setattr(budgets, "probe", None)
    assert budgets.lengths_of(replace(study, name="another"), tmp_path)[0] == lengths


def test_a_baseline_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    config = replace(base(), data=replace(base().data, uri=str(tmp_path / "nowhere")))
    study = Study("s", config, {"plain": {}}, seeds=(0,), budget="macs")
    with pytest.raises(ValueError, match="the baseline plain cannot be measured: no data at"):
        budgets.lengths_of(study, tmp_path)


# Processes


def test_the_reason_of_a_failure_is_what_the_process_said_last(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("epoch 1\nvitrail: 2 problems:\n  optim.lr: wrong\n  seed: wrong\n")
    assert failure_reason(log, 2) == "2 problems: optim.lr: wrong seed: wrong"
    log.write_text("Traceback (most recent call last):\nRuntimeError: no memory\n\n")
    assert failure_reason(log, 1) == "RuntimeError: no memory"
    assert failure_reason(log, -9) == "killed by SIGKILL (perhaps for lack of memory)"
    assert failure_reason(tmp_path / "absent", 3) == "exit code 3, and nothing was said"


# What people see

CLASSES = ("<b>bold</b>", "cat", "dog")


def sample(variants: tuple[str, ...] = ("base", "new"), seeds: int = 3, images: int = 60) -> Comparison:
    rng = np.random.default_rng(0)
    target = torch.from_numpy(rng.integers(0, 3, images))
    members = []
    for k, variant in enumerate(variants):
        for seed in range(seeds):
            wrong = torch.from_numpy(rng.random(images) < 0.3 - 0.05 * k)
            guess = torch.where(wrong, (target + 1) % 3, target)
            stored = StoredPredictions(torch.arange(images), target, guess, torch.zeros(images, 3).half())
            course = [
                {"step": e, "epoch": e / 2, "split": "val", "top1": 0.1 * e + 0.01 * seed, "loss": 1 / e}
                for e in range(1, 5)
            ]
            lines = [*course, {"step": 4, "epoch": 2.0, "split": "train", "loss": 0.3, "seconds": 2.0}]
            top1 = float((guess == target).double().mean())
            members.append(Member(variant, seed, f"r/{seed}", {"top1": top1}, "test", "d", CLASSES, lines, stored))
    return compare_members(
        "study & co",
        members,
        variants[0],
        failures=[Failure("broken", 0, "<script>alert(1)</script>")],
        prices={v: Price(1000 * (k + 1), 10**6 * 4**k, 28, 100.0, 2**20) for k, v in enumerate(variants)},
        lengths=dict.fromkeys(variants, "2 epochs"),
        conditions="here",
    )


class Balanced(HTMLParser):
    """Fails on tags that do not close in order; collects names of tags and links."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_has_every_part_and_escapes_what_it_is_told() -> None:
    page = render_comparison(sample(), {"python": "3"})
    parsed = Balanced(page)
    sections = {a["id"] for tag, a in parsed.seen if tag == "section"}
    names = ("results", "cost", "training-curves", "disagreement", "classes", "seeds", "runs", "conditions")
    assert sections == set(names)
    assert "script" not in {tag for tag, _ in parsed.seen}
    assert "<b>bold" not in page
    assert not [
        a for _, a in parsed.seen if str(a.get("src") or a.get("href") or "#")[0] != "#"
    ]  # nothing from outside


def test_a_report_on_single_runs_leaves_out_what_needs_seeds() -> None:
    page = render_comparison(sample(seeds=1), {})
    assert 'id="seeds"' not in page
    assert "With one seed" in page


def test_a_study_of_seeds_alone_is_told_as_one() -> None:
    found = sample(("only",), seeds=6)
    alone = replace(found, rows=found.rows[:1])  # without the failure
    values = [m.metrics["top1"] for m in alone.rows[0].members]
    low, high = f"{100 * min(values):.2f} %", f"{100 * max(values):.2f} %"
    assert f"over 6 seeds, from {low} to {high}." in verdict(alone)
    assert "Do early evaluations predict the end?" in render_comparison(alone, {})


@pytest.mark.parametrize("columns", [60, 80])
def test_tables_fit_a_terminal_and_keep_their_figures(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = sample(("a rather long name of a variant", "another long name of a variant"))
    out = io.StringIO()
    Console(file=out, width=columns).print(comparison_tables(found))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    row = found.rows[1]
    assert f"{100 * row.spread.mean:.2f} ± {100 * row.spread.std:.2f} " in text
    end = re.escape(f"to {100 * row.against.interval[1]:+.1f}")
    assert re.search(rf"{end}\s", text.replace("−", "-"))  # noqa: RUF001


def test_what_other_evaluators_found_stands_beside() -> None:
    found = sample()
    rows = []
    for row, base in zip(found.rows, (0.5, 0.7), strict=False):
        members = [replace(m, metrics={**m.metrics, "knn": base + 0.1 * m.seed, "map": 0.25}) for m in row.members]
        rows.append(replace(row, members=tuple(members)))
    found = replace(found, rows=(*rows, *found.rows[2:]))
    assert found.further()["knn"]["new"] == pytest.approx((0.8, 0.1))
    assert list(found.further()) == ["knn", "map"]
    out = io.StringIO()
    Console(file=out, width=80).print(comparison_tables(found))
    assert "0.800 ± 0.100" in out.getvalue()
    assert "0.800 ± 0.100" in render_comparison(found, {})
    assert not sample().further()


def test_points_of_the_front_are_joined_in_the_order_of_their_cost() -> None:
    points = [Point("a", 0, 1.0, 0.5, 0.1, True), Point("b", 1, 8.0, 0.9, 0.1, True), Point("c", 2, 9.0, 0.6)]
    chart = pareto_chart(points, title="t", x_label="cost")
    places = {float(x): float(y) for x, y in re.findall(r'class="point" cx="([\d.]+)" cy="([\d.]+)"', chart)}
    line = re.search(r'class="front" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', chart)
    joined = [float(v) for v in line.groups()]
    assert joined[0] < joined[2]
    assert places[joined[0]] == joined[1]
    assert places[joined[2]] == joined[3]


def test_a_limit_is_a_line_between_the_points_within_it_and_those_beyond() -> None:
    points = [Point("a", 0, 1.0, 0.5), Point("b", 1, 8.0, 0.9)]
    chart = pareto_chart(points, title="t", x_label="cost", limit=4.0)
    within, beyond = (float(x) for x in re.findall(r'class="point" cx="([\d.]+)"', chart))
    (line,) = re.findall(r'class="front" d="M([\d.]+) [\d.]+V', chart)
    assert float(line) == pytest.approx(within + (beyond - within) * np.log(4) / np.log(8), abs=0.2)
    assert ">budget<" in chart


def test_curves_show_the_mean_inside_its_band() -> None:
    chart = curves_chart({"a": [{1.0: 0.0, 2.0: 0.2}, {1.0: 0.4, 2.0: 0.6}]}, title="t")
    line = re.search(r'class="line v0" d="M([\d.]+) ([\d.]+)L', chart)
    band = [tuple(map(float, p.split())) for p in re.search(r'class="band v0" d="M([^z]+)z"', chart)[1].split("L")]
    heights = [y for x, y in band if x == float(line[1])]
    assert sum(heights) / 2 == pytest.approx(float(line[2]), abs=0.1)  # coordinates have one digit


def test_charts_survive_what_is_missing() -> None:
    nothing = np.full((2, 2), np.nan)
    assert "nothing was measured" in pareto_chart([], title="t", x_label="x")
    assert "nothing was recorded" in curves_chart({"a": [{}]}, title="t")
    assert "<rect" not in disagreement_chart(nothing, ["a", "b"], title="t")
    assert "nothing to compare" in gains_chart(np.array([np.nan]), ["a"], title="t")


def test_of_many_classes_the_best_and_the_worst_are_drawn() -> None:
    gains = np.linspace(-0.5, 0.5, 101)
    chart = gains_chart(gains, [f"class {i}" for i in range(101)], title="t")
    drawn = {int(n) for n in re.findall(r"<title>class (\d+):", chart)}
    assert drawn == {*range(12), *range(89, 101)}


# evaluate: several data sets, crop ratios and sizes

SETS = ("synthetic:shapes?n=60&size=36&classes=3", "synthetic:shapes?n=60&size=36&classes=3&seed=2")


def test_a_sweep_has_a_row_for_each_combination_with_the_figures_of_that_preprocessing(finished) -> None:
    path = finished[0].rows[0].members[0].path
    found = sweep(path, SETS, crop_ratios=(0.8, 1.0), image_sizes=(28, 35), workers=0)
    assert [(j.data, j.image_size, j.crop_ratio) for j in found] == [
        (d, s, r) for d in SETS for s in (28, 35) for r in (0.8, 1.0)
    ]
    model = vitrail.load(path)
    model.preprocess = replace(model.preprocess, size=35, crop_ratio=0.8)
    figures, _, _ = vitrail.evaluate(model, SETS[1], workers=0)
    assert found[6].figures.loss == figures.loss


def test_what_a_model_cannot_take_is_said_before_data_are_read(finished) -> None:
    path = finished[0].rows[0].members[0].path
    with pytest.raises(ValueError, match="cannot take images of 30 pixels: an image of 30x30 pixels cannot be cut"):
        sweep(path, ["/nowhere"], image_sizes=(28, 30))
    with pytest.raises(ConfigError, match=r"crop_ratio: 1.5 is out of range"):
        sweep(path, ["/nowhere"], crop_ratios=(1.5,))


def test_the_command_evaluates_many_at_once(finished, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import run

    path = finished[0].rows[0].members[0].path
    words = ["evaluate", path, "--data", *SETS, "--crop_ratio", "0.8", "1.0", "--workers", "0"]
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(t["data"], t["crop_ratio"]) for t in told] == [(d, r) for d in SETS for r in (0.8, 1.0)]
    assert all(0 <= t["top1"] <= 1 and t["run"] == path for t in told)
    assert run(words) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5
    assert max(map(len, out.splitlines())) <= 80
