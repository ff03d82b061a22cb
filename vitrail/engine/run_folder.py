"""The run folder: configuration, metrics (in a tracker too, on request), log, environment; one writer."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from vitrail.files import FORMAT_VERSION, LEFTOVER, parse_json, remove_leftovers, write_text
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.engine.trackers import Tracker

TIMING = ("seconds", "images_per_second")  # fields of metrics.jsonl that differ between equal runs


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `checkpoint/`, `model/`, `predictions.safetensors`, `report.html`, `log.txt`,
    `environment.json`; of a language model `completions.jsonl` in place of predictions. The report comes last: a run
    that has one, and final metrics, is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tracker: Tracker | None = None
        self._lock: Any = None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def gathered(self) -> Path:
        """Weights of a sharded model, while a process runs that needs them all."""
        return self.checkpoints / "gathered"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new run. An existing one is rejected: nothing is ever overwritten."""
        if not unused(path):
            hint = f"continue it with: vitrail train --resume {path}" if (path / "config.yaml").exists() else ""
            raise FileExistsError(f"{path} already exists; {hint or 'choose another --out'}")
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run.lock()
        write_text(run.config, config)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run, to continue it."""
        if not (path / "config.yaml").is_file():
            raise FileNotFoundError(f"{path} is no run folder (it has no config.yaml)")
        run = cls(path)
        run.lock()
        remove_leftovers(path.rglob(".*.tmp"), locked=True)
        return run

    def lock(self) -> None:
        """Lock the folder. The operating system releases the lock when the process ends, however it ends.

        A record lock belongs to this process alone, not to worker processes that outlive a kill by a moment.
        """
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock = None
            raise FileExistsError(
                f"another process is writing to {self.path}; wait for it or choose another --out"
            ) from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.tracker is not None:
            self.tracker.close()
        self.gathered.unlink(missing_ok=True)
        self.unlock()

    def write_environment(self, extra: Mapping[str, Any]) -> None:
        write_text(
            self.path / "environment.json",
            json.dumps({"format_version": FORMAT_VERSION, **environment(), **extra}, indent=1),
        )

    def log(self, text: str) -> None:
        """A line of log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8", errors="readable") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line and flush it, so that a checkpoint is never newer than the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.tracker is not None:
            self.tracker.write(line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line; a line torn by a kill is left out, and what is no line of metrics."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(parse_json(text))
            except json.JSONDecodeError:
                continue
        return [line for line in lines if isinstance(line, dict)]

    @property
    def finished(self) -> bool:
        """Whether everything is there. Resuming removes the final metrics first: the run is unfinished again."""
        return self.report.is_file() and any(line.get("final") for line in self.read_metrics())

    @property
    def busy(self) -> bool:
        """Whether another process is writing here. Not for the writer itself: asking would release its own lock."""
        if not (self.path / ".lock").exists():
            return False
        probe = RunFolder(self.path)
        try:
            probe.lock()
        except FileExistsError:
            return True
        probe.unlock()
        return False

    def cut_metrics(self, step: int) -> None:
        """Remove metrics logged after the checkpoint, and any final ones."""
        kept = [line for line in self.read_metrics() if line["step"] <= step and not line.get("final")]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def environment() -> dict[str, Any]:
    """Versions, hardware and command of a run."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    cuda = torch.cuda.is_available()
    return {
        "vitrail": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": installed("torchvision"),
        "timm": installed("timm"),
        "numpy": installed("numpy"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if cuda else "none",
        "command": " ".join(["vitrail", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def unused(path: Path) -> bool:
    """Whether a new run may be written to `path`: nothing is there but, perhaps, what a killed start left."""
    if not path.is_dir():
        return not path.exists()
    return all(entry.name == ".lock" or LEFTOVER.fullmatch(entry.name) for entry in path.iterdir())


def free_name(base: Path) -> Path:
    """`base`, or `base-2`, `base-3`, ... where that is taken."""
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path
