"""Device and precision of a run, its process group under torchrun, and requests to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.engine.config import EngineConfig

# Ctrl-C, a scheduler's request, a closed terminal, and what schedulers send before a time limit.
STOP_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, n)]


class StopRequest:
    """Set by the first of `STOP_SIGNALS` inside the `with` block, so that the step is finished and saved; a second
    Ctrl-C or SIGTERM interrupts at once. A hangup that is ignored (nohup) stays ignored."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number in (signal.SIGINT, signal.SIGTERM):
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:
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
        """Whether this process writes files and prints."""
        return self.rank == 0

    def wrap(self, objective: nn.Module, device: torch.device) -> nn.Module:
        """The objective, inside DDP where there are several processes. Buffers are not shared (banks are shards)."""
        if self.world == 1:
            return objective
        devices = [device] if device.type == "cuda" else None
        with warnings.catch_warnings():  # torch 2.15 deprecates the name, and advises to keep it for buffers like ours
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            return nn.parallel.DistributedDataParallel(objective, device_ids=devices, broadcast_buffers=False)

    def gather(self, value: Any) -> list[Any]:
        """Small host objects of every process, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def sum_of(self, *numbers: float) -> Callable[[], list[float]]:
        """Begin to sum numbers of the host over processes; the result waits until all have given theirs."""
        values = torch.tensor(numbers, dtype=torch.float64)  # on the host, whatever the device
        work = dist.all_reduce(values, async_op=True) if self.world > 1 else None

        def summed() -> list[float]:
            if work is not None:
                work.wait()
            return [float(value) for value in values.tolist()]

        return summed

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def say(self, quiet: bool, *lines: str) -> None:
        """Print lines to stderr, on the main process only."""
        if self.main and not quiet:
            for line in lines:
                print(line, file=sys.stderr, flush=True)


class Vote:
    """Whether any process has raised its flag, exchanged at every step and answered one step later.

    All processes learn it at the same step without waiting for a device: hosts exchange one number during the next
    step, and only a process that is a whole step ahead of another waits.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._asked: tuple[dist.Work, Tensor] | None = None

    def __call__(self, flag: bool) -> bool:
        """Whether any flag was raised at the last step (in a single process: at this one)."""
        if self.group.world == 1:
            return flag
        before, value = self._asked, torch.tensor(int(flag))  # on the host, whatever the device
        self._asked = (dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True), value)
        if before is None:
            return False
        before[0].wait()
        return bool(before[1])


def join(alone: bool = False) -> ProcessGroup:
    """Join the process group that torchrun describes in the environment, if any.

    `alone`: also where torchrun started a single process, which can shard its model, too.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and not (alone and "MASTER_ADDR" in os.environ):
        return ProcessGroup()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local)
        # Hosts also exchange numbers (`Vote`), without waiting for their devices.
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            # torchrun keeps its store over restarts, with addresses of the processes that are gone. (On several nodes
            # counts of restarts differ: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt its own store.)
            store, rank, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            prefix = f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        else:
            dist.init_process_group(backend)
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), local)


def lost_peer(error: RuntimeError) -> bool:
    """Whether an error is that of a process whose peer is gone (gloo has no exception of its own)."""
    return dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_GIVEN = WORKSPACE in os.environ  # by the user, before any run
AMX_PARAMETERS = 250_000
_ONEDNN = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def choose_device(name: str, group: ProcessGroup | None = None) -> torch.device:
    """`auto` is the accelerator if there is one. Raises `ValueError` for one that is not there.

    A process that uses the CPU has no numbers below 1e-38 from then on, and one that has it to itself keeps its freed
    memory. Gradients behind GELU become as small as that, and convolutions of an x86 CPU take 30 times as long with
    such ("denormal") numbers. PyTorch's threads have the setting where they begin after it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"engine.device: {name}, but torch sees no CUDA accelerator here; use auto or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("engine.device: mps, but torch sees none here; use auto or cpu")
    if name == "cuda" and group is not None and group.world > 1:
        return torch.device("cuda", group.local_rank)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"engine.device: no device {name!r}; use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"engine.device: {name}, but there are {torch.cuda.device_count()} here, counted from 0")
    if device.type == "cpu":
        torch.set_flush_denormal(True)
        if group is None or group.world == 1:
            keep_freed_memory()
    return device


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the rest of the process; other C libraries are left alone.

    Otherwise every activation of some MB comes from the kernel again, page by page: networks of 224 pixels spent half
    of their inference on a CPU in page faults.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 2**31 - 1)
    except (OSError, AttributeError):
        return


def evaluation_batch(device: torch.device) -> int:
    """Images at a time where none are learned from; fewer on a CPU, whose memory is then used again."""
    return 64 if device.type == "cpu" else 256


def choose_precision(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast: bf16 where asked for (`auto`: where the accelerator has it), else none (float32).

    Raises `ValueError` for fp8, which is bf16 around its layers, where the device does not multiply in it.
    """
    if precision == "fp8":
        from vitrail.kernels.fp8 import supports_fp8

        if not supports_fp8(device):
            needs = "fp8 needs a CUDA accelerator that multiplies in it (Ada, Hopper or newer)"
            raise ValueError(f"engine.precision: {needs}, not {device}; use auto")
    if precision == "auto":
        supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if supported else None
    return torch.bfloat16 if precision in ("bf16", "fp8") else None


def training_precision(precision: str, device: torch.device, model: nn.Module) -> torch.dtype | None:
    """The dtype of autocast in training steps: as `choose_precision`, and `auto` is bf16 on CPUs with AMX, too.

    There steps of ResNet-18 and ViT-Ti/4 take a third of the time. Models with grouped convolutions (0.7 to 1.3 times
    as fast) and those of few parameters, where other work counts, learn in float32.
    """
    if precision == "auto" and device.type == "cpu" and has_amx():
        grouped = any(isinstance(m, nn.Conv2d) and m.groups > 1 for m in model.modules())
        if not grouped and sum(p.numel() for p in model.parameters()) >= AMX_PARAMETERS:
            return torch.bfloat16
    return choose_precision(precision, device)


def has_amx() -> bool:
    """Whether the CPU has matrix units for bf16 (Intel Xeon, fourth generation and later) that PyTorch uses."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return bool(supported and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepare(config: EngineConfig, seed: int, device: torch.device, group: ProcessGroup) -> bool:
    """Set torch's global state for a run; returns whether to compile.

    Everything is set both ways, so that nothing depends on an earlier run in the same process, except that cuBLAS keeps
    the workspace of its first use.
    """
    torch.manual_seed(seed + 1_000_003 * group.rank)  # drop path and dropout differ between processes
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
    bf16_on_cpu = device.type == "cpu" and choose_precision(config.precision, device) is torch.bfloat16
    supported = not bf16_on_cpu or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    torch.backends.mkldnn.enabled = _ONEDNN and supported  # type: ignore[assignment]
    torch.backends.cudnn.benchmark = False  # it chooses by measured time, which differs from run to run
    return device.type == "cuda" if config.compile is None else config.compile
