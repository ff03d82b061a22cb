"""One bank whose rows lie in several processes: what is computed over all of them, as one process would.

Queries of all processes go to every shard, and what each shard says of them comes back: of the nearest rows the k best
of each, of a softmax its mean, log-sum and mean score, which together give those of the whole. With one process
these are the functions of `vitrail.kernels.similarity`. All processes must call them, with equally many queries each.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.kernels.similarity import PART, attend, top_rows, uncompiled
from vitrail.learn.bank import Bank, of_all, processes, sum_of_all


@uncompiled
@torch.no_grad()
def nearest(
    bank: Bank, queries: Tensor, k: int, own: Tensor, labels: Tensor | None = None, beside: bool = False
) -> tuple[Tensor, Tensor]:
    """Products and slots of the k nearest rows (`beside`: second rows) of the whole bank: [queries, k] each.

    As `top_rows`: the slots `own` [queries] come first; with `labels` [queries] only rows of that label are taken.
    """
    memory, known = bank.here(beside), None if labels is None else bank.labels_here()
    if not bank.sharded:
        return top_rows(queries, memory, k, own, labels, known)
    if not 1 <= k <= len(bank):
        raise ValueError(f"k = {k}, but the memory has {len(bank)} rows")
    most = min(k, len(memory))
    asked = None if labels is None else of_all(labels)
    scores, places = top_rows(of_all(queries), memory, most, bank.local(of_all(own)), asked, known)
    missing = (len(scores), k - most)  # a shard may have fewer rows than k
    scores = torch.cat([scores, scores.new_full(missing, float("-inf"))], 1)
    slots = torch.cat([places + bank.first, places.new_zeros(missing)], 1)
    said, where = _for_us(scores).transpose(0, 1).flatten(1), _for_us(slots).transpose(0, 1).flatten(1)
    best, order = said.topk(k, dim=1)
    return best, where.gather(1, order)


@uncompiled
@torch.no_grad()
def rows_of(bank: Bank, slots: Tensor) -> Tensor:
    """The rows of these slots [...], wherever they lie: [..., width], in float32."""
    if not bank.sharded:
        return bank.rows[slots].float()
    places = bank.local(of_all(slots[None]))  # [processes, ...]
    found = torch.where((places < bank.count)[..., None], bank.rows[places].float(), 0.0)
    return sum_of_all(found)[dist.get_rank()]  # one process has each of them, the others nothing


@uncompiled
@torch.no_grad()
def attend_all(
    queries: Tensor, memory: Tensor, temperature: float, values: Tensor | None = None, part: int = PART
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend`, where `memory` and `values` are this process's shards of the whole."""
    if processes() == 1:
        return attend(queries, memory, temperature, values, part)
    means, sums, scores = map(_for_us, attend(of_all(queries), memory, temperature, values, part))
    total = sums.logsumexp(0)
    weights = (sums - total).exp()  # [processes, queries]: share of each shard in the softmax
    return (weights[..., None] * means).sum(0), total, (weights * scores).sum(0)


def _for_us(said: Tensor) -> Tensor:
    """Of what every shard says of the queries of all [all queries, ...], what is of ours: [processes, queries, ...]."""
    count = processes()
    return of_all(said).unflatten(0, (count, count, len(said) // count))[:, dist.get_rank()]
