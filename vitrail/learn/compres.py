"""CompRess: match a frozen teacher's similarity distribution over a queue of anchors (Abbasi Koohpayegani et al., 2020,
arXiv 2010.14713)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.kernels.similarity import relation_loss
from vitrail.learn.bank import attend_all, make_bank
from vitrail.learn.config import CompresConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import PRECISIONS, MomentumCopy, SelfSupervised, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.classifier import Classifier


def momentum_of_run(steps: int) -> float:
    """Decay of a momentum encoder that lags as far behind, for the length of its run, as CompRess' does.

    The paper's 0.999 lags by 1,000 of 650,000 steps (130 epochs of ImageNet in batches of 256).

    >>> momentum_of_run(650_000), round(momentum_of_run(5_273), 3), momentum_of_run(100)
    (0.999, 0.877, 0.0)
    """
    return min(0.999, max(0.0, 1 - 650 / steps))


class Compres(SelfSupervised):
    """KL between the teacher's softmax over a queue of its embeddings and the student's.

    One queue: the student, through a linear map where widths differ, is compared with the teacher's anchors. Two: with
    its momentum encoder's embeddings of the same images, in the same slots; so only relations are transferred and
    widths do not matter. All see the same crop; the batch is pushed after the loss.
    """

    frozen = ("embedder.teacher",)
    views = ViewSpec(1)

    def __init__(
        self, model: Classifier, config: CompresConfig, teacher: Classifier, index: NDArray[np.int64], steps: int
    ) -> None:
        super().__init__(model)
        self.options = config
        self.embedder = Embedder(teacher, model, config.teacher, config.teacher_size, index if config.cache else None)
        width, theirs = self.head.features, self.embedder.width
        momentum = momentum_of_run(steps) if config.momentum is None else config.momentum
        self.key = MomentumCopy(model, momentum) if config.queues == 2 else None
        adapted = config.queues == 1 and width != theirs
        self.adapter: nn.Module = nn.Linear(width, theirs) if adapted else nn.Identity()
        self.bank = make_bank(config.bank, theirs, 0 if self.key is None else width, PRECISIONS[config.bank_precision])

    @classmethod
    def build(cls, model: Classifier, config: CompresConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        return cls(model, config, teacher, facts.index, facts.steps)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, bank = self.options, self.bank
        teacher = unit(self.embedder(batch))
        seen = self.encode(batch.images)
        student = unit(self.adapter(seen.embedding))
        temperatures = config.temperature, config.temperature
        anchors = bank.here(second=self.key is not None)
        loss = relation_loss(student, teacher, anchors, bank.here(), *temperatures, by=attend_all)
        bank.push(teacher, second=None if self.key is None else self.key.embed(batch.images))
        return self.losses(loss, seen, batch)

    @property
    def phase(self) -> int:
        return int(self.embedder.complete)

    def after_step(self, step: int) -> None:
        self.embedder.after_step(step)
        if self.key is not None:
            self.key.follow(self.model, step)
