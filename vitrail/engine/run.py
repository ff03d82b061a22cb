"""The run folder: configuration, metrics, log, environment, checkpoints; one writer at a time."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from vitrail.engine.track import TensorBoard
from vitrail.files import write_text
from vitrail.version import __version__

TIMING = ("seconds", "images_per_second")  # fields of metrics.jsonl that differ between equal runs


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `checkpoint/`, `model/`, `predictions.safetensors`, `report.html`, `log.txt`,
    `environment.json`; of a language model `completions.jsonl` in place of predictions. The report comes last: a run
    that has one, and final figures, is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tracker: TensorBoard | None = None
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
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new run. An existing one is refused: nothing is ever overwritten."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
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
        return run

    def lock(self) -> None:
        """Hold the run. The operating system lets go when the process ends, however it ends.

        A record lock belongs to this process alone: worker processes that outlive a kill by a moment do not hold it.
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
        self.unlock()

    def write_environment(self, extra: Mapping[str, Any]) -> None:
        write_text(self.path / "environment.json", json.dumps({**environment(), **extra}, indent=1))

    def log(self, text: str) -> None:
        """A line of log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line and flush it, so that what a checkpoint knows is also on disk."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.tracker is not None:
            self.tracker.write(line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line; a line torn by a kill is left out."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        return lines

    @property
    def finished(self) -> bool:
        """Whether everything is there. A resumed run loses its final figures first, and then counts as unfinished."""
        return self.report.is_file() and any(line.get("final") for line in self.read_metrics())

    @property
    def busy(self) -> bool:
        """Whether another process is writing here. Not for the writer itself: asking would let go of its own lock."""
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
        """Forget what was logged after the checkpoint, and any final figures."""
        kept = [line for line in self.read_metrics() if line["step"] <= step and not line.get("final")]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def environment() -> dict[str, Any]:
    """Versions, hardware and command, as they stand beside every figure."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

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


def free_name(base: Path) -> Path:
    """`base`, or `base-2`, `base-3`, ... where that is taken."""
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path
