"""Images ranked by their similarity to a query under a teacher, with the probabilities of teacher and student.

As in ISD (Tejankar et al. 2020, arXiv 2012.09259).

p(i) = softmax over all other images i of cos(query, anchor i) / temperature: the teacher's against its own anchors,
the student's against those that it learned to compare itself with. An image is never its own anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
