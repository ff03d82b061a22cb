"""Memory banks: a queue of embeddings, one divided among processes, and one embedding per training image.

A divided bank is searched as one process would search it. Queries of all processes go to every shard, and the results
of each shard come back: of the nearest rows the k best of each, of a softmax its mean, log-sum and mean score, which
together give those of the whole. All processes must call these functions, with equally many queries each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.kernels.similarity import PART, attend, top_rows, uncompiled


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


UNKNOWN = -1


class Bank(nn.Module):
    """The last `size` embeddings [size, width] with their labels; the oldest make room.

    It begins with random directions, is part of checkpoints, and is never copied: searches go over `rows` as they lie.
    Second rows (`second` is their width; 0: none) hold another embedding of the images in the same slots. In a process
    group `vitrail.learn.bank.make_bank` divides the rows among processes.
    """

    rows: Tensor  # [size, width]
    labels: Tensor  # [size]; UNKNOWN: none
    oldest: Tensor  # the slot that is overwritten next
    beside: Tensor  # second rows: [size, their width]

    def __init__(self, size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("rows", random_directions(size, width).to(dtype))
        self.register_buffer("labels", torch.full((size,), UNKNOWN))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.int64))
        if second:
            self.register_buffer("beside", random_directions(size, second).to(dtype))

    def __len__(self) -> int:
        return self.size

    def here(self, second: bool = False) -> Tensor:
        """The rows, or second rows, that this process holds."""
        return self.beside if second else self.rows

    def labels_here(self) -> Tensor:
        """Labels of the rows that this process holds."""
        return self.labels

    @uncompiled
    @torch.no_grad()
    def push(self, values: Tensor, labels: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """Overwrite the oldest rows with `values` [batch, width]; returns their slots [batch].

        A row that is not finite (of a step that will be skipped) leaves the old one. Nothing here waits for the device.
        Raises `ValueError` where the batch is larger than the bank.
        """
        if len(values) > self.size:
            raise ValueError(f"a bank of {self.size} rows cannot take a batch of {len(values)}; raise --objective.bank")
        slots = (self.oldest + torch.arange(len(values), device=self.rows.device)) % self.size
        finite = values.isfinite().all(1)
        if second is not None:
            finite = finite & second.isfinite().all(1)
            _overwrite(self.beside, self.local(slots), finite[:, None], second)
        _overwrite(self.rows, self.local(slots), finite[:, None], values)
        _overwrite(self.labels, slots, finite, torch.full_like(slots, UNKNOWN) if labels is None else labels)
        self.oldest.copy_((self.oldest + len(values)) % self.size)
        return slots

    def local(self, slots: Tensor) -> Tensor:
        """Rows of `here` that hold these slots."""
        return slots

    @uncompiled
    @torch.no_grad()
    def nearest(
        self, queries: Tensor, k: int, own: Tensor, labels: Tensor | None = None, second: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Products and slots of the k rows (`second`: second rows) nearest to queries [batch, width]: [batch, k] each.

        The slots `own` [batch] come first; with `labels` [batch] only rows of that label are taken.
        """
        return top_rows(queries, self.here(second), k, own, labels, None if labels is None else self.labels)

    @uncompiled
    @torch.no_grad()
    def rows_at(self, slots: Tensor) -> Tensor:
        """The rows of these slots [...]: [..., width], in float32."""
        return self.rows[slots].float()


def _overwrite(table: Tensor, rows: Tensor, finite: Tensor, values: Tensor) -> None:
    table.index_copy_(0, rows, torch.where(finite, values.detach().to(table.dtype), table[rows]))


def random_directions(count: int, width: int) -> Tensor:
    """Unit vectors [count, width], the same for the same count."""
    generator = torch.Generator().manual_seed(count)
    return nn.functional.normalize(torch.randn(count, width, generator=generator))


