"""What a classifier is made of, as data. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitrail.model.heads.config import HeadConfig
from vitrail.model.mixers.config import MixerConfig, Softmax
from vitrail.schema import Count, Fraction, NotNegative, Overrides, Positive


@dataclass(frozen=True)
class Patchify:
    """Non-overlapping patches and one linear projection."""

    kind: Literal["patchify"] = "patchify"
    patch: Count = 16


StemConfig = Patchify


@dataclass(frozen=True)
class TrunkConfig:
    """Images to tokens: a stem, a stack of residual blocks, a final norm."""

    image_size: Count = 224
    width: Count = 768
    depth: Count = 12
    heads: Count = 12
    patch: Count = 16
    mlp_ratio: Positive = 4.0
    mixer: MixerConfig = field(default_factory=Softmax)
    activation: Literal["gelu", "relu", "silu", "gelu_tanh"] = "gelu"
    layerscale: NotNegative | None = None
    """Start of LayerScale (none: no LayerScale)."""
    drop_path: Fraction = 0.0
    drop_path_rule: Literal["linear", "uniform"] = "linear"
    """`linear`: from 0 in the first block to `drop_path` in the last; `uniform`: the same in every block."""
    class_position: bool = True
    """The class token has a position embedding (timm's DeiT III has none)."""
    position_drop: Fraction = 0.0
    norm_eps: Positive = 1e-6


Tune = str
WEIGHTS_HELP = "none, timm (published weights of that name), a run folder, a model folder, or a weights file"


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from which weights."""

    name: str = "deit_tiny"
    """A name of `vitrail list models`, or `timm:NAME`."""
    weights: str = "none"
    """none, timm (published weights of that name), a run or model folder, or a weights file."""
    image_size: Count | None = None
    """Side of the square input (none: the model's own)."""
    head: HeadConfig | None = None
    """Head other than the model's own (`--model.head mean`)."""
    drop_path: Fraction | None = None
    trunk: Annotated[Mapping[str, Any], Overrides(TrunkConfig)] = field(default_factory=dict)
    """Anything else the name fixes: --model.trunk.depth 4, --model.trunk.width 64, ..."""
