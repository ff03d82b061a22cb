"""Models that are sharded over processes by FSDP2 (`--engine.shard full`), and their checkpoints.

Parameters, gradients, optimiser state, moving averages and momentum teachers are DTensors, rows of which lie on each
process; a block of the trunk is gathered while it computes. Models are initialised on the host of every process, as
without sharding, and reach the device in shards, block by block. For evaluation, and at the end, every process gathers
the weights (not gradients or optimiser state) of the model that is kept, because processes evaluate unequally many
batches.

A checkpoint is a folder: a safetensors file with the rows of each process, and `layout.json`, which is written last.
torch.distributed.checkpoint would pickle its metadata, and nothing of a run folder is unpickled.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.files import FORMAT_VERSION, parse_json, reject_later, write_text
from vitrail.model.store import current_names, write_tensors

if TYPE_CHECKING:
    from vitrail.engine.run_folder import State

FORMAT = 1
LAYOUT = "layout.json"
BLOCKS = re.compile(r"(^|\.)trunk(\..*)?\.blocks")


def is_sharded(tensor: Any) -> bool:
    """Whether a process holds only some rows of a tensor."""
    return dist.is_available() and isinstance(tensor, torch.distributed.tensor.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor (all processes must call it)."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def like(tensor: Tensor, layout: Tensor) -> Tensor:
    """A whole tensor that every process has, sharded as `layout` where that is; nothing is sent."""
    if not is_sharded(layout) or is_sharded(tensor):
        return tensor
    mesh, placements = layout.device_mesh, layout.placements  # type: ignore[attr-defined]
    local = tensor.to(layout.device)
    return torch.distributed.tensor.distribute_tensor(local, mesh, placements, src_data_rank=None)


def laid_out(tensors: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Whole tensors, sharded as those that a module has under their names."""
    there = module.state_dict()
    return {name: like(tensor, there[name]) if name in there else tensor for name, tensor in tensors.items()}


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no memory yet; buffers are copied."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def with_copied_weights(empty: nn.Module, model: nn.Module) -> nn.Module:
    """`empty`, a copy without weights, with copies of those of `model`, sharded alike."""
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(empty.get_submodule(owner), last, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    return empty.to(next(model.parameters()).device)


def gather_into(empty: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Give `empty` all weights and buffers of a sharded model (all processes must call it)."""
    tensors = {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict().items()}
    empty.load_state_dict(tensors, assign=True)
    empty.to(device).eval()


def shard_objective(objective: nn.Module, device: torch.device, autocast: torch.dtype | None) -> None:
    """Shard every block of a trunk, then the rest; parameters move to the device in shards.

    With autocast to bf16, weights are gathered in bf16; gradients are reduced in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for parameter in objective.parameters():  # objectives may draw some of theirs differently on each process
        dist.broadcast(parameter.data, 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if autocast is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32)
    for name, module in objective.named_modules():
        if BLOCKS.search(name) and name.endswith("blocks"):
            for block in module.children():
                fully_shard(block, **options)
    fully_shard(objective, **options)


def save_shards(folder: Path, state: State) -> Path:
    """Write a checkpoint (all processes must call it); it is complete once it has its name."""
    from vitrail.engine.run_folder import checksum

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
    """Read a checkpoint, whole, whatever the number of processes that wrote it. Raises `ValueError` if damaged."""
    from safetensors.torch import load_file

    from vitrail.engine.run_folder import State, checksum

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
        tensors = {name: torch.cat(every) if name in shapes else every[0] for name, every in parts.items()}
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
