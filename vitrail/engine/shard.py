"""Models that are sharded over processes by FSDP2 (`--engine.shard full`).

Parameters, gradients, optimiser state, moving averages and momentum teachers are DTensors, rows of which lie on each
process; a block of the trunk is gathered while it computes. Every process draws all initial weights, in the order of
an unsharded run, and keeps its rows of a block once the block is built: host memory is that of the rows, one block,
stem and head. Processes evaluate unequally many batches, so to evaluate, and to save the model, the weights that are
kept are gathered, one tensor at a time, into a file of the run folder that every process maps into its memory: the
system reads from it what a block needs, and may drop it afterwards. An accelerator holds all of them where they take
at most half of its free memory, otherwise one block at a time.
"""

from __future__ import annotations

import copy
import ctypes
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.engine.device import ProcessGroup
from vitrail.files import replacing
from vitrail.model.parts.block import Block, ParallelBlock
from vitrail.model.trunks.vit import Trunk

ALIGNED = 64  # bytes, at multiples of which gathered tensors begin
BLOCKS = re.compile(r"(^|\.)trunk(\..*)?\.blocks")


def can_shard() -> bool:
    """Whether this process has joined a group, be it alone."""
    return dist.is_available() and dist.is_initialized()


def is_sharded(tensor: Any) -> bool:
    """Whether a process holds only some rows of a tensor."""
    return dist.is_available() and isinstance(tensor, torch.distributed.tensor.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor (all processes must call it)."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def chunk_of(rows: int, world: int, rank: int) -> slice:
    """The rows of a process, divided as FSDP2 (and `torch.chunk`) divides them.

    >>> [chunk_of(5, 4, rank) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    size = -(-rows // world)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


class StoredRows:
    """A tensor of a checkpoint whose rows lie in the files of several processes, mapped but not read yet."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self.shape = torch.Size((sum(map(len, parts)), *parts[0].shape[1:]))

    def __getitem__(self, rows: slice) -> Tensor:
        """A copy of the rows from `rows.start` to `rows.stop`."""
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + len(part))
        spans = zip(starts, self.parts, strict=False)
        return torch.cat([part[max(rows.start - at, 0) : max(rows.stop - at, 0)] for at, part in spans])

    def whole(self) -> Tensor:
        return self[slice(0, len(self))]

    def __len__(self) -> int:
        return self.shape[0]


def like(tensor: Tensor | StoredRows, layout: Tensor) -> Tensor:
    """A tensor that every process has or can read, sharded as `layout` where that is; nothing is sent."""
    if not is_sharded(layout):
        return tensor.whole() if isinstance(tensor, StoredRows) else tensor
    if is_sharded(tensor):
        return tensor  # type: ignore[return-value]
    mesh, placements = layout.device_mesh, layout.placements  # type: ignore[attr-defined]
    assert placements[0].is_shard(0)
    rows = tensor[chunk_of(len(tensor), mesh.size(), mesh.get_local_rank())].to(layout.device)
    return torch.distributed.tensor.DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )


