"""Similarity distributions of a trained run's student and teacher over anchors, for comparison (as in CompRess, arXiv
2010.14713, and ISD, arXiv 2012.09259).

Anchors are the inspected images: a run's own queue holds embeddings whose images are no longer known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from vitrail.learn.compres import Compres
from vitrail.learn.config import CompresConfig, IsdConfig, MomentumConfig, ObjectiveConfig, PairConfig
from vitrail.learn.embedder import Embedder, load_embedder
from vitrail.learn.objective import Objective
from vitrail.learn.selfsupervised import MomentumPair, unit
from vitrail.model.classifier import Classifier

TEMPERATURE = 0.04  # CompRess', for runs that have none of their own


class Views(NamedTuple):
    """Unit vectors of images, a row each."""

    teacher: Tensor  # [images, width], as query and as anchor
    student: Tensor  # [images, its width], as query
    anchors: Tensor  # [images, the same], what the student compares itself with


@dataclass(frozen=True)
class Relation:
    """A student and its teacher; `look` takes images as the student takes them, [batch, 3, height, width]."""

    who: str  # the teacher, in words
    temperature: float
    teacher_temperature: float
    learned: bool  # whether this very comparison was the run's loss
    look: Callable[[Tensor], Views]


def has_teacher(config: ObjectiveConfig) -> bool:
    """Whether a run of this objective learns from a teacher: another model, or its momentum encoder."""
    return bool(getattr(config, "teacher", "")) or isinstance(config, MomentumConfig)


def read_relation(
    config: ObjectiveConfig, model: Classifier, stored: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> Relation:
    """The teacher of a run and `model`, which the run trained.

    `stored` gives the objective's state in the run's checkpoint, read where momentum encoders, predictors or maps
    between widths are needed; the student then has the weights that go with them. Other students are compared by the
    vector that they classify, among their own anchors, as CompRess does with two queues. Raises `ValueError` or
    `FileNotFoundError`, one sentence, where the teacher is gone.
    """
    if isinstance(config, MomentumConfig):
        like = PairConfig(config.momentum, config.momentum_end)  # DINO is no pair, and stores the same two networks
        pair = MomentumPair(deepcopy(model), like, 1, getattr(config, "predictor_hidden", None))
        _restore(pair, stored(), device)

        def beside_its_copy(images: Tensor) -> Views:
            target = pair.target.embed(images)
            return Views(target, unit(pair.predictor(pair.encode(images).embedding)), target)

        isd = isinstance(config, IsdConfig)
        two = (config.temperature, config.teacher_temperature) if isinstance(config, IsdConfig) else (TEMPERATURE,) * 2
        return Relation("its own slow copy", *two, isd, torch.inference_mode()(beside_its_copy))
    name, size = cast("str", getattr(config, "teacher", "")), getattr(config, "teacher_size", None)
    teacher = load_embedder(name, model, size)
    if isinstance(config, CompresConfig):
        small = replace(config, bank=1, cache=False)  # its memory is not read
        taught = Compres(deepcopy(model), small, teacher, np.zeros(1, dtype=np.int64), steps=1)
        _restore(taught, stored(), device)

        def as_in_training(images: Tensor) -> Views:
            seen = unit(taught.embedder.ask(images))
            student = unit(taught.adapter(taught.encode(images).embedding))
            return Views(seen, student, seen if taught.key is None else taught.key.embed(images))

        return Relation(name, config.temperature, config.temperature, True, torch.inference_mode()(as_in_training))
    embedder = Embedder(teacher, model, name, size).to(device).eval()

    def each_among_its_own(images: Tensor) -> Views:
        student = unit(model.outputs(images).representation)
        return Views(unit(embedder.ask(images)), student, student)

    return Relation(name, TEMPERATURE, TEMPERATURE, False, torch.inference_mode()(each_among_its_own))


def _restore(objective: Objective, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """What a checkpoint holds of an objective, without its memory and its frozen teacher."""
    wanted = {name for name in objective.state_dict() if not name.startswith(("bank.", "embedder."))}
    lacking = sorted(wanted - set(stored))
    if lacking:
        raise ValueError(f"its checkpoint has no {lacking[0]}, so its teacher cannot be made again")
    objective.load_state_dict({name: stored[name] for name in wanted}, strict=False)
    objective.to(device).eval()
