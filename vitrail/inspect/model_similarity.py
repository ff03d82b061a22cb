"""Similarity of two models' internals: linear CKA of features (Kornblith et al. 2019, arXiv 1905.00414), and the
divergence of attention maps (Li et al. 2024, arXiv 2411.09702).

Two models side by side: likeness of their layers, divergence of their maps, what attention transfer would carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitrail.measure.attention_maps import Seen, map_layers
from vitrail.measure.attention_statistics import Maps
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.trunks.vit import Trunk

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


MOST_PAIRS = 2**30  # numbers of all pairs of heads that are compared: minutes beyond


def cka_table(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Linear CKA of every layer of one model with every layer of the other, [layers, other layers], float64.

    Features [images, width] a layer, of the same images. As `likeness.cka` for each pair, by products of images rather
    than of channels: a table of two deep models would otherwise hold a matrix of channels for each of hundreds of
    pairs. NaN where features are constant.
    """

    def kernels(features: Sequence[Tensor]) -> Tensor:
        made = []
        for layer in features:
            centred = layer.double() - layer.double().mean(0)
            kernel = centred @ centred.mT
            made.append((kernel / kernel.norm()).flatten())
        return torch.stack(made)

    return kernels(first) @ kernels(second).mT


class Divergence:
    """Jensen-Shannon divergence of two models' maps in one layer under every matching of heads, over batches.

    A mean over the rows that both models have; `likeness.attention_divergence` of all images at once.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.heads: Tensor | None = None  # sums of [heads, other heads]
        self.averaged = 0.0

    def add(self, first: Maps, second: Maps) -> None:
        """Maps of the same images on the same grid; prefix tokens that one has more are not compared."""
        lack = min(first.prefix, second.prefix)
        one, rows = _common(first, lack)
        other, more = _common(second, lack)
        there = rows & more
        count = int(there.sum())
        if not count:
            return
        # Chosen rows as if of one image: [1, heads, rows, keys]
        one, other = (maps.permute(0, 2, 1, 3)[there].transpose(0, 1)[None] for maps in (one, other))
        if one.device.type == "mps":  # which has no float64
            one, other = one.cpu(), other.cpu()
        table = head_divergences(one, other).cpu() * count
        self.heads = table if self.heads is None else self.heads + table
        self.averaged += float(jensen_shannon(one.double().mean(1), other.double().mean(1)).sum())
        self.rows += count

    def values(self) -> dict[Matching, float | None]:
        """Nats, by matching; none where heads cannot be matched so."""
        if self.heads is None:
            return dict.fromkeys(("direct", "bipartite", "minimum", "averaged"))
        table = self.heads / self.rows
        square = table.shape[0] == table.shape[1]
        pairs = enumerate(assignment(table.tolist())) if square else ()
        return {
            "direct": float(table.diagonal().mean()) if square else None,
            "bipartite": float(torch.stack([table[i, j] for i, j in pairs]).mean()) if square else None,
            "minimum": float(table.amin(1).mean()),
            "averaged": self.averaged / self.rows,
        }


def _common(maps: Maps, prefix: int) -> tuple[Tensor, Tensor]:
    """Weights and rows with so many prefix tokens; where some are left out, rows are scaled to sum 1 again."""
    extra = maps.prefix - prefix
    keep = [i for i in range(maps.rows.shape[1]) if not prefix <= i < prefix + extra]
    if not extra:
        return maps.weights, maps.rows
    weights = maps.weights[:, :, keep][..., keep]
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30), maps.rows[:, keep]


class Divergences:
    """`Divergence` of all layers that both models have, on as many images as take a bearable time."""

    def __init__(self, first: Classifier, second: Classifier) -> None:
        self.layers = {i: Divergence() for i in map_layers(first) if i in map_layers(second)}
        self.images = 0
        self.most = 0
        self.reason = ""
        if not self.layers:
            self.reason = "the two have no layers with attention maps in common"
            return
        ours, theirs = cast("Trunk", first.trunk), cast("Trunk", second.trunk)
        grids = [t.patch_embed.grid(m.preprocess.size, m.preprocess.size) for t, m in ((ours, first), (theirs, second))]
        if grids[0] != grids[1]:
            told = " and ".join(f"{rows}x{columns}" for rows, columns in grids)
            self.reason = f"maps over {told} patches cannot be compared"
            return
        tokens = grids[0][0] * grids[0][1]
        pairs = len(self.layers) * ours.config.heads * theirs.config.heads * tokens**2
        self.most = max(4, MOST_PAIRS // pairs)

    def add(self, first: Seen, second: Seen) -> None:
        """One batch, or none of it where enough images were compared."""
        if self.images >= self.most:
            return
        for i, gathered in self.layers.items():
            gathered.add(first.maps(i), second.maps(i))
        self.images += first.count

    def values(self) -> dict[str, list[float | None]]:
        """By matching, one value a layer."""
        found = [gathered.values() for gathered in self.layers.values()]
        return {name: [layer[name] for layer in found] for name in ("direct", "bipartite", "minimum", "averaged")}


def transfer_account(teacher: Classifier, student: Classifier) -> dict[str, Any] | str:
    """Size and cost of attention transfer from one model to the other (Li et al. 2024, arXiv 2411.09702).

    Values per image of all maps, and of all q and k from which maps can be computed; multiply-accumulates of inference
    with attention copy (both models) and with attention distillation (the student alone). A message if they do not fit.
    """
    for model in (teacher, student):
        if not isinstance(model.trunk, Trunk) or not map_layers(model):
            return "attention transfer does not fit: one of the two has no attention maps"
        if model.policy is not None:
            return "attention transfer does not fit: an adaptive model's maps differ in size from image to image"
    one, other = cast("Trunk", teacher.trunk), cast("Trunk", student.trunk)
    kinds = [one.config.mixer.kind, other.config.mixer.kind]
    if kinds != ["softmax", "softmax"]:
        return f"attention transfer does not fit: it needs softmax attention, the mixers are {kinds[0]} and {kinds[1]}"
    facts = [_facts(teacher, one), _facts(student, other)]
    for what in facts[0]:
        if facts[0][what] != facts[1][what]:
            return f"attention transfer does not fit: {facts[0][what]} and {facts[1][what]} {what}"
    layers, heads, tokens = facts[0].values()
    costs = [cost(model).macs for model in (teacher, student)]
    return {
        "maps": layers * heads * tokens**2,
        "queries_and_keys": 2 * layers * tokens * one.width,
        "macs_copy": sum(costs),
        "macs_distilled": costs[1],
    }


def _facts(model: Classifier, trunk: Trunk) -> dict[str, int]:
    rows, columns = trunk.patch_embed.grid(model.preprocess.size, model.preprocess.size)
    return {"layers": len(trunk.blocks), "heads": trunk.config.heads, "tokens": trunk.prefix + rows * columns}
