"""Runs made one after the other in one process: each as if alone, in its own log, and a crash costs one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import vitrail
from vitrail.compare.budgets import probe
from vitrail.compare.jobs import IdleWorkers, run_missing
from vitrail.compare.study import Planned, Study, plan
from vitrail.compare.worker import Worker
from vitrail.config import dump, from_mapping
from vitrail.engine.config import EngineConfig
from vitrail.engine.device import ProcessGroup, prepare
from vitrail.engine.run_folder import TIMING, RunFolder
from vitrail.files import write_text
from vitrail.recipes import recipe

TINY = {
    "recipe": "demo",
    "data": {"uri": "synthetic:shapes?n=120&size=28&classes=3", "batch": 16, "workers": 0, "check": "off"},
    "model": {"trunk": {"depth": 2, "width": 32, "heads": 2}, "drop_path": 0.5},  # draws from torch's own generator
    "optim": {"steps": 12, "warmup": 0},
    "engine": {"ema": 0, "evaluate_every": 0.5, "log_every": 1, "device": "cpu"},
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE = 120.0


def wait_for(what: Callable[[], Any]) -> Any:
    """The first true value that `what()` gives."""
    until = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < until, "nothing came of it"
        time.sleep(0.02)
    return found


def carried_out(worker: Worker, words: list[str], log: Path) -> int:
    worker.submit(words, log)
    found = wait_for(lambda: [code for code in [worker.exit_code()] if code is not None])  # 0 is an answer
    return int(found[0])


def outcome(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Bytes of the weights, of what they predict and of the last checkpoint; metrics without times."""
    files = [p for p in run.rglob("*") if p.suffix == ".safetensors"]
    lines = [{k: v for k, v in line.items() if k not in TIMING} for line in RunFolder(run).read_metrics()]
    return {str(p.relative_to(run)): p.read_bytes() for p in files}, lines


# Real runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny run, and that run made alone."""
    place = tmp_path_factory.mktemp("worker")
    (place / "tiny.yaml").write_text(dump(from_mapping(TINY, recipe("demo"))))
    words = ["--config", str(place / "tiny.yaml"), "--out", str(place / "alone"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "train", *words], env=ENVIRONMENT, capture_output=True, check=True
    )
    (place / "alone.txt").write_bytes(done.stderr + done.stdout)
    return place


@pytest.fixture(scope="module")
def worker(place: Path) -> Iterator[Worker]:
    made = Worker(place / "worker.txt", ENVIRONMENT)
    yield made
    made.end()


@pytest.fixture(scope="module")
def codes(place: Path, worker: Worker) -> dict[str, int]:
    """Exit codes of orders: a run that sets everything otherwise, two that are refused, the one that was made alone."""
    config = ["--config", str(place / "tiny.yaml"), "--json"]
    otherwise = ["--seed", "5", "--engine.deterministic", "true", "--engine.precision", "bf16", "--optim.steps", "11"]
    orders = {
        "first": [*config, *otherwise, "--out", str(place / "first")],
        "refused": [*config, "--optim.lr", "-1", "--out", str(place / "refused")],
        "taken": [*config, "--out", str(place / "first")],
        "second": [*config, "--out", str(place / "second")],
    }
    return {name: carried_out(worker, words, place / f"{name}.txt") for name, words in orders.items()}


def test_a_run_that_comes_second_equals_the_same_run_made_alone(place: Path, codes: dict[str, int]) -> None:
    files, metrics = outcome(place / "second")
    expected_files, expected_metrics = outcome(place / "alone")
    assert files == expected_files
    assert any(name.startswith("model/") for name in files)
    assert metrics == expected_metrics
    assert outcome(place / "first")[0] != files


def test_exit_codes_and_last_words_are_those_of_the_command(place: Path, codes: dict[str, int]) -> None:
    assert codes == {"first": 0, "refused": 2, "taken": 2, "second": 0}
    assert (place / "refused.txt").read_text().startswith("vitrail: 1 problem:\n  optim.lr")
    assert not (place / "refused").exists()
    assert (place / "taken.txt").read_text().startswith(f"vitrail: {place / 'first'} already exists")


def test_a_log_is_that_of_the_run_made_alone(place: Path, codes: dict[str, int]) -> None:
    alone = (place / "alone.txt").read_text().replace(str(place / "alone"), str(place / "second"))
    assert (place / "second.txt").read_text() == alone
    assert "val  " in alone
    assert json.loads(alone.splitlines()[-1])["run"] == str(place / "second")
    assert (place / "worker.txt").read_text() == ""


def test_a_run_knows_the_command_that_would_make_it(place: Path, codes: dict[str, int]) -> None:
    told = json.loads((place / "second" / "environment.json").read_text())
    assert told["command"] == f"vitrail train --config {place / 'tiny.yaml'} --json --out {place / 'second'}"


