"""The objective that a configuration describes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import AugmentConfig
from vitrail.learn import config as learn
from vitrail.learn.config import (
    AttentionTransferConfig,
    DistillationConfig,
    GrafitConfig,
    MaeConfig,
    ObjectiveConfig,
    OneConfig,
    SupervisedConfig,
)
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
    if isinstance(config, AttentionTransferConfig):
        from vitrail.learn.attention_plan import load_source
        from vitrail.learn.attention_transfer import AttentionTransfer

        source = load_source(config.teacher, model)
        return AttentionTransfer(model, config, source, facts.labels, facts.augment)
    if isinstance(config, MaeConfig):
        from vitrail.learn.mae import Mae

        return Mae(model, config, facts.augment)
    return _compared(config, model, facts)


def _compared(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Objectives that compare embeddings: with a momentum teacher's, a frozen teacher's, or one another."""
    steps = facts.steps
    if isinstance(config, learn.ByolConfig):
        from vitrail.learn.byol import Byol

        return Byol(model, config, steps)
    if isinstance(config, learn.MocoConfig):
        from vitrail.learn.moco import Moco

        return Moco(model, config, steps)
    if isinstance(config, learn.IsdConfig):
        from vitrail.learn.isd import Isd

        return Isd(model, config, steps)
    if isinstance(config, learn.MsfConfig):
        from vitrail.learn.msf import Msf

        return Msf(model, config, steps)
    if isinstance(config, learn.CmsfConfig):
        from vitrail.learn.cmsf import Cmsf

        return Cmsf(model, config, steps, facts.labels, facts.index)
    if isinstance(config, learn.CompresConfig):
        from vitrail.learn.compres import Compres
        from vitrail.learn.embedder import load_embedder

        return Compres(model, config, load_embedder(config.teacher, model, config.teacher_size), facts.index)
    if isinstance(config, learn.SimregConfig):
        from vitrail.learn.embedder import load_embedder
        from vitrail.learn.simreg import Simreg

        return Simreg(model, config, load_embedder(config.teacher, model, config.teacher_size))
    if isinstance(config, learn.SupconConfig):
        from vitrail.learn.supcon import Supcon

        return Supcon(model, config)
    if isinstance(config, learn.ProtonwConfig):
        from vitrail.learn.protonw import Protonw

        return Protonw(model, config, steps)
    raise NotImplementedError(type(config).__name__)
