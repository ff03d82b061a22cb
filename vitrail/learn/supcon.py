"""SupCon: supervised contrast within a batch (Khosla et al., 2020, arXiv 2004.11362)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch, ViewSpec
from vitrail.learn.config import SupconConfig
from vitrail.learn.selfsupervised import SelfSupervised, reject_several, unit
from vitrail.model.classifier import Classifier


def supervised_contrast(embedding: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """-log probability of the positives, rows of the same label, among all others; mean over them, then over the batch.

    Unit vectors [rows, width], labels [rows]. The mean is outside the logarithm (L_out of Khosla et al.); rows
    without positives do not count.
    """
    with torch.autocast(embedding.device.type, enabled=False):
        scores = embedding.float() @ embedding.float().T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    chances = scores.masked_fill(itself, float("-inf")).log_softmax(1)
    positives = (labels[:, None] == labels[None]) & ~itself
    each = -torch.where(positives, chances, 0.0).sum(1) / positives.sum(1).clamp(min=1)
    return each.sum() / positives.any(1).sum().clamp(min=1)


class Supcon(SelfSupervised):
    """SupCon: both views of every image of a batch, by label. In a process group each process has its own batch."""

    views = ViewSpec(2)

    def __init__(self, model: Classifier, config: SupconConfig) -> None:
        super().__init__(model)
        reject_several(model, "supcon")
        self.temperature = config.temperature

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(torch.cat(batch.views))
        loss = supervised_contrast(unit(seen.embedding), batch.label.repeat(len(batch.views)), self.temperature)
        return self.losses(loss, seen.first(len(batch)), batch)
