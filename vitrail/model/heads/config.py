"""Options of every head: how tokens become logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.schema import Fraction


@dataclass(frozen=True)
class ClassToken:
    """One linear classifier on the class token."""

    kind: Literal["class_token"] = "class_token"
    drop: Fraction = 0.0


@dataclass(frozen=True)
class Mean:
    """One linear classifier on the mean of the patch tokens."""

    kind: Literal["mean"] = "mean"
    drop: Fraction = 0.0
    norm_after: bool = False
    """Apply the final norm to the mean instead of to every token (timm's `fc_norm`)."""


@dataclass(frozen=True)
class Own:
    """The classifier that a timm model brings with it."""

    kind: Literal["own"] = "own"


HeadConfig = ClassToken | Mean | Own
