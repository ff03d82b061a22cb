"""Regression of a frozen teacher's embedding: SimReg (Navaneet et al., 2022, arXiv 2201.05131), and the baselines Reg
and Reg-BN of CompRess (arXiv 2010.14713)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.learn.config import SimregConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import SelfSupervised, distance, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.classifier import Classifier


def regressor(width: int, out: int, layers: int, hidden: int) -> nn.Sequential:
    """`layers` linear maps from [batch, width] to [batch, out], BatchNorm and ReLU between them."""
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        width = hidden
    return nn.Sequential(*parts, nn.Linear(width, out))


def batch_normal(vectors: Tensor) -> Tensor:
    """Each channel of [batch, width] with the batch's own mean 0 and variance 1; no gain, no shift, no memory."""
    return F.batch_norm(vectors.float(), None, None, training=True)


class Simreg(SelfSupervised):
    """A predictor on the student regresses the teacher's embedding; it is discarded after training.

    unit         squared distance of unit vectors; with a deep predictor this is SimReg
    raw          mean squared error; with one layer this is Reg
    batch_norm   mean squared error after normalising both over the batch; with one layer this is Reg-BN
    """

    frozen = ("embedder.teacher",)
    views = ViewSpec(1)

    def __init__(self, model: Classifier, config: SimregConfig, teacher: Classifier) -> None:
        super().__init__(model)
        self.match = config.match
        self.embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        width = self.head.features
        self.regressor = regressor(width, self.embedder.width, config.layers, config.hidden or 2 * width)

    @classmethod
    def build(cls, model: Classifier, config: SimregConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, load_embedder(config.teacher, model, config.teacher_size))

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The loss of the student's embeddings against the teacher's, [batch, width] each."""
        if self.match == "unit":
            return distance(unit(student), unit(teacher)).mean()
        if self.match == "batch_norm":
            return F.mse_loss(batch_normal(student), batch_normal(teacher))
        return F.mse_loss(student.float(), teacher)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(batch.images)
        loss = self.compare(self.regressor(seen.embedding), self.embedder(batch))
        return self.losses(loss, seen, batch)
