"""The objective that a configuration describes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import AugmentConfig
from vitrail.learn.config import DistillationConfig, GrafitConfig, ObjectiveConfig, OneConfig, SupervisedConfig
from vitrail.learn.objective import Objective
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier


@dataclass(frozen=True)
class TrainingFacts:
    """What an objective may know of the images it will see."""

    labels: NDArray[np.int64]  # [images] class, or [images, classes] of 0/1
    index: NDArray[np.int64]  # [images] stable index of each: what `Batch.index` holds
    steps: int = 1  # of the run
    augment: AugmentConfig | None = None  # how views are made; none: not known


def build_objective(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Raises `ValueError`, with the remedy, where the objective does not fit the model or the data."""
    if isinstance(config, SupervisedConfig):
        return Supervised(model, config, facts.labels)
    if isinstance(config, DistillationConfig):
        from vitrail.learn.distillation import Distillation
        from vitrail.learn.teacher import load_teacher

        teacher = load_teacher(config.teacher, model, config.teacher_size)
        return Distillation(model, config, teacher, facts.labels, facts.index, facts.augment)
    if isinstance(config, OneConfig):
        from vitrail.learn.one import One

        return One(model, config, facts.labels)
    if isinstance(config, GrafitConfig):
        from vitrail.learn.grafit import Grafit

        return Grafit(model, config, facts.labels, facts.index)
    raise NotImplementedError(type(config).__name__)
