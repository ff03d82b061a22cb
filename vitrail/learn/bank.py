"""A memory of embeddings."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

UNKNOWN = -1


class Bank(nn.Module):
    """One row for each training image, found by the stable index that batches carry.

    It begins with random directions, is part of checkpoints, and is never copied: searches go over `rows` as they lie.
    In a process group every process holds all rows and sees the updates of all.
    """

    rows: Tensor
    labels: Tensor
    place: Tensor

    def __init__(self, index: NDArray[np.int64], labels: NDArray[np.int64], width: int) -> None:
        super().__init__()
        if len(index) != len(labels) or len(np.unique(index)) != len(index):
            raise ValueError("a bank wants one label and one index of its own for every image")
        place = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        place[torch.from_numpy(index)] = torch.arange(len(index))
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("labels", torch.from_numpy(labels.copy()), persistent=False)
        generator = torch.Generator().manual_seed(len(index))
        self.register_buffer("rows", nn.functional.normalize(torch.randn(len(index), width, generator=generator)))

    def where(self, index: Tensor) -> Tensor:
        """Row of each image [batch]."""
        return self.place[index]

    @torch.no_grad()
    def update(self, index: Tensor, values: Tensor, share: float = 0.5) -> None:
        """Move the rows of these images towards `values` [batch, width]: row <- (1 - share) row + share value.

        An image that comes twice moves to the last of its values.
        """
        values = values.detach().to(self.rows.dtype)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            index, values = _of_all(index), _of_all(values)
        at = self.where(index)
        self.rows[at] = torch.lerp(self.rows[at], values, share)


def _of_all(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)
