"""A projected embedding in parallel with a linear classifier."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.model.heads.config import Projected
from vitrail.model.heads.head import Head
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.tokens import Tokens


def projector(config: Projected, width: int) -> nn.Module:
    """Trunk features [batch, width] -> [batch, config.width]. Raises `ValueError` for a norm behind nothing."""
    if config.projector == "none":
        if config.last_norm:
            raise ValueError(
                "head.last_norm stands behind a projector, and head.projector is none; leave one of them out"
            )
        return nn.Identity()
    last: list[nn.Module] = [nn.BatchNorm1d(config.width, affine=False)] if config.last_norm else []
    if config.projector == "linear":
        linear = nn.Linear(width, config.width, bias=False)
        return nn.Sequential(linear, *last) if last else linear
    middle: list[nn.Module] = [nn.BatchNorm1d(config.hidden)] if config.norm else []
    return nn.Sequential(
        nn.Linear(width, config.hidden, bias=False),
        *middle,
        nn.ReLU(inplace=True),
        nn.Linear(config.hidden, config.width, bias=False),
        *last,
    )


class ProjectedHead(Head):
    """Logits from the pooled features, embeddings through a projector (Grafit, arXiv 2011.12982).

    Pooled features are the class token where `pool` says so, else the mean of the patches.
    """

    def __init__(self, config: Projected, width: int, classes: int) -> None:
        super().__init__()
        self.config = config
        self.prefix = int(config.pool == "class_token")
        self.features = width if config.projector == "none" else config.width
        self.fc = nn.Linear(width, classes)
        self.projector = projector(config, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.fc.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)

    def pooled(self, tokens: Tokens) -> Tensor:
        """The trunk's representation of an image, [batch, width]."""
        if self.prefix:
            return tokens.sequence[:, 0]
        return MeanHead.pool(tokens)

    def embed(self, tokens: Tokens) -> Tensor:
        return self.projector(self.pooled(tokens))

    def represent(self, tokens: Tokens) -> Tensor:
        return self.pooled(tokens) if self.config.judged == "trunk" else self.embed(tokens)

    def biases(self) -> list[list[Tensor]]:
        return [[self.fc.bias]]

    def forward(self, tokens: Tokens) -> Tensor:
        return self.fc(self.pooled(tokens))[:, None]
