"""Statistics of attention maps: entropy, attention distance, rows of the class token.

Maps are [batch, heads, tokens, tokens], queries before keys, on the tokens that the image began with: prefix tokens
first, then patches in raster order. No map outlives its batch; means over images are kept in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STATISTICS = ("entropy", "entropy_share", "class_entropy", "class_entropy_share", "distance")


@dataclass(frozen=True)
class LayerMaps:
    """Attention of one layer; tokens that are gone have rows and columns of zeros."""

    weights: Tensor  # [batch, heads, tokens, tokens]; rows of `rows` sum to 1
    rows: Tensor  # [batch, tokens], true where a token is a query
    keys: Tensor  # [batch, tokens], true where a token is a key
    prefix: int
    grid: tuple[int, int]


def shares(maps: Tensor) -> Tensor:
    """Magnitudes over their row sum: a softmax map as it is; a signed one (SimA, talking heads) as a distribution."""
    wide = maps.to(torch.promote_types(maps.dtype, torch.float32)).abs()
    return wide / wide.sum(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)


def entropies(weights: Tensor) -> Tensor:
    """Entropy in nats of distributions [..., keys]."""
    return torch.special.entr(weights).sum(-1)


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """Euclidean distance of every pair of patches, [patches, patches], in patches, float64."""
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in grid)
    positions = torch.cartesian_prod(rows, columns).reshape(-1, 2)
    return (positions[:, None] - positions[None]).square().sum(-1).sqrt()


def row_distances(maps: LayerMaps) -> tuple[Tensor, Tensor]:
    """Mean attention distance of each patch, [batch, heads, patches], and which patches attend to patches at all.

    Prefix tokens have no position: their rows and columns are left out and the rest of a row is scaled to sum 1.
    """
    patches = maps.weights[:, :, maps.prefix :, maps.prefix :]
    total = patches.sum(-1)
    distance = (patches * patch_distances(maps.grid).to(patches)).sum(-1)
    attends = (total > 0) & maps.rows[:, None, maps.prefix :]
    return torch.where(attends, distance / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0), attends


def class_rows(maps: LayerMaps) -> Tensor:
    """What the class token attends to, [batch, heads, tokens]; without one, the mean over all rows there are."""
    if maps.prefix:
        return maps.weights[:, :, 0]
    return maps.weights.sum(2) / maps.rows.sum(1).clamp_min(1)[:, None, None]


class RunningMean:
    """Mean over images of values [batch, heads] or [batch]."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, values: Tensor, valid: Tensor | None = None) -> None:
        """`valid` [batch] is false for images that have no value (none: all have one)."""
        known = values.detach().cpu().double()
        known = known if valid is None else known[valid.cpu()]
        self.total = known.sum(0) + (0.0 if self.total is None else self.total)
        self.count += len(known)

    def values(self) -> tuple[float, ...]:
        """One per head; NaN where no image counted."""
        assert self.total is not None
        return tuple((self.total / self.count if self.count else self.total * math.nan).flatten().tolist())


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer: means over images, one per head."""

    layer: int
    entropy: tuple[float, ...]  # nats, mean over all rows
    entropy_share: tuple[float, ...]  # of the logarithm of the number of visible tokens
    class_entropy: tuple[float, ...]  # of the class token's row, or of the mean row
    class_entropy_share: tuple[float, ...]
    distance: tuple[float, ...]  # patches
    row: str  # "class" or "mean": whose row `class_entropy` is of

    def to_json(self, pitch: float) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in STATISTICS}
        values["distance_pixels"] = [d * pitch for d in self.distance]
        by_head = {name: [v if math.isfinite(v) else None for v in heads] for name, heads in values.items()}
        means: dict[str, float | None] = {}
        for name, heads in by_head.items():
            known = [v for v in heads if v is not None]
            means[name] = sum(known) / len(known) if known else None
        return {"layer": self.layer, **means, "row": self.row, "heads": by_head}


class LayerCollector:
    """Entropy and distance of one layer over any number of batches."""

    def __init__(self, layer: int) -> None:
        self.layer, self.row = layer, "class"
        self.means = {name: RunningMean() for name in STATISTICS}

    def add(self, maps: LayerMaps) -> None:
        self.row = "class" if maps.prefix else "mean"
        queries, keys = maps.rows.sum(1), maps.keys.sum(1)
        rows = entropies(maps.weights)
        greatest = keys.cpu().clamp_min(2).double().log().to(rows)[:, None]  # one token alone has no entropy share
        entropy = torch.where(maps.rows[:, None], rows, 0.0).sum(2) / queries.clamp_min(1)[:, None]
        class_entropy = rows[:, :, 0] if maps.prefix else entropies(class_rows(maps))
        present = maps.rows[:, 0] if maps.prefix else queries > 0
        distance, attends = row_distances(maps)
        self.means["entropy"].add(entropy, queries > 0)
        self.means["entropy_share"].add(entropy / greatest, (queries > 0) & (keys > 1))
        self.means["class_entropy"].add(class_entropy, present)
        self.means["class_entropy_share"].add(class_entropy / greatest, present & (keys > 1))
        self.means["distance"].add(distance.sum(2) / attends.sum(2).clamp_min(1), attends.any(2).all(1))

    def result(self) -> LayerStatistics:
        return LayerStatistics(layer=self.layer, row=self.row, **{n: mean.values() for n, mean in self.means.items()})


def spread_out(sampled: Tensor, query_patches: Tensor, key_patches: Tensor, prefix: int) -> Tensor:
    """A map of sampled tokens [batch, heads, queries, keys] on all of them, [batch, heads, tokens, tokens].

    The masks [batch, patches] say which patches the queries and keys are: in raster order, the first of the columns of
    each image; what follows is padding, and lands on patches that were dropped.
    """
    batch, heads, queries, keys = sampled.shape
    tokens = prefix + key_patches.shape[1]

    def positions(mask: Tensor, count: int) -> Tensor:
        first = torch.arange(prefix, device=mask.device).expand(batch, -1)
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True) + prefix
        return torch.cat([first, order], 1)[:, :count]

    columns = positions(key_patches, keys)[:, None, None].expand(-1, heads, queries, -1)
    wide = sampled.new_zeros(batch, heads, queries, tokens).scatter(3, columns, sampled)
    rows = positions(query_patches, queries)[:, None, :, None].expand(-1, heads, -1, tokens)
    return sampled.new_zeros(batch, heads, tokens, tokens).scatter(2, rows, wide)
