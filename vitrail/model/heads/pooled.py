"""Linear classifiers: on the class token (ViT, DeiT), on the mean of the patches, on DeiT's two tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import ClassToken, Distilled, Mean
from vitrail.model.heads.head import Head, LinearHead, mean_of_probabilities
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

    @classmethod
    def build(cls, config: Mean, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        if config.mlp and config.hidden is None:
            raise ValueError("head.mlp needs the width of its hidden layer; set head.hidden")
        return cls(width, classes, **settings(config))

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
        self.features = 2 * width
        self.fusion = fusion
        self.fc = nn.Linear(width, classes)
        self.fc_dist = nn.Linear(width, classes)
        self.reset_parameters()

    @classmethod
    def build(cls, config: Distilled, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        return cls(width, classes, config.fusion)

    def reset_parameters(self) -> None:
        for layer in (self.fc, self.fc_dist):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def embed(self, tokens: Tokens) -> Tensor:
        return torch.cat([tokens.token(0), tokens.token(1)], 1)

    def forward(self, tokens: Tokens) -> Tensor:
        return torch.stack([self.fc(tokens.token(0)), self.fc_dist(tokens.token(1))], 1)

    def biases(self) -> list[list[Tensor]]:
        return [[self.fc.bias], [self.fc_dist.bias]]

    def fuse(self, stack: Tensor) -> Tensor:
        return mean_of_probabilities(stack) if self.fusion == "softmax" else stack.mean(1)
