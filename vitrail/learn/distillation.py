"""Knowledge distillation: labels and a teacher, soft or hard (DeiT, Touvron et al., 2020, arXiv 2012.12877), or labels
and the model's own ensemble of branches (ONE)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.learn.config import DistillationConfig, OneConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.supervised import Supervised
from vitrail.learn.teacher import Teacher, TeacherCache, load_teacher, reject_moving_views, reject_other_classes
from vitrail.model.classifier import Classifier
from vitrail.model.heads.branches import BranchesHead
from vitrail.model.heads.pooled import DistilledHead

LOOK_EVERY = 16  # steps between checks whether the teacher's logits of every image are cached
SHARES = {"hard": 0.5, "soft": 0.1}


def softened_divergence(
    student: Tensor, teacher: Tensor, temperature: float, first: Literal["teacher", "student"] = "teacher"
) -> Tensor:
    """T^2 KL of two softmaxes at temperature T, mean over the batch; logits [batch, classes], computed in float32.

    `first` says whose distribution stands first: KL(teacher || student), where the teacher is the target as usual, or
    KL(student || teacher), as eq. 2 of DeiT is printed.
    """
    p, q = ((logits.float() / temperature).log_softmax(-1) for logits in (teacher, student))
    if first == "student":
        p, q = q, p
    return temperature**2 * (p.exp() * (p - q)).sum(-1).mean()


class Distillation(Supervised):
    """(1 - weight) times the loss on labels plus `weight` times that on a teacher, which sees the student's images.

    The class classifier of a head with a distillation token learns from labels and the other one from the teacher;
    every classifier of any other head learns from both, as CaiT does. `hard`: cross entropy with the teacher's decision
    on the augmented, mixed image (where several labels may hold: binary, with each of its decisions). Smoothing and
    class weights are for true labels only. `soft`: the divergence from its probabilities.

    Raises `ValueError` where the teacher has other classes, or its logits are to be cached for views that change.
    """

    frozen = ("teacher",)

    def __init__(
        self,
        model: Classifier,
        config: DistillationConfig,
        teacher: Classifier,
        labels: NDArray[np.int64] | None = None,
        index: NDArray[np.int64] | None = None,
        augment: AugmentConfig | None = None,
    ) -> None:
        super().__init__(model, config.labels, labels)
        if teacher.multilabel != model.multilabel:
            raise ValueError(
                f"objective.teacher: {config.teacher or 'the teacher'} was trained with one label per image, here are "
                "several, or the other way round; fine-tune it on this data first"
            )
        if model.multilabel and config.mode == "soft":
            raise ValueError("objective.mode: soft compares probabilities that sum to 1; with several labels use hard")
        note = reject_other_classes(teacher.classes, model.classes, config.teacher)
        self.notes = () if note is None else (note,)
        self.options = config
        self.weight = SHARES[config.mode] if config.weight is None else config.weight
        self.token = isinstance(model.head, DistilledHead)
        self.teacher = Teacher(teacher, model.preprocess, config.teacher, config.teacher_size)
        if (
            self.teacher.size != teacher.preprocess.size
        ):  # models of one size are rejected here and not at the first step
            self.teacher(torch.zeros(1, 3, self.teacher.size, self.teacher.size, dtype=torch.uint8))
        self.answers: TeacherCache | None = None
        if config.cache:
            reject_moving_views(augment)
            assert index is not None
            self.answers = TeacherCache(index, len(teacher.classes))

    @classmethod
    def build(cls, model: Classifier, config: DistillationConfig, facts: TrainingFacts) -> Objective:
        teacher = load_teacher(config.teacher, model, config.teacher_size)
        return cls(model, config, teacher, facts.counted(config.labels), facts.index, facts.augment)

    @property
    def phase(self) -> int:
        return int(self.answers is not None and self.answers.complete)

    def binary_classifiers(self) -> Collection[int]:
        """A distillation token learns the teacher's decision by cross entropy, unless several labels may hold."""
        if isinstance(self.model.head, DistilledHead) and not self.model.multilabel:
            return (0,)
        return super().binary_classifiers()

    def teach(self, batch: Batch) -> Tensor:
        """The teacher's logits [batch, classes], in float32 and without gradient."""
        if self.answers is None:
            return self.teacher(batch.images)
        if self.answers.complete:
            return self.answers.read(batch.index)
        logits: Tensor = self.teacher(batch.images)
        self.answers.write(batch.index, logits)
        return logits

    def from_teacher(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """The loss of one classifier's logits [batch, classes] against the teacher's."""
        if self.options.mode == "soft":
            return softened_divergence(logits, teacher, self.options.temperature, self.options.first)
        if self.model.multilabel:
            return F.binary_cross_entropy_with_logits(logits.float(), (teacher > 0).float())
        return F.cross_entropy(logits.float(), teacher.argmax(-1))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        targets = self.teach(batch)
        out = self.model.outputs(batch.images)
        by_label, by_teacher = (out.stack[:, :1], out.stack[:, 1:]) if self.token else (out.stack, out.stack)
        labels = self.combined([self.criterion(logits, batch.target) for logits in by_label.unbind(1)])
        teacher = self.combined([self.from_teacher(logits, targets) for logits in by_teacher.unbind(1)])
        agreement = (by_teacher.float().mean(1).argmax(-1) == targets.argmax(-1)).float().mean()
        logged = {"loss_labels": labels, "loss_teacher": teacher, "teacher_agreement": agreement}
        return self.with_head_losses((1 - self.weight) * labels + self.weight * teacher, out, batch, logged)

    def after_step(self, step: int) -> None:
        if self.answers is not None and not self.answers.complete and (step + 1) % LOOK_EVERY == 0:
            self.answers.look()


class One(Supervised):
    """ONE: branches learn from labels and from their own on-the-fly ensemble (Lan et al., 2018, arXiv 1806.04606).

    sum_k CE(z_k) + CE(z_e) + T^2 sum_k KL(softmax(z_e / T) || softmax(z_k / T)), with z_e = sum_k gate_k z_k.

    The ensemble is a target without gradient in the divergence, as in the authors' code: it learns from labels alone,
    and branches do not make it easier to follow. Raises `ValueError` for a head without branches.
    """

    def __init__(self, model: Classifier, config: OneConfig, labels: NDArray[np.int64] | None = None) -> None:
        super().__init__(model, config.labels, labels)
        if not isinstance(model.head, BranchesHead):
            raise ValueError(
                "objective one: the model has no branches that could teach each other; use --model.head branches"
            )
        if model.multilabel:
            raise ValueError("objective one compares probabilities that sum to 1; with several labels use supervised")
        self.options = config

    @classmethod
    def build(cls, model: Classifier, config: OneConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.counted(config.labels))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        stack = self.model.stack(batch.images)  # the branches, then their ensemble
        ensemble, branches = stack[:, -1].detach(), stack[:, :-1].unbind(1)
        parts = [self.criterion(logits, batch.target) for logits in stack.unbind(1)]
        divergences = [softened_divergence(logits, ensemble, self.options.temperature) for logits in branches]
        divergence = torch.stack(divergences).sum()
        logged = {"loss_ensemble": parts[-1], "loss_branches": torch.stack(parts[:-1]).mean(), "divergence": divergence}
        return {"loss": self.combined(parts) + divergence, **{name: value.detach() for name, value in logged.items()}}