def test_a_stopped_run_is_saved_and_let_go_by_a_worker_that_goes_on(place: Path, worker: Worker) -> None:
    out, log = place / "stopped", place / "stopped.txt"
    worker.submit(["--config", str(place / "tiny.yaml"), "--optim.steps", "1000000", "--out", str(out)], log)
    wait_for(lambda: len(RunFolder(out).read_metrics()) > 12)
    assert RunFolder(out).busy
    worker.stop()
    assert wait_for(worker.exit_code) == 130
    assert "continue with: vitrail train --resume" in log.read_text().splitlines()[-1]
    assert list((out / "checkpoint").iterdir())
    assert worker.alive
    assert not RunFolder(out).busy


LEFT = """
import gc, json, os, pathlib, signal, sys
from vitrail.compare.worker import train_run

place, *words = sys.argv[1:]

def left(name, *more):
    code = train_run([*words, "--out", f"{place}/left-{name}", *more], pathlib.Path(f"{place}/left-{name}.txt"))
    import torch
    from vitrail.data.dataset import Split
    from vitrail.engine.loop import Loop

    files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    return {
        "code": code,
        "objects": [type(o).__name__ for o in gc.get_objects() if isinstance(o, (torch.nn.Module, Split, Loop))],
        "frozen": gc.get_freeze_count(),
        "default handlers": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "files": [f for f in files if f.startswith(f"{place}/left-{name}/")],
    }

good = left("good")
# Updates that are not finite end a run, after the collector was told not to look at what stays.
words += ["--optim.lr", "1e17", "--optim.clip", "0", "--optim.steps", "100"]
bad = left("bad", "--engine.log_every", "30", "--engine.evaluate_every", "0")
pathlib.Path(f"{place}/left.json").write_text(json.dumps([good, bad]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from /proc")
def test_nothing_of_a_run_is_left_behind_whether_it_ends_well_or_badly(place: Path) -> None:
    words = [str(place), "--config", str(place / "tiny.yaml")]
    subprocess.run([sys.executable, "-c", LEFT, *words], env=ENVIRONMENT, check=True)
    nothing = {"objects": [], "frozen": 0, "default handlers": True, "files": []}
    assert json.loads((place / "left.json").read_text()) == [{"code": 0, **nothing}, {"code": 2, **nothing}]
    assert "training has diverged" in (place / "left-bad.txt").read_text()


def test_what_is_global_is_set_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def settings(device: str, **options: Any) -> tuple[Any, ...]:
        prepare(EngineConfig(**options), 0, torch.device(device), ProcessGroup())
        return (
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.rand(()).item(),
        )

    plain = settings("cpu")
    try:
        assert settings("cuda", deterministic=True)[:4] == (True, ":4096:8", "high", False)
        assert settings("cpu") == plain
        torch.backends.cudnn.benchmark = True
        assert settings("cuda", precision="float32") == plain
    finally:
        settings("cpu")
    assert plain[:4] == (False, None, "highest", False)


@pytest.mark.slow
def test_a_study_that_is_asked_to_stop_saves_what_it_makes_and_goes_on_later(tmp_path: Path) -> None:
    settings = {**TINY, "optim": {"steps": 150, "warmup": 0}, "engine": {**TINY["engine"], "evaluate_every": 0}}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({"base": settings, "variants": {"plain": {}}, "seeds": 1}))
    words = [sys.executable, "-m", "vitrail", "compare", str(file), "--out", str(tmp_path), "--seconds", "0"]
    study = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for(lambda: [p for p in tmp_path.glob("run-*") if len(RunFolder(p).read_metrics()) > 3])
    study.send_signal(signal.SIGTERM)
    assert study.wait(PATIENCE) == 130
    (run,) = tmp_path.glob("run-*")
    assert not RunFolder(run).busy
    assert not RunFolder(run).finished
    saved = max(int(line["step"]) for line in RunFolder(run).read_metrics())
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"after step {saved}" in (tmp_path / "tiny" / "logs" / "plain-seed0.txt").read_text()
    assert RunFolder(run).finished


# Scheduling, with something quick in place of training

STAND_IN = """
import ctypes, json, os, pathlib, signal, subprocess, sys, time, yaml
word = lambda name: pathlib.Path(sys.argv[sys.argv.index(name) + 1])
out, config = word("--out"), yaml.safe_load(word("--config").read_text())
seed, name = config["seed"], word("--config").stem
if "TALKS" in os.environ:
    print("python", name)
    os.system(f"echo program {name}")
    ctypes.CDLL(None).printf(f"C code {name}\\n".encode())
