"""MAE: masked autoencoding (He et al., 2021, arXiv 2111.06377).

Most patches are masked; the trunk sees the others, with their positions, and a light decoder predicts the pixels of the
masked ones. The decoder belongs to the objective: the model alone is kept, and its head stays untrained.

images [batch, 3, height, width]; patches [batch, rows * columns, patch * patch * 3]
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.learn.config import MaeConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.model.classifier import Classifier
from vitrail.model.config import Patchify, TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import Tokens, gather, random_order
from vitrail.model.trunks.vit import Trunk


def patchify(images: Tensor, patch: int) -> Tensor:
    """Pixels of every patch, [batch, rows * columns, patch * patch * 3]: row by row, channels last."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def normalised(patches: Tensor) -> Tensor:
    """Every patch with mean 0 and deviation 1; a flat one becomes 0."""
    mean, variance = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


def grid_sinusoid(grid: tuple[int, int], width: int) -> Tensor:
    """The fixed table [rows * columns, width] of MAE: a quarter each of sines and cosines of column and row."""
    if width % 4:
        raise ValueError(
            f"objective.decoder_width: positions have four parts, into which {width} cannot be cut; use "
            f"{width // 4 * 4 or 4}"
        )
    sides = (torch.arange(side, dtype=torch.float64) for side in grid)
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    omega = 10000 ** -(torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = [position.reshape(-1, 1) * omega for position in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1).float()


class Decoder(nn.Module):
    """Tokens of visible patches to the pixels of all: mask tokens, fixed positions, a few blocks, one linear layer."""

    edge_layers = ("predict",)
    positions: Tensor

    def __init__(self, config: MaeConfig, width: int, grid: tuple[int, int], patch: int) -> None:
        super().__init__()
        inner = config.decoder_width
        blocks = TrunkConfig(
            width=inner, depth=config.decoder_depth, heads=config.decoder_heads, patch=patch, image_size=grid[0] * patch
        )
        self.embed = nn.Linear(width, inner)
        self.mask_token = nn.Parameter(torch.empty(1, 1, inner))
        self.register_buffer("positions", grid_sinusoid(grid, inner), persistent=False)
        self.blocks = nn.ModuleList(Block(blocks, grid, i, 0.0) for i in range(config.decoder_depth))
        self.norm = nn.LayerNorm(inner, eps=1e-6)
        self.predict = nn.Linear(inner, patch * patch * 3)
        nn.init.normal_(self.mask_token, std=0.02)
        for layer in (self.embed, self.predict):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tokens) -> Tensor:
        """Pixels of all patches, [batch, rows * columns, patch * patch * 3]."""
        assert tokens.index is not None
        x = self.embed(tokens.sequence)
        prefix, seen = x[:, : tokens.prefix], x[:, tokens.prefix :]
        whole = self.mask_token.to(x.dtype).expand(len(x), len(self.positions), -1)
        whole = whole.scatter(1, tokens.index[..., None].expand_as(seen), seen) + self.positions.to(x.dtype)
        state = Tokens(torch.cat([prefix, whole], 1), tokens.prefix, tokens.grid)
        for block in self.blocks:
            state = block(state)
        return self.predict(self.norm(state.patches))


class Mae(Objective):
    """The mean squared error of the hidden patches' pixels.

    The trunk sees `Tokens` whose `index` says which patches are there. Labels are not read, and the head is left as it
    is. Raises `ValueError` for a trunk that cannot work on some patches only.
    """

    reading = "mae trains no classifier, so top-1 means nothing; look at knn, or fine-tune: --model.weights RUN"

    def __init__(self, model: Classifier, config: MaeConfig, augment: AugmentConfig | None = None) -> None:
        super().__init__()
        self.model, self.config = model, config
        trunk = cast("Trunk", model.trunk)
        plain = isinstance(trunk, Trunk) and isinstance(trunk.config.stem, Patchify) and not trunk.config.local
        if not plain or not all(isinstance(m, SoftmaxMixer) for block in trunk._blocks() for m in block.mixers):
            raise ValueError(
                "objective mae hides patches from the trunk, so it needs attention and a plain patch stem, without "
                "convolutions; use a ViT (vit_*, deit_*, deit3_*)"
            )
        count = trunk.grid[0] * trunk.grid[1]
        self.visible = round(count * (1 - config.mask))
        if not 0 < self.visible < count:
            raise ValueError(
                f"objective.mask: {config.mask:g} of {count} patches leaves {self.visible} to see and "
                f"{count - self.visible} to guess; use a share between"
            )
        self.decoder = Decoder(config, trunk.width, trunk.grid, trunk.config.patch)
        model.head.requires_grad_(False)  # it gets no gradient, and decay alone would shrink it
        if augment is not None and (augment.mixup or augment.cutmix):
            self.notes = (
                "warning: images are mixed, though masked autoencoding reads no labels; use --data.augment.mixup 0 "
                "--data.augment.cutmix 0",
            )

    @classmethod
    def build(cls, model: Classifier, config: MaeConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.augment)

    def guess(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels guessed for all patches, and which were hidden [batch, hidden], of normalised images."""
        trunk = cast("Trunk", self.model.trunk)
        tokens = trunk.embed(images)
        visible, hidden = random_order(len(images), tokens.patches.shape[1], self.visible, images.device)
        sequence = torch.cat([tokens.sequence[:, : tokens.prefix], gather(tokens.patches, visible)], 1)
        encoded, _ = trunk.encode(replace(tokens, sequence=sequence, index=visible))
        return self.decoder(encoded), hidden

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        images = self.model._images(batch.images)
        guessed, hidden = self.guess(images)
        pixels = patchify(images.float(), cast("Trunk", self.model.trunk).config.patch)
        target = normalised(pixels) if self.config.normalise else pixels
        return {"loss": (gather(guessed.float(), hidden) - gather(target, hidden)).square().mean()}
