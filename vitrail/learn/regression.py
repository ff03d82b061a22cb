"""Learning one value per image: squared, absolute or Huber error of standardised values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import RegressionConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.model.classifier import Calibration, Classifier

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


class Regression(Objective):
    """The one output of a model learns values of mean 0 and deviation 1 over the training images.

    The model's calibration takes its output back to the units of the data, wherever it predicts.
    """

    def __init__(self, model: Classifier, config: RegressionConfig, values: NDArray[Any]) -> None:
        super().__init__()
        if model.head.classifiers != 1:
            raise ValueError("objective.kind: regression needs a head with one classifier; set --model.head.kind mean")
        self.model, self.config = model, config
        self.mean, self.deviation = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64)) or 1.0
        model.calibration = Calibration("vector", 1.0, (self.deviation,), (self.mean,))
        model.stated["regression"] = {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def build(cls, model: Classifier, config: Any, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.labels)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        out = self.model.outputs(batch.images)
        standard = (batch.target.flatten() - self.mean) / self.deviation
        added = out.losses(batch.target)
        loss = LOSSES[self.config.loss](out.stack[:, 0, 0].float(), standard)
        return {"loss": sum(added.values(), loss), **{name: value.detach() for name, value in added.items()}}
