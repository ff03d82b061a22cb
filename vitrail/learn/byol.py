"""BYOL: predict what a slow copy of oneself says of another view (efficiency-1 §2.E2, §2.F1)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import ByolConfig
from vitrail.learn.selfsupervised import MomentumPair, distance, unit
from vitrail.model.classifier import Classifier


class Byol(MomentumPair):
    """Mean squared distance of unit vectors: one way (the thesis' BYOL-asym), or, `symmetric`, both."""

    def __init__(self, model: Classifier, config: ByolConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        self.symmetric = config.symmetric

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if not self.symmetric:
            online, target, seen = self.pair(batch)
            return self.losses(distance(online, target).mean(), seen, batch)
        both = torch.cat(batch.views)
        seen = self.encode(both)
        other = self.target.embed(both).roll(len(batch), 0)  # each view's target is the other view
        return self.losses(distance(unit(self.predictor(seen.embedding)), other).mean(), seen.first(len(batch)), batch)
