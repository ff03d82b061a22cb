"""Studies side by side on one accelerator: what one leaves idle, another uses.

    python studies/all.py [NAME ...] --data FOLDER [--side 9] [--jobs 3] [--minutes 9] [--smoke]

FOLDER holds cifar100.npz and cifar10.npz, and what else a study names that lacks it; runs and reports land in
FOLDER/runs/studies, what each process printed in FOLDER/runs/logs. Without names: the studies of training and heads,
longest first, so that the last minutes are not one study's alone. Studies of rows are cut into processes as
studies/plans.py says; earlier names come first. A study of `vitrail compare` takes as many places of `--side` as it has
`--jobs`. After `--minutes`, or at SIGTERM, everything is stopped, and the same command goes on: finished runs and rows
are never made again. Times of studies made side by side mean nothing; benchmarks/ is where times are measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from found import UNFINISHED, key, read_rows  # noqa: E402
from plans import PLANS, Process, Row  # noqa: E402

ENDED = "ended.txt"  # beside the rows of a study; remove it where rows or models were removed
LAST_ROW = 0.4  # minutes in which a script may end what it is at
STUDIES = (
    *("small-deit", "layerscale", "recipe-ablation", "heads-vit", "second-order", "cait-heads", "grafit"),
    *("resmlp-mixers", "teachers", "heads-resnet", "seeds", "augmentations", "bce", "grafit-weight", "recipe-swap"),
    *("distillation", "resolution", "crop", "stem-pooling", "attention-only", "gramian", "removed"),
)


@dataclass(frozen=True)
class Job:
    """A process to be started: what it is called, what it runs, how many places it takes, what it waits for."""

    name: str
    command: tuple[str, ...]
    places: int = 1
    study: str = ""
    waits: tuple[Row, ...] = ()
    timed: bool = False  # ends by itself where it is told how many minutes it has
    first: bool = False  # served before the others where CUDA's MPS runs


def jobs_of(name: str, jobs: int, smoke: bool) -> list[Job]:
    """All processes of a study."""
    extra = ("--smoke",) if smoke else ()
    if name in PLANS:
        return [of_rows(process, extra) for process in PLANS[name]()]
    words = (sys.executable, "-m", "vitrail", "compare", str(HERE / f"{name}.yaml"), "--jobs", str(jobs))
    return [Job(name, (*words, "--seconds", "0", *extra), jobs)]


def of_rows(process: Process, extra: Sequence[str]) -> Job:
    words = (sys.executable, str(HERE / process.script), *process.words, "--out", f"runs/studies/{process.study}")
    name = f"{process.study}: {process.name}"
    return Job(name, (*words, *extra), 1, process.study, process.waits, True, process.first)


def lacking(name: str, folder: Path) -> list[str]:
    """Files that a study of rows needs and FOLDER does not have."""
    wanted = {file for process in PLANS[name]() for file in process.data} if name in PLANS else set()
    return sorted(file for file in wanted if not (folder / file).exists())


def ended(folder: Path, study: str) -> set[str]:
    """Processes of a study that made all their rows: to begin them again would take ten seconds each, for nothing."""
    path = folder / "runs" / "studies" / study / ENDED
    return set(path.read_text().splitlines()) if study and path.is_file() else set()


def end(process: subprocess.Popen[bytes], seconds: float = 20) -> None:
    """Ask a study and its runs to stop, and wait until the last has written what it must; then no longer."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)  # raises when none of them is left
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Pool:
    """Starts the first job that waits for nothing more whenever there is a place for it."""

    def __init__(
        self, waiting: Sequence[Job], folder: Path, side: int, minutes: float | None, every: float = 1
    ) -> None:
        self.waiting, self.folder, self.side, self.every = list(waiting), folder, side, every
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.rows: dict[str, set[tuple[object, ...]]] = {}  # by study
        self.running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
        self.failed: list[str] = []
        (folder / "runs" / "logs").mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """All of it, or what there is time for; says how each job ended."""
        studies = {job.study for job in self.waiting if job.study}
        while (self.waiting or self.running) and time.monotonic() < self.until:
            for job, (process, _) in list(self.running.items()):
                if process.poll() is not None:
                    self._over(job, process.returncode)
            for study in studies:
                found = read_rows(self.folder / "runs" / "studies" / study)
                self.rows[study] = {key(row) for row in found if "failed" not in row}
            begun = [self._begin(job) for job in self._ready()]
            if not self.running and not begun:
                break  # what the others wait for will not come
            time.sleep(self.every)
        for job, (process, _) in list(self.running.items()):
            end(process)
            self._over(job, None)

    def stop(self) -> None:
        """As if the time were over."""
        self.until = float("-inf")

    def _ready(self) -> list[Job]:
        free, found = self.side - sum(job.places for job in self.running), []
        for job in self.waiting:
            alone = not self.running and not found  # one that has more runs at a time than there are places
            if (job.places <= free or alone) and all(row in self.rows[job.study] for row in job.waits):
                found.append(job)
                free -= job.places
        return found

    def _begin(self, job: Job) -> Job:
        self.waiting.remove(job)
        left = (self.until - time.monotonic()) / 60 - LAST_ROW
        words = [*job.command, *(("--minutes", f"{left:.2f}") if job.timed and left < float("inf") else ())]
        path = self.folder / "runs" / "logs" / f"{job.name.replace(': ', '-').replace(' ', '-')}.txt"
        with path.open("w") as log:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "CUDA_MPS_CLIENT_PRIORITY": "0" if job.first else "1"},
            )
        self.running[job] = process, time.monotonic()
        return job

    def _over(self, job: Job, code: int | None) -> None:
        _, began = self.running.pop(job)
        said = {None: "out of time", UNFINISHED: "out of time", 0: "done"}.get(code)
        if code != 0:
            self.failed.append(job.name)
        elif job.study:
            with (self.folder / "runs" / "studies" / job.study / ENDED).open("a") as file:
                file.write(job.name + "\n")
        said = said or f"failed with exit code {code}: see its log"
        print(f"{job.name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(STUDIES), help="studies (none: all)")
    parser.add_argument("--data", type=Path, default=Path.cwd(), help="folder of the data, and of what comes out")
    parser.add_argument("--side", type=int, default=9, help="processes at a time")
    parser.add_argument("--jobs", type=int, default=3, help="runs of a study of `vitrail compare` at a time")
    parser.add_argument("--minutes", type=float, help="stop everything then")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    known = {*PLANS, *(path.stem for path in HERE.glob("*.yaml"))}
    for name in options.names:
        if name not in known:
            parser.error(f"no study {name!r}; there are {', '.join(sorted(known))}")
        if missing := lacking(name, options.data):
            parser.error(
                f"{name} needs {', '.join(missing)} in {options.data}; the header of its script says what they are"
            )
    wanted = [job for name in options.names for job in jobs_of(name, options.jobs, options.smoke)]
    waiting = [job for job in wanted if job.name not in ended(options.data, job.study)]
    pool = Pool(waiting, options.data, options.side, options.minutes)
    signal.signal(signal.SIGTERM, lambda *_: pool.stop())
    pool.run()
    for job in pool.waiting:
        print(f"{job.name}: not begun")
    return 1 if pool.failed or pool.waiting else 0


if __name__ == "__main__":
    sys.exit(main())
