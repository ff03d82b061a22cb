"""Disagreement of predictions: of two models, and of each with the labels (DeiT, arXiv 2012.12877, table 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LABELS = "labels"


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Share of images with different top-1 decisions, for every pair. The first row are the labels: 1 - accuracy."""

    names: tuple[str, ...]
    rates: Tensor  # [names, names] float64; symmetric, zero on the diagonal

    def between(self, one: str, other: str) -> float:
        """The rate of one pair."""
        return float(self.rates[self.names.index(one), self.names.index(other)])

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "rates": self.rates.tolist()}


def disagreement(predictions: Mapping[str, Tensor], labels: Tensor) -> Disagreement:
    """Rates between the labels and every named prediction: logits [images, classes] or decisions [images].

    Of equal logits the lower class number wins. Raises `ValueError` where predictions are not of the same images.

    >>> disagreement({"a": torch.tensor([0, 1]), "b": torch.tensor([0, 0])}, torch.tensor([0, 1])).rates.tolist()
    [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.5, 0.5, 0.0]]
    """
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise ValueError(
            f"labels of shape {list(labels.shape)} are not class numbers [images]; decisions are compared where each "
            "image has one label"
        )
    if LABELS in predictions:
        raise ValueError(f"no prediction may be called {LABELS!r}: that is the first row")
    rows = [labels.detach().cpu().long()]
    for name, said in predictions.items():
        if said.ndim not in (1, 2) or len(said) != len(labels) or (said.ndim == 1 and said.is_floating_point()):
            raise ValueError(
                f"the prediction {name!r} has shape {list(said.shape)}: logits [images, classes] or class numbers "
                f"[images] of the same {len(labels)} images are needed"
            )
        rows.append(_decisions(said.detach().cpu(), name))
    said = torch.stack(rows)
    different = (said[:, None] != said[None]).sum(-1).double()
    return Disagreement((LABELS, *predictions), different / len(labels))


def _decisions(said: Tensor, name: str) -> Tensor:
    if said.ndim == 1:
        return said.long()
    if said.isnan().any():
        raise ValueError(f"the prediction {name!r} has logits that are no numbers")
    return said.argmax(1)
