"""The run folder: configuration, metrics (in a tracker too, on request), log, environment, checkpoints; one writer.

A checkpoint is one safetensors file, tensors and a JSON header, written atomically: it is complete or not there. Its
header has a checksum, so that a damaged one is reported and never used.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.files import FORMAT_VERSION, LEFTOVER, LaterVersion, parse_json, reject_later, remove_leftovers, write_text
from vitrail.model.store import current_names, write_tensors
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


FORMAT = 1


@dataclass
class State:
    """Everything that training needs to continue as if it had never stopped."""

    step: int  # optimiser steps done
    tensors: dict[str, Tensor]  # by name: objective/..., ema/..., optimizer/..., rng/..., meter/...
    facts: dict[str, Any] = field(default_factory=dict)  # plain values

    def stored(self, prefix: str) -> dict[str, Any]:
        """What is stored under names that start with `prefix/`, without it; of sharded tensors `StoredRows`."""
        cut = len(prefix) + 1
        return {name[cut:]: t for name, t in self.tensors.items() if name.startswith(prefix + "/")}

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The same as whole tensors."""
        return {name: t if isinstance(t, Tensor) else t.whole() for name, t in self.stored(prefix).items()}


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of names and values."""
    total = 0
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous()
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def checkpoint_path(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:09d}"
    return path if path.is_dir() else path.with_suffix(".safetensors")


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first: files, or folders where the model is sharded."""
    matches = (re.fullmatch(r"step-(\d+)(\.safetensors)?", p.name) for p in folder.glob("step-*"))
    return sorted({int(m[1]) for m in matches if m})


def save(folder: Path, state: State, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`; no older one is removed before the new one is safe."""
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": state.step, "facts": state.facts}
    header["checksum"] = checksum(state.tensors)
    path = checkpoint_path(folder, state.step)
    write_tensors(path, state.tensors, {"vitrail": json.dumps(header)})
    prune(folder, state.step, keep)
    return path


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to that of `step`, which is whole."""
    for older in [s for s in steps_saved(folder) if s <= step][: -max(1, keep)]:
        path = checkpoint_path(folder, older)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read(path: Path) -> State:
    """Read one checkpoint. Raises `ValueError` with one sentence if it is damaged or foreign."""
    from safetensors import safe_open

    if path.is_dir():
        from vitrail.engine.shard import read_shards

        return read_shards(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})["vitrail"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"checkpoint {path} is damaged or not ours ({reason})") from None
    reject_later(f"checkpoint {path}", header, FORMAT)
    if header.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {header.get('format')}, this version reads {FORMAT}")
    if header["checksum"] != checksum(tensors):
        raise ValueError(f"checkpoint {path} is damaged (its checksum does not match)")
    return State(header["step"], current_names(tensors), header["facts"])


def newest(folder: Path) -> tuple[State | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each damaged one."""
    damaged: list[str] = []
    for step in reversed(steps_saved(folder)):
        try:
            return read(checkpoint_path(folder, step)), damaged
        except LaterVersion:
            raise
        except ValueError as error:
            damaged.append(str(error))
    return None, damaged