def make_bank(size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> Bank:
    """A bank; in a process group, the shard of one. Raises `ValueError` where there are more processes than rows."""
    return Bank(size, width, second, dtype) if processes() == 1 else ShardedBank(size, width, second, dtype)


class ShardedBank(Bank):
    """The rows of a run of slots, and the labels of all.

    What is pushed, where it goes, and what a checkpoint holds are those of one process. Slots of other processes are
    written to a last row that is never read, so that nothing has to be decided on the host.
    """

    complete_batches = True  # with an image less on one process, `of_all` would receive what it does not expect

    def __init__(self, size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(size, width, second, dtype)
        if size < processes():
            raise ValueError(
                f"objective.bank: {size} rows cannot be shared by {processes()} processes; raise --objective.bank"
            )
        self.first, self.count = _share(size, rank())
        self.parts = ["rows", "beside"] if second else ["rows"]
        for name in self.parts:
            setattr(self, name, self._shard(getattr(self, name)))

    def here(self, second: bool = False) -> Tensor:
        return super().here(second)[: self.count]

    def labels_here(self) -> Tensor:
        return self.labels[self.first : self.first + self.count]

    def local(self, slots: Tensor) -> Tensor:
        row = slots - self.first
        return torch.where((row >= 0) & (row < self.count), row, self.count)

    @uncompiled
    def push(self, values: Tensor, labels: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """The rows of all processes, in rank order; returns the slots of those of this one."""
        labels = torch.full_like(self.labels[:1], UNKNOWN).expand(len(values)) if labels is None else labels
        slots = super().push(of_all(values), of_all(labels), None if second is None else of_all(second))
        return slots[len(values) * rank() :][: len(values)]

    @uncompiled
    @torch.no_grad()
    def nearest(
        self, queries: Tensor, k: int, own: Tensor, labels: Tensor | None = None, second: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not 1 <= k <= self.size:
            raise ValueError(f"k = {k}, but the memory has {self.size} rows")
        memory, most = self.here(second), min(k, self.count)
        asked, known = (None, None) if labels is None else (of_all(labels), self.labels_here())
        scores, rows = top_rows(of_all(queries), memory, most, self.local(of_all(own)), asked, known)
        missing = (len(scores), k - most)  # a shard may have fewer rows than k
        scores = torch.cat([scores, scores.new_full(missing, float("-inf"))], 1)
        slots = torch.cat([rows + self.first, rows.new_zeros(missing)], 1)
        scores, slots = (_of_own_queries(shards).transpose(0, 1).flatten(1) for shards in (scores, slots))
        best, order = scores.topk(k, dim=1)
        return best, slots.gather(1, order)

    @uncompiled
    @torch.no_grad()
    def rows_at(self, slots: Tensor) -> Tensor:
        local = self.local(of_all(slots[None]))  # [processes, ...]
        rows = torch.where((local < self.count)[..., None], self.rows[local].float(), 0.0)
        return sum_of_all(rows)[rank()]  # one process holds each of them, the others zeros

    def _shard(self, whole: Tensor) -> Tensor:
        held = whole[self.first : self.first + self.count]
        return torch.cat([held, torch.zeros_like(held[:1])])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """All shards as one (all processes must call it)."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        most = _share(self.size, 0)[1]
        for name in self.parts:
            held = self.here(name == "beside")
            padded = torch.cat([held, held.new_zeros(most - len(held), held.shape[1])])
            shards = enumerate(of_all(padded).split(most))
            destination[prefix + name] = torch.cat([shard[: _share(self.size, number)[1]] for number, shard in shards])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        parts = {prefix + name for name in self.parts}
        state_dict = {name: self._shard(t) if name in parts else t for name, t in state_dict.items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)


@uncompiled
@torch.no_grad()
def attend_all(
    queries: Tensor, memory: Tensor, temperature: float, values: Tensor | None = None, part: int = PART
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`, where `memory` and `values` are this process's shards of the whole."""
    if processes() == 1:
        return attend(queries, memory, temperature, values, part)
    means, sums, scores = map(_of_own_queries, attend(of_all(queries), memory, temperature, values, part))
    total = sums.logsumexp(0)
    weights = (sums - total).exp()  # [processes, queries]: share of each shard in the softmax
    return (weights[..., None] * means).sum(0), total, (weights * scores).sum(0)


def _of_own_queries(results: Tensor) -> Tensor:
    """Of the results of every shard for the queries of all [all queries, ...], ours: [processes, queries, ...]."""
    count = processes()
    return of_all(results).unflatten(0, (count, count, len(results) // count))[:, rank()]


def _share(size: int, number: int) -> tuple[int, int]:
    """First row and number of rows of a process's shard; the first processes hold one more where it does not divide."""
    base, extra = divmod(size, processes())
    return number * base + min(number, extra), base + (number < extra)


class ImageMemory(nn.Module):
    """Rows [images, width], in the order of `index`, and the labels of the images; rows are part of checkpoints.

    It begins with random directions, or `empty`: with zeros. In a process group every process holds all rows and sees
    the updates of all. Raises `ValueError` where an index comes twice.
    """

    rows: Tensor  # [images, width]
    labels: Tensor  # [images]
    row_of_index: Tensor  # [largest index + 1]

    def __init__(
        self,
        index: NDArray[np.int64],
        width: int,
        labels: NDArray[np.int64] | None = None,
        dtype: torch.dtype = torch.float32,
        empty: bool = False,
    ) -> None:
        super().__init__()
        self.complete_batches = processes() > 1  # as of `ShardedBank`
        labels = np.full(len(index), UNKNOWN) if labels is None else labels
        if len(index) != len(labels) or len(np.unique(index)) != len(index):
            raise ValueError("a memory of images takes one label and one index for every image")
        row_of_index = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        row_of_index[torch.from_numpy(index)] = torch.arange(len(index))
        self.register_buffer("row_of_index", row_of_index, persistent=False)
        self.register_buffer("labels", torch.from_numpy(labels.copy()), persistent=False)
        rows = torch.zeros(len(index), width) if empty else random_directions(len(index), width)
        self.register_buffer("rows", rows.to(dtype))

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: Tensor) -> Tensor:
        """Row of each image [batch]."""
        return self.row_of_index[index]

    def known(self, index: Tensor) -> Tensor:
        """Of a memory that began empty: whether the row of each image [batch] was set."""
        return self.rows[self.where(index)].any(1)

    @uncompiled
    @torch.no_grad()
    def update(self, index: Tensor, values: Tensor, share: float = 0.5) -> None:
        """Move the rows of these images towards `values` [batch, width]: row <- (1 - share) row + share value.

        An image that comes twice moves to the last of its values; values that are not finite move nothing.
        """
        index, values = of_all(index), of_all(values.detach().to(self.rows.dtype))
        at = self.where(index)
        old = self.rows[at]
        finite = values.isfinite().all(1, keepdim=True)
        self.rows[at] = torch.where(finite, torch.lerp(old, values, share), old)
