"""Many training runs in worker processes: a crash is a row of the table and not the end of a study.

A worker (`vitrail.compare.worker`) trains the seeds of one variant, one after the other: on an accelerator most of a
short run is compilation, which a second model of the same shape does not need. Several work side by side on one
accelerator or spread over several. Nothing is remembered here: what is finished, begun or missing is read from the run
folders, so a killed study resumes where it stopped, also next to others that share its runs.

Runs that compile nothing need no worker per variant: with `IdleWorkers` one process trains them all, over many studies.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitrail.compare.study import Planned
from vitrail.compare.worker import PATIENCE, Worker
from vitrail.config import dump
from vitrail.engine.device import StopRequest
from vitrail.engine.progress import Progress, duration
from vitrail.engine.run_folder import RunFolder
from vitrail.files import write_text

POLL_EVERY = 0.1  # seconds


class StudyStopped(Exception):
    """A study was asked to stop; its unfinished runs saved their state."""


@dataclass
class IdleWorkers:
    """Processes that wait for a run of any variant. Who makes this ends it."""

    workers: list[tuple[str | None, Worker]] = field(default_factory=list)  # with the device that each was given

    def take(self, device: str | None) -> Worker | None:
        """One that is alive and was given this device."""
        for entry in [e for e in self.workers if e[0] == device]:
            self.workers.remove(entry)
            if entry[1].alive:
                return entry[1]
        return None

    def end(self) -> None:
        """End all processes."""
        while self.workers:
            self.workers.pop()[1].end()


@dataclass
class _Slot:
    """A worker, the variant it trains, and the run it is at."""

    worker: Worker
    variant: str
    device: str | None  # for CUDA_VISIBLE_DEVICES
    job: Planned | None = None
    log: Path = Path()
    began: float = 0.0


def visible_devices() -> list[str]:
    """Names of the CUDA accelerators that a child may be given; empty without one."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def given_device(device: str | None) -> dict[str, str]:
    """The environment of a process that sees this device alone (none: all)."""
    return {**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}


