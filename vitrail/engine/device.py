"""Which machine a run uses and how exactly it computes there."""

from __future__ import annotations

import os

import torch

from vitrail.engine.config import EngineConfig
from vitrail.engine.distributed import Group

WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_GIVEN = WORKSPACE in os.environ  # by the user, before any run
_ONEDNN = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def choose_device(name: str, group: Group | None = None) -> torch.device:
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


def prepare(config: EngineConfig, seed: int, device: torch.device, group: Group) -> bool:
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
