"""Toy detection: the one box of each image, predicted from patch tokens.

Attention transfer was also evaluated on COCO detection (Li et al., 2024, arXiv 2411.09702); `synthetic:shapes` with one
object per image is the smallest task of that kind. A detector is a classifier whose four "logits" are the sides of a
box, so every objective of classifiers trains it, attention transfer included.

boxes [batch, 4]: left, top, right, bottom in sides of the picture
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import Split
from vitrail.data.preprocess import box_table
from vitrail.learn.attention_teacher import Source
from vitrail.learn.attention_transfer import AttentionTransfer
from vitrail.learn.config import AttentionTransferConfig, SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.learn.teacher import refuse_moving_views
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.vit import Trunk

SIDES = ("left", "top", "right", "bottom")


class BoxHead(Head):
    """Patch tokens to one box, [batch, 1, 4].

    Every patch guesses how far from its middle the four sides are, and how much it knows: the box is the mean of the
    guesses under the softmax of the latter. One linear layer: all else must come from the trunk.
    """

    edge_layers = ("guess",)
    middles: Tensor

    def __init__(self, width: int, grid: tuple[int, int], prefix: int) -> None:
        super().__init__()
        self.prefix, self.features = prefix, width
        self.guess = nn.Linear(width, 5)
        nn.init.trunc_normal_(self.guess.weight, std=0.02)
        nn.init.zeros_(self.guess.bias)
        rows, columns = ((torch.arange(n) + 0.5) / n for n in grid)
        place = torch.cartesian_prod(rows, columns).reshape(-1, 2).flip(1)  # x, y of every patch, in raster order
        self.register_buffer("middles", torch.cat([place, place], 1), persistent=False)

    def _guesses(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        found = self.guess(tokens.patches).float()  # bf16 has too few digits for places of whole pictures
        return found[..., :4] + self.middles, found[..., 4].softmax(1)

    def forward(self, tokens: Tokens) -> Tensor:
        sides, weights = self._guesses(tokens)
        return (weights[..., None] * sides).sum(1)[:, None]

    def embed(self, tokens: Tokens) -> Tensor:
        weights = self._guesses(tokens)[1]
        return (weights[..., None] * tokens.patches).sum(1)

    def maps(self, tokens: Tokens) -> Tensor:
        return self._guesses(tokens)[1][:, None]


def detector(model: Classifier) -> Classifier:
    """The same trunk, weights included, under a new box head; `detector(model)(images)` gives boxes [batch, 4].

    It is not made to be saved: no name of a head stands for it. Raises `ValueError` for a trunk without patches.
    """
    trunk = model.trunk
    if not isinstance(trunk, Trunk):
        raise ValueError("boxes are guessed from the patches of a trunk of ours; use a ViT (vit_*, deit_*)")
    head = BoxHead(trunk.width, trunk.grid, trunk.prefix).to(next(model.parameters()).device)
    spec = {**model.spec, "head": {"kind": "boxes"}}
    return Classifier(trunk, head, spec=spec, classes=SIDES, preprocess=model.preprocess).train(model.training)


class Boxes(Supervised):
    """The mean distance of the four sides from where they are: boxes of the split `known`, by stable index.

    Raises `ValueError` where pictures have no boxes, or `augment` would move them.
    """

    boxes: Tensor

    def __init__(self, model: Classifier, known: Split, augment: AugmentConfig | None = None) -> None:
        super().__init__(model, SupervisedConfig())
        self._know(known, augment)

    def _know(self, known: Split, augment: AugmentConfig | None) -> None:
        if augment is not None:
            refuse_moving_views(augment)
        self.register_buffer("boxes", torch.from_numpy(box_table(known, self.model.preprocess)), persistent=False)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(logits.float(), target)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return super().forward(replace(batch, target=self.boxes[batch.index]))


class BoxTransfer(Boxes, AttentionTransfer):
    """Boxes in place of labels, and the attention of a teacher."""

    def __init__(
        self,
        model: Classifier,
        config: AttentionTransferConfig,
        teacher: Source,
        known: Split,
        augment: AugmentConfig | None = None,
    ) -> None:
        AttentionTransfer.__init__(self, model, config, teacher)
        self._know(known, augment)
