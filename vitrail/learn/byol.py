"""BYOL: predict the momentum encoder's embedding of another view (Grill et al., 2020, arXiv 2006.07733)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import ByolConfig
from vitrail.learn.selfsupervised import MomentumPair, distance, unit
from vitrail.model.classifier import Classifier


def uniformity(embedding: Tensor, temperature: float) -> Tensor:
    """log of the mean of exp(cosine / temperature) over all pairs of views of different images (UniSiam, Lu et al.,
    2022, arXiv 2207.09176).

    `embedding` [2 * images, width]: row i and row i + images are two views of one image. The images are those of this
    process.
    """
    images = len(embedding) // 2
    seen = unit(embedding)
    pairs = (seen @ seen.T / temperature).exp()
    other = 1 - torch.eye(images, device=seen.device).repeat(2, 2)
    return ((pairs * other).sum() / other.sum()).log()


class Byol(MomentumPair):
    """Mean squared distance of unit vectors: one way (BYOL-asym of ISD, arXiv 2012.09259), or, `symmetric`, both.

    A momentum of 0 compares the model with itself under a stop-gradient (SimSiam, arXiv 2011.10566); with `uniformity`
    that is UniSiam, whose loss is here doubled (plus 2), since a squared distance is 2 - 2 cos.
    """

    def __init__(self, model: Classifier, config: ByolConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        self.symmetric = config.symmetric
        self.itself = config.momentum == 0 and config.momentum_end is None
        self.uniformity, self.temperature = config.uniformity, config.uniformity_temperature
        if self.uniformity and not self.symmetric:
            raise ValueError("objective.uniformity compares both views; set --objective.symmetric, too")

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if not self.symmetric:
            online, target, seen = self.pair(batch)
            return self.losses(distance(online, target).mean(), seen, batch)
        if self.itself:
            seen = self.encode(torch.cat(batch.views))
            target = unit(seen.embedding).detach().roll(len(batch), 0)  # each view's target is the other view
            online = unit(self.predictor(seen.embedding))
        else:
            online, target, seen = self.both(batch)
        loss = distance(online, target).mean()
        if not self.uniformity:
            return self.losses(loss, seen.first(len(batch)), batch)
        spread = uniformity(seen.embedding, self.temperature)
        return self.losses(loss + 2 * self.uniformity * spread, seen.first(len(batch)), batch, uniformity=spread)
