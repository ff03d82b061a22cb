"""The studies run as documented, and their smallest size already shows the direction of their claims."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_script
from study_calls import STUDIES, call, script_module
from torch import Tensor

IMAGES = 1024  # of the quick test draw


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the quick study of heads wrote."""
    out = tmp_path_factory.mktemp("study")
    call(STUDIES / "heads.py", "--quick", "--seeds", "1", "--workers", "1", "--out", str(out))
    written: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return written


def accuracy(heads: dict[str, Any], task: str, head: str) -> float:
    (found,) = (r["test"] for r in heads["results"] if (r["task"], r["head"]) == (task, head))
    return float(found)


def at_level(found: float, level: float) -> bool:
    """Within three standard errors of a coin that hits with this probability."""
    return abs(found - level) < 3 * (level * (1 - level) / IMAGES) ** 0.5


def test_mean_pooling_is_at_chance_where_only_covariances_differ(heads: dict[str, Any]) -> None:
    assert heads["size"]["test"] == IMAGES
    assert at_level(accuracy(heads, "covariance", "mean"), 0.25)


@pytest.mark.parametrize("head", ["second_order, covariance", "second_order, cross, svpn_fast"])
def test_second_order_heads_read_covariances(heads: dict[str, Any], head: str) -> None:
    assert accuracy(heads, "covariance", head) > 0.9


@pytest.mark.parametrize("head", ["mean", "second_order, covariance", "second_order, cross, svpn_fast"])
def test_all_heads_read_means(heads: dict[str, Any], head: str) -> None:
    assert accuracy(heads, "mean", head) > 0.9


@pytest.mark.parametrize("head", ["class_only", "second_order, cross, svpn_fast"])
def test_class_token_or_words_alone_give_one_of_two_bits(heads: dict[str, Any], head: str) -> None:
    assert at_level(accuracy(heads, "mixed", head), 0.5)


def test_class_token_and_words_together_give_both_bits(heads: dict[str, Any]) -> None:
    assert accuracy(heads, "mixed", "sum") > 0.9


@pytest.fixture(scope="module")
def draw() -> Callable[[str, int, int, int], tuple[Tensor, Tensor]]:
    """How the study of heads draws its tokens."""
    drawn: Callable[[str, int, int, int], tuple[Tensor, Tensor]] = script_module(
        STUDIES / "heads.py", "study_of_heads"
    ).draw
    return drawn


@pytest.mark.parametrize(("task", "differ"), [("covariance", "covariances"), ("mean", "means")])
def test_classes_differ_in_one_moment_only(draw: Callable[..., tuple[Tensor, Tensor]], task: str, differ: str) -> None:
    tokens, labels = draw(task, 0, 0, 4000)
    words = [tokens[labels == c, 1:].flatten(0, 1).double().numpy() for c in range(4)]
    means = np.stack([w.mean(0) for w in words])
    covariances = np.stack([np.cov(w.T) for w in words])
    error = (2 / (1000 * 32)) ** 0.5  # of a unit variance over a class of 1000 images; means and covariances have less
    spread = {"means": np.ptp(means, axis=0).max(), "covariances": np.ptp(covariances, axis=0).max()}
    assert spread.pop(differ) > 0.5
    assert max(spread.values()) < 8 * error
    assert np.ptp(covariances.diagonal(axis1=1, axis2=2), axis=0).max() < 8 * error


