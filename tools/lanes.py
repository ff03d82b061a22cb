"""Run queues of commands side by side for a given time, as they share an accelerator, and keep what they print.

    python tools/lanes.py FILE --out FOLDER --minutes 28 [--detach]
    python tools/lanes.py --wait 580 --out FOLDER

FILE is YAML: commands that have the machine to themselves, one after the other, then lanes that run side by side, and
at last commands that have it to themselves again, for whose minutes lanes end before the time is over.

    environment: {HF_HUB_OFFLINE: "1"}
    alone:
      - {name: tests, command: python -m pytest -m gpu tests/kernels}
    lanes:
      fits:
        - {name: fit-3ms, command: vitrail fit imagenette --latency 3ms --minutes 3, minutes: 4}
      studies:
        - {name: teacher, command: vitrail train small-msf --data cifar10.npz --out runs/teacher, minutes: 4}
        - {name: student, command: vitrail train small-compres --objective.teacher runs/teacher, after: [teacher]}
    last:
        - {name: times, command: vitrail bench runs/teacher, minutes: 2}

A command begins when all that it comes `after` have succeeded, and only if its `minutes` (1 if not said) are left.
Lanes share an NVIDIA accelerator by CUDA MPS where that can be started, but for commands with `mps: false` (tests that
provoke faults, say, which would take the others down). A command finds its name in $NAME. What it prints goes to
FOLDER/NAME.log, begin and exit status to FOLDER/times.jsonl. What runs when the time is over gets SIGTERM (training
then ends with a checkpoint). `--detach` returns at once, and `--wait` returns after so many seconds, or when all has
ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

KEYS = {"name", "command", "minutes", "after", "mps"}
PATIENCE = 20.0  # seconds that a command has to end after it was asked to


class Lanes:
    """What runs, what has ended, and until when."""

    def __init__(self, plan: dict[str, Any], out: Path, seconds: float) -> None:
        self.plan, self.out, self.begun = plan, out, time.monotonic()
        self.until = self.begun + seconds
        self.environment = {**os.environ, **{name: str(value) for name, value in plan.get("environment", {}).items()}}
        self.ended: dict[str, int] = {}
        self.change = threading.Condition()

    def note(self, name: str, **facts: Any) -> None:
        line = {"name": name, "at": round(time.monotonic() - self.begun, 1), **facts}
        with (self.out / "times.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def call(self, job: dict[str, Any], environment: dict[str, str]) -> None:
        """Run one command, unless what it waits for fails or the time is too short."""
        name, status = job["name"], 1
        with self.change:
            others = job.get("after", [])
            self.change.wait_for(lambda: all(o in self.ended for o in others), max(0.0, self.until - time.monotonic()))
            ready = all(self.ended.get(other) == 0 for other in others)
        if not ready or time.monotonic() + 60 * job.get("minutes", 1) > self.until:
            self.note(name, left_out="time" if ready else "after")
        else:
            self.note(name, began=True)
            with (self.out / f"{name}.log").open("w") as log:
                env = {**(environment if job.get("mps", True) else self.environment), "NAME": name}
                call = ["bash", "-c", job["command"]]
                process = subprocess.Popen(call, stdout=log, stderr=log, env=env, start_new_session=True)
                try:
                    status = process.wait(max(0.0, self.until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        status = process.wait(PATIENCE)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        status = process.wait()
            self.note(name, status=status)
        with self.change:
            self.ended[name] = status
            self.change.notify_all()

    def run(self) -> int:
        """All commands; the number of those that did not succeed."""
        for job in self.plan.get("alone", []):
            self.call(job, self.environment)
        shared = {**self.environment, **start_mps(self.out)}
        queues = [list(jobs) for jobs in self.plan.get("lanes", {}).values()]
        threads = [threading.Thread(target=lambda q=q: [self.call(job, shared) for job in q]) for q in queues]
        last, until = self.plan.get("last", []), self.until
        self.until -= PATIENCE * bool(last) + 60 * sum(job.get("minutes", 1) for job in last)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.until = until
        for job in last:
            self.call(job, self.environment)
        return sum(status != 0 for status in self.ended.values())


def start_mps(out: Path) -> dict[str, str]:
    """CUDA's server for processes that share an accelerator, where there is one, and what makes them use it."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return {}
    folders = {"CUDA_MPS_PIPE_DIRECTORY": str(out / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(out / "mps-log")}
    for folder in folders.values():
        Path(folder).mkdir(exist_ok=True)
    started = subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **folders}, check=False)
    return folders if started.returncode == 0 else {}


def read_plan(path: Path) -> dict[str, Any]:
    """The file; `SystemExit` where names are missing, used twice, or come after what is not there."""
    plan: dict[str, Any] = yaml.safe_load(path.read_text())
    jobs = [*plan.get("alone", []), *(job for lane in plan.get("lanes", {}).values() for job in lane)]
    jobs += plan.get("last", [])
    if bad := [job for job in jobs if not {"name", "command"} <= job.keys() <= KEYS]:
        sys.exit(f"{path}: a command has name, command, minutes, after and mps; not so {bad[0]}")
    names = [job["name"] for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    unknown = {other for job in jobs for other in job.get("after", [])} - set(names)
    if twice or unknown:
        sys.exit(f"{path}: " + (f"{min(twice)} is there twice" if twice else f"there is no {min(unknown)} to wait for"))
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--detach", action="store_true", help="return at once; the commands go on")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="for commands that were begun with --detach")
    options = parser.parse_args()
    finished = options.out / "finished"
    if options.wait is not None:
        until = time.monotonic() + options.wait
        while time.monotonic() < until and not finished.exists():
            time.sleep(0.2)
        times = options.out / "times.jsonl"
        print(times.read_text() if times.exists() else "nothing has begun\n", end="")
        return
    plan = read_plan(options.file)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.detach:
        again = [sys.executable, __file__, str(options.file), "--out", str(options.out)]
        with (options.out / "lanes.log").open("w") as log:
            again += ["--minutes", str(options.minutes)]
            subprocess.Popen(again, stdout=log, stderr=log, start_new_session=True)
        return
    failed = Lanes(plan, options.out.resolve(), 60 * options.minutes).run()
    finished.touch()
    sys.exit(f"{failed} commands did not succeed; see {options.out}/times.jsonl" if failed else 0)


if __name__ == "__main__":
    main()
