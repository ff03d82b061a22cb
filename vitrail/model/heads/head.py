"""Base class of all heads: tokens -> a stack of logits."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens
from vitrail.registry import part

if TYPE_CHECKING:
    from vitrail.model.config import TrunkConfig
    from vitrail.model.heads.config import HeadConfig


def writes_texts(model: nn.Module) -> bool:
    """Whether a model is a language model: it continues texts and knows no classes."""
    return bool(getattr(getattr(model, "head", None), "writes_texts", False))


def build_head(config: HeadConfig, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
    """The head of a configuration, by its kind. Raises `ValueError` where it does not fit the trunk."""
    head: Head = part("head", config.kind).build(config, width, classes, trunk)
    return head


class Head(nn.Module):
    """Tokens to `[batch, classifiers, classes]`.

    `prefix`: how many learned tokens the trunk must put in front of the patches. `own_norm`: the head normalises after
    layers of its own, so the trunk must not. `classifiers`: how many logit vectors the stack holds. `takes_packed`:
    packed tokens are welcome; otherwise they come padded and masked. `begins_anew`: it is of the task, and not of what
    the trunk was trained on before. `loss_scale`: factor of the loss of each classifier, set by the objective that
    trains the head; 1 for cross entropy and for a binary one that sums over classes, 1 / classes for its mean.
    """

    prefix: int = 0
    own_norm: bool = False
    takes_packed: bool = False
    begins_anew: bool = True
    writes_texts: bool = False  # a language model's
    loss_scale: float = 1.0
    classifiers: int = 1
    features: int
    edge_layers: tuple[str, ...] = ("fc",)  # child layers that give logits: no hidden matrices

    @classmethod
    def build(cls, config: Any, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        """The head that `config` describes, for tokens of `width`; settings it leaves open follow `trunk`."""
        return cls(config, width, classes)

    def embed(self, tokens: Tokens) -> Tensor:
        """The vector that is classified, `[batch, features]`."""
        raise NotImplementedError

    def represent(self, tokens: Tokens) -> Tensor:
        """The representation that kNN, linear probes and clustering use, `[batch, width]`."""
        return self.embed(tokens)

    def forward(self, tokens: Tokens) -> Tensor:
        raise NotImplementedError

    def fuse(self, stack: Tensor) -> Tensor:
        """One logit vector from the stack, `[batch, classes]`."""
        return stack.mean(1) if stack.shape[1] > 1 else stack[:, 0]

    def losses(self, stack: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Losses of the head itself (decorrelation and the like), by name."""
        return {}

    def biases(self) -> list[list[Tensor]]:
        """For each classifier of the stack, the biases that its logits are made of, `[classes]` or one for all.

        They share memory with the parameters. A classifier that only joins others has none of its own.
        """
        return []

    def start_biases(self, logits: Tensor, classifiers: Collection[int] | None = None) -> None:
        """Start classifiers (none: all) at `logits`, `[classes]`, before they read anything from the tokens.

        Biases that are frozen stay, and so does a classifier with any bias other than zero: it was trained before.
        """
        for k, parts in enumerate(self.biases()):
            if not parts or (classifiers is not None and k not in classifiers) or not self._fresh(parts):
                continue
            with torch.no_grad():
                for part in parts:
                    share = logits.to(part) / len(parts)
                    part.copy_(share if len(part) == len(share) else share.mean())

    def _fresh(self, parts: list[Tensor]) -> bool:
        return all(part.requires_grad and not part.is_meta and not part.any() for part in parts)

    def maps(self, tokens: Tokens) -> Tensor | None:
        """Attention maps of the head: `[batch, maps, patches]`, rows that sum to 1; none where it has no maps."""
        return None


class LinearHead(Head):
    """`copies` linear classifiers on one vector per image, fused by their mean.

    With `hidden`, a linear map to so many features stands before them: parameters without a new kind of feature. With
    `mlp`, too, BatchNorm and ReLU stand between the two maps.
    """

    def __init__(
        self, width: int, classes: int, drop: float = 0.0, copies: int = 1, hidden: int | None = None, mlp: bool = False
    ) -> None:
        super().__init__()
        self.features, self.classifiers = width, copies
        self.drop = nn.Dropout(drop)
        self.wide = nn.Identity() if hidden is None else nn.Linear(width, hidden)
        between = mlp and hidden is not None
        self.act = nn.Sequential(nn.BatchNorm1d(hidden or 0), nn.ReLU()) if between else nn.Identity()
        self.fc = nn.Linear(width if hidden is None else hidden, copies * classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.wide, self.fc)

    @property
    def first(self) -> nn.Linear:
        """The layer that reads the vector."""
        return self.wide if isinstance(self.wide, nn.Linear) else self.fc

    def biases(self) -> list[list[Tensor]]:
        return [[part] for part in self.fc.bias.unflatten(0, (self.classifiers, -1))]

    def forward(self, tokens: Tokens) -> Tensor:
        return self.fc(self.drop(self.act(self.wide(self.embed(tokens))))).unflatten(-1, (self.classifiers, -1))


def mean_of_probabilities(stack: Tensor) -> Tensor:
    """Log of the mean over classifiers of their softmax: the argmax of summed probabilities, as logits."""
    mean = stack.float().log_softmax(-1).logsumexp(1)
    return mean - math.log(stack.shape[1])
