"""Settings of supervised objectives, with or without a teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitrail.schema import Count, Fraction, NotNegative, Positive


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised learning: cross entropy or binary cross entropy on labels."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """`bce`: one sigmoid per class (RSB, arXiv 2110.00476). Multi-label data always use it."""
    smoothing: Fraction = 0.0
    """Label smoothing: the true class keeps 1 - smoothing."""
    smoothing_style: Literal["all", "others"] = "all"
    """Share smoothing over all classes (torch) or over the other classes only (DeiT, arXiv 2012.12877)."""
    bce_threshold: Fraction | None = None
    """Targets above it become 1, the rest 0 (none: soft targets)."""
    bce_sum: bool = False
    """Sum over classes, then mean over the batch (else mean over both)."""
    class_weights: str = "none"
    """none; `balanced`: weigh a class by the inverse of its training frequency, mean weight 1; or weights by name, as
    "cat=3,lynx=0.5" (1 for those that are not named)."""
    logit_adjustment: NotNegative = 0.0
    """Strength with which the log of each class's training frequency is added to its logit, in training alone; 1 makes
    rare classes count as if all were as frequent (Menon et al., arXiv 2007.07314). With `bce` the log odds (LiVT, Xu et
    al., arXiv 2212.02015)."""
    count_generated: bool = True
    """Whether generated images count for frequencies (where the data tell them from real ones)."""
    classifier_loss: Literal["sum", "mean"] = "sum"
    """How the losses of several classifiers of one head are put together."""


def named_weights(text: str) -> dict[str, float]:
    """Weights by class of `class_weights`; empty for none and balanced. Raises `ValueError` for any other text.

    >>> named_weights("cat=3, lynx=0.5")
    {'cat': 3.0, 'lynx': 0.5}
    """
    if text in ("none", "balanced"):
        return {}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            found[""] = 0.0
    if "" in found or not all(0 <= weight < float("inf") for weight in found.values()):
        raise ValueError(f"{text!r} is not none, balanced or NAME=WEIGHT,NAME=WEIGHT with weights of 0 and more")
    return found


@dataclass(frozen=True)
class DistillationConfig:
    """Knowledge distillation: labels and a teacher (DeiT, Touvron et al., 2020, arXiv 2012.12877).

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
    """Soft: KL(teacher || student), as usual, or KL(student || teacher), as DeiT's eq. 2 is printed."""
    cache: bool = False
    """Ask the teacher once for each image; only where views are fixed (crop evaluation, no flips, no mixing)."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""


@dataclass(frozen=True)
class GrafitConfig:
    """Fine-grained representations from coarse labels (Grafit, Touvron et al., 2020, arXiv 2011.12982).

    The sum of the parts with the weights below. The model's head must be `projected`: what it embeds is compared.
    """

    kind: Literal["grafit"] = "grafit"
    neighbours: NotNegative = 1.0
    """Weight of the neighbour loss (NCA) over the memory of all training images."""
    instance: NotNegative = 1.0
    """Weight of the instance loss: agreement of views with the momentum encoder."""
    classification: NotNegative = 0.0
    """Weight of the labels' cross entropy."""
    triplet: NotNegative = 0.0
    """Weight of the triplet loss within a batch."""
    views: Count = 4
    """Augmented views of each image (2 or more for `instance`; the others take the first)."""
    temperature: Positive = 0.05
    momentum: Fraction = 0.99
    """Decay of the momentum encoder."""
    predictor_hidden: Count = 4096
    triplet_margin: Positive = 0.2
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


@dataclass(frozen=True)
class OneConfig:
    """On-the-fly native ensemble (ONE, Lan et al., 2018, arXiv 1806.04606): branches learn labels and their gated
    ensemble."""

    kind: Literal["one"] = "one"
    temperature: Positive = 3.0
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


@dataclass(frozen=True)
class LanguageModelConfig:
    """Next-token prediction of completions, given their prompts; the model's head must be `next_token`."""

    kind: Literal["language_model"] = "language_model"
    smoothing: Fraction = 0.0
    """Label smoothing: the true word keeps 1 - smoothing, the whole vocabulary shares the rest."""
