"""Options of every mixer: how tokens exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.schema import Fraction, Positive


@dataclass(frozen=True)
class Softmax:
    """Scaled dot-product attention (architectures-and-training §2.3)."""

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = True
    attention_drop: Fraction = 0.0


@dataclass(frozen=True)
class TalkingHeads:
    """Attention whose heads are mixed before and after the softmax (CaiT, architectures-and-training §5.4)."""

    kind: Literal["talking_heads"] = "talking_heads"
    qkv_bias: bool = True
    attention_drop: Fraction = 0.0


@dataclass(frozen=True)
class LinearPatches:
    """One learned matrix over patches, shared by all channels (ResMLP, architectures-and-training §6.1)."""

    kind: Literal["linear_patches"] = "linear_patches"


@dataclass(frozen=True)
class PatchMlp:
    """A two-layer perceptron over patches (ablation of ResMLP)."""

    kind: Literal["patch_mlp"] = "patch_mlp"
    ratio: Positive = 4.0


@dataclass(frozen=True)
class PatchConv:
    """A 3x3 convolution over the patch grid: full, depth-wise or separable (ablations of ResMLP)."""

    kind: Literal["patch_conv"] = "patch_conv"
    style: Literal["full", "depthwise", "separable"] = "depthwise"


@dataclass(frozen=True)
class NoMixing:
    """No exchange at all: a bag of patches (ablation of ResMLP)."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class GatedConv:
    """1x1, depth-wise 3x3 and 1x1 convolutions with squeeze-and-excitation (PatchConvNet §7.1)."""

    kind: Literal["gated_conv"] = "gated_conv"
    squeeze: Fraction = 0.25


MixerConfig = Softmax | TalkingHeads | LinearPatches | PatchMlp | PatchConv | NoMixing | GatedConv
