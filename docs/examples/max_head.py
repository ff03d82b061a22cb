"""A head in one file: a linear classifier on the largest value of every channel over the patches.

VITRAIL_PARTS=max_head vitrail train vit --data photos/ --model.head max
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vitrail.model.heads.config import HeadOptions
from vitrail.model.heads.head import LinearHead
from vitrail.model.parts.tokens import Tokens
from vitrail.registry import register, settings
from vitrail.schema import Fraction


@dataclass(frozen=True)
class Max(HeadOptions):
    """One linear classifier on the maximum over the patch tokens."""

    kind: Literal["max"] = "max"
    drop: Fraction = 0.0


@register("head", Max)
class MaxHead(LinearHead):
    """A linear classifier on the maximum over the patch tokens."""

    @classmethod
    def build(cls, config: Max, width: int, classes: int, trunk: object = None) -> "MaxHead":
        return cls(width, classes, **settings(config))

    def embed(self, tokens: Tokens) -> Tensor:  # [batch, width]
        return tokens.patches.amax(1)
