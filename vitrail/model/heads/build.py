"""A head from its configuration."""

from __future__ import annotations

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.class_attention import (
    AttentionPoolHead,
    ClassAttentionMixer,
    ClassBlock,
    ClassDecoderHead,
    ClassMlpMixer,
    ClassSimaMixer,
    XcitClassBlock,
)
from vitrail.model.heads.config import (
    AttentionPool,
    Branches,
    ClassAttention,
    ClassMlp,
    ClassToken,
    Distilled,
    Gramian,
    HeadConfig,
    Mean,
    NextToken,
    Projected,
    SecondOrder,
)
from vitrail.model.heads.head import Head
from vitrail.model.heads.pooled import ClassTokenHead, DistilledHead, MeanHead
from vitrail.model.heads.projected import ProjectedHead
from vitrail.model.heads.second_order import SecondOrderHead


def build_head(config: HeadConfig, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
    """The head that `config` describes, for tokens of `width`; what it leaves open follows `trunk`."""
    if isinstance(config, ClassToken):
        return ClassTokenHead(width, classes, config.drop, config.copies, config.hidden)
    if isinstance(config, Mean):
        if config.mlp and config.hidden is None:
            raise ValueError("head.mlp needs the width of its hidden layer; set head.hidden")
        return MeanHead(
            width,
            classes,
            config.drop,
            config.copies,
            config.hidden,
            mlp=config.mlp,
            norm_after=config.norm_after,
        )
    if isinstance(config, Distilled):
        return DistilledHead(width, classes, config.fusion)
    if isinstance(config, Projected):
        return ProjectedHead(config, width, classes)
    if isinstance(config, SecondOrder):
        return SecondOrderHead(config, width, classes)
    if isinstance(config, Gramian):
        from vitrail.model.heads.gramian import GramianHead

        return GramianHead(config, width, classes)
    if isinstance(config, AttentionPool):
        inherited = trunk.layerscale if trunk is not None and trunk.layerscale is not None else 1.0
        return AttentionPoolHead(config, width, classes, inherited)
    if isinstance(config, ClassAttention):
        return _class_attention(config, width, classes, trunk)
    if isinstance(config, ClassMlp):
        return _class_mlp(config, width, classes, trunk)
    if isinstance(config, NextToken):
        raise ValueError("the head next_token is for texts; use it with --model.name text:gpt or text:FOLDER")
    if isinstance(config, Branches):  # takes layers from its trunk, so `vitrail.model.build` makes both at once
        raise ValueError("a timm model cannot be cut into branches; the head branches works with models of the zoo")
    raise ValueError(f"the head {config.kind!r} belongs to timm models; choose class_token or mean")


def _class_attention(config: ClassAttention, width: int, classes: int, trunk: TrunkConfig | None) -> ClassDecoderHead:
    heads = config.heads or (trunk.heads if trunk is not None else max(1, width // 64))
    start = config.layerscale if config.layerscale is not None else trunk.layerscale if trunk is not None else None
    block = XcitClassBlock if config.style == "xcit" else ClassBlock
    mixer = ClassSimaMixer if config.attention == "sima" else ClassAttentionMixer
    blocks = [
        block(
            mixer(width, heads, config.token_in_keys),
            width,
            config.mlp_ratio,
            "layernorm",
            start if config.scaled else None,
            "gelu" if trunk is None else trunk.activation,
        )
        for _ in range(config.layers)
    ]
    return ClassDecoderHead(blocks, width, classes, "layernorm")


def _class_mlp(config: ClassMlp, width: int, classes: int, trunk: TrunkConfig | None) -> ClassDecoderHead:
    if trunk is None:
        raise ValueError(
            "class_mlp reads a fixed number of patches, which this trunk does not fix; use class_attention"
        )
    count = (trunk.image_size // trunk.patch) ** 2 + 1
    blocks = [
        ClassBlock(ClassMlpMixer(count), width, config.mlp_ratio, trunk.norm, trunk.layerscale)
        for _ in range(config.layers)
    ]
    return ClassDecoderHead(blocks, width, classes, trunk.norm)
