"""A worker process (`vitrail.compare.worker`) as whoever gives it orders sees it.

Many training runs, made by worker processes: a crash is a row of the table and not the end of a study.

A worker (`vitrail.compare.worker`) trains the seeds of one variant, one after the other: on an accelerator most of a
short run is compilation, which a second model of the same shape does not need. Several work side by side on one
accelerator or spread over several. Nothing is remembered here: what is finished, begun or missing is read from the run
folders, so a killed study resumes where it stopped, also next to others that share its runs.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.compare.study import Planned
from vitrail.config import dump
from vitrail.engine.device import StopRequest
from vitrail.engine.progress import Progress, duration
from vitrail.engine.run_folder import RunFolder
from vitrail.files import write_text

PATIENCE = 10.0  # seconds that a worker without an order gets to end


class Worker:
    """Starts the process, which takes one order at a time."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`log` holds what is said before the first order."""
        with log.open("ab") as words:
            # In a session of its own: Ctrl-C reaches the process that gives orders alone, which then asks each run to
            # save, once.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vitrail.compare.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=environment,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def order(self, words: Sequence[str], log: Path) -> None:
        """Begin the run that `vitrail train WORDS` makes. A worker that is no more says so as its answer."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> int | None:
        """The exit code of the run that was ordered, None while it goes on.

        A worker that died gives its own: below 0, the signal that killed it.
        """
        code = self.process.poll()  # first: what was answered before the end counts
        if code is not None:
            self._listener.join(1.0)  # no longer: a process that the run left behind may hold the pipe
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return code

    def stop(self) -> None:
        """Ask a run to save and to stop; as SIGTERM to `vitrail train`."""
        self.process.terminate()  # nothing happens where it is no more

    def end(self, patience: float | None = PATIENCE) -> None:
        """No more orders; returns when the process is gone. One that has none to carry out is killed if need be."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it died with an order unread
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._answers.put(json.loads(line)["code"])


LOOK_EVERY = 0.1  # seconds


class StudyStopped(Exception):
    """A study was asked to stop; its unfinished runs saved their state."""


@dataclass
class _Job:
    planned: Planned
    log: Path
    began: float


