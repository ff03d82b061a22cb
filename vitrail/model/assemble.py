"""Classifiers from specifications: the parts of a model put together, each imported where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail.data.config import PreprocessConfig
from vitrail.model.classifier import Classifier
from vitrail.model.config import (
    AnyTrunkConfig,
    CifarResNet,
    DenoiserConfig,
    Guided,
    TextBackbone,
    TimmBackbone,
    TrunkConfig,
)
from vitrail.model.heads.config import Branches, Distilled, HeadConfig, NextToken, Own, SecondOrder
from vitrail.model.heads.head import Head, build_head
from vitrail.model.trunks.base import BaseTrunk
from vitrail.schema import build, plain

Device = str | torch.device | None


@dataclass(frozen=True)
class Parts:
    """Configuration of a model; `plain(parts)` is stored with its weights."""

    trunk: AnyTrunkConfig | TextBackbone
    head: HeadConfig
    name: str = ""


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    """Names as given, or numbers as names."""
    if not isinstance(classes, int):
        return tuple(classes)
    if classes < 1:
        raise ValueError(f"a classifier needs at least one class, not {classes}")
    return tuple(str(i) for i in range(classes))


def head_config(head: str | HeadConfig | dict[str, Any]) -> HeadConfig:
    """A head's options from its name, its dataclass, or stored values."""
    values = head if isinstance(head, (str, dict)) else plain(head)
    return build(Parts, {"trunk": plain(TrunkConfig()), "head": values}).head


def default_preprocess(size: int) -> PreprocessConfig:
    """Small images are already cropped to their object, so nothing more is cut off."""
    return PreprocessConfig(size=size, crop_ratio=1.0 if size <= 64 else 0.875)


def from_spec(
    spec: dict[str, Any],
    *,
    classes: Sequence[str],
    multilabel: bool,
    preprocess: PreprocessConfig,
    device: Device,
    pretrained: bool = False,
) -> Classifier:
    """The architecture that `spec` describes, with new weights (timm's own trunks: with published ones)."""
    return assemble(build(Parts, spec), classes, multilabel, preprocess, device, pretrained=pretrained)


def assemble(
    parts: Parts,
    classes: Sequence[str],
    multilabel: bool = False,
    preprocess: PreprocessConfig | None = None,
    device: Device = None,
    pretrained: bool = False,
) -> Classifier:
    """A classifier of these parts, with new weights. Raises `ValueError` where they do not fit each other."""
    config, head = parts.trunk, parts.head
    if multilabel and isinstance(config, DenoiserConfig):
        raise ValueError("a denoiser is given one class per image, but several labels may hold here")
    late = isinstance(head, SecondOrder) and head.fusion == "late" and head.late_rule == "softmax"
    if multilabel and (late or (isinstance(head, Distilled) and head.fusion == "softmax")):
        raise ValueError(
            f"the head {head.kind} adds softmax probabilities, but several labels may hold here; "
            "use fusion logits (distilled) or late_rule logits (second_order)"
        )
    backbone = None
    if isinstance(config, TimmBackbone):
        from vitrail.model.trunks.timm_trunk import build_backbone, timm_preprocess

        backbone, accepted = build_backbone(config, len(classes) if isinstance(head, Own) else 0, pretrained, device)
        parts = replace(parts, trunk=accepted)
        published = timm_preprocess(backbone)
        preprocess = preprocess or replace(published, size=config.image_size or published.size)
    elif isinstance(config, TextBackbone):
        preprocess = preprocess or PreprocessConfig()  # of images: a text model has none
    else:
        preprocess = preprocess or default_preprocess(config.image_size)
        if isinstance(config, DenoiserConfig):  # noise is added to what lies in -1..1
            preprocess = replace(preprocess, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    channels = config.options.get("in_chans", 3) if isinstance(config, TimmBackbone) else getattr(config, "channels", 3)
    if len(preprocess.mean) != channels:  # until they are measured
        preprocess = replace(preprocess, mean=(0.5,) * channels, std=(0.25,) * channels)
    with torch.device(device or "cpu"):
        trunk, built = _trunk_and_head(parts, len(classes), backbone)
    model = Classifier(trunk, built, spec=plain(parts), classes=classes, preprocess=preprocess, multilabel=multilabel)
    return model.to(device) if pretrained and device is not None else model


def _trunk_and_head(parts: Parts, classes: int, backbone: nn.Module | None) -> tuple[BaseTrunk, Head]:
    config, chosen = parts.trunk, parts.head
    trunk: Any
    if isinstance(config, TrunkConfig):
        if isinstance(chosen, Branches):
            from vitrail.model.heads.branches import branch_blocks

            return branch_blocks(config, chosen, classes)
        from vitrail.model.trunks.vit import Trunk

        head = build_head(chosen, config.width, classes, config)
        return Trunk(config, prefix=head.prefix, final_norm=not head.own_norm), head
    if isinstance(config, Guided):
        from vitrail.model.trunks.guided import GuidedTrunk

        head = build_head(chosen, config.student.width, classes, config.student)
        return GuidedTrunk(config, prefix=head.prefix, final_norm=not head.own_norm), head
    if isinstance(config, DenoiserConfig):
        from vitrail.model.trunks.denoiser import Denoiser, DenoisingHead

        if not isinstance(chosen, Own):
            raise ValueError(f"a denoiser classifies by itself, without a head {chosen.kind}; leave --model.head out")
        return Denoiser(config, classes), DenoisingHead(classes)
    if isinstance(config, TextBackbone):
        from vitrail.model.trunks.text_trunk import TextTrunk

        trunk = TextTrunk(config)
        if isinstance(chosen, NextToken):
            from vitrail.model.heads.next_token import NextTokenHead

            return trunk, NextTokenHead(chosen, trunk)
    elif isinstance(config, CifarResNet):
        from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk

        bottleneck = config.block == "bottleneck"
        shortcut = None if bottleneck else config.shortcut
        make = partial(CifarResNetTrunk, config.depth, bottleneck, shortcut, config.channels)
        if isinstance(chosen, Branches):
            from vitrail.model.heads.branches import branch_stages

            return branch_stages(make, chosen, classes)
        trunk = make()
    else:
        from vitrail.model.trunks.timm_trunk import OwnHead, TimmTrunk, classifier_names

        assert backbone is not None
        if isinstance(chosen, Own):
            return TimmTrunk(backbone, config, classifier_names(backbone)), OwnHead(backbone)
        trunk = TimmTrunk(backbone, config)
    head = build_head(chosen, trunk.width, classes)
    class_tokens = int(getattr(trunk, "class_tokens", trunk.prefix))  # without registers
    if head.prefix > class_tokens:
        raise ValueError(
            f"{parts.name or config.kind} has {class_tokens} class tokens, the head {chosen.kind} needs {head.prefix}; "
            "heads that pool patches work: mean, class_attention, attention_pool, gramian, "
            "or second_order with class_token none and fusion words_only"
        )
    return trunk, head
