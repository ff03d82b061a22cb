"""The objective that a configuration describes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.learn.config import ObjectiveConfig, SupervisedConfig
from vitrail.learn.objective import Objective
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier


@dataclass(frozen=True)
class TrainingFacts:
    """What an objective may know of the images it will see."""

    labels: NDArray[np.int64]  # [images] class, or [images, classes] of 0/1
    index: NDArray[np.int64]  # [images] stable index of each: what `Batch.index` holds
    steps: int = 1  # of the run


def build_objective(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Raises `ValueError`, with the remedy, where the objective does not fit the model or the data."""
    if isinstance(config, SupervisedConfig):
        return Supervised(model, config, facts.labels)
    raise NotImplementedError(type(config).__name__)
