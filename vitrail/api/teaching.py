"""Embeddings of a trained run's teacher and student, over the inspected images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.engine import checkpoint
from vitrail.learn.relation import Relation, has_teacher, read_relation
from vitrail.measure.anchors import Anchors, ranked_anchors
from vitrail.measure.evaluate import evaluation_mode
from vitrail.measure.learned import NEAREST
from vitrail.model.classifier import Classifier


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
