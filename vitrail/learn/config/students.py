"""Settings of objectives that distil the embeddings of a frozen teacher into a student."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Fraction, Positive, Range


@dataclass(frozen=True)
class CompresConfig:
    """Match a frozen teacher's similarity distribution over a queue of anchors (CompRess, Abbasi Koohpayegani et al.,
    2020, arXiv 2010.14713)."""

    kind: Literal["compres"] = "compres"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    queues: Annotated[int, Range(1, 2)] = 1
    """1: compare with the teacher's anchors, through a linear map where widths differ. 2: with those of the
    student's momentum encoder."""
    temperature: Positive = 0.04
    bank: Count = 128_000
    """Embeddings that a queue holds; the oldest make room."""
    bank_precision: Literal["float32", "bf16"] = "float32"
    momentum: Fraction | None = None
    """Two queues: decay of the student's momentum encoder. None: 1 - 650 / steps, at least 0 and at most 0.999, so that
    it lags by the share of the run that the paper's 0.999 does in 650,000 steps (0.15 %)."""
    cache: bool = False
    """Embed each image once by the teacher and keep the embedding of its first view."""


@dataclass(frozen=True)
class SimregConfig:
    """Regress a frozen teacher's embedding (SimReg, Navaneet et al., 2022, arXiv 2201.05131)."""

    kind: Literal["simreg"] = "simreg"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    layers: Count = 4
    """Of the predictor, which is discarded after training; 1 is plain regression."""
    hidden: Count | None = None
    """Width between the predictor's layers (none: twice the embedding)."""
    match: Literal["unit", "raw", "batch_norm"] = "unit"
    """Compare unit vectors, embeddings as they are, or both normalised over the batch."""


@dataclass(frozen=True)
class ClustersConfig:
    """Classify the cluster of a frozen teacher's features (the baseline CC of CompRess, arXiv 2010.14713)."""

    kind: Literal["clusters"] = "clusters"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    clusters: Annotated[int, Range(2)] = 16_000


@dataclass(frozen=True)
class CrdConfig:
    """Contrast a frozen teacher's embedding of an image with those of others (CRD, Tian et al., 2019, arXiv
    1910.10699)."""

    kind: Literal["crd"] = "crd"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    width: Count = 128
    """To which both embeddings are mapped."""
    negatives: Count = 16_384
    temperature: Positive = 0.07