out.mkdir(parents=True)
(out / "process").write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {time.monotonic()}")
if name in os.environ.get("TO_BE_KILLED", ""):
    os.kill(os.getpid(), signal.SIGKILL)
if name in os.environ.get("TO_FAIL", ""):
    print("vitrail: that was wrong", file=sys.stderr)
    sys.exit(2)
time.sleep(0.2)
awaited, late = json.loads(os.environ.get("AWAITS", "{}")).get(name), time.monotonic() + 60
while awaited and not pathlib.Path(awaited).exists() and time.monotonic() < late:
    time.sleep(0.01)
(out / "report.html").write_text("")
(out / "metrics.jsonl").write_text('{"final": true, "split": "test", "top1": 0.5}')
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `python -m` looks first: a package whose command is `STAND_IN`, and whose worker is the real one."""
    real = Path(vitrail.__file__).parent
    for package in (Path(), Path("compare")):
        (tmp_path / "vitrail" / package).mkdir()
        (tmp_path / "vitrail" / package / "__init__.py").write_text(f"__path__.append({str(real / package)!r})")
    (tmp_path / "vitrail" / "__main__.py").write_text(STAND_IN)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is held back is what could reach another's log
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(root: Path, variants: int, seeds: int) -> list[Planned]:
    changes = {f"v{n}": {"model": {"trunk": {"width": 32 + 16 * n}}} for n in range(variants)}
    return plan(Study("s", from_mapping(TINY, recipe("demo")), changes, seeds=range(seeds)), {}, root / "runs")


def process(one: Planned) -> str:
    return (one.path / "process").read_text().split()[0]


def let_await(monkeypatch: pytest.MonkeyPatch, what: dict[str, Path]) -> None:
    """Runs end only when a file is there: which worker is free first is then no matter of chance."""
    monkeypatch.setenv("AWAITS", json.dumps({name: str(path) for name, path in what.items()}))


def test_seeds_of_a_variant_share_a_process_and_variants_do_not(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = planned(stand_in, 2, 3)
    partner = {p.name: other.path / "process" for p in runs for other in runs if p.seed == other.seed and p != other}
    let_await(monkeypatch, partner)
    assert run_missing(runs, stand_in / "s", jobs=2, devices=[], quiet=True) == {}
    assert {(p.variant, process(p)) for p in runs} == {("v0", process(runs[0])), ("v1", process(runs[1]))}
    assert process(runs[0]) != process(runs[1])


def test_a_new_worker_goes_where_there_are_fewest(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = planned(stand_in, 2, 3)
    last = next(p for p in runs if p.name == "v0-seed2")
    let_await(monkeypatch, {"v1-seed2": last.path / "report.html"})
    before = [p for p in runs if p.name in ("v0-seed0", "v1-seed0", "v1-seed1")]
    run_missing(before, stand_in / "s", jobs=2, devices=[], quiet=True)
    run_missing(runs, stand_in / "s", jobs=2, devices=[], quiet=True)  # v0 lacks two seeds, v1 one
    made = {p.name: process(p) for p in runs}
    assert made["v0-seed1"] == made["v0-seed2"] != made["v1-seed2"]


def test_with_one_job_variants_come_one_after_the_other(stand_in: Path) -> None:
    runs = planned(stand_in, 2, 2)
    run_missing(runs, stand_in / "s", jobs=1, devices=[], quiet=True)
    began = sorted(runs, key=lambda p: float((p.path / "process").read_text().split()[2]))
    assert [p.name for p in began] == ["v0-seed0", "v0-seed1", "v1-seed0", "v1-seed1"]


def test_jobs_beyond_the_variants_share_the_seeds_of_one(stand_in: Path) -> None:
    runs = planned(stand_in, 1, 4)
    run_missing(runs, stand_in / "s", devices=["4", "7"], quiet=True)
    said = [(p.path / "process").read_text().split()[:2] for p in runs]
    assert sorted(place for _, place in said) == ["4", "4", "7", "7"]
    assert len({number for number, _ in said}) == 2


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("TO_BE_KILLED", "killed by SIGKILL (perhaps for lack of memory)"), ("TO_FAIL", "that was wrong")],
)
def test_a_run_that_ends_badly_costs_itself_and_the_next_one_gets_a_fresh_worker(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, variable: str, reason: str
) -> None:
    runs = planned(stand_in, 1, 4)
    monkeypatch.setenv(variable, "v0-seed1")
    assert run_missing(runs, stand_in / "s", jobs=1, devices=[], quiet=True) == {runs[1].path: reason}
    assert [RunFolder(p.path).finished for p in runs] == [True, False, True, True]
    assert process(runs[0]) == process(runs[1]) != process(runs[2]) == process(runs[3])


def test_an_idle_worker_trains_all_variants_of_one_study_after_another(stand_in: Path) -> None:
    runs, idle = planned(stand_in, 3, 1), IdleWorkers()
    try:
        run_missing(runs[:2], stand_in / "s", jobs=1, devices=[], quiet=True, idle=idle)
        run_missing(runs[2:], stand_in / "t", jobs=1, devices=[], quiet=True, idle=idle)
        assert len({process(p) for p in runs}) == 1
        (worker,) = [worker for _, worker in idle.workers]
        assert worker.alive
    finally:
        idle.end()
    assert not worker.alive


@pytest.mark.parametrize("variable", ["TO_BE_KILLED", "TO_FAIL"])
def test_a_run_that_ends_badly_ends_the_idle_worker_and_not_the_study(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    runs, idle = planned(stand_in, 3, 1), IdleWorkers()
    monkeypatch.setenv(variable, "v1-seed0")
    try:
        assert set(run_missing(runs, stand_in / "s", jobs=1, devices=[], quiet=True, idle=idle)) == {runs[1].path}
        assert process(runs[0]) == process(runs[1]) != process(runs[2])
        assert [str(worker.process.pid) for _, worker in idle.workers] == [process(runs[2])]
    finally:
        idle.end()


def test_an_idle_worker_serves_no_other_device(stand_in: Path) -> None:
    runs, idle = planned(stand_in, 2, 1), IdleWorkers()
    try:
        run_missing(runs[:1], stand_in / "s", devices=["4"], quiet=True, idle=idle)
        run_missing(runs[1:], stand_in / "t", devices=["7"], quiet=True, idle=idle)
        assert [(p.path / "process").read_text().split()[1] for p in runs] == ["4", "7"]
    finally:
        idle.end()


def test_a_log_holds_the_words_of_its_run_and_of_no_other(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKS", "")
    monkeypatch.setenv("TO_FAIL", "v0-seed1")
    run_missing(planned(stand_in, 1, 3), stand_in / "s", jobs=1, devices=[], quiet=True)
    for seed in range(3):
        said = (stand_in / "s" / "logs" / f"v0-seed{seed}.txt").read_text().splitlines()
        expected = {f"{who} v0-seed{seed}" for who in ("python", "program", "C code")}
        assert set(said) == expected | ({"vitrail: that was wrong"} if seed == 1 else set())
        assert len(said) == len(set(said))


def test_a_warning_is_told_to_every_run(stand_in: Path) -> None:
    (stand_in / "vitrail" / "noisy.py").write_text("import warnings\ndef speak(): warnings.warn('look out')\n")
    (stand_in / "vitrail" / "__main__.py").write_text(f"from vitrail import noisy\nnoisy.speak()\n{STAND_IN}")
    run_missing(planned(stand_in, 1, 2), stand_in / "s", jobs=1, devices=[], quiet=True)
    assert ["look out" in log.read_text() for log in (stand_in / "s" / "logs").iterdir()] == [True, True]


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_that_cannot_begin_is_a_failed_run_and_says_why(
    early: bool, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stand_in / "vitrail" / "compare" / "__init__.py").write_text("raise ImportError('no such thing')")
    (one,) = planned(stand_in, 1, 1)

    def write_when_the_worker_has_ended(path: Path, text: str) -> None:
        for _ in range(600):
            if any(log.stat().st_size for log in (stand_in / "s" / "logs").iterdir()):
                break
            time.sleep(0.1)
        write_text(path, text)

    if early:  # before it is given its run
        monkeypatch.setattr("vitrail.compare.jobs.write_text", write_when_the_worker_has_ended)
    failed = run_missing([one], stand_in / "s", jobs=1, devices=[], quiet=True)
    assert failed == {one.path: "ImportError: no such thing"}


def test_finished_runs_are_not_begun_again(stand_in: Path) -> None:
    runs = planned(stand_in, 1, 2)
    run_missing(runs, stand_in / "s", devices=["4"], quiet=True)
    (stand_in / "vitrail" / "__main__.py").write_text("raise SystemExit('must not begin')")
    assert run_missing(runs, stand_in / "s", devices=["4"], quiet=True) == {}


@pytest.mark.slow
def test_a_measured_speed_leaves_its_worker_for_the_next() -> None:
    config, idle = from_mapping(TINY, recipe("demo")), IdleWorkers()
    try:
        assert probe(config, 0.1, steps=2, idle=idle) > 0
        (first,) = idle.workers
        assert probe(config, 0.1, steps=2, idle=idle) > 0
        assert idle.workers == [first]
        with pytest.raises(RuntimeError, match="nowhere"):
            probe(replace(config, data=replace(config.data, uri="nowhere")), 0.1, idle=idle)
        assert not first[1].alive
    finally:
        idle.end()