def laid_out(tensors: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Tensors as a checkpoint has them, sharded as those that a module has under their names."""
    there = module.state_dict()
    return {name: like(tensor, there[name]) if name in there else tensor for name, tensor in tensors.items()}


class PartialParameter(nn.Parameter):
    """A parameter without data (meta device) whose rows of this process are kept apart until the model is sharded."""

    rows: Tensor
    group: ProcessGroup

    @classmethod
    def of(cls, parameter: nn.Parameter, group: ProcessGroup) -> PartialParameter:
        partial = cls(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        partial.group = group
        partial.rows = partial.rows_of(parameter.detach()).clone()
        return partial

    def rows_of(self, tensor: Tensor) -> Tensor:
        """This process's rows of a whole tensor, divided as FSDP2 divides it."""
        return tensor[chunk_of(len(tensor), self.group.world, self.group.rank)]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> PartialParameter:  # weights are loaded through it
        self.rows.copy_(self.rows_of(source))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialParameter:  # momentum encoders start as copies
        partial = PartialParameter(self.data, self.requires_grad)
        partial.group, partial.rows = self.group, self.rows
        memo[id(self)] = partial
        return partial


def _release() -> None:
    """Return freed memory to the system: between tensors that stay, glibc keeps it, and does not use it again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def keeping_rows(group: ProcessGroup) -> Iterator[None]:
    """Blocks that are built inside keep only the rows of this process; whole weights can be loaded into them."""

    def keep(parent: nn.Module, name: str, block: nn.Module | None) -> None:
        if isinstance(parent, nn.ModuleList) and isinstance(block, (Block, ParallelBlock)):
            for part in block.modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None and not isinstance(parameter, PartialParameter):
                        part._parameters[key] = PartialParameter.of(parameter, group)
            parameter = None
            _release()

    handle = nn.modules.module.register_module_module_registration_hook(keep)
    try:
        with warnings.catch_warnings():  # of torch, which takes the copy for one without effect
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            yield
    finally:
        handle.remove()


def is_partial(model: nn.Module) -> bool:
    """Whether blocks keep only the rows of this process."""
    return any(isinstance(parameter, PartialParameter) for parameter in model.parameters())


def can_be_partial(model: nn.Module) -> bool:
    """Whether nothing changes the weights of a model's blocks after each was built."""
    trunk = getattr(model, "trunk", None)
    return type(trunk) is Trunk and trunk.config.start == "default"


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


def gather_into(empty: nn.Module, model: nn.Module, device: torch.device, file: Path) -> dict[str, Tensor]:
    """Give `empty` all weights and buffers of a sharded model (all processes must call it).

    They lie in `file`, which all processes must be able to read; returns them as they are mapped from it.
    """
    state = model.state_dict()
    _write_gathered(state, file)
    dist.barrier()
    sizes = [_padded(tensor.numel() * tensor.itemsize) for tensor in state.values()]
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=sum(sizes))
    contents = torch.empty(0, dtype=torch.uint8).set_(storage).split(sizes)  # type: ignore[arg-type]
    mapped = {
        name: content[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), content in zip(state.items(), contents, strict=True)
    }
    hold(empty, mapped, device)
    return mapped


def _padded(size: int) -> int:
    return max(1, -(-size // ALIGNED)) * ALIGNED


def _write_gathered(state: dict[str, Tensor], file: Path) -> None:
    gathered = (whole(tensor.detach()).contiguous().cpu().reshape(-1).view(torch.uint8) for tensor in state.values())
    if dist.get_rank() != 0:
        for _ in gathered:
            pass
        return
    with replacing(file) as temporary, temporary.open("wb") as out:
        for content in gathered:
            out.write(content.numpy().data)
            out.write(bytes(_padded(len(content)) - len(content)))


def hold(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Give a model these weights, to be evaluated on `device`: all of them there, or a block at a time."""
    model.load_state_dict(weights, assign=True)
    model.eval()
    size = sum(tensor.numel() * tensor.itemsize for tensor in weights.values())
    if device.type != "cuda" or size <= _free(device) / 2:
        model.to(device)
    else:
        hold_one_block(model, device)


def _free(device: torch.device) -> int:
    """Bytes of an accelerator that are free, or held by the allocator for later."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


def hold_one_block(model: nn.Module, device: torch.device) -> None:
    """Move a model to `device`, but blocks of the trunk only while they compute."""
    blocks = [block for blocks in _lists_of_blocks(model) for block in blocks.children()]
    away = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    model._apply(lambda tensor: tensor if id(tensor) in away else tensor.to(device))
    for block in blocks:
        if not block._forward_pre_hooks:  # not yet
            block.register_forward_pre_hook(partial(_fetch, device))
            block.register_forward_hook(_drop, always_call=True)


def _fetch(device: torch.device, block: nn.Module, args: object) -> None:
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.mapped = tensor.data  # type: ignore[attr-defined]
        tensor.data = tensor.data.to(device, copy=True)


def _drop(block: nn.Module, args: object, output: object) -> None:
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data = tensor.__dict__.pop("mapped")


def _lists_of_blocks(module: nn.Module) -> list[nn.Module]:
    return [m for name, m in module.named_modules() if BLOCKS.search(name) and name.endswith("blocks")]


def shard_objective(objective: nn.Module, device: torch.device, autocast: torch.dtype | None) -> None:
    """Shard every block of a trunk, then the rest; parameters move to the device in shards, block by block.

    With autocast to bf16, weights are gathered in bf16; gradients are reduced in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for parameter in objective.parameters():  # objectives may draw some of theirs differently on each process
        if not isinstance(parameter, PartialParameter):
            dist.broadcast(parameter.data, 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if autocast is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32)
    for module in (*(block for blocks in _lists_of_blocks(objective) for block in blocks.children()), objective):
        kept = {n: p.rows for n, p in module.named_parameters() if isinstance(p, PartialParameter)}
        fully_shard(module, **options)
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        while kept:
            name, rows = kept.popitem()
            module.get_parameter(name).data.to_local().copy_(rows)  # type: ignore[attr-defined]
        _release()
