"""Checkpoints: one safetensors file with a JSON header or, of a sharded model, a folder with a file per process.

A file is written atomically: it is complete or not there. A folder gets its name when all is written, `layout.json`
last. Both have checksums, so that a damaged one is reported and never used. torch.distributed.checkpoint would pickle
its metadata, and nothing of a run folder is unpickled. A process that resumes maps files and copies only its rows.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.engine.shard import StoredRows, is_sharded
from vitrail.files import FORMAT_VERSION, LaterVersion, parse_json, reject_later, write_text
from vitrail.model.store import current_names, write_tensors

LAYOUT = "layout.json"
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


# Of sharded models


def save_shards(folder: Path, state: State) -> Path:
    """Write a checkpoint (all processes must call it); it is complete once it has its name."""
    rank, path = dist.get_rank(), folder / f"step-{state.step:09d}"
    temporary = folder / f"{path.name}.partial"
    if rank == 0:
        for left in folder.glob("*.partial"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    rows: dict[str, Tensor] = {}
    shapes = {name: list(t.shape) for name, t in state.tensors.items() if is_sharded(t)}
    for name, tensor in state.tensors.items():
        if name in shapes:
            assert tensor.placements[0].is_shard(0)  # type: ignore[attr-defined]
            local = tensor.to_local()  # type: ignore[attr-defined]
            if local.numel():
                rows[name] = local
        elif rank == 0:
            rows[name] = tensor
    write_tensors(temporary / f"rank-{rank:05d}.safetensors", rows)
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, checksum(rows))
    if rank == 0:
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": state.step, "facts": state.facts}
        write_text(temporary / LAYOUT, json.dumps({**header, "checksums": sums, "shapes": shapes}))
        shutil.rmtree(path, ignore_errors=True)  # of an earlier attempt at this step
        temporary.rename(path)
    return path


def read_shards(path: Path) -> State:
    """Read a checkpoint, whatever the number of processes that wrote it. Raises `ValueError` if damaged.

    Tensors are mapped from the files, those that were sharded as `StoredRows`.
    """
    from safetensors.torch import load_file

    try:
        header = parse_json((path / LAYOUT).read_text(encoding="utf-8"))
        reject_later(f"checkpoint {path}", header, FORMAT)
        parts: dict[str, list[Tensor]] = {}
        for rank, expected in enumerate(header["checksums"]):
            rows = load_file(path / f"rank-{rank:05d}.safetensors")
            if checksum(rows) != expected:
                raise ValueError(f"the checksum of process {rank} does not match")
            for name, tensor in rows.items():
                parts.setdefault(name, []).append(tensor)
        shapes = header["shapes"]
        tensors: dict[str, Any] = {n: StoredRows(every) if n in shapes else every[0] for n, every in parts.items()}
        if any(list(tensors[name].shape) != shape for name, shape in shapes.items()):
            raise ValueError("rows are missing")
        return State(header["step"], current_names(tensors), header["facts"])
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, json.JSONDecodeError) as error:
        if type(error).__name__ == "LaterVersion":
            raise
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"checkpoint {path} is damaged or not ours ({reason})") from None
    except Exception as error:  # safetensors has an error of its own
        raise ValueError(f"checkpoint {path} is damaged or not ours ({error})") from None
