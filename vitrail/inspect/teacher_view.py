"""Similarity distributions of a trained run's student and teacher over anchors, for comparison (as in CompRess, arXiv
2010.14713, and ISD, arXiv 2012.09259).

Anchors are the inspected images: a run's own queue holds embeddings whose images are no longer known.

Images ranked by their similarity to a query under a teacher, with the probabilities of teacher and student.

As in ISD (Tejankar et al. 2020, arXiv 2012.09259).

p(i) = softmax over all other images i of cos(query, anchor i) / temperature: the teacher's against its own anchors,
the student's against those that it learned to compare itself with. An image is never its own anchor.

Embeddings of a trained run's teacher and student, over the inspected images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.engine import run_folder as checkpoint
from vitrail.inspect.weight_statistics import NEAREST
from vitrail.learn.compres import Compres
from vitrail.learn.config import CompresConfig, IsdConfig, MomentumConfig, ObjectiveConfig, PairConfig
from vitrail.learn.objective import Objective
from vitrail.learn.selfsupervised import MomentumPair, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.measure.evaluator import evaluation_mode
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


PART = 1 << 22  # similarities that are held at once


@dataclass(frozen=True)
class Anchors:
    """The first images as queries, all others as anchors: the teacher's most likely ones first."""

    who: str  # the teacher, in words
    temperature: float
    teacher_temperature: float
    learned: bool  # whether this comparison was the student's loss
    rows: Tensor  # [queries, k]
    teacher: Tensor  # [queries, k], probabilities
    student: Tensor  # [queries, k]
    divergences: Tensor  # [queries], KL(teacher || student) over all anchors, nats
    divergence: float  # mean over all images as queries
    same_first: float  # share of all images whose most likely anchor is the same for both
    images: int
    labels: NDArray[np.int64] | None = None  # [images], numbers of the data's classes
    levels: NDArray[np.int64] | None = None  # [images, levels] of a taxonomy, finest first

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.who,
            "temperature": self.temperature,
            "teacher_temperature": self.teacher_temperature,
            "learned": self.learned,
            "divergence": self.divergence,
            "same_first": self.same_first,
            "rows": self.rows.tolist(),
            "teacher": [[round(v, 6) for v in row] for row in self.teacher.tolist()],
            "student": [[round(v, 6) for v in row] for row in self.student.tolist()],
        }


def anchor_probabilities(queries: Tensor, anchors: Tensor, temperature: float, first: int = 0) -> Tensor:
    """log p [queries, images]; query j is image `first` + j, whose own column is minus infinity.

    queries [queries, width], anchors [images, width], of unit length; float64, as ISD's 0.01 makes large exponents.
    """
    scores = queries.double() @ anchors.double().T / temperature
    own = torch.arange(len(queries), device=scores.device)
    scores[own, own + first] = -torch.inf
    return scores.log_softmax(1)


def ranked_anchors(
    teacher: Tensor,
    student: Tensor,
    anchors: Tensor,
    *,
    queries: int,
    k: int,
    temperature: float,
    teacher_temperature: float,
    who: str = "",
    learned: bool = True,
    labels: NDArray[np.int64] | None = None,
    levels: NDArray[np.int64] | None = None,
) -> Anchors:
    """Of images [images, width] each as the teacher, the student and the student's anchors have them.

    Raises `ValueError` where there is one image alone.
    """
    images = len(teacher)
    if images < 2:
        raise ValueError("there are no anchors: one image alone")
    k, queries = min(k, images - 1), min(queries, images)
    shown: list[tuple[Tensor, Tensor, Tensor]] = []
    total, same, each = 0.0, 0, []
    for start in range(0, images, step := max(1, PART // images)):
        some = slice(start, start + step)
        said = anchor_probabilities(teacher[some], teacher, teacher_temperature, start)
        learnt = anchor_probabilities(student[some], anchors, temperature, start)
        # An image's own column is 0 log 0 for both.
        gap = torch.where(said.isfinite(), said.exp() * (said - learnt), 0.0).sum(1)
        total += float(gap.sum())
        same += int((said.argmax(1) == learnt.argmax(1)).sum())
        here = max(0, min(queries - start, len(said)))
        top, rows = said[:here].topk(k, dim=1)
        shown.append((rows, top.exp(), learnt[:here].gather(1, rows).exp()))
        each.append(gap[:here])
    rows, by_teacher, by_student = (torch.cat([part[i] for part in shown]).cpu() for i in range(3))
    return Anchors(
        who=who,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        learned=learned,
        rows=rows,
        teacher=by_teacher,
        student=by_student,
        divergences=torch.cat(each).cpu(),
        divergence=total / images,
        same_first=same / images,
        images=images,
        labels=labels,
        levels=levels,
    )


class AnchorGather:
    """Embeddings of images by both, batch by batch; `reason` says in one sentence why there is no teacher, if so."""

    def __init__(self, run: tuple[Path, RunConfig] | None, model: Classifier, device: torch.device) -> None:
        self.model, self.reason = model, ""
        self.relation: Relation | None = None
        self.views: list[tuple[Tensor, ...]] = []
        self.taught = run is not None and has_teacher(run[1].objective)
        if run is None:
            self.reason = "no ranked anchors: it is no run, so nothing is known of a teacher"
        elif not self.taught:
            self.reason = (
                f"no ranked anchors: the run's objective, {run[1].objective.kind}, has no teacher to rank them"
            )
        else:
            try:
                self.relation = _read(*run, model, device)
            except (ValueError, FileNotFoundError) as error:
                self.reason = f"no ranked anchors: {str(error).removeprefix('objective.teacher: ')}"

    def add(self, images: Tensor) -> None:
        """Images as the student takes them, [batch, 3, height, width]."""
        if self.relation is not None:
            with evaluation_mode(self.model):
                self.views.append(tuple(part.float().cpu() for part in self.relation.look(images)))

    def result(
        self, pictures: int, labels: NDArray[np.int64] | None, levels: NDArray[np.int64] | None
    ) -> Anchors | None:
        """The first `pictures` images as queries; none without a teacher, or of one image alone.

        `labels` and `levels` are of all images, where known.
        """
        if self.relation is None:
            return None
        if sum(len(some[0]) for some in self.views) < 2:
            self.reason = "no ranked anchors: one image alone has none"
            return None
        teacher, student, anchors = (torch.cat(parts) for parts in zip(*self.views, strict=True))
        return ranked_anchors(
            teacher,
            student,
            anchors,
            queries=pictures,
            k=NEAREST,
            temperature=self.relation.temperature,
            teacher_temperature=self.relation.teacher_temperature,
            who=self.relation.who,
            learned=self.relation.learned,
            labels=labels,
            levels=levels,
        )


def _read(folder: Path, config: RunConfig, model: Classifier, device: torch.device) -> Relation:
    def stored() -> dict[str, Tensor]:
        state = checkpoint.newest(folder / "checkpoint")[0]
        if state is None:
            raise ValueError(f"{folder} has no whole checkpoint, which holds the teacher or what goes with it")
        return state.part("objective")

    return read_relation(config.objective, model, stored, device)