def test_word_means_spread_alike_whatever_the_covariance(draw: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Else a linear classifier of the mean would be above chance: it can tell a wide class from a narrow one."""
    tokens, labels = draw("covariance", 0, 0, 4000)
    for c in range(4):
        found = np.cov(tokens[labels == c, 1:].mean(1).double().numpy().T) * 32
        assert np.abs(found - np.eye(16)).max() < 5 * (2 / 1000) ** 0.5


@pytest.mark.slow
def test_the_speed_run_times_and_judges(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    for words in (["tune", "--only", "recipe", "mean"], ["judge", "--seeds", "2"]):
        call(STUDIES / "speedrun.py", *words, "--smoke", "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("split") for line in lines[:4]] == ["val", "val", "test", "test"]
    assert all(line["seconds"] >= line["training_seconds"] > 0 for line in lines[:4])
    means = {line["figure"]: line["mean"] for line in lines[4:]}
    assert means["top1"] == pytest.approx((lines[2]["top1"] + lines[3]["top1"]) / 2, abs=1e-4)


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_file_makes_sense(path: Path) -> None:
    from vitrail.compare.study import read_study

    study = read_study(path)
    assert study.name == path.stem
    assert len(study.seeds) >= 3 or study.base.data.judge == "val"  # what chooses settings may have one
    assert path.read_text().startswith("# ")  # what is expected, and where that is said


def test_features_that_keep_images_apart_can_be_cut_anywhere() -> None:
    """One-hot features separate any labels; equal ones separate only what is counted more often."""
    features = script_module(STUDIES / "features.py")
    coarse = torch.arange(40) % 4
    apart, known = features.separability(torch.eye(40), coarse, cuts=2)
    assert apart == known == [1.0, 1.0]
    same, halves = features.separability(torch.ones(40, 8), coarse, cuts=2)
    assert same == pytest.approx([1 / 8, 1 / 8])
    assert halves == pytest.approx([1 / 2, 1 / 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resolution", "teachers", "attention-only", "removed"])
def test_a_study_in_which_runs_stand_on_others_comes_to_its_report(name: str, tmp_path: Path) -> None:
    text = re.sub(r"cifar100?\.npz", "'synthetic:shapes?n=90&size=32'", (STUDIES / f"{name}.yaml").read_text())
    (tmp_path / f"{name}.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "compare", f"{name}.yaml", "--smoke", "--jobs", "1", "--seconds", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("report: ")][-1]
    assert (tmp_path / report).with_name("table.json").is_file()


@pytest.mark.slow
def test_runs_of_a_study_are_looked_at_from_outside(tmp_path: Path) -> None:
    """Two tokens and their cosine; a run never differs from a teacher that is itself, and does from the labels."""
    study = tmp_path / "study.yaml"
    study.write_text(
        "name: two\nbase: {recipe: small-deit, data: {uri: 'synthetic:shapes?n=90&size=32', batch: 20, workers: 0},"
        " model: {trunk: {depth: 1, width: 48, heads: 3}}, optim: {steps: 3}, engine: {device: cpu}}\n"
        "variants: {two: {model: {head: {kind: distilled}}}, one: {}}\nseeds: 2\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def said(*words: str) -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return [[c.strip() for c in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]

    said("-m", "vitrail", "compare", "study.yaml", "--jobs", "1", "--seconds", "0")
    folder = tmp_path / "runs" / "studies" / "two"
    rows = json.loads((folder / "table.json").read_text())["rows"]
    features = (str(STUDIES / "features.py"), "{}", str(folder), "--data", "synthetic:shapes?n=90&size=32")

    ((name, learned, last, seeds),) = said(*(w.format("tokens") for w in features), "--only", "two")
    assert (name, seeds) == ("two", "2")
    assert all(-1 <= float(c.split()[0]) <= 1 for c in (learned, last))

    itself = next(run["path"] for run in rows[1]["runs"] if run["seed"] == 0)
    *_, one, teacher = said(*(w.format("disagreement") for w in features), "--teacher", itself)
    wrong = [1 - run["top1"] for run in rows[1]["runs"]]
    assert float(one[2].split("%")[0]) == pytest.approx(100 * sum(wrong) / 2, abs=0.06)
    assert float(teacher[2].strip("%")) == pytest.approx(100 * wrong[0], abs=0.06)
    # with itself 0, with the other seed as often as the two seeds differ
    assert float(one[1].split("%")[0]) == pytest.approx(float(one[3].strip("%")) / 2, abs=0.06)


@pytest.fixture(scope="module")
def runner() -> Any:
    """studies/all.py as a module."""
    return script_module(STUDIES / "all.py", "all_studies")


def writes(name: str, before: str = "", after: str = "") -> tuple[str, ...]:
    """A process that makes one row of the study `s`, and code around it."""
    row = json.dumps({"table": "t", "subject": name, "what": "w", "seed": 0})
    lines = ("import pathlib", before, f"open('runs/studies/s/found.jsonl', 'a').write({row + chr(10)!r})", after)
    return (sys.executable, "-c", "\n".join(lines))


def test_processes_of_a_study_begin_when_the_rows_they_wait_for_are_there(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "studies" / "s").mkdir(parents=True)
    # The first goes on after its row until the second, which waits for that row, has made its own: both run at once.
    seen = "while 'second' not in pathlib.Path('runs/studies/s/found.jsonl').read_text(): pass"
    first = runner.Job("first", writes("first", after=seen), study="s")
    second = runner.Job("second", writes("second"), study="s", waits=(("t", "first", "w", 0),))
    never = runner.Job("never", writes("never"), study="s", waits=(("t", "nobody", "w", 0),))
    pool = runner.Pool([never, second, first], tmp_path, side=2, minutes=1, every=0.05)
    pool.run()
    made = [json.loads(line)["subject"] for line in (tmp_path / "runs/studies/s/found.jsonl").read_text().splitlines()]
    assert made == ["first", "second"]
    assert pool.waiting == [never]  # what nobody makes is not waited for when nothing is running
    assert not pool.failed


def test_no_more_processes_at_a_time_than_there_are_places(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "studies" / "s").mkdir(parents=True)
    other = "assert not pathlib.Path('busy').exists(); pathlib.Path('busy').touch(); import time; time.sleep(0.2)"
    jobs = [
        runner.Job(f"job {n}", writes(str(n), other, "pathlib.Path('busy').unlink()"), places=2, study="s")
        for n in range(3)
    ]
    pool = runner.Pool(jobs, tmp_path, side=3, minutes=1, every=0.05)
    pool.run()
    assert not pool.failed
    assert not pool.waiting


def test_a_process_that_fails_or_is_out_of_time_is_said(runner: Any, tmp_path: Path, capsys: Any) -> None:
    bad = runner.Job("bad", (sys.executable, "-c", "raise SystemExit(3)"))
    long = runner.Job("long", (sys.executable, "-c", "import time; time.sleep(60)"))
    pool = runner.Pool([bad, long], tmp_path, side=2, minutes=0.03, every=0.05)
    pool.run()
    assert sorted(pool.failed) == ["bad", "long"]
    said = capsys.readouterr().out
    assert "bad: failed with exit code 3" in said
    assert "long: out of time" in said


def test_a_process_that_made_all_its_rows_is_not_begun_again(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "studies" / "s").mkdir(parents=True)
    late = runner.Job("late", (sys.executable, "-c", f"raise SystemExit({runner.UNFINISHED})"), study="s")
    pool = runner.Pool([runner.Job("whole", writes("whole"), study="s"), late], tmp_path, 2, minutes=1, every=0.05)
    pool.run()
    assert runner.ended(tmp_path, "s") == {"whole"}
    assert runner.ended(tmp_path, "another") == set()
    assert pool.failed == ["late"]


def test_what_many_wait_for_is_served_first(runner: Any, tmp_path: Path) -> None:
    says = (sys.executable, "-c", "import os; print(os.environ['CUDA_MPS_CLIENT_PRIORITY'])")
    jobs = [runner.Job("mae", says, first=True), runner.Job("student", says)]
    runner.Pool(jobs, tmp_path, side=2, minutes=1, every=0.05).run()
    logs = tmp_path / "runs" / "logs"
    assert [(logs / f"{name}.txt").read_text().strip() for name in ("mae", "student")] == ["0", "1"]


def test_a_run_that_is_asked_to_stop_ends_its_study(tmp_path: Path) -> None:
    """A signal to a process is not a row that failed: nothing is written, and the exit code says that more is to do."""
    from found import UNFINISHED, Found, read_rows, to_the_end  # type: ignore[import-not-found]

    from vitrail.engine.loop import Stopped

    def stopped() -> dict[str, Any]:
        raise Stopped(3, tmp_path)

    def study() -> None:
        with to_the_end(found, float("inf")):
            found.guarded("t", "w", 0, lambda: found.row("t", "s", "w", 0, stopped) and None)
            found.row("t", "next", "w", 0, dict)

    found = Found(tmp_path)
    with pytest.raises(SystemExit) as ended:
        study()
    assert ended.value.code == UNFINISHED
    assert read_rows(tmp_path) == []


def test_a_study_ends_by_itself_at_sigterm(tmp_path: Path) -> None:
    """Not by the signal's own action, which would end it in the middle of what an accelerator does for it."""
    from found import UNFINISHED, read_rows

    lines = (
        "import os, pathlib, signal, time, found",
        f"rows = found.Found(pathlib.Path({str(tmp_path)!r}))",
        "def deaf():",
        "    try:",
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        "    except Exception:",
        "        return {}",
        "with found.to_the_end(rows, float('inf')):",
        "    rows.row('t', 'deaf', 'w', 0, deaf)",
        "    rows.row('t', 'next', 'w', 0, dict)",
    )
    done = run_script("\n".join(lines), folder=STUDIES)
    assert done.code == UNFINISHED, done.err
    assert "stopped; the same command goes on" in done.err
    assert [row["subject"] for row in read_rows(tmp_path)] == ["deaf"]


def test_a_pool_that_is_stopped_stops_what_it_began(runner: Any, tmp_path: Path) -> None:
    pool = runner.Pool([runner.Job("long", (sys.executable, "-c", "import time; time.sleep(60)"))], tmp_path, 1, None)
    threading.Timer(0.5, pool.stop).start()
    pool.run()
    assert pool.failed == ["long"]
    assert not pool.running


def test_a_row_that_failed_is_not_tried_twice_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STUDIES)
    from found import Found, read_rows

    tries = []

    def bad() -> dict[str, Any]:
        tries.append(1)
        raise RuntimeError("no")

    found = Found(tmp_path)
    assert [found.row("t", "s", "w", 0, bad) for _ in range(3)] == [None] * 3
    assert len(tries) == found.failed == len(read_rows(tmp_path)) == 1
    assert Found(tmp_path).row("t", "s", "w", 0, dict) is not None  # the next call tries it again


