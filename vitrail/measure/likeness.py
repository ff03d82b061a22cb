"""Similarity of two models' internals: linear CKA of features (Kornblith et al. 2019, arXiv 1905.00414), and the
divergence of attention maps (Li et al. 2024, arXiv 2411.09702)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Matching = Literal["direct", "bipartite", "minimum", "averaged"]


class Cka:
    """Linear CKA of two sets of features of the same images, gathered a batch at a time, in float64.

    |Ycᵀ Xc|² / (|Xcᵀ Xc| |Ycᵀ Yc|) with centred columns, in [0, 1]; orthogonal maps and scales do not change it. Only
    sums and products of columns are kept, so any number of images fits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[Tensor] = []
        self.products: list[Tensor] = []  # xᵀx, yᵀy, yᵀx

    def add(self, x: Tensor, y: Tensor) -> None:
        """Features [images, width] and [images, other width] of the same images."""
        if len(x) != len(y):
            raise ValueError(f"CKA compares features of the same images, not of {len(x)} and {len(y)}")
        x, y = x.detach().double(), y.detach().double()
        sums, products = [x.sum(0), y.sum(0)], [x.mT @ x, y.mT @ y, y.mT @ x]
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.count else sums
        self.products = [a + b for a, b in zip(self.products, products, strict=True)] if self.count else products
        self.count += len(x)

    def value(self) -> float:
        """CKA of everything added so far; NaN where features are constant."""
        x, y = self.sums
        pairs = ((x, x), (y, y), (y, x))
        own, other, both = (
            product - torch.outer(a, b) / self.count for product, (a, b) in zip(self.products, pairs, strict=True)
        )
        return float(both.square().sum() / (own.norm() * other.norm()))


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of features [images, width] and [images, other width]."""
    gathered = Cka()
    gathered.add(x, y)
    return gathered.value()


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Divergence in nats of distributions [..., keys] each, in [0, ln 2]: the entropy of the mean less the mean one."""
    p, q = p.double(), q.double()
    mean = torch.special.entr((p + q) / 2) - (torch.special.entr(p) + torch.special.entr(q)) / 2
    return mean.sum(-1).clamp_min(0)


def head_divergences(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence of every head of one layer with every head of the other, [heads, other heads].

    Maps [images, heads, queries, keys]; mean over images and queries, one pair of heads at a time.
    """
    rows = [
        torch.stack([jensen_shannon(first[:, i], second[:, j]).mean() for j in range(second.shape[1])])
        for i in range(first.shape[1])
    ]
    return torch.stack(rows)


def attention_divergence(first: Tensor, second: Tensor, matching: Matching = "direct") -> float:
    """Divergence of two models' maps [images, heads, queries, keys] in one layer, under a matching of heads.

    `direct`: head i with head i; `bipartite`: one to one, the least in total; `minimum`: every head of the first with
    its nearest of the second; `averaged`: of the mean over heads. Models that compute the same function may be far
    apart (average pooling by one head or by several, say): this compares maps, not functions.
    """
    if matching == "averaged":
        return float(jensen_shannon(first.double().mean(1), second.double().mean(1)).mean())
    if matching == "direct" and first.shape[1] != second.shape[1]:
        raise ValueError(f"{first.shape[1]} and {second.shape[1]} heads have no direct pairs; use bipartite or minimum")
    table = head_divergences(first, second)
    if matching == "minimum":
        return float(table.amin(1).mean())
    if matching == "direct":
        return float(table.diagonal().mean())
    chosen = assignment(table.tolist())
    return float(torch.stack([table[i, j] for i, j in enumerate(chosen)]).mean())


def assignment(cost: list[list[float]]) -> list[int]:
    """The column of every row of a square table such that each is taken once and their sum is least (Hungarian).

    >>> assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    [1, 0, 2]
    """
    size = len(cost)
    if any(len(row) != size for row in cost):
        raise ValueError("one-to-one pairs need a square table: as many heads on both sides")
    # Rows enter one by one along the cheapest path of reduced costs; index 0 stands for "none yet".
    of_row, of_column = [0.0] * (size + 1), [0.0] * (size + 1)
    row_of, before = [0] * (size + 1), [0] * (size + 1)
    for row in range(1, size + 1):
        row_of[0] = row
        column = 0
        least, done = [float("inf")] * (size + 1), [False] * (size + 1)
        while row_of[column]:
            done[column] = True
            here, step, following = row_of[column], float("inf"), 0
            for j in range(1, size + 1):
                if not done[j]:
                    reduced = cost[here - 1][j - 1] - of_row[here] - of_column[j]
                    if reduced < least[j]:
                        least[j], before[j] = reduced, column
                    if least[j] < step:
                        step, following = least[j], j
            for j in range(size + 1):
                if done[j]:
                    of_row[row_of[j]] += step
                    of_column[j] -= step
                else:
                    least[j] -= step
            column = following
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    columns = [0] * size
    for j in range(1, size + 1):
        columns[row_of[j] - 1] = j - 1
    return columns
