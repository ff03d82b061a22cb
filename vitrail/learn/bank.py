"""A memory of embeddings."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.kernels.similarity import uncompiled

UNKNOWN = -1


class Bank(nn.Module):
    """One row for each training image, found by its stable index; or, made by `Bank.queue`, the last images seen.

    It begins with random directions (`empty`: with zeros, which nobody has set), is part of checkpoints, and is never
    copied: searches go over `rows` as they lie. In a process group every process holds all rows and sees the updates
    of all. A queue's second rows, `beside`, say something else of the images in the same slots: the same slot, the same
    image.
    """

    rows: Tensor  # [rows, width]
    labels: Tensor  # [rows]; UNKNOWN: none
    place: Tensor  # by image: row of each index
    oldest: Tensor  # queues: the slot that is overwritten next
    beside: Tensor  # queues with second rows: [rows, its width]

    def __init__(
        self,
        index: NDArray[np.int64],
        labels: NDArray[np.int64],
        width: int,
        dtype: torch.dtype = torch.float32,
        empty: bool = False,
    ) -> None:
        super().__init__()
        if len(index) != len(labels) or len(np.unique(index)) != len(index):
            raise ValueError("a bank wants one label and one index of its own for every image")
        place = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        place[torch.from_numpy(index)] = torch.arange(len(index))
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("labels", torch.from_numpy(labels.copy()), persistent=False)
        rows = torch.zeros(len(index), width) if empty else _directions(len(index), width)
        self.register_buffer("rows", rows.to(dtype))

    @classmethod
    def queue(cls, size: int, width: int, beside: int = 0, dtype: torch.dtype = torch.float32) -> Bank:
        """The last `size` embeddings, first in, first out; `beside`: width of the second rows (0: there are none).

        Second rows of the same width begin as the first ones do. What it holds and where it stands is in checkpoints.
        """
        bank = cls(np.arange(size), np.full(size, UNKNOWN), width, dtype)
        bank.register_buffer("labels", bank.labels)  # pushed with the rows, so they are stored with them
        bank.register_buffer("oldest", torch.zeros((), dtype=torch.int64))
        if beside:
            bank.register_buffer("beside", _directions(size, beside).to(dtype))
        return bank

    def __len__(self) -> int:
        return len(self.rows)

    def known(self, index: Tensor) -> Tensor:
        """Of a bank that began empty: whether somebody set the row of each image [batch]."""
        return self.rows[self.where(index)].any(1)

    @uncompiled
    @torch.no_grad()
    def push(self, values: Tensor, labels: Tensor | None = None, beside: Tensor | None = None) -> Tensor:
        """Overwrite a queue's oldest rows with `values` [batch, width]; returns the slots of these rows [batch].

        In a process group the rows of all processes are pushed, in rank order. Nothing here waits for the device.
        Raises `ValueError` where the batch is larger than the queue.
        """
        labels = torch.full_like(self.labels[:1], UNKNOWN).expand(len(values)) if labels is None else labels
        count = len(values)
        first = count * dist.get_rank() if processes() > 1 else 0
        values, labels = of_all(values), of_all(labels)
        beside = None if beside is None else of_all(beside)
        if len(values) > len(self.rows):
            raise ValueError(
                f"a bank of {len(self.rows)} rows cannot take a batch of {len(values)}; raise objective.bank"
            )
        slots = (self.oldest + torch.arange(len(values), device=self.rows.device)) % len(self.rows)
        self.rows.index_copy_(0, slots, values.detach().to(self.rows.dtype))
        self.labels.index_copy_(0, slots, labels)
        if beside is not None:
            self.beside.index_copy_(0, slots, beside.detach().to(self.beside.dtype))
        self.oldest.copy_((self.oldest + len(values)) % len(self.rows))
        return slots[first : first + count]

    def where(self, index: Tensor) -> Tensor:
        """Row of each image [batch]."""
        return self.place[index]

    @uncompiled
    @torch.no_grad()
    def update(self, index: Tensor, values: Tensor, share: float = 0.5) -> None:
        """Move the rows of these images towards `values` [batch, width]: row <- (1 - share) row + share value.

        An image that comes twice moves to the last of its values.
        """
        values = values.detach().to(self.rows.dtype)
        index, values = of_all(index), of_all(values)
        at = self.where(index)
        self.rows[at] = torch.lerp(self.rows[at], values, share)


def _directions(count: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return nn.functional.normalize(torch.randn(count, width, generator=generator))


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def of_all(own: Tensor) -> Tensor:
    """The rows of all processes, in rank order; equally many of each."""
    if processes() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(processes())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)
