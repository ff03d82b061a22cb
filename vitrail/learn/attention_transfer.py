"""Attention copy and attention distillation: labels, and the attention of a teacher (Li et al., 2024, arXiv
2411.09702)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

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
from vitrail.learn.teacher import refuse_moving_views
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
            refuse_moving_views(augment)
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
        said = self.guide(images, batch.index, keep, learn=self.training)
        parts = PARTS[self.options.target]
        want = {f"{what}.{s}" for what in parts for s, _ in self.guide.config.layers}
        out = self.model.outputs(images, want, keep)
        each, floor = self._losses(out.captured, said)
        values = [self.criterion(logits, batch.target) for logits in out.stack.unbind(1)]
        labels = torch.stack(values).sum() if self.config.classifier_loss == "sum" else torch.stack(values).mean()
        transfer = torch.stack(each).sum() if each else torch.zeros_like(labels)
        losses = {"loss_labels": labels.detach(), "loss_transfer": transfer.detach()}
        if floor:  # how far apart the two are: 0 where they are the same
            losses["divergence"] = transfer.detach() - torch.stack(floor).sum()
        for (layer, _), value in zip(self.guide.config.layers, each, strict=True):
            losses[f"transfer_{layer}"] = value.detach()
        total = labels + self.options.weight * transfer
        for name, value in out.losses(batch.target).items():
            losses[name] = value.detach()
            total = total + value
        return {"loss": total, **losses}

    def _losses(self, own: Mapping[str, Tensor], said: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The loss of every layer and, for maps, the least it can be: the teacher's entropy."""
        assert self.guide is not None
        config = self.guide.config
        heads = [s for s, _ in config.heads]
        each: list[Tensor] = []
        floor: list[Tensor] = []
        for layer, _ in config.layers:
            if config.target != "map":
                parts = PARTS[config.target]
                terms = [
                    F.mse_loss((own[n] if what == "tokens" else pick(own[n], heads)).float(), said[n].float())
                    for what, n in ((what, f"{what}.{layer}") for what in parts)
                ]
                each.append(self._over_heads(torch.stack(terms).sum()))
                continue
            q, k = pick(own[f"q.{layer}"], heads), pick(own[f"k.{layer}"], heads)
            if f"attention.{layer}" in said:
                given = said[f"attention.{layer}"]
                cross, entropy = map_match(q, k, given), map_entropy(given)
            else:
                made_of = self.guide.made_of(layer, said)
                cross, entropy = attention_match(q, k, said[f"q.{layer}"], said[f"k.{layer}"], made_of)
            each.append(self._over_heads(cross.mean()))
            floor.append(self._over_heads(entropy.mean()))
        return each, floor

    def _over_heads(self, mean: Tensor) -> Tensor:
        assert self.guide is not None
        one = self.options.head_reduction == "mean" or self.options.target == "features"
        return mean if one else mean * len(self.guide.config.heads)

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
    made = Classifier(
        trunk,
        model.head,
        spec=spec,
        classes=model.classes,
        preprocess=model.preprocess,
        multilabel=model.multilabel,
    )
    made.stated = model.stated
    return made.train(model.training)


def unused_parameters(model: Classifier) -> int:
    """Parameters of q and k (or v) that the teacher's replace: they have no gradient and no effect."""
    guide = getattr(model.trunk, "guide", None)
    if guide is None:
        return 0
    trunk = cast("Trunk", model.trunk)
    bias = int(getattr(trunk.config.mixer, "qkv_bias", True))
    rows = len(guide.config.heads) * (trunk.width // trunk.config.heads)
    return len(guide.config.layers) * len(PARTS[guide.config.target]) * rows * (trunk.width + bias)
