"""Attention copy and attention distillation: labels, and the attention of a teacher (Li et al., 2024, arXiv
2411.09702)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.kernels.attention_match import attention_match, map_entropy, map_match
from vitrail.learn.attention_teacher import Source, load_source, make_guide
from vitrail.learn.config import AttentionTransferConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.supervised import Supervised
from vitrail.learn.teacher import reject_moving_views
from vitrail.model.classifier import Classifier
from vitrail.model.config import Guided
from vitrail.model.trunks.guided import PARTS, Guide, draw_keep, guided, pick
from vitrail.model.trunks.vit import Trunk
from vitrail.schema import plain


class AttentionTransfer(Supervised):
    """Labels, and a frozen teacher's attention on the same augmented images that the student sees.

    `copy`: the model that is trained, evaluated and kept is the student with its teacher inside. `distill`: the loss is
    labels + weight * Σ over layers of the mean over images, heads and queries of the cross entropy of both attentions
    (teacher first), and the student alone is kept.

    `teacher` becomes a part of this objective and is cut after the last layer that is taken. Raises `ValueError`, with
    the remedy, where teacher and student do not fit.
    """

    def __init__(
        self,
        model: Classifier,
        config: AttentionTransferConfig,
        teacher: Source,
        labels: NDArray[np.int64] | None = None,
        augment: AugmentConfig | None = None,
    ) -> None:
        guide, notes = make_guide(model, teacher, config)
        rows = 3 if config.target == "features" else 4
        if len(guide.config.stored) == rows:
            reject_moving_views(augment)
        setattr(guide.source, "name", config.teacher)  # noqa: B010, for the checkpoint
        if config.mode == "copy":
            spec = {**model.spec, "trunk": plain(Guided(student=cast("Trunk", model.trunk).config, guide=guide.config))}
            model = _with_trunk(model, guided(cast("Trunk", model.trunk), guide), spec)
        super().__init__(model, config.labels, labels)
        self.options = config
        self.guide: Guide | None = None
        if config.mode == "copy":
            self.frozen = ("model.trunk.guide.source",)
            unused = unused_parameters(model)
            if unused:
                what = " and ".join(PARTS[config.target])
                notes.append(f"note: {unused:,} parameters of {what} have no effect where the teacher's are copied")
        else:
            self.frozen = ("guide.source",)
            self.guide = guide
            guide.inputs = True  # the loss keeps them for its backward pass, in place of q and k
        self.notes = tuple(notes)

    @classmethod
    def build(cls, model: Classifier, config: AttentionTransferConfig, facts: TrainingFacts) -> Objective:
        source = load_source(config.teacher, model)
        return cls(model, config, source, facts.counted(config.labels), facts.augment)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        if self.guide is None:
            return super().forward(batch)
        images = self.model._images(batch.images)
        shared = self.training and self.guide.config.share_drop_path
        keep = draw_keep(cast("Trunk", self.model.trunk), images) if shared else {}
        teacher = self.guide(images, batch.index, keep, learn=self.training)
        want = {f"{what}.{s}" for what in PARTS[self.options.target] for s, _ in self.guide.config.layers}
        out = self.model.outputs(images, want, keep)
        each, floor = self._losses(out.captured, teacher)
        labels = self.combined([self.criterion(logits, batch.target) for logits in out.stack.unbind(1)])
        transfer = torch.stack(each).sum() if each else torch.zeros_like(labels)
        logged = {"loss_labels": labels, "loss_transfer": transfer}
        if floor:  # the distance of the two: 0 where they are the same
            logged["divergence"] = transfer.detach() - torch.stack(floor).sum()
        logged |= {f"transfer_{layer}": v for (layer, _), v in zip(self.guide.config.layers, each, strict=True)}
        return self.with_head_losses(labels + self.options.weight * transfer, out, batch, logged)

    def _losses(
        self, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The loss of every layer and, for maps, the least it can be: the teacher's entropy."""
        assert self.guide is not None
        config = self.guide.config
        heads = [s for s, _ in config.heads]
        factor = 1 if self.options.head_reduction == "mean" or self.options.target == "features" else len(heads)
        each: list[Tensor] = []
        floor: list[Tensor] = []
        for layer, _ in config.layers:
            if config.target != "map":
                terms = []
                for what in PARTS[config.target]:
                    name = f"{what}.{layer}"
                    features = student[name] if what == "tokens" else pick(student[name], heads)
                    terms.append(F.mse_loss(features.float(), teacher[name].float()))
                each.append(torch.stack(terms).sum() * factor)
                continue
            q, k = pick(student[f"q.{layer}"], heads), pick(student[f"k.{layer}"], heads)
            if f"attention.{layer}" in teacher:
                maps = teacher[f"attention.{layer}"]
                cross, entropy = map_match(q, k, maps), map_entropy(maps)
            else:
                parts = teacher[f"q.{layer}"], teacher[f"k.{layer}"]
                cross, entropy = attention_match(q, k, *parts, self.guide.made_of(layer, teacher))
            each.append(cross.mean() * factor)
            floor.append(entropy.mean() * factor)
        return each, floor

    def export_student(self) -> Classifier:
        """The student as a plain classifier, which answers as it does here in evaluation mode.

        Raises `ValueError` for a copying one, which cannot do without its teacher.
        """
        if self.guide is None:
            raise ValueError(
                "a student that copies attention needs its teacher at inference; keep the model with both inside "
                "(objective.model), or distill"
            )
        return copy.deepcopy(self.model).eval()


def _with_trunk(model: Classifier, trunk: Trunk, spec: dict[str, object]) -> Classifier:
    """The same classifier, its head included, around another trunk."""
    options: dict[str, Any] = {n: getattr(model, n) for n in ("classes", "preprocess", "multilabel")}
    classifier = Classifier(trunk, model.head, spec=spec, **options)
    classifier.stated = model.stated
    return classifier.train(model.training)


def unused_parameters(model: Classifier) -> int:
    """Parameters of q and k (or v) that the teacher's replace: they have no gradient and no effect."""
    guide = getattr(model.trunk, "guide", None)
    if guide is None:
        return 0
    trunk = cast("Trunk", model.trunk)
    bias = int(getattr(trunk.config.mixer, "qkv_bias", True))
    rows = len(guide.config.heads) * (trunk.width // trunk.config.heads)
    return len(guide.config.layers) * len(PARTS[guide.config.target]) * rows * (trunk.width + bias)
