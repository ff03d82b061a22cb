"""The state of a run on disk: one safetensors file a checkpoint, tensors and a JSON header, written atomically.

A file is complete or it is not there; its header carries a checksum, so a damaged one is named and never used.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.model.earlier_names import current_names
from vitrail.model.store import write_tensors

FORMAT = 1


@dataclass
class State:
    """Everything that training needs to go on as if it had never stopped."""

    step: int  # optimiser steps done
    tensors: dict[str, Tensor]  # by name: objective/..., ema/..., optimizer/..., rng/..., meter/...
    facts: dict[str, Any] = field(default_factory=dict)  # plain values

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name starts with `prefix/`, without it."""
        cut = len(prefix) + 1
        return {name[cut:]: t for name, t in self.tensors.items() if name.startswith(prefix + "/")}


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        data = tensors[name].detach().cpu().contiguous()
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first."""
    found = (re.fullmatch(r"step-(\d+)\.safetensors", p.name) for p in folder.glob("step-*.safetensors"))
    return sorted(int(m[1]) for m in found if m)


def save(folder: Path, state: State, keep: int) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`; nothing older goes before the new one is safe."""
    header = {"format": FORMAT, "step": state.step, "facts": state.facts, "checksum": _checksum(state.tensors)}
    path = _file(folder, state.step)
    write_tensors(path, state.tensors, {"vitrail": json.dumps(header)})
    for step in steps_saved(folder)[: -max(1, keep)]:
        _file(folder, step).unlink(missing_ok=True)
    return path


def read(path: Path) -> State:
    """Read one checkpoint. Raises `ValueError` with one sentence if it is damaged or foreign."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["vitrail"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"checkpoint {path} is damaged or not ours ({reason})") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {header.get('format')}, this version reads {FORMAT}")
    if header["checksum"] != _checksum(tensors):
        raise ValueError(f"checkpoint {path} is damaged (its checksum does not match)")
    return State(header["step"], current_names(tensors), header["facts"])


def newest(folder: Path) -> tuple[State | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each damaged one that was passed over."""
    damaged: list[str] = []
    for step in reversed(steps_saved(folder)):
        try:
            return read(_file(folder, step)), damaged
        except ValueError as error:
            damaged.append(str(error))
    return None, damaged
