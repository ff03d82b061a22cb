"""Sums and gathers over the processes that train together; with one process, the tensor itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them."""
    return dist.get_rank() if processes() > 1 else 0


def of_all(local: Tensor) -> Tensor:
    """The rows of all processes, in rank order; equally many of each."""
    if processes() == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(processes())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts)


def sum_of_all(local: Tensor) -> Tensor:
    """The sum over all processes."""
    if processes() > 1:
        local = local.clone()
        dist.all_reduce(local)
    return local
