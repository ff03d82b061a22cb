"""An objective in one file: the multi-class margin loss.

VITRAIL_PARTS=margin_objective vitrail train vit --data photos/ --objective margin --objective.margin 0.5
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import ObjectiveOptions
from vitrail.learn.objective import Objective
from vitrail.model.classifier import Classifier
from vitrail.registry import register
from vitrail.schema import Positive


@dataclass(frozen=True)
class MarginConfig(ObjectiveOptions):
    """The true class must lead every other by a margin (Crammer and Singer 2001)."""

    kind: Literal["margin"] = "margin"
    margin: Positive = 1.0


@register("objective", MarginConfig)
class Margin(Objective):
    """`loss`, and the share of the batch that violates the margin."""

    def __init__(self, model: Classifier, config: MarginConfig) -> None:
        super().__init__()
        self.model, self.margin = model, config.margin

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.model(batch.images)
        each = F.multi_margin_loss(logits, batch.label, margin=self.margin, reduction="none")
        return {"loss": each.mean(), "violations": (each > 0).float().mean()}
