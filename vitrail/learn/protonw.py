"""ProtoNW: classification by the class means of a bank; a baseline of CMSF (Navaneet et al., 2021, arXiv
2112.04607)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.bank import make_bank
from vitrail.learn.cmsf import class_means
from vitrail.learn.config import ProtonwConfig
from vitrail.learn.selfsupervised import PRECISIONS, MomentumPair, refuse_several, unit
from vitrail.model.classifier import Classifier


class Protonw(MomentumPair):
    """Cross entropy of a softmax over the cosines with the class means of a bank; classes not in it are left out."""

    def __init__(self, model: Classifier, config: ProtonwConfig, steps: int) -> None:
        super().__init__(model, config, steps, config.predictor_hidden)
        refuse_several(model, "protonw")
        self.temperature = config.temperature
        self.bank = make_bank(config.bank, self.head.features, dtype=PRECISIONS[config.bank_precision])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        online, target, seen = self.pair(batch)
        self.bank.push(target, batch.label)
        means, counts = class_means(self.bank.here(), self.bank.labels_here(), len(self.model.classes))
        with torch.autocast(online.device.type, enabled=False):
            scores = online @ unit(means).T / self.temperature
        scores = scores.masked_fill(counts[None] == 0, float("-inf"))
        return self.losses(F.cross_entropy(scores, batch.label), seen, batch)
