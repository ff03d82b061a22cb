"""FixMatch: confident predictions of weak views are labels of strong ones (Sohn et al., 2020, arXiv 2001.07685)."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.cmsf import draw_labelled
from vitrail.learn.config import FixmatchConfig, SupervisedConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import VIEWS, reject_several
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier


class FixMatch(Supervised):
    """Eq. 3 and 4 of the paper, whose images without a label include those with one; here they do not."""

    known: Tensor
    views = VIEWS["weak_strong"]

    def __init__(self, model: Classifier, options: FixmatchConfig, facts: TrainingFacts) -> None:
        super().__init__(model, SupervisedConfig())
        reject_several(model, "fixmatch")
        self.options, labelled = options, draw_labelled(facts.labels, options.labelled)
        if len(labelled) == len(facts.labels):
            raise ValueError(f"objective.labelled: with {options.labelled:g} no image is without a label; lower it")
        self.groups = 1 + np.arange(len(facts.labels)) % options.ratio  # drawn as often as one another
        self.groups[labelled] = 0
        known = np.zeros(facts.index.max() + 1, bool)
        known[facts.index[labelled]] = True
        self.register_buffer("known", torch.from_numpy(known), persistent=False)

    @classmethod
    def build(cls, model: Classifier, config: FixmatchConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        weak, strong = self.model(torch.cat(batch.views)).float().chunk(2)  # one pass: BatchNorm sees all views
        known, (sure, guess) = self.known[batch.index], weak.detach().softmax(1).max(1)
        confident = ~known & (sure >= self.options.threshold)
        labels = (F.cross_entropy(weak, batch.label, reduction="none") * known).sum() / known.sum().clamp(min=1)
        pseudo = (F.cross_entropy(strong, guess, reduction="none") * confident).sum() / (~known).sum().clamp(min=1)
        loss = labels + self.options.weight * pseudo
        return {"loss": loss, "labels": labels.detach(), "confident": confident.float().mean()}
