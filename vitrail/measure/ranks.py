"""Rows that the processes of a group hold, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rows_of_all(columns: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Rows of all ranks: the first column says their order; every column is [rows, ...], as long as the others.

    A rank may have no rows at all (none), and then knows no shapes; none where nobody has any. In one process rows come
    back as they are, and in their order.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None if columns is None else list(columns)
    own = None if columns is None else [(c.shape, c.dtype) for c in columns]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    shapes = next((one for one in told if one is not None), None)
    if shapes is None:
        return None
    counts = [0 if one is None else one[0][0][0] for one in told]
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    made = []
    for number, (shape, dtype) in enumerate(shapes):
        padded = torch.zeros(max(counts), *shape[1:], dtype=dtype, device=device)  # ranks must send equal sizes
        if columns is not None:
            padded[: len(columns[number])] = columns[number]
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded)
        made.append(torch.cat([rows[:n] for rows, n in zip(received, counts, strict=True)]))
    order = made[0].argsort(stable=True)
    return [column[order] for column in made]
