"""ResMLP's patch-mixing matrices: rows as images, and their sparsity compared with the MLP's (arXiv 2105.03404).

A [patches, patches] of a block mixes patches, B and C are the two layers of its MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from vitrail.model.classifier import Classifier
from vitrail.model.mixers.patches import LinearPatchesMixer
from vitrail.model.trunk import Trunk

NEAR_ZERO = 0.05  # of the largest magnitude of a matrix
CENTRAL = 6  # rows and columns of patches whose rows are shown


def sparsity(weight: Tensor) -> float:
    """Share of entries below 5 % of the largest magnitude."""
    sizes = weight.detach().abs()
    return float((sizes < NEAR_ZERO * sizes.max()).double().mean())


class Mixing(NamedTuple):
    """The matrices of one block."""

    a: Tensor  # [patches, patches], row before column
    grid: tuple[int, int]
    mlp: Any  # with fc1 and fc2; none where the block has no MLP


def mixing_blocks(model: Classifier) -> list[Mixing]:
    """Blocks that mix patches by one learned matrix, ours and timm's ResMLP; none where the model has no such."""
    if isinstance(model.trunk, Trunk):
        ours = [b for b in model.trunk.blocks if isinstance(getattr(b, "attn", None), LinearPatchesMixer)]
        return [Mixing(b.attn.tokens.weight, b.attn.grid, b.mlp) for b in ours]  # type: ignore[union-attr, arg-type]
    backbone: Any = getattr(model.trunk, "backbone", None)
    theirs = [b for b in getattr(backbone, "blocks", ()) if isinstance(getattr(b, "linear_tokens", None), nn.Linear)]
    return [Mixing(b.linear_tokens.weight, tuple(backbone.stem.grid_size), b.mlp_channels) for b in theirs]


def mixing_sparsity(model: Classifier) -> dict[str, list[float]]:
    """By depth: of A, B and C."""
    blocks = mixing_blocks(model)
    if not blocks:
        return {}
    found = {"A": [sparsity(block.a) for block in blocks]}
    if all(block.mlp is not None for block in blocks):
        found |= {"B": [sparsity(block.mlp.fc1.weight) for block in blocks]}
        found |= {"C": [sparsity(block.mlp.fc2.weight) for block in blocks]}
    return found


def central_rows(weight: Tensor, grid: tuple[int, int], most: int = CENTRAL) -> Tensor:
    """The rows of A of the patches in the middle, each on the grid: [down, across, rows, columns].

    `down` and `across` are at most `most`, and the middle of an odd rest lies towards the origin.
    """
    rows, columns = grid
    whole = weight.detach().float().cpu().view(rows, columns, rows, columns)
    down, across = min(most, rows), min(most, columns)
    top, left = (rows - down) // 2, (columns - across) // 2
    return whole[top : top + down, left : left + across]


def mixing_rows(model: Classifier) -> list[Tensor]:
    """`central_rows` of every block that has them."""
    return [central_rows(block.a, block.grid) for block in mixing_blocks(model)]
