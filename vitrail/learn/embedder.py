"""Embeddings of a frozen teacher: its classes do not matter."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.learn.image_memory import ImageMemory
from vitrail.learn.teacher import Teacher, load_teacher
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.projected import ProjectedHead

LOOK_EVERY = 16  # steps between checks whether every embedding is cached


def load_embedder(name: str, student: Classifier, size: int | None = None) -> Classifier:
    """A teacher by name, as for distillation, but a published one may have any classes, or none."""
    if not name.startswith("timm:"):
        return load_teacher(name, student, size)
    try:
        return create_model(name, weights="timm", image_size=size)
    except ValueError as error:
        raise ValueError(f"objective.teacher: {error}") from None


def features(model: Classifier, images: Tensor) -> Tensor:
    """Features of the trunk, [batch, width]: before a projector, which served its own training only."""
    tokens = model.tokens(images)
    return model.head.pooled(tokens) if isinstance(model.head, ProjectedHead) else model.head.embed(tokens)


class Embedder(nn.Module):
    """The teacher's embeddings of a batch [batch, width], in float32 and without gradient.

    With `index`, the stable indices of all training images, each is computed once, and that of an image's first
    view is cached (CompRess, arXiv 2010.14713, caches the un-augmented image's, which batches do not carry). The cache
    is stored in checkpoints, so a resumed run continues as it would have.
    """

    def __init__(
        self,
        teacher: Classifier,
        student: Classifier,
        name: str = "",
        size: int | None = None,
        index: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__()
        self.teacher = Teacher(teacher, student.preprocess, name, size)
        side = self.teacher.size
        with torch.no_grad():  # one small look tells the width, and refuses sizes that the teacher cannot take
            probe = self.teacher.seen(torch.zeros(1, 3, side, side, dtype=torch.uint8))
            self.width = features(self.teacher.model, probe).shape[1]
        self.cache = None if index is None else ImageMemory(index, self.width, empty=True)
        self.complete = False

    def ask(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return features(self.teacher.model, self.teacher.seen(images)).float()

    def forward(self, batch: Batch) -> Tensor:
        if self.cache is None:
            return self.ask(batch.images)
        kept = self.cache.rows[self.cache.where(batch.index)]
        if self.complete:
            return kept
        said = torch.where(self.cache.known(batch.index)[:, None], kept, self.ask(batch.images))
        self.cache.update(batch.index, said, share=1.0)
        return said

    def after_step(self, step: int) -> None:
        """Now and then see whether every image is known (waits for the device)."""
        if self.cache is not None and not self.complete and (step + 1) % LOOK_EVERY == 0:
            self.complete = bool(self.cache.rows.any(1).all())
