"""What a model is trained on, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitrail.schema import Count, Fraction, NotNegative, Positive


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


@dataclass(frozen=True)
class DistillationConfig:
    """Labels and a teacher (architectures-and-training §4.2).

    A head with a distillation token gives its class classifier the labels and the other one the teacher; any other head
    learns both with every classifier.
    """

    kind: Literal["distillation"] = "distillation"
    teacher: str = ""
    """A run folder, a model folder, timm:NAME with its published weights, or a weights file of a CIFAR ResNet."""
    mode: Literal["hard", "soft"] = "hard"
    """`hard`: the teacher's decision is a second label. `soft`: its probabilities, at `temperature`."""
    weight: Fraction | None = None
    """Share of the teacher (none: one half for hard, 0.1 for soft)."""
    temperature: Positive = 3.0
    """Of soft targets."""
    first: Literal["teacher", "student"] = "teacher"
    """Soft: KL(teacher || student), as usual, or KL(student || teacher), as equation 3.2 is printed."""
    cache: bool = False
    """Ask the teacher once for each image; only where views are fixed (crop evaluation, no flips, no mixing)."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""


@dataclass(frozen=True)
class GrafitConfig:
    """Fine representations from coarse labels (architectures-and-training §3): neighbours and instances.

    The sum of the parts with the weights below. The model's head must be `projected`: what it embeds is compared.
    """

    kind: Literal["grafit"] = "grafit"
    neighbours: NotNegative = 1.0
    """Weight of the neighbour loss (NCA) over the memory of all training images."""
    instance: NotNegative = 1.0
    """Weight of the agreement of views with a momentum copy."""
    classification: NotNegative = 0.0
    """Weight of the labels' cross entropy."""
    triplet: NotNegative = 0.0
    """Weight of the triplet loss within a batch."""
    views: Count = 4
    """Augmented views of each image (2 or more for `instance`; the others take the first)."""
    temperature: Positive = 0.05
    momentum: Fraction = 0.99
    """Decay of the momentum copy; not stated in the thesis."""
    predictor_hidden: Count = 4096
    triplet_margin: Positive = 0.2
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


@dataclass(frozen=True)
class OneConfig:
    """On-the-fly native ensemble (heads §3.5): branches learn labels and their gated ensemble."""

    kind: Literal["one"] = "one"
    temperature: Positive = 3.0
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


ObjectiveConfig = SupervisedConfig | DistillationConfig | GrafitConfig | OneConfig
