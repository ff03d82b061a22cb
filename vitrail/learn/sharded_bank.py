"""One memory bank whose rows lie in several processes, searched as one process would search it.

Queries of all processes go to every shard, and the results of each shard come back: of the nearest rows the k best of
each, of a softmax its mean, log-sum and mean score, which together give those of the whole. All processes must call
these functions, with equally many queries each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.kernels.similarity import PART, attend, top_rows, uncompiled
from vitrail.learn.bank import UNKNOWN, Bank
from vitrail.learn.collective import of_all, processes, rank, sum_of_all


def make_bank(size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> Bank:
    """A bank; in a process group, the shard of one. Raises `ValueError` where there are more processes than rows."""
    return Bank(size, width, second, dtype) if processes() == 1 else ShardedBank(size, width, second, dtype)


class ShardedBank(Bank):
    """The rows of a run of slots, and the labels of all.

    What is pushed, where it goes, and what a checkpoint holds are those of one process. Slots of other processes are
    written to a last row that is never read, so that nothing has to be decided on the host.
    """

    def __init__(self, size: int, width: int, second: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(size, width, second, dtype)
        if size < processes():
            raise ValueError(
                f"objective.bank: {size} rows cannot be shared by {processes()} processes; raise objective.bank"
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
        place = slots - self.first
        return torch.where((place >= 0) & (place < self.count), place, self.count)

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
        scores, places = top_rows(of_all(queries), memory, most, self.local(of_all(own)), asked, known)
        missing = (len(scores), k - most)  # a shard may have fewer rows than k
        scores = torch.cat([scores, scores.new_full(missing, float("-inf"))], 1)
        slots = torch.cat([places + self.first, places.new_zeros(missing)], 1)
        scores, slots = (_of_own_queries(found).transpose(0, 1).flatten(1) for found in (scores, slots))
        best, order = scores.topk(k, dim=1)
        return best, slots.gather(1, order)

    @uncompiled
    @torch.no_grad()
    def rows_at(self, slots: Tensor) -> Tensor:
        places = self.local(of_all(slots[None]))  # [processes, ...]
        found = torch.where((places < self.count)[..., None], self.rows[places].float(), 0.0)
        return sum_of_all(found)[rank()]  # one process holds each of them, the others zeros

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
            shards = of_all(padded).split(most)
            whole = [shard[: _share(self.size, number)[1]] for number, shard in enumerate(shards)]
            destination[prefix + name] = torch.cat(whole)

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
