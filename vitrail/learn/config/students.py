"""Small models that learn from the embeddings of a large one; settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Fraction, Positive, Range


@dataclass(frozen=True)
class CompresConfig:
    """See images as near to one another as a frozen teacher does (efficiency-1 §2.C)."""

    kind: Literal["compres"] = "compres"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    queues: Annotated[int, Range(1, 2)] = 1
    """1: compare with the teacher's anchors, through a linear map where widths differ. 2: with a slow copy's."""
    temperature: Positive = 0.04
    bank: Count = 128_000
    """Embeddings that a queue holds; the oldest make room."""
    bank_precision: Literal["float32", "bf16"] = "float32"
    momentum: Fraction | None = None
    """Two queues: decay of the student's momentum encoder. None: 1 - 650 / steps, at least 0 and at most 0.999, so that
    it lags by the share of the run that the paper's 0.999 does in 650,000 steps (0.15 %)."""
    cache: bool = False
    """Ask the teacher once for each image and keep what it said of the view that came first."""


@dataclass(frozen=True)
class SimregConfig:
    """Regress a frozen teacher's embedding (efficiency-1 §1.3, §2.C4)."""

    kind: Literal["simreg"] = "simreg"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    layers: Count = 4
    """Of the predictor, which goes when training ends; 1 is plain regression."""
    hidden: Count | None = None
    """Width between the predictor's layers (none: twice the embedding)."""
    match: Literal["unit", "raw", "batch_norm"] = "unit"
    """Compare unit vectors, embeddings as they are, or both normalised over the batch."""


@dataclass(frozen=True)
class ClustersConfig:
    """Tell which cluster of a frozen teacher's features an image is in (efficiency-1 §2.C4, CC)."""

    kind: Literal["clusters"] = "clusters"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    clusters: Annotated[int, Range(2)] = 16_000


@dataclass(frozen=True)
class CrdConfig:
    """Tell a frozen teacher's embedding of an image from those of others (efficiency-1 §2.C4, CRD)."""

    kind: Literal["crd"] = "crd"
    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    width: Count = 128
    """To which both embeddings are mapped."""
    negatives: Count = 16_384
    temperature: Positive = 0.07
