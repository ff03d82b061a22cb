"""What a model is trained on, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.schema import Fraction


@dataclass(frozen=True)
class SupervisedConfig:
    """Labels (architectures-and-training §2.3, §9.4, §12 items 18 and 21)."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """`bce`: one sigmoid a class. Multi-label data always use it."""
    smoothing: Fraction = 0.0
    """Label smoothing: the true class keeps 1 - smoothing."""
    smoothing_style: Literal["all", "others"] = "all"
    """Share smoothing over all classes (torch) or over the other classes only (the thesis)."""
    bce_threshold: Fraction | None = None
    """Targets above it become 1, the rest 0 (none: soft targets)."""
    bce_sum: bool = False
    """Sum over classes, then mean over the batch (else mean over both)."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: weigh a class by the inverse of its training frequency, mean weight 1."""
    classifier_loss: Literal["sum", "mean"] = "sum"
    """How the losses of several classifiers of one head are put together."""


ObjectiveConfig = SupervisedConfig
