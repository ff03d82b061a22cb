"""Settings of objectives that reconstruct images, or transfer the attention of a teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitrail.learn.config.labels import SupervisedConfig
from vitrail.schema import Count, Fraction, NotNegative, Positive, Whole


@dataclass(frozen=True)
class MaeConfig:
    """Masked autoencoding: masked patches are predicted from visible ones, without labels (MAE, He et al., 2021, arXiv
    2111.06377)."""

    kind: Literal["mae"] = "mae"
    mask: Fraction = 0.75
    """Share of the patches that is masked."""
    decoder_width: Count = 512
    decoder_depth: Count = 8
    decoder_heads: Count = 16
    normalise: bool = True
    """Pixels of every patch are brought to mean 0 and deviation 1 before they are compared."""


@dataclass(frozen=True)
class DiffusionConfig:
    """Class-conditional denoising diffusion; the model must be a denoiser."""

    kind: Literal["diffusion"] = "diffusion"
    prediction: Literal["v", "eps"] = "v"
    """Prediction target: velocity, or the noise itself."""
    schedule: Literal["cosine", "scaled_linear"] = "cosine"
    """How the signal fades; `scaled_linear` is Stable Diffusion's."""
    drop_label: Fraction = 0.1
    """Share of labels that are withheld, for guidance."""
    min_snr: Positive | None = None
    """Cap of the weight of times with little noise; 5 is usual (none: no weights)."""


@dataclass(frozen=True)
class AttentionTransferConfig:
    """Labels, and the attention of a teacher (attention transfer, Li et al., 2024, arXiv 2411.09702).

    `copy`: the student uses the teacher's attention, and needs it at inference, too. `distill`: it has its own, which
    is drawn to the teacher's; the teacher is dropped after training.
    """

    kind: Literal["attention_transfer"] = "attention_transfer"
    teacher: str = ""
    """A run or model folder, timm:NAME of a plain ViT, random (untrained), or a .safetensors file with `attention.0`
    and so on: [heads, tokens, tokens], or with images in front, by stable index (distill, fixed views)."""
    mode: Literal["copy", "distill"] = "distill"
    target: Literal["map", "q", "k", "v", "qk", "features"] = "map"
    """What is taken. Distilled maps: cross entropy; all else: mean squared error. Copying q and k is copying maps."""
    layers: str = "all"
    """Layers of the student that take: all, first:K, last:K, or a list such as 0,1,5."""
    heads: str = "all"
    """Heads of the student that take: all, first:K, last:K, or a list."""
    layer_map: tuple[Whole, ...] = ()
    """Teacher's layer for each of them (empty: the same; needed where depths differ)."""
    head_map: tuple[Whole, ...] = ()
    """Teacher's head for each of them (empty: the same; needed where numbers of heads differ)."""
    aggregate: Literal["none", "examples", "layers", "heads", "queries"] = "none"
    """Average the teacher's maps over this before they are taken; examples: a running mean over training."""
    weight: NotNegative = 1.0
    """Of the distillation loss, relative to 1 for the labels (the paper: 3 for its main result, 1 elsewhere)."""
    head_reduction: Literal["mean", "sum"] = "mean"
    """Over heads; always the mean over images and queries, and the sum over layers."""
    drop_path: Literal["off", "shared"] = "off"
    """The teacher's: none, or the student's masks for both."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: the student's)."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""
