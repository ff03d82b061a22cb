"""Purity of neighbourhoods (MSF, arXiv 2105.07269), and ranks of the nearest images of the same class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.similarity import PART, parts, top_rows
from vitrail.measure.evaluate import EvaluationData, Findings, Model
from vitrail.measure.retrieval import embedded_split, own_rows

KIN = 5  # CMSF looks at five


def neighbour_purity(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    k: int,
    *,
    own: Tensor | None = None,
    part: int = PART,
) -> float:
    """Mean share of the k nearest that have the query's class; of all of them where the memory has fewer.

    Queries [queries, width], memory [rows, width], compared by cosine. `own` [queries] is each query's own row of the
    memory, which does not count.
    """
    unit, rows = F.normalize(queries.float(), dim=1), F.normalize(memory.float(), dim=1)
    most = min(k + (own is not None), len(memory))
    if most <= (own is not None):
        raise ValueError("there are no neighbours: the memory has no other image")
    total = 0.0
    size = max(1, part // most)
    for first in range(0, len(unit), size):
        some = slice(first, first + size)
        _, found = top_rows(unit[some], rows, most, own=None if own is None else own[some], part=part)
        found = found if own is None else found[:, 1:]
        total += float((memory_labels[found] == labels[some, None]).double().mean(1).sum())
    return total / len(unit)


def kin_ranks(
    queries: Tensor, labels: Tensor, memory: Tensor, memory_labels: Tensor, k: int, *, part: int = PART
) -> Tensor:
    """Rank in the whole memory, from 1, of the k-th nearest image of the query's class; [those with k such images].

    Equally near images of other classes count as farther.
    """
    unit, rows = F.normalize(queries.float(), dim=1), F.normalize(memory.float(), dim=1)
    if k > len(rows):
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    kin = top_rows(unit, rows, k, labels=labels, memory_labels=memory_labels, part=part)[0][:, -1]
    nearer = torch.zeros(len(unit), dtype=torch.int64, device=unit.device)
    for some in parts(len(unit), len(rows), part):
        # The same parts and the same product as in the search: an image is not nearer than itself by rounding.
        nearer += (unit @ rows[some].T > kin[:, None]).sum(1)
    return nearer[kin.isfinite()] + 1


def judge_purity(
    model: Model,
    data: EvaluationData,
    *,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
) -> Findings:
    """The evaluator "purity": of the 5 nearest training images, and of as many as it takes to meet 5 of one's class.

    `median_rank` is the median over queries of the rank of the fifth image of their class; 5 is the best there is.
    """
    queries, memory = (embedded_split(model, data, split, device, autocast) for split in (data.split, "train"))
    four = (queries.embedding, queries.label, memory.embedding, memory.label)
    own = own_rows(data, queries)
    numbers = {"purity": neighbour_purity(*four, KIN, own=own)}
    itself = int(own is not None)  # one's own image is its nearest
    ranks = kin_ranks(*four, KIN + itself) - itself
    if len(ranks):
        numbers["median_rank"] = float(ranks.double().quantile(0.5))
        numbers["purity_at_median_rank"] = neighbour_purity(*four, max(1, round(numbers["median_rank"])), own=own)
    return {"numbers": numbers, "tables": {}, "pictures": {}}
