"""Options of every mixer: how tokens exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Fraction, OneOf, Positive


class MixerOptions:
    """Base of the settings of mixers."""

    kind: str


MixerConfig = Annotated[MixerOptions, OneOf("mixer")]


@dataclass(frozen=True)
class Softmax(MixerOptions):
    """Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762)."""

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = True
    attention_drop: Fraction = 0.0


@dataclass(frozen=True)
class TalkingHeads(MixerOptions):
    """Attention whose heads are mixed before and after the softmax (as in CaiT, arXiv 2103.17239)."""

    kind: Literal["talking_heads"] = "talking_heads"
    qkv_bias: bool = True
    attention_drop: Fraction = 0.0
    stored_map: Literal["auto", "always", "never"] = "auto"
    """`always`: the maps of all heads are stored and mixed. `never`: they are not, for `heads` times as many
    multiplications; equal up to rounding. `auto`: they are not on CUDA, from 196 tokens on and in training from 324
    on, up to a width of 256; wider networks train faster with them, in more memory from 576 tokens on."""


@dataclass(frozen=True)
class LinearPatches(MixerOptions):
    """One learned matrix over patches, shared by all channels (ResMLP, arXiv 2105.03404)."""

    kind: Literal["linear_patches"] = "linear_patches"


@dataclass(frozen=True)
class PatchMlp(MixerOptions):
    """A two-layer perceptron over patches (ablation of ResMLP)."""

    kind: Literal["patch_mlp"] = "patch_mlp"
    ratio: Positive = 4.0


@dataclass(frozen=True)
class PatchConv(MixerOptions):
    """A 3x3 convolution over the patch grid: full, depth-wise or separable (ablations of ResMLP)."""

    kind: Literal["patch_conv"] = "patch_conv"
    style: Literal["full", "depthwise", "separable"] = "depthwise"


@dataclass(frozen=True)
class NoMixing(MixerOptions):
    """No exchange at all: a bag of patches (ablation of ResMLP)."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class GatedConv(MixerOptions):
    """1x1, depth-wise 3x3 and 1x1 convolutions with squeeze-and-excitation (PatchConvNet, arXiv 2112.13692)."""

    kind: Literal["gated_conv"] = "gated_conv"
    squeeze: Fraction = 0.25


@dataclass(frozen=True)
class Sima(MixerOptions):
    """Attention without softmax: q and k normalised over tokens, products in either order (SimA, arXiv 2206.08898)."""

    kind: Literal["sima"] = "sima"
    qkv_bias: bool = True
    norm: Literal["l1", "l2", "none"] = "l1"
    """Of every channel over tokens (none diverges in training)."""
    order: Literal["auto", "qk_first", "kv_first"] = "auto"
    """Which product comes first; auto: the cheaper, the result is the same."""


@dataclass(frozen=True)
class Xca(MixerOptions):
    """Channels attend to channels by their covariance over tokens (XCiT, arXiv 2106.09681)."""

    kind: Literal["xca"] = "xca"
    qkv_bias: bool = True


@dataclass(frozen=True)
class EluKernel(MixerOptions):
    """Linear attention with features 1 + elu (arXiv 2006.16236)."""

    kind: Literal["elu_kernel"] = "elu_kernel"
    qkv_bias: bool = True


@dataclass(frozen=True)
class Efficient(MixerOptions):
    """Softmax of q over channels and of k over tokens, then linear attention (arXiv 1812.01243)."""

    kind: Literal["efficient"] = "efficient"
    qkv_bias: bool = True


@dataclass(frozen=True)
class CosFormer(MixerOptions):
    """Linear attention with relu features (arXiv 2202.08791)."""

    kind: Literal["cosformer"] = "cosformer"
    qkv_bias: bool = True
    reweight: bool = False
    """Near patches weigh more, by cosines of distances; costs four times as much and did not converge in the
    experiments of SimA (arXiv 2206.08898)."""
