"""Learning by comparing views of images, most of it without labels; settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Fraction, NotNegative, Positive, Range, Whole

Views = Literal["weak_strong", "strong_strong", "weak_weak"]


@dataclass(frozen=True)
class MomentumConfig:
    """What objectives with a momentum teacher share. The model's head must be `projected`."""

    momentum: Fraction = 0.99
    """Decay of the momentum teacher."""
    momentum_end: Fraction | None = None
    """Its decay at the end of the run, on a cosine; 1 as in BYOL's paper (none: constant)."""


@dataclass(frozen=True)
class PairConfig(MomentumConfig):
    """What objectives share that show one view to the momentum teacher and another to the model."""

    views: Views = "strong_strong"
    """The teacher's and the model's: made by data.weak or data.augment (the papers' w/s, s/s, w/w)."""


@dataclass(frozen=True)
class BankConfig(PairConfig):
    """What objectives with a bank of earlier embeddings share."""

    bank: Count = 128_000
    """Embeddings that the bank holds; the oldest make room."""
    bank_precision: Literal["float32", "bf16"] = "float32"


@dataclass(frozen=True)
class ByolConfig(PairConfig):
    """Predict what a slow copy of oneself says of another view (efficiency-1 §2.E2)."""

    kind: Literal["byol"] = "byol"
    predictor_hidden: Count = 4096
    symmetric: bool = False
    """Learn from both views, each against the other (else one way, which costs half: BYOL-asym)."""
    uniformity: NotNegative = 0.0
    """UniSiam: weight of pushing images of the batch apart, beside the cosine (published: 0.1, with `symmetric` and a
    momentum of 0, which makes the slow copy the model itself; efficiency-2 §3.5)."""
    uniformity_temperature: Positive = 2.0


@dataclass(frozen=True)
class MocoConfig(BankConfig):
    """Tell the other view of an image from a bank of others (He et al., arXiv 1911.05722)."""

    kind: Literal["moco"] = "moco"
    symmetric: bool = False
    """Both views are query and key in turn; a step costs twice as much."""
    momentum: Fraction = 0.999
    bank: Count = 65_536
    temperature: Positive = 0.2


@dataclass(frozen=True)
class IsdConfig(BankConfig):
    """See other images as near as a slow copy of oneself does (efficiency-1 §2.E)."""

    kind: Literal["isd"] = "isd"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1
    """Of the online network."""
    teacher_temperature: Positive = 0.01
    """Of the momentum teacher; below the other one it sharpens what is learned."""


@dataclass(frozen=True)
class MsfConfig(BankConfig):
    """Move towards the mean of one's neighbours in a bank (efficiency-1 §2.F)."""

    kind: Literal["msf"] = "msf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    k: Count = 5
    """Neighbours, oneself among them; with 1 this is BYOL."""


@dataclass(frozen=True)
class CmsfConfig(BankConfig):
    """Mean shift among neighbours that something else allows (efficiency-1 §2.G)."""

    kind: Literal["cmsf"] = "cmsf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    constraint: Literal["self", "semi", "supervised"] = "self"
    """`self`: an older embedding of the same images; `supervised`: the label; `semi`: the label of a share of the
    images, and confident pseudo-labels of the others."""
    k: Count | None = 5
    """Neighbours, oneself among them (none: all that are allowed, with labels only)."""
    pool: Count = 5
    """`self`: neighbours that the older embedding allows, the thesis' k'."""
    labelled: Fraction = 0.1
    """`semi`: share of every class whose labels may be used."""
    threshold: Fraction = 0.85
    """`semi`: probability above which a pseudo-label counts."""


@dataclass(frozen=True)
class DinoConfig(MomentumConfig):
    """Say of small views what a slow copy of oneself says of large ones (efficiency-1 §2.B4).

    Two large views are made by data.augment; small ones too, of a smaller share of the image.
    """

    kind: Literal["dino"] = "dino"
    momentum: Fraction = 0.996
    momentum_end: Fraction | None = 1.0
    prototypes: Annotated[int, Range(2)] = 65_536
    """Learned directions over which the softmaxes go."""
    temperature: Positive = 0.1
    """Of the student."""
    teacher_temperature: Positive = 0.07
    teacher_temperature_start: Positive = 0.04
    teacher_warmup: Fraction = 0.3
    """Share of the run in which the teacher's temperature rises from its start."""
    centre_momentum: Fraction = 0.9
    """Decay of the teacher's mean, which is taken away from what it says."""
    freeze_last: Fraction = 0.01
    """Share of the run in which the prototypes do not learn yet (the authors: one epoch of a hundred)."""
    local_views: Whole = 8
    """Small views of each image."""
    local_size: Count | None = 96
    """Their side in pixels (none: the model's, where it can see no other)."""
    local_scale: tuple[Fraction, Fraction] = (0.05, 0.4)
    """Share of the image's area that they cover; large ones: data.augment.scale."""


@dataclass(frozen=True)
class SupconConfig:
    """Contrast within a batch, by label (efficiency-1 §2.G3)."""

    kind: Literal["supcon"] = "supcon"
    temperature: Positive = 0.1


@dataclass(frozen=True)
class ProtonwConfig(BankConfig):
    """The class means of a bank as a classifier (efficiency-1 §2.G3)."""

    kind: Literal["protonw"] = "protonw"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1
