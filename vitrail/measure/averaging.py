"""Ensembles: probabilities of several models averaged, and the gain over each (Li et al. 2024, arXiv 2411.09702).

Probabilities are averaged, not logits, with equal weights. Two models of one recipe that differ in their seed gain
too, so the gain of two different models means little without that control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.measure.classification import Figures, SingleLabelFigures, classification
from vitrail.measure.evaluate import Predictions


def averaged(members: Sequence[Predictions]) -> Predictions:
    """What the mean of the members' probabilities says, as logits (float64); images may come in any order.

    Raises `ValueError` where members are not of the same images, labels and classes.
    """
    if not members:
        raise ValueError("an ensemble needs at least one model")
    orders = [made.index.argsort(stable=True) for made in members]
    first, total = members[0], None
    for made, order in zip(members, orders, strict=True):
        same = len(made) == len(first) and made.logits.shape == first.logits.shape
        if not same or not made.index[order].equal(first.index[orders[0]]):
            raise ValueError("the models of an ensemble must have judged the same images with the same classes")
        if not made.target[order].equal(first.target[orders[0]]):
            raise ValueError("the models of an ensemble count their classes differently: labels of an image differ")
        logits = made.logits[order].double()
        shares = logits.sigmoid() if made.multilabel else logits.softmax(1)
        total = shares if total is None else total + shares
    assert total is not None
    mean = total / len(members)
    said = mean.logit() if first.multilabel else mean.log()
    lowest = math.log(torch.finfo(torch.float64).tiny)  # a probability of zero is no logit
    return Predictions(first.index[orders[0]], first.target[orders[0]], said.clamp(lowest, -lowest))


@dataclass(frozen=True)
class Together:
    """An ensemble beside its members."""

    members: dict[str, Figures]
    ensemble: Figures

    @property
    def key(self) -> str:
        """The figure that counts."""
        return "top1" if isinstance(self.ensemble, SingleLabelFigures) else "map"

    @property
    def best(self) -> float:
        """The best member alone."""
        return max(made.scalars()[self.key] for made in self.members.values())

    @property
    def gain(self) -> float:
        """Of the ensemble over its best member."""
        return self.ensemble.scalars()[self.key] - self.best

    @property
    def gain_over_mean(self) -> float:
        """Of the ensemble over its members' mean."""
        each = [made.scalars()[self.key] for made in self.members.values()]
        return self.ensemble.scalars()[self.key] - sum(each) / len(each)

    def to_json(self) -> dict[str, Any]:
        return {
            "members": {name: made.scalars() for name, made in self.members.items()},
            "ensemble": self.ensemble.scalars(),
            "gain": self.gain,
            "gain_over_mean": self.gain_over_mean,
        }


def together(members: Mapping[str, Predictions], classes: Sequence[str] | None = None) -> Together:
    """Figures of every named member and of their mean probabilities."""
    each = {name: classification(made.logits, made.target, classes) for name, made in members.items()}
    mean = averaged(list(members.values()))
    return Together(each, classification(mean.logits, mean.target, classes))
