"""ISD: match the momentum encoder's similarities to a queue of other images (Tejankar et al., 2020, arXiv
2012.09259)."""

from __future__ import annotations

from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.kernels.similarity import relation_loss
from vitrail.learn.bank import attend_all, make_bank
from vitrail.learn.config import IsdConfig
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair
from vitrail.model.classifier import Classifier


class Isd(MomentumPair):
    """KL between two softmaxes over a queue of the target's embeddings: the target's and the online network's.

    The batch is pushed after the loss, so an image is never its own anchor.
    """

    def __init__(self, model: Classifier, config: IsdConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        self.options = config
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, rows = self.options, self.bank.here()
        online, target, seen = self.pair(batch)
        temperatures = config.temperature, config.teacher_temperature
        loss = relation_loss(online, target, rows, rows, *temperatures, by=attend_all)
        self.bank.push(target)
        return self.losses(loss, seen, batch)
