"""torchrun: who we are among the processes, and the few things they do together."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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

    def say(self, quiet: bool, *lines: str) -> None:
        """Tell a person, by the main process alone."""
        if self.main and not quiet:
            for line in lines:
                print(line, file=sys.stderr, flush=True)


class Vote:
    """Whether any process raises its flag, asked at every step and answered one step later.

    So all processes learn it at the same step, and nobody waits for a device: hosts exchange one number while the next
    step is made, and only one that is a whole step ahead of another waits for it.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._asked: tuple[dist.Work, Tensor] | None = None

    def __call__(self, flag: bool) -> bool:
        """Raise one's own flag or not; returns whether any was raised the last time (alone: this time)."""
        if self.group.world == 1:
            return flag
        before, value = self._asked, torch.tensor(int(flag))  # on the host, whatever the device
        self._asked = (dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True), value)
        if before is None:
            return False
        before[0].wait()
        return bool(before[1])


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
        # Hosts speak with each other, too (`Vote`), and must not wait for their devices to do so.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Group(dist.get_rank(), dist.get_world_size(), local)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
