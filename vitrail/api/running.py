"""Many training runs, each a process of its own: a crash is a row of the table and not the end of a study.

Several run side by side on one accelerator or spread over several. Nothing is remembered here: what is finished, begun
or missing is read from the run folders, so a killed study goes on where it was, beside others that share its runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.api.studies import Planned
from vitrail.config import dump
from vitrail.engine.progress import Progress, duration
from vitrail.engine.run import RunFolder
from vitrail.engine.signals import StopRequest
from vitrail.files import write_text

LOOK_EVERY = 0.1  # seconds


class StudyStopped(Exception):
    """A study was asked to stop; its unfinished runs saved their state."""


@dataclass
class _Job:
    planned: Planned
    process: subprocess.Popen[bytes]
    log: Path
    place: str | None  # what CUDA_VISIBLE_DEVICES says
    began: float


def visible_devices() -> list[str]:
    """Names of the CUDA accelerators that a child may be given; empty without one."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def run_missing(
    planned: Sequence[Planned],
    folder: Path,
    *,
    jobs: int | None = None,
    devices: Sequence[str] | None = None,
    quiet: bool = False,
) -> dict[Path, str]:
    """Begin or continue every run that is not finished, `jobs` at a time (none: one a device).

    `folder` is the study's: it keeps the configurations and what the processes print. Returns run folder -> reason of
    those that failed. Raises `StudyStopped` on Ctrl-C or SIGTERM, after the running ones have saved.
    """
    places: list[str | None] = [*(visible_devices() if devices is None else devices)] or [None]
    most = len(places) if jobs is None else jobs
    if most < 1:
        raise ValueError(f"jobs: {most}; at least one run must be made at a time")
    unique = {p.path: p for p in planned}
    waiting = [p for p in unique.values() if not RunFolder(p.path).finished]
    failed: dict[Path, str] = {}
    running: list[_Job] = []
    told: set[Path] = set()
    with StopRequest() as stop, Progress("study", len(unique), unit="runs", quiet=quiet) as bar:
        bar.advance(len(unique) - len(waiting))
        try:
            while waiting or running:
                for one in list(waiting):
                    if stop.requested or len(running) >= most:
                        break
                    if not _begin(one, places, running, folder, most, bar, told):
                        continue
                    waiting.remove(one)
                time.sleep(LOOK_EVERY)
                if stop.requested:
                    raise StudyStopped("stopped; the same command goes on where it was")
                for job in [j for j in running if j.process.poll() is not None]:
                    running.remove(job)
                    again = _end(job, failed, bar)
                    if again:
                        waiting.append(job.planned)
        finally:
            _stop(running)
    return failed


def _begin(
    one: Planned,
    places: Sequence[str | None],
    running: list[_Job],
    folder: Path,
    most: int,
    bar: Progress,
    told: set[Path],
) -> bool:
    """Start a run; true where nothing more is to be waited for."""
    run = RunFolder(one.path)
    if run.busy:
        if one.path not in told:
            told.add(one.path)
            bar.say(f"{one.name}: another process is making this run ({one.path}); waiting for it")
        return False
    if run.finished:
        bar.advance(1)
        bar.say(f"{one.name}: finished by another process")
        return True
    place = min(places, key=lambda p: sum(j.place == p for j in running))
    job = _start(one, place, folder, most)
    running.append(job)
    how = "continued" if "--resume" in job.process.args else "begun"  # type: ignore[operator]
    bar.say(f"{one.name}: {how}{'' if place is None else f' on device {place}'}")
    return True


def _start(one: Planned, place: str | None, folder: Path, most: int) -> _Job:
    _clear_stub(one.path)
    if (one.path / "config.yaml").is_file():
        words = ["--resume", str(one.path)]
    else:
        config = folder / "configs" / f"{one.name}.yaml"
        write_text(config, dump(one.config))
        words = ["--config", str(config), "--out", str(one.path)]
    environment = dict(os.environ)
    if place is not None:
        environment["CUDA_VISIBLE_DEVICES"] = place
    if most > 1:  # side by side, each gets its share of the cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // most)))
    log = folder / "logs" / f"{one.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        # In a session of its own: Ctrl-C reaches this process alone, which then asks each run once to save.
        process = subprocess.Popen(
            [sys.executable, "-m", "vitrail", "train", *words, "--json"],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    return _Job(one, process, log, place, time.monotonic())


def _end(job: _Job, failed: dict[Path, str], bar: Progress) -> bool:
    """Say how a run ended; true where it must be tried again, because another process has it."""
    one, run = job.planned, RunFolder(job.planned.path)
    if run.finished:
        final = [line for line in run.read_metrics() if line.get("final")][-1]
        figure = next((f"{k} {final[k]:.4f}" for k in ("top1", "map") if k in final), "")
        bar.advance(1, f"{one.name} finished")
        bar.say(f"{one.name}: finished in {duration(time.monotonic() - job.began)}, {final['split']} {figure}")
        return False
    if run.busy:
        return True
    failed[one.path] = failure_reason(job.log, job.process.returncode)
    bar.advance(1, f"{one.name} failed")
    bar.say(f"{one.name}: failed: {failed[one.path]} (see {job.log})")
    return False


def failure_reason(log: Path, code: int) -> str:
    """What a process said last, in one line."""
    if code < 0:
        kind = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        memory = " (perhaps for lack of memory)" if kind == "SIGKILL" else ""
        return f"killed by {kind}{memory}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = [n for n, line in enumerate(lines) if line.startswith("vitrail: ")]
    if said:
        return " ".join(" ".join(lines[said[-1] :]).removeprefix("vitrail: ").split())
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last or f"exit code {code}, and nothing was said"


def _clear_stub(path: Path) -> None:
    """A folder that a kill left before its configuration was written holds nothing, and would be refused."""
    if path.is_dir() and {p.name for p in path.iterdir()} <= {".lock"}:
        shutil.rmtree(path)


def _stop(running: Sequence[_Job]) -> None:
    for job in running:
        if job.process.poll() is None:
            job.process.terminate()
    for job in running:
        job.process.wait()
