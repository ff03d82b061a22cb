"""Linear classifiers: on the class token, the mean of the patches, DeiT's two tokens, and next to a projector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import ClassToken, Distilled, Mean, Projected
from vitrail.model.heads.head import Head, LinearHead, mean_of_probabilities
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens
from vitrail.registry import settings


class ClassTokenHead(LinearHead):
    """A linear classifier on the class token."""

    prefix = 1
    takes_packed = True

    @classmethod
    def build(cls, config: ClassToken, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        return cls(width, classes, **settings(config))

    def embed(self, tokens: Tokens) -> Tensor:
        return tokens.token(0)


class MeanHead(LinearHead):
    """A linear classifier on the mean of the patch tokens; with `norm_after`, the final norm comes after the mean."""

    def __init__(self, width: int, classes: int, *, norm_after: bool = False, **options: Any) -> None:
        super().__init__(width, classes, **options)
        self.own_norm = norm_after
        self.norm = nn.LayerNorm(width, eps=1e-6) if norm_after else nn.Identity()

    @classmethod
    def build(cls, config: Mean, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        if config.mlp and config.hidden is None:
            raise ValueError("head.mlp needs the width of its hidden layer; set head.hidden")
        return cls(width, classes, **settings(config))

    def embed(self, tokens: Tokens) -> Tensor:
        return self.norm(self.pool(tokens))

    @staticmethod
    def pool(tokens: Tokens) -> Tensor:
        """Mean of the patches that are there, [batch, width]; merged ones count as all that they stand for."""
        patches, weight = tokens.patches, tokens.mask if tokens.size is None else tokens.size
        if weight is None:
            return patches.mean(1)
        weight = weight[:, tokens.prefix :, None].to(patches.dtype)
        return (patches * weight).sum(1) / weight.sum(1).clamp(min=1)


class DistilledHead(Head):
    """A classifier on the class token and one on the distillation token (DeiT, arXiv 2012.12877).

    Classifier 0 learns from labels, classifier 1 from a teacher. They are fused by the mean of logits, as timm does and
    the published weights expect, or by the sum of their softmax, as in the paper: the two can disagree.
    """

    prefix = 2
    takes_packed = True
    classifiers = 2
    edge_layers = ("fc", "fc_dist")

    def __init__(self, width: int, classes: int, fusion: str = "logits") -> None:
        super().__init__()
        self.features, self.fusion = 2 * width, fusion
        self.fc, self.fc_dist = nn.Linear(width, classes), nn.Linear(width, classes)
        self.reset_parameters()

    @classmethod
    def build(cls, config: Distilled, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        return cls(width, classes, config.fusion)

    def reset_parameters(self) -> None:
        small_normal(self.fc, self.fc_dist)

    def embed(self, tokens: Tokens) -> Tensor:
        return torch.cat([tokens.token(0), tokens.token(1)], 1)

    def forward(self, tokens: Tokens) -> Tensor:
        return torch.stack([self.fc(tokens.token(0)), self.fc_dist(tokens.token(1))], 1)

    def biases(self) -> list[list[Tensor]]:
        return [[self.fc.bias], [self.fc_dist.bias]]

    def fuse(self, stack: Tensor) -> Tensor:
        return mean_of_probabilities(stack) if self.fusion == "softmax" else stack.mean(1)


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
    middle: list[nn.Module] = [*([nn.BatchNorm1d(config.hidden)] if config.norm else []), nn.ReLU(inplace=True)]
    first, second = nn.Linear(width, config.hidden, bias=False), nn.Linear(config.hidden, config.width, bias=False)
    return nn.Sequential(first, *middle, second, *last)


class ProjectedHead(Head):
    """Logits from the pooled features, embeddings through a projector (Grafit, arXiv 2011.12982).

    Pooled features are the class token where `pool` says so, else the mean of the patches.
    """

    def __init__(self, config: Projected, width: int, classes: int) -> None:
        super().__init__()
        self.config, self.prefix = config, int(config.pool == "class_token")
        self.features = width if config.projector == "none" else config.width
        self.fc = nn.Linear(width, classes)
        self.projector = projector(config, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.fc)

    def pooled(self, tokens: Tokens) -> Tensor:
        """The trunk's representation of an image, [batch, width]."""
        return tokens.sequence[:, 0] if self.prefix else MeanHead.pool(tokens)

    def embed(self, tokens: Tokens) -> Tensor:
        return self.projector(self.pooled(tokens))

    def represent(self, tokens: Tokens) -> Tensor:
        return self.pooled(tokens) if self.config.judged == "trunk" else self.embed(tokens)

    def biases(self) -> list[list[Tensor]]:
        return [[self.fc.bias]]

    def forward(self, tokens: Tokens) -> Tensor:
        return self.fc(self.pooled(tokens))[:, None]
