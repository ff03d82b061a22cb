"""The objective that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.batch import Batch
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

TAUGHT = (learn.CompresConfig, learn.SimregConfig, learn.ClustersConfig, learn.CrdConfig)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training images that an objective may use."""

    labels: NDArray[np.int64]  # [images] class, or [images, classes] of 0/1
    index: NDArray[np.int64]  # [images] stable index of each: what `Batch.index` holds
    steps: int = 1  # of the run
    augment: AugmentConfig | None = None  # how views are made; none: not known
    images: Callable[[], Iterable[Batch]] | None = None  # this process's share of them, once, as evaluation sees them
    generated: NDArray[np.bool_] | None = None  # [images] which of them a model made; none: all are real

    def counted(self, config: SupervisedConfig) -> NDArray[np.int64]:
        """Labels of the images by which class frequencies are counted."""
        return self.labels if self.generated is None or config.count_generated else self.labels[~self.generated]


def build_objective(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Raises `ValueError`, with the remedy, where the objective does not fit the model or the data."""
    if isinstance(config, SupervisedConfig):
        return Supervised(model, config, facts.counted(config))
    if isinstance(config, DistillationConfig):
        from vitrail.learn.distillation import Distillation
        from vitrail.learn.teacher import load_teacher

        teacher = load_teacher(config.teacher, model, config.teacher_size)
        return Distillation(model, config, teacher, facts.counted(config.labels), facts.index, facts.augment)
    if isinstance(config, OneConfig):
        from vitrail.learn.one import One

        return One(model, config, facts.counted(config.labels))
    if isinstance(config, GrafitConfig):
        from vitrail.learn.grafit import Grafit

        if facts.generated is not None and not config.labels.count_generated:
            raise ValueError("objective.labels.count_generated: grafit counts all images alike; leave it on")
        return Grafit(model, config, facts.labels, facts.index)
    if isinstance(config, AttentionTransferConfig):
        from vitrail.learn.attention_teacher import load_source
        from vitrail.learn.attention_transfer import AttentionTransfer

        source = load_source(config.teacher, model)
        return AttentionTransfer(model, config, source, facts.counted(config.labels), facts.augment)
    if isinstance(config, MaeConfig | learn.DiffusionConfig | learn.LanguageModelConfig):
        return _making(config, model, facts)
    if isinstance(config, learn.AttackConfig):
        from vitrail.learn.attack import Attack

        return Attack(model, config)
    if isinstance(config, learn.DefenceConfig):
        from vitrail.learn.defence import PatchTraining

        return PatchTraining(model, config, facts.counted(config.labels), facts.steps)
    return _compared(config, model, facts)


def _making(
    config: MaeConfig | learn.DiffusionConfig | learn.LanguageModelConfig, model: Classifier, facts: TrainingFacts
) -> Objective:
    """Objectives that predict images or texts themselves."""
    if isinstance(config, MaeConfig):
        from vitrail.learn.mae import Mae

        return Mae(model, config, facts.augment)
    if isinstance(config, learn.DiffusionConfig):
        from vitrail.learn.diffusion import Diffusion

        return Diffusion(model, config, facts.augment)
    from vitrail.learn.language_model import LanguageModel

    return LanguageModel(model, config)


def _compared(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Objectives that compare embeddings: with a momentum teacher's, or one another."""
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
    if isinstance(config, learn.DinoConfig):
        from vitrail.learn.dino import Dino

        return Dino(model, config, steps, facts.augment)
    if isinstance(config, learn.SupconConfig):
        from vitrail.learn.supcon import Supcon

        return Supcon(model, config)
    if isinstance(config, learn.ProtonwConfig):
        from vitrail.learn.protonw import Protonw

        return Protonw(model, config, steps)
    return _taught(config, model, facts)


def _taught(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """Objectives that learn from a frozen teacher's embeddings."""
    from vitrail.learn.teacher import load_embedder

    if not isinstance(config, TAUGHT):
        raise NotImplementedError(type(config).__name__)
    teacher = load_embedder(config.teacher, model, config.teacher_size)
    if isinstance(config, learn.CompresConfig):
        from vitrail.learn.compres import Compres

        return Compres(model, config, teacher, facts.index, facts.steps)
    if isinstance(config, learn.SimregConfig):
        from vitrail.learn.simreg import Simreg

        return Simreg(model, config, teacher)
    if isinstance(config, learn.ClustersConfig):
        from vitrail.learn.clusters import Clusters, cluster_images
        from vitrail.learn.teacher import Embedder

        if facts.images is None:
            raise ValueError("objective clusters looks at all training images first, and was given none")
        embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        found = cluster_images(embedder, facts.images(), facts.index, config.clusters)
        return Clusters(model, config, found, facts.index)
    from vitrail.learn.crd import Crd

    return Crd(model, config, teacher, facts.index)
