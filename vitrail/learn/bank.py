"""A memory of embeddings."""

from __future__ import annotations

from typing import Any

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
    copied: searches go over `rows` as they lie. A queue's second rows, `beside`, say something else of the images in
    the same slots: the same slot, the same image.

    In a process group every process holds all rows of a bank by image, and sees the updates of all. Of a queue it holds
    the rows of a run of slots, its shard, and the labels of all; `vitrail.learn.shards` searches all shards. What is
    pushed, where it goes, and what a checkpoint holds are those of one process.
    """

    rows: Tensor  # [rows here, width]; a shard has one more, for what belongs to others
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
        self.total, self.first, self.count = len(index), 0, len(index)  # all rows; first one here; how many here

    @classmethod
    def queue(cls, size: int, width: int, beside: int = 0, dtype: torch.dtype = torch.float32) -> Bank:
        """The last `size` embeddings, first in, first out; `beside`: width of the second rows (0: there are none).

        Second rows of the same width begin as the first ones do. What it holds and where it stands is in checkpoints.
        Raises `ValueError` where there are more processes than rows.
        """
        bank = cls(np.arange(size), np.full(size, UNKNOWN), width, dtype)
        bank.register_buffer("labels", bank.labels)  # pushed with the rows, so they are stored with them
        bank.register_buffer("oldest", torch.zeros((), dtype=torch.int64))
        if beside:
            bank.register_buffer("beside", _directions(size, beside).to(dtype))
        if processes() > 1:
            bank._keep_shard()
        return bank

    def __len__(self) -> int:
        return self.total

    @property
    def sharded(self) -> bool:
        """Whether other processes hold other rows."""
        return self.count < self.total

    def here(self, beside: bool = False) -> Tensor:
        """The rows, or second rows, of the slots from `first` on that this process holds: [count, width]."""
        return (self.beside if beside else self.rows)[: self.count]

    def labels_here(self) -> Tensor:
        """Labels of the rows here, [count]."""
        return self.labels[self.first : self.first + self.count]

    def local(self, slots: Tensor) -> Tensor:
        """Places here of these slots; of slots that others hold, the place after the last."""
        place = slots - self.first
        return torch.where((place >= 0) & (place < self.count), place, self.count)

    def _keep_shard(self) -> None:
        if self.total < processes():
            raise ValueError(
                f"objective.bank: {self.total} rows cannot be shared by {processes()} processes; raise objective.bank"
            )
        self.first, self.count = _share(self.total, dist.get_rank())
        for name in self._parts():
            setattr(self, name, self._cut(getattr(self, name)))

    def _parts(self) -> list[str]:
        return ["rows", "beside"] if "beside" in self._buffers else ["rows"]

    def _cut(self, whole: Tensor) -> Tensor:
        """The shard of all rows, and one row that nobody reads: what others hold is written there, without a look."""
        own = whole[self.first : self.first + self.count]
        return torch.cat([own, torch.zeros_like(own[:1])])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """All shards as one (all processes must call it)."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.sharded:
            return
        most = _share(self.total, 0)[1]
        for name in self._parts():
            own = self.here(name == "beside")
            padded = torch.cat([own, own.new_zeros(most - len(own), own.shape[1])])
            shards = of_all(padded).split(most)
            whole = [shard[: _share(self.total, rank)[1]] for rank, shard in enumerate(shards)]
            destination[prefix + name] = torch.cat(whole)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self.sharded:
            parts = {prefix + name for name in self._parts()}
            state_dict = {name: self._cut(t) if name in parts else t for name, t in state_dict.items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def known(self, index: Tensor) -> Tensor:
        """Of a bank that began empty: whether somebody set the row of each image [batch]."""
        return self.rows[self.where(index)].any(1)

    @uncompiled
    @torch.no_grad()
    def push(self, values: Tensor, labels: Tensor | None = None, beside: Tensor | None = None) -> Tensor:
        """Overwrite a queue's oldest rows with `values` [batch, width]; returns the slots of these rows [batch].

        In a process group the rows of all processes are pushed, in rank order. A row that holds no number (of a step
        that will be skipped) leaves the old one. Nothing here waits for the device. Raises `ValueError` where the batch
        is larger than the queue.
        """
        labels = torch.full_like(self.labels[:1], UNKNOWN).expand(len(values)) if labels is None else labels
        count = len(values)
        first = count * dist.get_rank() if processes() > 1 else 0
        values, labels = of_all(values), of_all(labels)
        beside = None if beside is None else of_all(beside)
        if len(values) > self.total:
            raise ValueError(f"a bank of {self.total} rows cannot take a batch of {len(values)}; raise objective.bank")
        slots = (self.oldest + torch.arange(len(values), device=self.rows.device)) % self.total
        places = self.local(slots) if self.sharded else slots
        good = values.isfinite().all(1)
        if beside is not None:
            good = good & beside.isfinite().all(1)
            self.beside.index_copy_(0, places, _or_old(good[:, None], beside, self.beside[places]))
        self.rows.index_copy_(0, places, _or_old(good[:, None], values, self.rows[places]))
        self.labels.index_copy_(0, slots, _or_old(good, labels, self.labels[slots]))
        self.oldest.copy_((self.oldest + len(values)) % self.total)
        return slots[first : first + count]

    def where(self, index: Tensor) -> Tensor:
        """Row of each image [batch]."""
        return self.place[index]

    @uncompiled
    @torch.no_grad()
    def update(self, index: Tensor, values: Tensor, share: float = 0.5) -> None:
        """Move the rows of these images towards `values` [batch, width]: row <- (1 - share) row + share value.

        An image that comes twice moves to the last of its values; what is no number moves nothing.
        """
        values = values.detach().to(self.rows.dtype)
        index, values = of_all(index), of_all(values)
        at = self.where(index)
        old = self.rows[at]
        self.rows[at] = _or_old(values.isfinite().all(1, keepdim=True), torch.lerp(old, values, share), old)


def _or_old(good: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(good, new.detach().to(old.dtype), old)


def _directions(count: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return nn.functional.normalize(torch.randn(count, width, generator=generator))


def _share(total: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a process's shard; the first processes hold one more where it does not divide."""
    base, extra = divmod(total, processes())
    return rank * base + min(rank, extra), base + (rank < extra)


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


def sum_of_all(own: Tensor) -> Tensor:
    """The sum over all processes."""
    if processes() > 1:
        own = own.clone()
        dist.all_reduce(own)
    return own
