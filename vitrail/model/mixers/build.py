"""A mixer from its configuration."""

from __future__ import annotations

from vitrail.model.mixers.config import (
    CosFormer,
    Efficient,
    EluKernel,
    GatedConv,
    LinearPatches,
    MixerConfig,
    NoMixing,
    PatchConv,
    PatchMlp,
    Sima,
    Softmax,
    TalkingHeads,
    Xca,
)
from vitrail.model.mixers.kernel_attention import CosFormerMixer, EfficientMixer, EluKernelMixer
from vitrail.model.mixers.mixer import Mixer
from vitrail.model.mixers.patches import GatedConvMixer, LinearPatchesMixer, NoMixer, PatchConvMixer, PatchMlpMixer
from vitrail.model.mixers.sima import SimaMixer
from vitrail.model.mixers.softmax import SoftmaxMixer, TalkingHeadsMixer
from vitrail.model.mixers.xca import XcaMixer


def build_mixer(config: MixerConfig, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
    """The mixer that `config` describes, for tokens of `width` on a patch `grid`."""
    if isinstance(config, Softmax):
        return SoftmaxMixer(width, heads, config.qkv_bias, config.attention_drop)
    if isinstance(config, TalkingHeads):
        return TalkingHeadsMixer(width, heads, config.qkv_bias, config.attention_drop)
    if isinstance(config, (Sima, Xca, EluKernel, Efficient, CosFormer)):
        return _of_linear_cost(config, width, heads)
    if isinstance(config, LinearPatches):
        return LinearPatchesMixer(grid)
    if isinstance(config, PatchMlp):
        return PatchMlpMixer(grid, config.ratio)
    if isinstance(config, PatchConv):
        return PatchConvMixer(width, config.style)
    if isinstance(config, GatedConv):
        return GatedConvMixer(width, config.squeeze)
    assert isinstance(config, NoMixing)
    return NoMixer()


def _of_linear_cost(config: Sima | Xca | EluKernel | Efficient | CosFormer, width: int, heads: int) -> Mixer:
    if isinstance(config, Sima):
        return SimaMixer(width, heads, config.qkv_bias, config.norm, config.order)
    if isinstance(config, Xca):
        return XcaMixer(width, heads, config.qkv_bias)
    if isinstance(config, EluKernel):
        return EluKernelMixer(width, heads, config.qkv_bias)
    if isinstance(config, Efficient):
        return EfficientMixer(width, heads, config.qkv_bias)
    return CosFormerMixer(width, heads, config.qkv_bias, config.reweight)
