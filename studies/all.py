"""Studies side by side on one accelerator: what one leaves idle, another uses.

    python studies/all.py [NAME ...] --data FOLDER [--side 3] [--jobs 3] [--minutes 9] [--smoke]

FOLDER holds cifar100.npz and cifar10.npz (distillation: cifar10_resnet56.safetensors, too); runs and reports land in
FOLDER/runs/studies, what each study printed in FOLDER/runs/logs. Without names: those of training and heads, longest
first, so that the last minutes are not one study's alone; `PROGRAMS` are those that are a script. After `--minutes`
everything is stopped, and the same command goes on: finished runs are never repeated. Times of studies made side by
side mean nothing; benchmarks/ is where times are measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAST_ROW = 0.4  # minutes in which a script may end what it is at
CHAINED = {  # name: arguments of studies/chained.py
    "resolution": ("resolution", "cifar100.npz"),
    "attention": ("attention", "cifar100.npz", "cifar10.npz"),
    "teachers": ("teachers", "cifar10.npz"),
    "removed": ("removed", "cifar100.npz"),
}
UNLABELLED = ("selfsupervised.py", "cifar100.npz", "cifar10.npz", "--part")
PROGRAMS = {  # name: script and arguments, without parts that time something; each has a folder of rows by its name
    "adaptive": ("adaptive.py", "cifar100.npz", "--part", "base", "ats", "victims", "attacks", "defence", "variations"),
    "attention-transfer": ("attention_transfer.py", "cifar100.npz", "--other", "cifar10.npz"),
    "adapters": ("adapters.py", "cifar100.npz", "cifar10.npz", "--part", "main", "bits", "toy", "shots", "scratch"),
    "genie": ("genie.py", "cifar10.npz"),
    "selfsupervised-main": (*UNLABELLED, "main"),
    "selfsupervised-small": (*UNLABELLED, "students", "vit", "attention"),
    "selfsupervised-labels": (*UNLABELLED, "noise", "coarse", "tail", "cifar10"),
}
STUDIES = (
    *("small-deit", "layerscale", "recipe-ablation", "heads-vit", "second-order", "cait-heads", "grafit"),
    *("resmlp-mixers", "teachers", "heads-resnet", "seeds", "augmentations", "bce", "grafit-weight", "recipe-swap"),
    *("distillation", "resolution", "crop", "stem-pooling", "attention", "gramian", "removed"),
)


def command(name: str, jobs: int, smoke: bool, minutes: float) -> list[str]:
    """What makes a study, and ends by itself in so many minutes where it can."""
    extra = ["--smoke"] if smoke else []
    if name in PROGRAMS:
        script, *words = PROGRAMS[name]
        until = [] if minutes == float("inf") else ["--minutes", f"{minutes:.2f}"]
        return [sys.executable, str(HERE / script), *words, "--out", f"runs/studies/{name}", *until, *extra]
    if name in CHAINED:
        return [sys.executable, str(HERE / "chained.py"), *CHAINED[name], "--jobs", str(jobs), *extra]
    words = [sys.executable, "-m", "vitrail", "compare", str(HERE / f"{name}.yaml"), "--jobs", str(jobs)]
    return [*words, "--seconds", "0", *extra]


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
    """Takes one study after the other, `side` at a time."""

    def __init__(self, names: list[str], folder: Path, jobs: int, smoke: bool, minutes: float | None) -> None:
        self.waiting, self.folder, self.jobs, self.smoke = list(names), folder, jobs, smoke
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.lock = threading.Lock()
        self.failed: list[str] = []
        (folder / "runs" / "logs").mkdir(parents=True, exist_ok=True)

    def take(self) -> None:
        while time.monotonic() < self.until:
            with self.lock:
                if not self.waiting:
                    return
                name = self.waiting.pop(0)
            self.run(name)

    def run(self, name: str) -> None:
        began = time.monotonic()
        with (self.folder / "runs" / "logs" / f"{name}.txt").open("w") as log:
            process = subprocess.Popen(
                command(name, self.jobs, self.smoke, (self.until - time.monotonic()) / 60 - LAST_ROW),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, min(self.until - time.monotonic(), threading.TIMEOUT_MAX)))
                said = "done" if code == 0 else f"failed with exit code {code}: see its log"
            except subprocess.TimeoutExpired:
                end(process)
                code, said = 1, "out of time"
        if code:
            self.failed.append(name)
        print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(STUDIES), help="studies (none: all)")
    parser.add_argument("--data", type=Path, default=Path.cwd(), help="folder of the data, and of what comes out")
    parser.add_argument("--side", type=int, default=3, help="studies at a time")
    parser.add_argument("--jobs", type=int, default=3, help="runs of a study at a time")
    parser.add_argument("--minutes", type=float, help="stop everything then")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    known = {*CHAINED, *PROGRAMS, *(path.stem for path in HERE.glob("*.yaml"))}
    for name in options.names:
        if name not in known:
            parser.error(f"no study {name!r}; there are {', '.join(sorted(known))}")
    pool = Pool(options.names, options.data, options.jobs, options.smoke, options.minutes)
    threads = [threading.Thread(target=pool.take) for _ in range(options.side)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in pool.waiting:
        print(f"{name}: not begun")
    return 1 if pool.failed or pool.waiting else 0


if __name__ == "__main__":
    sys.exit(main())
