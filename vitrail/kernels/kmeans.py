"""k-means clustering."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.kernels.similarity import PART


class KMeansResult(NamedTuple):
    """Centres and assignments."""

    centres: Tensor  # [clusters, width]
    label: Tensor  # [rows] nearest centre
    inertia: float  # sum of squared distances to the nearest centre


def kmeans(rows: Tensor, clusters: int, *, iterations: int = 50, seed: int = 0, part: int = PART) -> KMeansResult:
    """Lloyd's iterations from a k-means++ start, on the device of `rows` [rows, width]; ends early when nothing moves.

    A cluster that loses all of its rows takes the row that lies farthest from its centre. Raises `ValueError` for more
    clusters than rows.
    """
    if not 1 <= clusters <= len(rows):
        raise ValueError(f"{clusters} clusters of {len(rows)} rows are impossible")
    rows = rows.float()
    centres = _spread(rows, clusters, seed)
    label, distance = _assigned(rows, centres, part)
    for _ in range(iterations):
        sums = torch.zeros_like(centres).index_add_(0, label, rows)
        counts = torch.bincount(label, minlength=clusters)
        empty = (counts == 0).nonzero()[:, 0]
        centres = sums / counts.clamp(min=1)[:, None]
        if len(empty):
            centres[empty] = rows[distance.topk(len(empty)).indices]
        before = label
        label, distance = _assigned(rows, centres, part)
        if torch.equal(before, label):
            break
    return KMeansResult(centres, label, float(distance.double().sum()))


def _spread(rows: Tensor, clusters: int, seed: int) -> Tensor:
    """k-means++: of a few rows drawn in proportion to their squared distance from the centres, the most useful one."""
    generator = torch.Generator().manual_seed(seed)
    trials = 2 + int(math.log(clusters))
    chosen = [int(torch.randint(len(rows), (), generator=generator))]
    squares = rows.square().sum(1)
    distance = (rows - rows[chosen[0]]).square().sum(1)
    for _ in range(clusters - 1):
        weights = distance.double().cpu()
        if not float(weights.sum()) > 0:  # fewer different rows than clusters
            weights = torch.ones_like(weights)
        drawn = torch.multinomial(weights, trials, replacement=True, generator=generator).to(rows.device)
        products = (rows @ rows[drawn].T).T  # [trials, rows]
        left = torch.minimum(distance, (squares[drawn, None] + squares - 2 * products).clamp(min=0))
        left[torch.arange(trials, device=rows.device), drawn] = 0  # which rounding would leave above 0
        best = int(left.double().sum(1).argmin())
        chosen.append(int(drawn[best]))
        distance = left[best]
    return rows[torch.tensor(chosen, device=rows.device)].clone()


def _assigned(rows: Tensor, centres: Tensor, part: int) -> tuple[Tensor, Tensor]:
    size = max(1, part // len(centres))
    norms = centres.square().sum(1)
    labels, distances = [], []
    for first in range(0, len(rows), size):
        chunk = rows[first : first + size]
        best = (norms - 2 * chunk @ centres.T).min(1)
        labels.append(best.indices)
        distances.append((best.values + chunk.square().sum(1)).clamp(min=0))
    return torch.cat(labels), torch.cat(distances)
