"""MoCo: tell the other view of an image from a bank of other images (efficiency-1 §2.C4, §2.E1)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.kernels.similarity import log_sum
from vitrail.learn.config import MocoConfig
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair
from vitrail.learn.sharded_bank import attend_all, make_bank
from vitrail.model.classifier import Classifier


def contrast(online: Tensor, target: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """InfoNCE: -log softmax of the own target among [own target, bank], mean over the batch; [batch, width] each.

    In a process group `bank` is this process's shard. Gradients reach `online` only.
    """
    own = (online * target.detach()).sum(1) / temperature
    return (torch.logaddexp(own, log_sum(online, bank, temperature, by=attend_all)) - own).mean()


class Moco(MomentumPair):
    """Contrast with a queue of what the target said of earlier images; the batch is pushed after the loss."""

    def __init__(self, model: Classifier, config: MocoConfig, steps: int) -> None:
        super().__init__(model, config, steps)
        self.temperature = config.temperature
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.pair(batch)
        loss = contrast(online, target, self.bank.here(), self.temperature)
        self.bank.push(target)
        return self.losses(loss, seen, batch)
