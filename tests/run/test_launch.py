"""Training as jobs, through submitit's executor for one machine: the code that SLURM runs, without its scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitrail.cli import run
from vitrail.engine.checkpoint import newest
from vitrail.run.launch import Cluster, TrainJob, submit

TINY = {
    "recipe": "demo",
    "data": {"uri": "synthetic:shapes?n=120&size=28", "batch": 16, "workers": 0, "check": "off"},
    "model": {"name": "vit_micro_28", "trunk": {"depth": 1}},
    "engine": {"device": "cpu", "log_every": 1, "evaluate_every": 0},
    "calibrate": False,
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def arguments(folder: Path, out: Path, steps: int) -> list[str]:
    """Of `vitrail train`, as a job has them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, "optim": {"steps": steps, "warmup": 0.0}}))
    return ["--config", str(folder / "config.json"), "--out", str(out), "--resume", "auto"]


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def wait(condition: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def test_without_submitit_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r'pip install "vitrail\[slurm\]"'):
        submit([["demo"]], tmp_path, "slurm", Cluster())


def test_without_slurm_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="could not submit to slurm"):
        submit([["demo"]], tmp_path, "slurm", Cluster())


def test_parameters_of_slurm_must_have_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mem_gb' is not KEY=VALUE"):
        submit([["demo"]], tmp_path, "slurm", Cluster(slurm=("mem_gb",)))


def test_slurm_is_asked_for_nodes_processes_time_and_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"sbatch": 'cp "$1" "$COPY"; echo Submitted batch job 7', "srun": "", "sacct": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("COPY", str(tmp_path / "batch.sh"))
    cluster = Cluster(nodes=4, gpus=8, hours=2, partition="gpu", account="lab", slurm=("mem_gb=64", "constraint=a100"))
    (job,) = submit([["demo"]], tmp_path / "jobs", "slurm", cluster, "name")
    asked = (tmp_path / "batch.sh").read_text()
    assert job.job_id == "7"
    wanted = ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "time=120", "partition=gpu", "account=lab", "mem=64GB")
    for line in (*wanted, "constraint=a100", "signal=USR2@120", "job-name=name"):
        assert f"#SBATCH --{line}\n" in asked


def test_a_job_that_ends_in_time_gives_back_the_same_command() -> None:
    delayed = TrainJob("demo", "--out", "x", patience=3.0).checkpoint()
    assert delayed.function.arguments == ("demo", "--out", "x")


@pytest.mark.slow
def test_a_job_of_two_processes_ends_with_a_finished_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = arguments(tmp_path / "given", out, 4)[:4]
    assert run(["train", *words, "--launch", "local", "--gpus", "2", "--hours", "0.05"]) == 0
    state, _ = newest(out / "checkpoint")
    assert state is not None
    assert state.facts["world"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_is_signalled_goes_on_and_ends_with_the_same_weights(processes: int, tmp_path: Path) -> None:
    interrupted, whole, cluster = tmp_path / "interrupted", tmp_path / "whole", Cluster(gpus=processes, hours=0.1)
    (job,) = submit([arguments(tmp_path / "a", interrupted, 40)], tmp_path / "jobs", "local", cluster)
    metrics = interrupted / "metrics.jsonl"
    wait(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 3)
    for task in children(job._process.pid):
        os.kill(task, signal.SIGUSR2)  # as the executor does before the time limit
    wait(job.done)
    log = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*_log.*"))
    assert "Requeued job" in log
    assert "resuming" in log
    (job,) = submit([arguments(tmp_path / "b", whole, 40)], tmp_path / "other", "local", cluster)
    wait(job.done)
    first, second = (load_file(path / "model" / "model.safetensors") for path in (interrupted, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)
    state, _ = newest(interrupted / "checkpoint")
    assert state is not None
    assert state.facts["world"] == processes


@pytest.mark.slow
def test_a_study_through_jobs_equals_one_through_workers(tmp_path: Path) -> None:
    from vitrail.compare.run import compare_study

    study = tmp_path / "study.yaml"
    study.write_text(
        json.dumps(
            {
                "name": "tiny",
                "base": {**TINY, "optim": {"steps": 2}},
                "variants": {"slow": {"optim": {"lr": 1e-4}}, "fast": {"optim": {"lr": 1e-2}}},
                "seeds": [0, 1],
            }
        )
    )
    options = {"seconds": 0, "quiet": True}
    by_jobs, _ = compare_study(study, root=tmp_path / "a", jobs="local", cluster=Cluster(hours=0.1), **options)
    by_workers, _ = compare_study(study, root=tmp_path / "b", jobs=1, **options)
    of = [{(m.variant, m.seed): m.metrics for r in c.rows for m in r.members} for c in (by_jobs, by_workers)]
    assert len(of[0]) == 4
    assert of[0] == of[1]
