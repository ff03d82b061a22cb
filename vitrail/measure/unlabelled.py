"""Metrics that need no labels: whether embeddings distinguish images."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.measure.classification import Figures


@dataclass(frozen=True, eq=False)
class UnlabelledFigures(Figures):
    """No classes, so nothing of each class, and no loss (NaN)."""

    spread: float
    """Of the embeddings: 0 where all images get one, 1 where they point everywhere alike."""
    rank: float
    """In how many directions they differ (participation ratio)."""

    def scalars(self) -> dict[str, float]:
        return {"spread": self.spread, "rank": self.rank}
