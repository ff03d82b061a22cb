"""How well embeddings find images of the same class, at every granularity (architectures-and-training §3.3-3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.neighbours import nearest, neighbour_probabilities

NEIGHBOURS = (10, 15, 20, 25, 30)
TEMPERATURE = 0.05
CERTAIN = 1e-6  # probabilities of a coarse class are kept this far from 0 and 1


@dataclass(frozen=True)
class Embedded:
    """Images as vectors."""

    embedding: Tensor  # [images, width]
    label: Tensor  # [images] class
    index: Tensor  # [images] stable index

    def __len__(self) -> int:
        return len(self.index)


def knn_probabilities(
    queries: Tensor, memory: Tensor, memory_labels: Tensor, classes: int, k: int, temperature: float = TEMPERATURE
) -> Tensor:
    """On-the-fly classification: [queries, classes] from the k nearest of the memory (eq. 2.6)."""
    cosines, rows = nearest(queries, memory, min(k, len(memory)))
    return neighbour_probabilities(cosines, rows, memory_labels, classes, temperature)


def knn_accuracy(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    *,
    neighbours: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> dict[int, float]:
    """Top-1 share of right answers for each number of neighbours; one search serves all."""
    most = min(max(neighbours), len(memory))
    classes = int(max(labels.max(), memory_labels.max())) + 1
    cosines, rows = nearest(queries, memory, most)
    found = {}
    for k in neighbours:
        shares = neighbour_probabilities(cosines[:, :k], rows[:, :k], memory_labels, classes, temperature)
        found[k] = float((shares.argmax(1) == labels).float().mean())
    return found


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """Average precision of every query: scores and relevance [queries, items] -> [queries]; 0 without a relevant item.

    Items of equal score count as ranked in the order in which they lie.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    hits = relevant.gather(1, order).float()
    ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    precision = hits.cumsum(1) / ranks
    return (precision * hits).sum(1) / hits.sum(1).clamp(min=1)


def coarse_bonus(probabilities: Tensor, memory_coarse: Tensor) -> Tensor:
    """log p / (1 - p) of each item's coarse class for each query: [queries, items] from [queries, coarse] (eq. 2.5)."""
    sure = probabilities.double().clamp(CERTAIN, 1 - CERTAIN)
    return (sure.log() - (-sure).log1p()).float()[:, memory_coarse]


def mean_average_precision(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    *,
    coarse: Tensor | None = None,
    memory_coarse: Tensor | None = None,
    part: int = 1 << 24,
) -> float:
    """Mean over queries of the average precision of a ranking of the whole memory; relevant: the same label.

    With `coarse` [queries, coarse classes] the ranking is conditioned on those probabilities of the query and the
    known coarse class of each item; one-hot rows are the oracle: everything of the true coarse class comes first.
    """
    if (coarse is None) != (memory_coarse is None):
        raise ValueError("a conditioned ranking needs coarse probabilities of queries and coarse classes of items")
    unit, rows = F.normalize(queries.float(), dim=-1), F.normalize(memory.float(), dim=-1)
    total = 0.0
    size = max(1, part // max(1, len(memory)))
    for first in range(0, len(queries), size):
        chosen = slice(first, first + size)
        scores = unit[chosen] @ rows.T
        if coarse is not None and memory_coarse is not None:
            scores = scores + coarse_bonus(coarse[chosen], memory_coarse)
        relevant = labels[chosen, None] == memory_labels[None]
        total += float(average_precision(scores, relevant).sum())
    return total / len(queries)
