"""MSF: move towards the mean of the nearest neighbours in a bank (Abbasi Koohpayegani et al., 2021, arXiv
2105.07269)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.bank import make_bank
from vitrail.learn.config import MsfConfig
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair, distance, one_label
from vitrail.model.classifier import Classifier


def shift_loss(online: Tensor, near: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean squared distance to some rows `near` [batch, k, width] of the bank, of each image and then of the batch.

    `valid` [batch, k] says which of them count, at least one for each image (none: all).
    """
    apart = distance(online[:, None], near)
    if valid is None:
        return apart.mean(1).mean()
    return (torch.where(valid, apart, 0.0).sum(1) / valid.sum(1)).mean()


class Msf(MomentumPair):
    """The target's embedding is pushed first and is its own first neighbour, so with k = 1 this is BYOL, exactly."""

    def __init__(self, model: Classifier, config: MsfConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        if config.k > config.bank:
            raise ValueError(f"objective.k: {config.k} neighbours in a bank of {config.bank}; raise --objective.bank")
        self.k = config.k
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.pair(batch)
        own = self.bank.push(target, one_label(batch))  # labels serve metrics only
        found = own[:, None] if self.k == 1 else self.bank.nearest(target, self.k, own)[1]
        pure = self.purity(found, batch, self.bank)
        return self.losses(shift_loss(online, self.bank.rows_at(found)), seen, batch, **pure)
