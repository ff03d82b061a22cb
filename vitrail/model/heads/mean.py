"""Average pooling."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.model.heads.head import LinearHead
from vitrail.model.tokens import Tokens


class MeanHead(LinearHead):
    """A linear classifier on the mean of the patch tokens; with `norm_after`, the final norm comes after the mean."""

    def __init__(
        self,
        width: int,
        classes: int,
        drop: float = 0.0,
        copies: int = 1,
        hidden: int | None = None,
        *,
        mlp: bool = False,
        norm_after: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(width, classes, drop, copies, hidden, mlp=mlp)
        self.own_norm = norm_after
        self.norm = nn.LayerNorm(width, eps=eps) if norm_after else nn.Identity()

    def embed(self, tokens: Tokens) -> Tensor:
        return self.norm(self.pool(tokens))

    @staticmethod
    def pool(tokens: Tokens) -> Tensor:
        """Mean of the patches that are there, [batch, width]."""
        patches = tokens.patches
        if tokens.mask is None:
            return patches.mean(1)
        real = tokens.mask[:, tokens.prefix :, None].to(patches.dtype)
        return (patches * real).sum(1) / real.sum(1).clamp(min=1)
