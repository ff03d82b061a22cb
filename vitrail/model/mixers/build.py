"""A mixer from its configuration."""

from __future__ import annotations

from vitrail.model.mixers.config import (
    GatedConv,
    LinearPatches,
    MixerConfig,
    NoMixing,
    PatchConv,
    PatchMlp,
    Softmax,
    TalkingHeads,
)
from vitrail.model.mixers.mixer import Mixer
from vitrail.model.mixers.patches import GatedConvMixer, LinearPatchesMixer, NoMixer, PatchConvMixer, PatchMlpMixer
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.mixers.talking_heads import TalkingHeadsMixer


def build_mixer(config: MixerConfig, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
    """The mixer that `config` describes, for tokens of `width` on a patch `grid`."""
    if isinstance(config, Softmax):
        return SoftmaxMixer(width, heads, config.qkv_bias, config.attention_drop)
    if isinstance(config, TalkingHeads):
        return TalkingHeadsMixer(width, heads, config.qkv_bias, config.attention_drop)
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
