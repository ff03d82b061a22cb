"""DINO: predict from small views what a momentum teacher predicts from large ones (Caron et al., arXiv 2104.14294).

Predictions are softmaxes over learned directions, the prototypes. Nothing pushes images apart: centring (the teacher's
mean is subtracted from its scores) and a sharp teacher softmax keep all predictions from becoming one.

Left out: the projector is the head's, of two layers where the authors' has three; and what is kept is the student, or
with `engine.ema` its moving average, where the authors keep the teacher.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch, View, ViewSpec
from vitrail.data.config import AugmentConfig
from vitrail.kernels.similarity import uncompiled
from vitrail.learn.bank import processes
from vitrail.learn.config import DinoConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import MomentumCopy, SelfSupervised, unit
from vitrail.model.classifier import Classifier

LARGE = 2  # views that the teacher sees; they come first


class Prototypes(nn.Module):
    """Cosines of unit vectors [.., width] with learned directions: [.., prototypes], in float32."""

    def __init__(self, width: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes, width))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, vectors: Tensor, learning: Tensor | None = None) -> Tensor:
        """`learning` is 0 where no gradient may change the prototypes, else 1 (none: 1)."""
        weight: Tensor = self.weight
        if learning is not None:  # a gradient of zero, not none: several processes want one for every parameter
            weight = torch.lerp(weight.detach(), weight, learning)
        with torch.autocast(vectors.device.type, enabled=False):
            return F.linear(vectors.float(), unit(weight))


def view_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy of the student's softmax under the teacher's probabilities, mean over images and pairs of views.

    Student's scores [views, batch, prototypes], already over their temperature; teacher's probabilities [large views,
    batch, prototypes], whose views are the first of the student's: a view is not compared with itself.
    """
    with torch.autocast(student.device.type, enabled=False):
        student, teacher = student.float(), teacher.float()
        # -sum_k p_k log softmax(s)_k = logsumexp(s) - p . s: the log-softmax need not be kept
        products = torch.einsum("tbk,vbk->tvb", teacher, student)
        cross = student.logsumexp(-1)[None] - products
    large, views = cross.shape[:2]
    same_view = torch.eye(large, views, dtype=torch.bool, device=cross.device)
    return cross.mean(-1).masked_fill(same_view, 0.0).sum() / (large * views - large)


class Dino(SelfSupervised):
    """See the module. Raises `ValueError` where images are mixed, or the model cannot see small views."""

    centre: Tensor  # [prototypes]
    sharpness: Tensor  # temperature of the teacher in this step
    learning: Tensor  # 1 where the prototypes learn, 0 in the first steps, where they wait for the rest of the network

    def __init__(self, model: Classifier, config: DinoConfig, steps: int, augment: AugmentConfig | None = None) -> None:
        super().__init__(model)
        if augment is not None and (augment.mixup or augment.cutmix):
            raise ValueError("data.augment: dino compares views of one image; set mixup and cutmix to 0")
        self.options, self.steps = config, steps
        small = View(size=config.local_size, scale=config.local_scale)
        self.views = ViewSpec.of(*[View()] * LARGE, *[small] * config.local_views)
        if config.local_views and config.local_size is not None:
            _try_size(model, config.local_size)
        self.last = Prototypes(self.head.features, config.prototypes)
        self.target = MomentumCopy.of(model, config.momentum, config.momentum_end, steps)
        self.target_last = MomentumCopy.of(self.last, config.momentum, config.momentum_end, steps)
        self.register_buffer("centre", torch.zeros(config.prototypes))
        self.register_buffer("sharpness", torch.ones(()), persistent=False)
        self.register_buffer("learning", torch.ones(()), persistent=False)
        self.before_step(0)

    @classmethod
    def build(cls, model: Classifier, config: DinoConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.steps, facts.augment)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        large = torch.cat(batch.views[:LARGE])
        wanted = self.sharpened(self.target_last(self.target.embed(large)))
        seen = self.encode(large)
        embedding = seen.embedding
        if len(batch.views) > LARGE:
            embedding = torch.cat([embedding, self.encode(torch.cat(batch.views[LARGE:])).embedding])
        scores = self.last(unit(embedding), self.learning) / self.options.temperature
        loss = view_loss(scores.unflatten(0, (len(batch.views), len(batch))), wanted)
        return self.losses(loss, seen.first(len(batch)), batch)

    @uncompiled
    @torch.no_grad()
    def sharpened(self, scores: Tensor) -> Tensor:
        """The teacher's probabilities [large views, batch, prototypes] of its scores [large views * batch, prototypes].

        The centre then moves towards the mean of these scores, over all processes.
        """
        probabilities = ((scores - self.centre) / self.sharpness).softmax(-1)
        mean = scores.mean(0)
        if processes() > 1:
            dist.all_reduce(mean)
            mean /= processes()
        if self.training:
            mean = torch.where(mean.isfinite(), mean, self.centre)  # of a step that will be skipped nothing stays
            self.centre.lerp_(mean, 1 - self.options.centre_momentum)
        return probabilities.unflatten(0, (LARGE, -1))

    def before_step(self, step: int) -> None:
        self.sharpness.fill_(self.teacher_temperature(step))
        self.learning.fill_(float(step >= self.options.freeze_last * self.steps))

    def teacher_temperature(self, step: int) -> float:
        """It rises on a line in the first share of the run, and then stays."""
        config = self.options
        done = min(1.0, step / max(1.0, config.teacher_warmup * self.steps))
        start, end = config.teacher_temperature_start, config.teacher_temperature
        return start + (end - start) * done

    def after_step(self, step: int) -> None:
        self.target.follow(self.model, step)
        self.target_last.follow(self.last, step)


def _try_size(model: Classifier, size: int) -> None:
    trains = model.training
    try:
        with torch.no_grad():
            model.eval().tokens(torch.zeros(1, 3, size, size))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"objective.local_size: the model cannot see images of {size} pixels ({error}); use another size, none for "
            "the model's own, or --objective.local_views 0"
        ) from None
    finally:
        model.train(trains)
