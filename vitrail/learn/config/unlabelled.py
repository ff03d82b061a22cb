"""Settings of objectives that compare views of images, most of them self-supervised."""

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
    """Predict the momentum encoder's embedding of another view (BYOL, Grill et al., 2020, arXiv 2006.07733)."""

    kind: Literal["byol"] = "byol"
    predictor_hidden: Count = 4096
    symmetric: bool = False
    """Learn from both views, each against the other (else one way, which costs half: BYOL-asym)."""
    uniformity: NotNegative = 0.0
    """Weight of UniSiam's uniformity term over the batch (Lu et al., 2022, arXiv 2207.09176; published: 0.1, with
    `symmetric` and a momentum of 0, which makes the momentum encoder the model itself)."""
    uniformity_temperature: Positive = 2.0


@dataclass(frozen=True)
class MocoConfig(BankConfig):
    """Contrast the other view of an image with a bank of other images (MoCo, He et al., 2019, arXiv 1911.05722)."""

    kind: Literal["moco"] = "moco"
    symmetric: bool = False
    """Both views are query and key in turn; a step costs twice as much."""
    momentum: Fraction = 0.999
    bank: Count = 65_536
    temperature: Positive = 0.2


@dataclass(frozen=True)
class IsdConfig(BankConfig):
    """Match the momentum encoder's similarities to a queue of other images (ISD, Tejankar et al., 2020, arXiv
    2012.09259)."""

    kind: Literal["isd"] = "isd"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1
    """Of the online network."""
    teacher_temperature: Positive = 0.01
    """Of the momentum teacher; below the other one it sharpens what is learned."""


@dataclass(frozen=True)
class MsfConfig(BankConfig):
    """Move towards the mean of the nearest neighbours in a bank (MSF, Abbasi Koohpayegani et al., 2021, arXiv
    2105.07269)."""

    kind: Literal["msf"] = "msf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    k: Count = 5
    """Neighbours, the image itself among them; with 1 this is BYOL."""


@dataclass(frozen=True)
class CmsfConfig(BankConfig):
    """Mean shift among a constrained set of neighbours (CMSF, Navaneet et al., 2021, arXiv 2112.04607)."""

    kind: Literal["cmsf"] = "cmsf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    constraint: Literal["self", "semi", "supervised"] = "self"
    """`self`: an older embedding of the same images; `supervised`: the label; `semi`: the label of a share of the
    images, and confident pseudo-labels of the others."""
    k: Count | None = 5
    """Neighbours, the image itself among them (none: all that are allowed, with labels only)."""
    pool: Count = 5
    """`self`: neighbours in the older embedding, among which `k` are chosen."""
    labelled: Fraction = 0.1
    """`semi`: share of every class whose labels may be used."""
    threshold: Fraction = 0.85
    """`semi`: probability above which a pseudo-label counts."""


@dataclass(frozen=True)
class DinoConfig(MomentumConfig):
    """Predict from small views what the momentum teacher predicts from large ones (DINO, Caron et al., 2021, arXiv
    2104.14294).

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
    """Decay of the centre, the running mean of the teacher's scores that is subtracted from them."""
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
    """Supervised contrast within a batch (SupCon, Khosla et al., 2020, arXiv 2004.11362)."""

    kind: Literal["supcon"] = "supcon"
    temperature: Positive = 0.1


@dataclass(frozen=True)
class ProtonwConfig(BankConfig):
    """Classification by the class means of a bank (the baseline ProtoNW of CMSF, arXiv 2112.04607)."""

    kind: Literal["protonw"] = "protonw"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1