def run_missing(
    planned: Sequence[Planned],
    folder: Path,
    *,
    jobs: int | None = None,
    devices: Sequence[str] | None = None,
    minutes: float | None = None,
    quiet: bool = False,
    idle: IdleWorkers | None = None,
) -> dict[Path, str]:
    """Begin or continue every run that is not finished, `jobs` at a time (none: one per device). A run that stands on
    others is begun when these are finished, and fails where one of them did.

    Each worker stays with its variant while that has runs to train; a new one takes the first run of the plan whose
    variant has fewest workers. So all variants go on side by side where there are as many jobs, and with fewer they
    come one after the other. After a run that failed, the rest of its variant is trained by a fresh worker. With `idle`
    a worker takes any run, and is left there at the end.

    `folder` is the study's: it keeps the configurations and logs of the runs. Returns run folder -> reason of those
    that failed. Raises `StudyStopped` on Ctrl-C, SIGTERM or after so many minutes, when the running ones have saved.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    available: list[str | None] = [*(visible_devices() if devices is None else devices)] or [None]
    most = len(available) if jobs is None else jobs
    if most < 1:
        raise ValueError(f"jobs: {most}; at least one run must be made at a time")
    unique = {p.path: p for p in planned}
    waiting = [p for p in unique.values() if not RunFolder(p.path).finished]
    with StopRequest() as stop, Progress("study", len(unique), quiet=quiet) as progress:
        progress.advance(len(unique) - len(waiting))
        scheduler = _Scheduler(waiting, folder, available, most, progress, idle)
        try:
            while waiting or scheduler.slots:
                scheduler.assign()
                time.sleep(POLL_EVERY)
                if stop.requested or time.monotonic() > end:
                    raise StudyStopped("stopped; the same command goes on where it was")
                scheduler.collect()
        finally:
            scheduler.stop()
    return scheduler.failed


class _Scheduler:
    """The workers of a study, at most `most` of them, and the runs that wait for one."""

    def __init__(
        self,
        waiting: list[Planned],
        folder: Path,
        devices: Sequence[str | None],
        most: int,
        progress: Progress,
        idle: IdleWorkers | None = None,
    ) -> None:
        self.idle = idle
        self.waiting, self.folder, self.devices, self.most, self.progress = waiting, folder, devices, most, progress
        self.slots: list[_Slot] = []
        self.failed: dict[Path, str] = {}  # run folder -> reason
        self._reported: set[Path] = set()

    def assign(self) -> None:
        """Give every idle worker the next run of its variant, or replace it by one for another variant."""
        for blocked in list(self.waiting):
            if lost := [path for path in blocked.needs if path in self.failed]:
                self.waiting.remove(blocked)
                self.failed[blocked.path] = f"it stands on {lost[0]}, which failed: {self.failed[lost[0]]}"
                self.progress.advance(1, f"{blocked.name} failed")
        for slot in [s for s in self.slots if s.job is None]:
            job = self._next(slot.variant if self.idle is None else None) if slot.worker.alive else None
            if job is None and self.idle is not None and slot.worker.alive:
                self.slots.remove(slot)
                self.idle.workers.append((slot.device, slot.worker))
            elif job is None:
                self._end(slot)
            else:
                self._submit(slot, job)
        while len(self.slots) < self.most and (job := self._next()) is not None:
            self._submit(self._start(job), job)

    def collect(self) -> None:
        """Record runs that have ended."""
        for slot in list(self.slots):
            if slot.job is None or (code := slot.worker.exit_code()) is None:
                continue
            job, slot.job = slot.job, None
            if code or not RunFolder(job.path).finished:
                self._end(slot)  # its state is unknown; and a lock that it held is free now
            self._record(job, slot, code)

    def stop(self) -> None:
        """Ask running runs to save, and wait until they have."""
        for slot in self.slots:
            if slot.job is not None:
                slot.worker.stop()
        for slot in self.slots:
            slot.worker.end(PATIENCE if slot.job is None else None)

    def _next(self, variant: str | None = None) -> Planned | None:
        """Take the next run (of this variant) off the list."""
        pending = {p.path for p in self.waiting} | {s.job.path for s in self.slots if s.job is not None}
        candidates = [p for p in self.waiting if variant in (None, p.variant) and pending.isdisjoint(p.needs)]
        for job in sorted(candidates, key=lambda p: sum(s.variant == p.variant for s in self.slots)):
            run = RunFolder(job.path)
            if run.busy:
                if job.path not in self._reported:
                    self._reported.add(job.path)
                    self.progress.say(f"{job.name}: another process is making this run ({job.path}); waiting for it")
                continue
            self.waiting.remove(job)
            if not run.finished:
                return job
            self.progress.advance(1)
            self.progress.say(f"{job.name}: finished by another process")
        return None

    def _start(self, job: Planned) -> _Slot:
        device = min(self.devices, key=lambda d: sum(s.device == d for s in self.slots))
        environment = given_device(device)
        if self.most > 1:  # side by side, each gets its share of the cores
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.most)))
        log = self._new_log(job)
        worker = None if self.idle is None else self.idle.take(device)
        self.slots.append(_Slot(worker or Worker(log, environment), job.variant, device, log=log))
        return self.slots[-1]

    def _end(self, slot: _Slot) -> None:
        self.slots.remove(slot)
        slot.worker.end()

    def _submit(self, slot: _Slot, job: Planned) -> None:
        if job.path.is_dir() and {p.name for p in job.path.iterdir()} <= {".lock"}:
            shutil.rmtree(job.path)  # left by a kill before its configuration was written; it would be rejected
        continued = (job.path / "config.yaml").is_file()
        if continued:
            arguments = ["--resume", str(job.path)]
        else:
            config = self.folder / "configs" / f"{job.name}.yaml"
            write_text(config, dump(job.config))
            arguments = ["--config", str(config), "--out", str(job.path)]
        begun = slot.job is None and slot.log == self._log(job)  # it may hold why the worker could not begin
        slot.variant = job.variant
        slot.job, slot.log, slot.began = job, slot.log if begun else self._new_log(job), time.monotonic()
        slot.worker.submit([*arguments, "--json"], slot.log)
        device = "" if slot.device is None else f" on device {slot.device}"
        self.progress.say(f"{job.name}: {'continued' if continued else 'begun'}{device}")

    def _log(self, job: Planned) -> Path:
        return self.folder / "logs" / f"{job.name}.txt"

    def _new_log(self, job: Planned) -> Path:
        log = self._log(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        return log

    def _record(self, job: Planned, slot: _Slot, code: int) -> None:
        """Report how a run ended; one that another process has is tried again."""
        run = RunFolder(job.path)
        if run.finished:
            final = [line for line in run.read_metrics() if line.get("final")][-1]
            metric = next((f"{k} {final[k]:.4f}" for k in ("top1", "map") if k in final), "")
            self.progress.advance(1, f"{job.name} finished")
            took = duration(time.monotonic() - slot.began)
            self.progress.say(f"{job.name}: finished in {took}, {final['split']} {metric}")
        elif run.busy:
            self.waiting.append(job)
        else:
            self.failed[job.path] = failure_reason(slot.log, code)
            self.progress.advance(1, f"{job.name} failed")
            self.progress.say(f"{job.name}: failed: {self.failed[job.path]} (see {slot.log})")


def failure_reason(log: Path, code: int) -> str:
    """The last error message of a process, in one line."""
    if code < 0:
        kind = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        memory = " (perhaps for lack of memory)" if kind == "SIGKILL" else ""
        return f"killed by {kind}{memory}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [n for n, line in enumerate(lines) if line.startswith("vitrail: ")]
    if errors:
        return " ".join(" ".join(lines[errors[-1] :]).removeprefix("vitrail: ").split())
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last or f"exit code {code}, and nothing was said"
