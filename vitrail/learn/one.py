"""ONE: branches learn from labels and from their own on-the-fly ensemble (Lan et al., 2018, arXiv 1806.04606)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import OneConfig
from vitrail.learn.distillation import softened_divergence
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier
from vitrail.model.heads.branches import BranchesHead


class One(Supervised):
    """sum_k CE(z_k) + CE(z_e) + T^2 sum_k KL(softmax(z_e / T) || softmax(z_k / T)), with z_e = sum_k gate_k z_k.

    The ensemble is a target without gradient in the divergence, as in the authors' code: it learns from labels alone,
    and branches do not make it easier to follow. Raises `ValueError` for a head without branches.
    """

    def __init__(self, model: Classifier, config: OneConfig, labels: NDArray[np.int64] | None = None) -> None:
        super().__init__(model, config.labels, labels)
        if not isinstance(model.head, BranchesHead):
            raise ValueError(
                "objective one: the model has no branches that could teach each other; use --model.head branches"
            )
        if model.multilabel:
            raise ValueError("objective one compares probabilities that sum to 1; with several labels use supervised")
        self.options = config

    @classmethod
    def build(cls, model: Classifier, config: OneConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.counted(config.labels))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        stack = self.model.stack(batch.images)  # the branches, then their ensemble
        together = stack[:, -1].detach()
        parts = [self.criterion(logits, batch.target) for logits in stack.unbind(1)]
        labels = torch.stack(parts).sum() if self.config.classifier_loss == "sum" else torch.stack(parts).mean()
        follows = torch.stack(
            [softened_divergence(logits, together, self.options.temperature) for logits in stack[:, :-1].unbind(1)]
        ).sum()
        return {
            "loss": labels + follows,
            "loss_ensemble": parts[-1].detach(),
            "loss_branches": torch.stack(parts[:-1]).mean().detach(),
            "divergence": follows.detach(),
        }
