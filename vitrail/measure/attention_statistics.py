"""How attention maps look: their entropy, how far they reach, what the class token sees.

Maps are [batch, heads, tokens, tokens], queries before keys, on the tokens that the image began with: prefix tokens
first, then patches in raster order. No map outlives its batch; means over images are kept in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Maps:
    """Attention of one layer; tokens that are gone have rows and columns of zeros."""

    weights: Tensor  # [batch, heads, tokens, tokens]; rows of `rows` sum to 1
    rows: Tensor  # [batch, tokens], true where a token asked
    keys: Tensor  # [batch, tokens], true where a token could be seen
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
    place = torch.cartesian_prod(rows, columns).reshape(-1, 2)
    return (place[:, None] - place[None]).square().sum(-1).sqrt()


def row_distances(maps: Maps) -> tuple[Tensor, Tensor]:
    """How far each patch looks on average, [batch, heads, patches], and which do look at patches at all.

    Prefix tokens have no place: their rows and columns are left out and the rest of a row is scaled to sum 1.
    """
    patches = maps.weights[:, :, maps.prefix :, maps.prefix :]
    seen = patches.sum(-1)
    far = (patches * patch_distances(maps.grid).to(patches)).sum(-1)
    looks = (seen > 0) & maps.rows[:, None, maps.prefix :]
    return torch.where(looks, far / seen.clamp_min(torch.finfo(seen.dtype).tiny), 0.0), looks


def class_rows(maps: Maps) -> Tensor:
    """What the class token attends to, [batch, heads, tokens]; without one, the mean over all rows there are."""
    if maps.prefix:
        return maps.weights[:, :, 0]
    return maps.weights.sum(2) / maps.rows.sum(1).clamp_min(1)[:, None, None]


class RunningMean:
    """A mean over images of values [batch, heads] or [batch], those that count."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, values: Tensor, counts: Tensor) -> None:
        """`counts` [batch] is false for images that have no value."""
        counts = counts.cpu()
        part = values.detach().cpu().double()[counts].sum(0)
        self.total = part if self.total is None else self.total + part
        self.count += int(counts.sum())

    def values(self) -> tuple[float, ...]:
        """One per head; NaN where no image counted."""
        assert self.total is not None
        return tuple((self.total / self.count if self.count else self.total * math.nan).flatten().tolist())


@dataclass(frozen=True)
class LayerLook:
    """How one layer looks: means over images, one number per head."""

    layer: int
    entropy: tuple[float, ...]  # nats, mean over all rows
    entropy_share: tuple[float, ...]  # of the logarithm of how many tokens can be seen
    class_entropy: tuple[float, ...]  # of the class token's row, or of the mean row
    class_entropy_share: tuple[float, ...]
    distance: tuple[float, ...]  # patches
    row: str  # "class" or "mean": whose row `class_entropy` is of

    def to_json(self, pitch: float) -> dict[str, Any]:
        names = ("entropy", "entropy_share", "class_entropy", "class_entropy_share", "distance")
        found = {name: getattr(self, name) for name in names}
        found["distance_pixels"] = [d * pitch for d in self.distance]
        by_head = {name: [v if math.isfinite(v) else None for v in values] for name, values in found.items()}
        means = {name: _mean(values) for name, values in by_head.items()}
        return {"layer": self.layer, **means, "row": self.row, "heads": by_head}


class LayerGather:
    """Entropy and distance of one layer over any number of batches."""

    def __init__(self, layer: int) -> None:
        self.layer, self.row = layer, "class"
        self.means = {name: RunningMean() for name in ("rows", "rows_share", "one", "one_share", "distance")}

    def add(self, maps: Maps) -> None:
        self.row = "class" if maps.prefix else "mean"
        asked, seen = maps.rows.sum(1), maps.keys.sum(1)
        rows = entropies(maps.weights)
        most = seen.cpu().clamp_min(2).double().log().to(rows)[:, None]  # of one token alone nothing can be said
        mean = torch.where(maps.rows[:, None], rows, 0.0).sum(2) / asked.clamp_min(1)[:, None]
        one = rows[:, :, 0] if maps.prefix else entropies(class_rows(maps))
        there = maps.rows[:, 0] if maps.prefix else asked > 0
        far, looks = row_distances(maps)
        self.means["rows"].add(mean, asked > 0)
        self.means["rows_share"].add(mean / most, (asked > 0) & (seen > 1))
        self.means["one"].add(one, there)
        self.means["one_share"].add(one / most, there & (seen > 1))
        self.means["distance"].add(far.sum(2) / looks.sum(2).clamp_min(1), looks.any(2).all(1))

    def result(self) -> LayerLook:
        found = {name: mean.values() for name, mean in self.means.items()}
        return LayerLook(
            self.layer,
            found["rows"],
            found["rows_share"],
            found["one"],
            found["one_share"],
            found["distance"],
            self.row,
        )


def spread_out(found: Tensor, asking: Tensor, seen: Tensor, prefix: int) -> Tensor:
    """A map of sampled tokens [batch, heads, queries, keys] on all of them, [batch, heads, tokens, tokens].

    `asking` and `seen` [batch, patches] say which patches the queries and keys are: in raster order, the first of the
    columns of each image; what follows is padding, and lands on patches that are gone.
    """
    batch, heads, queries, keys = found.shape
    tokens = prefix + seen.shape[1]

    def places(there: Tensor, count: int) -> Tensor:
        first = torch.arange(prefix, device=there.device).expand(batch, -1)
        order = (~there).to(torch.int8).argsort(dim=1, stable=True) + prefix
        return torch.cat([first, order], 1)[:, :count]

    columns = places(seen, keys)[:, None, None].expand(-1, heads, queries, -1)
    wide = found.new_zeros(batch, heads, queries, tokens).scatter(3, columns, found)
    rows = places(asking, queries)[:, None, :, None].expand(-1, heads, -1, tokens)
    return found.new_zeros(batch, heads, tokens, tokens).scatter(2, rows, wide)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
