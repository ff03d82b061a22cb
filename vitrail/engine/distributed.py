"""torchrun: who we are among the processes, and the few things they do together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Group:
    """This process among all processes of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    def wrap(self, objective: nn.Module, device: torch.device) -> nn.Module:
        """The objective itself, or it inside DDP. Buffers stay each process's own (banks are shards)."""
        if self.world == 1:
            return objective
        places = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(objective, device_ids=places, broadcast_buffers=False)

    def gather(self, value: Any) -> list[Any]:
        """Small host objects of every process, in rank order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any process (asked at logging steps only)."""
        if self.world == 1:
            return flag
        value = torch.tensor(float(flag), device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())


def join() -> Group:
    """Join the process group that torchrun describes in the environment, or be alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Group()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
    return Group(dist.get_rank(), dist.get_world_size(), local)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
