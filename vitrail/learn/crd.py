"""CRD: contrast the teacher's embedding of an image with its embeddings of others, and the other way round.

Contrastive representation distillation (Tian et al., 2019, arXiv 1910.10699) without its supervised term, a baseline of
CompRess (arXiv 2010.14713). The images of a batch share their negatives, which the authors' code draws for each of
them: one matrix product in place of a gather of batch x negatives rows.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.counter import seed_of
from vitrail.kernels.similarity import uncompiled
from vitrail.learn.bank import ImageMemory, processes, rank, sum_of_all
from vitrail.learn.config import CrdConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import SelfSupervised, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.classifier import Classifier


def noise_contrast(own: Tensor, others: Tensor, constant: Tensor, images: int) -> Tensor:
    """Noise-contrastive estimation, mean over the batch, of scores over their temperature: own [batch], others
    [batch, negatives].

    exp(score) / constant is taken as the probability of being the same image, negatives / images as that of noise.
    """
    noise = np.log(others.shape[1] / images)
    same, different = own - constant.log() - noise, others - constant.log() - noise  # log odds against noise
    return (F.softplus(-same) + F.softplus(different).sum(1)).mean()


class Crd(SelfSupervised):
    """Both embeddings go through linear maps to one width and are compared with memories of the other's, by image.

    The constants of the softmaxes are set in the first step and are kept, as the authors do.
    """

    frozen = ("embedder.teacher",)
    views = ViewSpec(1)
    constants: Tensor  # [2]: the student's, the teacher's; 0 before the first step
    chosen: Tensor  # rows of this step's negatives [negatives]

    def __init__(self, model: Classifier, config: CrdConfig, teacher: Classifier, index: NDArray[np.int64]) -> None:
        super().__init__(model)
        self.options = config
        self.embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        self.of_student = nn.Linear(self.head.features, config.width)
        self.of_teacher = nn.Linear(self.embedder.width, config.width)
        self.students, self.teachers = (ImageMemory(index, config.width) for _ in range(2))
        self.register_buffer("constants", torch.zeros(2))
        self.register_buffer("chosen", torch.zeros(config.negatives, dtype=torch.int64), persistent=False)

    @classmethod
    def build(cls, model: Classifier, config: CrdConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        return cls(model, config, teacher, facts.index)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(batch.images)
        student = unit(self.of_student(seen.embedding))
        teacher = unit(self.of_teacher(self.embedder(batch)))
        return self.losses(self.compare(student, teacher, batch), seen, batch)

    @uncompiled
    def compare(self, student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
        """The loss of unit vectors [batch, width], after which the memories move halfway to them."""
        losses = []
        for i, (vectors, memory) in enumerate(((student, self.teachers), (teacher, self.students))):
            with torch.autocast(vectors.device.type, enabled=False):
                own = (vectors * memory.rows[memory.where(batch.index)]).sum(1) / self.options.temperature
                others = vectors @ memory.rows[self.chosen].T / self.options.temperature
            self._set_constant(i, own, others)
            losses.append(noise_contrast(own, others, self.constants[i].clone(), len(memory)))
        for memory, vectors in ((self.students, student), (self.teachers, teacher)):
            moved = memory.rows[memory.where(batch.index)] + vectors.detach()
            memory.update(batch.index, unit(moved), share=1.0)
        return losses[0] + losses[1]

    def before_step(self, step: int) -> None:
        self.chosen.copy_(self.draw(step))

    def draw(self, step: int) -> Tensor:
        """Rows of the negatives [negatives] of a step; others in every process."""
        device = self.constants.device
        generator = torch.Generator(device).manual_seed(seed_of("negative", step, rank()))
        return torch.randint(len(self.students), (self.options.negatives,), generator=generator, device=device)

    @torch.no_grad()
    def _set_constant(self, i: int, own: Tensor, others: Tensor) -> None:
        mean = torch.cat([own[:, None], others], 1).exp().mean()
        first = sum_of_all(mean) / processes() * len(self.students)
        self.constants[i] = torch.where(self.constants[i] == 0, first, self.constants[i])