@dataclass
class _Hand:
    """A worker, what it is for and what it does."""

    worker: Worker
    variant: str
    place: str | None  # what CUDA_VISIBLE_DEVICES says
    job: _Job | None = None


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

    Each worker stays with its variant while that has runs to make; a new one takes the first run of the plan whose
    variant has fewest workers. So all variants go on side by side where there are as many jobs, and with fewer they
    come one after the other. After a run that failed, what its variant still lacks is made by a fresh worker.

    `folder` is the study's: it keeps the configurations and what the runs print. Returns run folder -> reason of those
    that failed. Raises `StudyStopped` on Ctrl-C or SIGTERM, after the running ones have saved.
    """
    places: list[str | None] = [*(visible_devices() if devices is None else devices)] or [None]
    most = len(places) if jobs is None else jobs
    if most < 1:
        raise ValueError(f"jobs: {most}; at least one run must be made at a time")
    unique = {p.path: p for p in planned}
    waiting = [p for p in unique.values() if not RunFolder(p.path).finished]
    with StopRequest() as stop, Progress("study", len(unique), quiet=quiet) as bar:
        bar.advance(len(unique) - len(waiting))
        crew = _Crew(waiting, folder, places, most, bar)
        try:
            while waiting or crew.hands:
                crew.hand_out()
                time.sleep(LOOK_EVERY)
                if stop.requested:
                    raise StudyStopped("stopped; the same command goes on where it was")
                crew.collect()
        finally:
            crew.stop()
    return crew.failed


class _Crew:
    """The workers of a study, at most `most` of them, and the runs that wait for one."""

    def __init__(
        self, waiting: list[Planned], folder: Path, places: Sequence[str | None], most: int, bar: Progress
    ) -> None:
        self.waiting, self.folder, self.places, self.most, self.bar = waiting, folder, places, most, bar
        self.hands: list[_Hand] = []
        self.failed: dict[Path, str] = {}  # run folder -> reason
        self._told: set[Path] = set()

    def hand_out(self) -> None:
        """Give every worker that has nothing to do the next run of its variant, or let it go for another one."""
        for hand in [h for h in self.hands if h.job is None]:
            one = self._next(hand.variant) if hand.worker.alive else None
            if one is None:
                self._dismiss(hand)
            else:
                self._order(hand, one)
        while len(self.hands) < self.most and (one := self._next()) is not None:
            self._order(self._hire(one), one)

    def collect(self) -> None:
        """See which runs have ended, and how."""
        for hand in list(self.hands):
            if hand.job is None or (code := hand.worker.answer()) is None:
                continue
            job, hand.job = hand.job, None
            if code or not RunFolder(job.planned.path).finished:
                self._dismiss(hand)  # who knows what it left behind; and a lock that it held is free now
            self._end(job, code)

    def stop(self) -> None:
        """Ask the runs that go on to save, and wait until they have."""
        for hand in self.hands:
            if hand.job is not None:
                hand.worker.stop()
        for hand in self.hands:
            hand.worker.end(PATIENCE if hand.job is None else None)

    def _next(self, variant: str | None = None) -> Planned | None:
        """Take the run to make next (of this variant) off the list."""
        able = [p for p in self.waiting if variant in (None, p.variant)]
        for one in sorted(able, key=lambda p: sum(h.variant == p.variant for h in self.hands)):
            run = RunFolder(one.path)
            if run.busy:
                if one.path not in self._told:
                    self._told.add(one.path)
                    self.bar.say(f"{one.name}: another process is making this run ({one.path}); waiting for it")
                continue
            self.waiting.remove(one)
            if not run.finished:
                return one
            self.bar.advance(1)
            self.bar.say(f"{one.name}: finished by another process")
        return None

    def _hire(self, one: Planned) -> _Hand:
        place = min(self.places, key=lambda p: sum(h.place == p for h in self.hands))
        environment = dict(os.environ)
        if place is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place
        if self.most > 1:  # side by side, each gets its share of the cores
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.most)))
        hand = _Hand(Worker(self._new_log(one), environment), one.variant, place)
        self.hands.append(hand)
        return hand

    def _dismiss(self, hand: _Hand) -> None:
        self.hands.remove(hand)
        hand.worker.end()

    def _order(self, hand: _Hand, one: Planned) -> None:
        _clear_stub(one.path)
        continued = (one.path / "config.yaml").is_file()
        if continued:
            words = ["--resume", str(one.path)]
        else:
            config = self.folder / "configs" / f"{one.name}.yaml"
            write_text(config, dump(one.config))
            words = ["--config", str(config), "--out", str(one.path)]
        hand.job = _Job(one, self._new_log(one), time.monotonic())
        hand.worker.order([*words, "--json"], hand.job.log)
        place = "" if hand.place is None else f" on device {hand.place}"
        self.bar.say(f"{one.name}: {'continued' if continued else 'begun'}{place}")

    def _new_log(self, one: Planned) -> Path:
        log = self.folder / "logs" / f"{one.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        return log

    def _end(self, job: _Job, code: int) -> None:
        """Say how a run ended; one that another process has is tried again."""
        one, run = job.planned, RunFolder(job.planned.path)
        if run.finished:
            final = [line for line in run.read_metrics() if line.get("final")][-1]
            figure = next((f"{k} {final[k]:.4f}" for k in ("top1", "map") if k in final), "")
            self.bar.advance(1, f"{one.name} finished")
            took = duration(time.monotonic() - job.began)
            self.bar.say(f"{one.name}: finished in {took}, {final['split']} {figure}")
        elif run.busy:
            self.waiting.append(one)
        else:
            self.failed[one.path] = failure_reason(job.log, code)
            self.bar.advance(1, f"{one.name} failed")
            self.bar.say(f"{one.name}: failed: {self.failed[one.path]} (see {job.log})")


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
