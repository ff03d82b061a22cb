"""The classifier of ViT and DeiT."""

from __future__ import annotations

from torch import Tensor

from vitrail.model.heads.head import LinearHead
from vitrail.model.tokens import Tokens


class ClassTokenHead(LinearHead):
    """A linear classifier on the class token."""

    prefix = 1
    takes_packed = True

    def embed(self, tokens: Tokens) -> Tensor:
        return tokens.token(0)
