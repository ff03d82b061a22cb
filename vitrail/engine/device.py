"""Ctrl-C and SIGTERM: finish the step, save, say how to go on.

torchrun: who we are among the processes, and the few things they do together.

Which machine a run uses and how exactly it computes there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.engine.config import EngineConfig


class StopRequest:
    """Set by the first Ctrl-C or SIGTERM inside the `with` block; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


@dataclass(frozen=True)
class ProcessGroup:
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

    def __init__(self, group: ProcessGroup) -> None:
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


def join() -> ProcessGroup:
    """Join the process group that torchrun describes in the environment, or be alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ProcessGroup()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local)
        # Hosts speak with each other, too (`Vote`), and must not wait for their devices to do so.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), local)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_GIVEN = WORKSPACE in os.environ  # by the user, before any run
_ONEDNN = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def choose_device(name: str, group: ProcessGroup | None = None) -> torch.device:
    """`auto` is the accelerator if there is one. Raises `ValueError` for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"engine.device: {name}, but torch sees no CUDA accelerator here; use auto or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("engine.device: mps, but torch sees none here; use auto or cpu")
    if name == "cuda" and group is not None and group.world > 1:
        return torch.device("cuda", group.local_rank)
    return torch.device(name)


def choose_precision(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast: bf16 where asked for (`auto`: where the accelerator has it), else none (float32)."""
    if precision == "auto":
        able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if able else None
    return torch.bfloat16 if precision == "bf16" else None


def prepare(config: EngineConfig, seed: int, device: torch.device, group: ProcessGroup) -> bool:
    """Set what is global in torch for a run; returns whether to compile.

    Everything is set both ways, so that nothing depends on an earlier run of the same process. One thing is beyond
    that: cuBLAS, once used, keeps the workspace it began with.
    """
    torch.manual_seed(seed + 1_000_003 * group.rank)  # drop path and dropout draw apart in every process
    tf32 = device.type == "cuda" and config.precision != "float32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic:
        os.environ.setdefault(WORKSPACE, DETERMINISTIC)
    elif not _GIVEN and os.environ.get(WORKSPACE) == DETERMINISTIC:
        del os.environ[WORKSPACE]
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:
        torch.use_deterministic_algorithms(config.deterministic)
    # On a CPU that cannot multiply bf16 the first such product switches oneDNN off for good, in the middle of a step:
    # there it is off from the start, and on again for the next run.
    halves = device.type == "cpu" and choose_precision(config.precision, device) is torch.bfloat16
    able = not halves or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    torch.backends.mkldnn.enabled = _ONEDNN and able  # type: ignore[assignment]
    torch.backends.cudnn.benchmark = False  # it chooses by the clock; what is chosen without it is always the same
    return device.type == "cuda" if config.compile is None else config.compile