def test_every_plan_names_scripts_parts_and_tables_that_exist(runner: Any) -> None:
    """What a process waits for is of a table of its study, and no two processes have one name."""
    from plans import PLANS  # type: ignore[import-not-found]

    for plan in PLANS.values():
        processes = plan()
        assert len({process.name for process in processes}) == len(processes)
        for process in processes:
            source = (STUDIES / process.script).read_text()
            parts = process.words[process.words.index("--part") + 1 :]
            parts = parts[: next((i for i, word in enumerate(parts) if word.startswith("--")), len(parts))]
            assert parts
            assert all(f'"{part}"' in source for part in parts)
            tables = source + (STUDIES / "found.py").read_text()
            assert all(f'"{table}"' in tables and seed in range(3) for table, _, _, seed in process.waits)


def test_every_way_of_a_study_is_in_its_plan_and_every_name_there_is_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans name ways by hand: one misspelt, or one left out, would be a row that nobody makes."""
    monkeypatch.syspath_prepend(str(STUDIES))
    from adapter_runs import WAYS  # type: ignore[import-not-found]
    from attention_models import AUTOENCODERS, MODEL, ways  # type: ignore[import-not-found]
    from plans import PLANS
    from selfsupervised import (  # type: ignore[import-not-found]
        BOTH_VIEWS,
        METHODS,
        SETTINGS,
        SETTINGS_OF,
        TUNED,
        UNTRAINED,
    )

    methods = {
        "settings": {*TUNED},
        "main": {*BOTH_VIEWS, UNTRAINED},
        "vit": {*METHODS, UNTRAINED},
        "cifar10": {*METHODS},
    }

    def named(study: str, part: str) -> set[str]:
        found = set()
        for words in (process.words for process in PLANS[study]()):
            if "--of" in words and words[words.index("--part") + 1] == part:
                rest = words[words.index("--of") + 1 :]
                found |= {*rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]}
        return found

    taught = ways(MODEL.trunk["depth"], MODEL.trunk["heads"])
    assert named("attention-transfer", "teachers") == {*AUTOENCODERS}
    for part in ("main", "layers"):
        assert named("attention-transfer", part) == {name for name, way in taught.items() if way.part == part}
    for part in ("main", "scratch"):
        assert named("adapters", part) == {name for name, way in WAYS.items() if way.part == part}
    short = {part: {what.partition(",")[0].replace(" ", "-") for what in of} for part, of in methods.items()}
    assert {part: named("selfsupervised", part) for part in short} == short
    waited = {row for process in PLANS["selfsupervised"]() for row in process.waits if row[0] == "settings"}
    assert waited == {("settings", each, what, 0) for what in TUNED for each in SETTINGS_OF.get(what, SETTINGS)}


def test_data_that_a_study_lacks_are_named_before_anything_begins(tmp_path: Path) -> None:
    done = run_script(STUDIES / "all.py", "genie", "--data", str(tmp_path))
    assert done.code == 2
    assert "genie needs cifar10.npz, cifar10_resnet56.safetensors" in done.err


def test_studies_out_of_time_may_write_what_they_must(runner: Any, tmp_path: Path) -> None:
    """A run of the study, not the study itself, writes its checkpoint when it is asked to stop."""
    wrote, ready = tmp_path / "checkpoint", tmp_path / "ready"
    run = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(15, lambda *_: (time.sleep(0.3), pathlib.Path({str(wrote)!r}).touch(), sys.exit()))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)"
    )
    study = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {run!r}])"
    process = subprocess.Popen([sys.executable, "-c", study], start_new_session=True)
    while not ready.exists():
        time.sleep(0.02)
    runner.end(process)
    assert wrote.exists()
    assert process.returncode is not None
