"""Classifiers from names, specifications and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail.data.config import PreprocessConfig
from vitrail.model.adapters.apply import without_adapters
from vitrail.model.adaptive.config import AdaptiveConfig
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
from vitrail.model.heads.branches import branch_blocks, branch_stages
from vitrail.model.heads.config import Branches, Distilled, HeadConfig, NextToken, Own, SecondOrder
from vitrail.model.heads.head import Head, build_head
from vitrail.model.trunks.base import BaseTrunk
from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk
from vitrail.model.trunks.guided import GuidedTrunk
from vitrail.model.trunks.timm_trunk import OwnHead, TimmTrunk, build_backbone, classifier_names, timm_preprocess
from vitrail.model.trunks.vit import Trunk
from vitrail.model.zoo import ZOO
from vitrail.schema import build, near, plain


@dataclass(frozen=True)
class Parts:
    """What a model is made of; `plain(parts)` is stored with its weights."""

    trunk: AnyTrunkConfig | TextBackbone
    head: HeadConfig
    name: str = ""


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    """Names as given, or numbers as names."""
    if isinstance(classes, int):
        if classes < 1:
            raise ValueError(f"a classifier needs at least one class, not {classes}")
        return tuple(str(i) for i in range(classes))
    return tuple(classes)


def create_model(
    name: str,
    *,
    classes: int | Sequence[str] | None = None,
    image_size: int | None = None,
    head: str | HeadConfig | None = None,
    weights: str = "none",
    device: str | torch.device | None = None,
    multilabel: bool = False,
    preprocess: PreprocessConfig | None = None,
    **overrides: Any,
) -> Classifier:
    """A classifier by name.

    `classes` is a number or names (none: as the source counts, mostly 1000). Everything the name fixes can be
    overridden by keyword (`depth=4`, `width=64`, `drop_path=0.1`, ...); with `timm:NAME` keywords go to timm. `weights`
    is `none`, `timm` (published weights), a run or model folder, or a weights file; a head of another size starts anew.
    `device="meta"` builds without memory. `text:FOLDER` is a classifier of texts, see `model/text_build.py`. Raises
    `ValueError` for an unknown name or override, with near matches.

    >>> create_model("deit_tiny", classes=10, depth=2).head.fc.out_features
    10
    """
    if name.startswith("text:"):
        from vitrail.model.text_build import create_text_model

        if image_size is not None:
            raise ValueError(f"model.image_size: {name} reads texts; its size is --model.trunk.length")
        return create_text_model(
            name,
            classes=class_names(2 if classes is None else classes),
            head=head,
            weights=weights,
            device=device,
            multilabel=multilabel,
            **overrides,
        )
    parts, default_classes = _parts(name, image_size, head, overrides)
    pretrained = weights == "timm" and isinstance(parts.trunk, TimmBackbone)
    model = _assemble(
        parts, class_names(classes or default_classes), multilabel, preprocess, device, pretrained=pretrained
    )
    if weights != "none" and not pretrained:
        from vitrail.model.weights import start_from

        start_from(model, name, weights)
    return model


def _parts(
    name: str, image_size: int | None, head: str | HeadConfig | None, overrides: dict[str, Any]
) -> tuple[Parts, int]:
    if name.startswith("timm:"):
        backbone = TimmBackbone(name=name.removeprefix("timm:"), image_size=image_size, options=overrides)
        return Parts(backbone, Own() if head is None else head_config(head), name), 1000
    if name not in ZOO:
        raise ValueError(f"no model {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    spec = ZOO[name]
    known = {f.name for f in fields(spec.trunk)} - {"kind"}
    for key in overrides:
        if key not in known:
            raise ValueError(f"{name} has no part {key!r}{near(key, known)}")
    changes = dict(overrides) if image_size is None else {**overrides, "image_size": image_size}
    trunk = build(type(spec.trunk), {k: plain(v) for k, v in changes.items()}, spec.trunk)
    return Parts(trunk, spec.head if head is None else head_config(head), name), spec.classes


def head_config(head: str | HeadConfig | dict[str, Any]) -> HeadConfig:
    """A head's options from its name, its dataclass, or stored values."""
    return build(
        Parts, {"trunk": plain(TrunkConfig()), "head": head if isinstance(head, (str, dict)) else plain(head)}
    ).head


def from_spec(
    spec: dict[str, Any],
    *,
    classes: Sequence[str],
    multilabel: bool,
    preprocess: PreprocessConfig,
    device: str | torch.device | None,
    pretrained: bool = False,
) -> Classifier:
    """The architecture that `spec` describes, with new weights (timm's own trunks: with published ones)."""
    return _assemble(build(Parts, spec), classes, multilabel, preprocess, device, pretrained=pretrained)


def _assemble(
    parts: Parts,
    classes: Sequence[str],
    multilabel: bool,
    preprocess: PreprocessConfig | None,
    device: str | torch.device | None,
    pretrained: bool = False,
) -> Classifier:
    if multilabel and isinstance(parts.trunk, DenoiserConfig):
        raise ValueError("a denoiser is given one class per image, but several labels may hold here")
    if multilabel and _sums_probabilities(parts.head):
        raise ValueError(
            f"the head {parts.head.kind} adds softmax probabilities, but several labels may hold here; "
            "use fusion logits (distilled) or late_rule logits (second_order)"
        )
    if isinstance(parts.trunk, TimmBackbone):
        count, size = len(classes) if isinstance(parts.head, Own) else 0, parts.trunk.image_size
        backbone, taken = build_backbone(parts.trunk, count, pretrained, device)
        parts = replace(parts, trunk=taken)
        own = timm_preprocess(backbone)
        preprocess = preprocess or (own if size is None else replace(own, size=size))
    elif isinstance(parts.trunk, TextBackbone):
        backbone, preprocess = None, preprocess or PreprocessConfig()  # of images: nothing of it concerns a text
    else:
        backbone = None
        preprocess = preprocess or default_preprocess(parts.trunk.image_size)
        if isinstance(parts.trunk, DenoiserConfig):  # noise is added to what lies in -1..1
            preprocess = replace(preprocess, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    with torch.device(device or "cpu"):
        trunk, head = _trunk_and_head(parts, len(classes), backbone)
    model = Classifier(trunk, head, spec=plain(parts), classes=classes, preprocess=preprocess, multilabel=multilabel)
    return model.to(device) if pretrained and device is not None else model


def _sums_probabilities(head: HeadConfig) -> bool:
    if isinstance(head, SecondOrder):
        return head.fusion == "late" and head.late_rule == "softmax"
    return isinstance(head, Distilled) and head.fusion == "softmax"


def _trunk_and_head(parts: Parts, classes: int, backbone: nn.Module | None) -> tuple[BaseTrunk, Head]:
    config = parts.trunk
    if isinstance(config, TrunkConfig):
        if isinstance(parts.head, Branches):
            return branch_blocks(config, parts.head, classes)
        head = build_head(parts.head, config.width, classes, config)
        return Trunk(config, prefix=head.prefix, final_norm=not head.own_norm), head
    if isinstance(config, Guided):
        head = build_head(parts.head, config.student.width, classes, config.student)
        return GuidedTrunk(config, prefix=head.prefix, final_norm=not head.own_norm), head
    if isinstance(config, DenoiserConfig):
        from vitrail.model.trunks.denoiser import Denoiser, DenoisingHead

        if not isinstance(parts.head, Own):
            raise ValueError(f"a denoiser classifies by itself, without a head {parts.head.kind}; leave model.head out")
        return Denoiser(config, classes), DenoisingHead(classes)
    trunk: Any
    if isinstance(config, TextBackbone):
        from vitrail.model.trunks.text_trunk import TextTrunk

        trunk = TextTrunk(config)
        if isinstance(parts.head, NextToken):
            from vitrail.model.heads.next_token import NextTokenHead

            return trunk, NextTokenHead(parts.head, trunk)
    elif isinstance(config, CifarResNet):
        shortcut = config.shortcut if config.block == "basic" else None
        make = partial(CifarResNetTrunk, config.depth, config.block == "bottleneck", shortcut)
        if isinstance(parts.head, Branches):
            return branch_stages(make, parts.head, classes)
        trunk = make()
    else:
        assert backbone is not None
        if isinstance(parts.head, Own):
            return TimmTrunk(backbone, config, classifier_names(backbone)), OwnHead(backbone)
        trunk = TimmTrunk(backbone, config)
    head = build_head(parts.head, trunk.width, classes)
    if head.prefix > trunk.prefix:
        raise ValueError(
            f"{parts.name or config.kind} has {trunk.prefix} class tokens, the head {parts.head.kind} needs "
            f"{head.prefix}; heads that pool patches work: mean, class_attention, attention_pool, gramian, "
            "or second_order with class_token none and fusion words_only"
        )
    return trunk, head


def default_preprocess(size: int) -> PreprocessConfig:
    """Small images are already cropped to their object, so nothing more is cut off."""
    return PreprocessConfig(size=size, crop_ratio=1.0 if size <= 64 else 0.875)


def make_adaptive(model: Classifier, adaptive: str | AdaptiveConfig | Mapping[str, Any] | None) -> Classifier:
    """The same weights under another adaptive policy: `ats`, `avit`, `adavit` or one with options (none: without any).

    What a policy itself learns starts anew; an adapter in use is merged. Raises `ValueError` for a trunk in which the
    policy cannot work.

    >>> plain = create_model("deit_tiny", classes=10, depth=4)
    >>> make_adaptive(plain, "ats").policy.at
    (1, 2, 3)
    """
    model = without_adapters(model)
    parts = build(Parts, model.spec)
    if not isinstance(parts.trunk, TrunkConfig):
        raise ValueError(f"adaptive policies work in our own blocks; {parts.name or parts.trunk.kind} has none")
    trunk = build(TrunkConfig, {"adaptive": plain(adaptive)}, parts.trunk)
    device = next(model.parameters()).device
    made = _assemble(replace(parts, trunk=trunk), model.classes, model.multilabel, model.preprocess, device)
    own = made.state_dict()
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("trunk.policy.")}
    made.load_state_dict({**{k: v for k, v in own.items() if k.startswith("trunk.policy.")}, **weights})
    made.stated = {name: value for name, value in model.stated.items() if name != "figures"}  # of another model
    return made.to(next(model.parameters()).dtype).train(model.training)


def replace_head(
    model: Classifier, head: str | HeadConfig, classes: int | Sequence[str] | None = None
) -> tuple[Classifier, list[str]]:
    """The same trunk, weights included, under another head; returns it and what was adapted, in words.

    Class tokens that the new head needs and the old trunk lacks start anew, with positions of zero. An adapter in use
    is merged.
    """
    model = without_adapters(model)
    parts = replace(build(Parts, model.spec), head=head_config(head))
    names = model.classes if classes is None else class_names(classes)
    device = next(model.parameters()).device
    made = _assemble(parts, names, model.multilabel, model.preprocess, device)
    notes: list[str] = []
    state, own = model.trunk.state_dict(), made.trunk.state_dict()
    ready = {}
    for name, target in own.items():
        value = state.get(name)
        if name == "pos_embed" and value is not None and value.shape != target.shape:
            before, after = model.trunk.placed_prefix, made.trunk.placed_prefix
            assert isinstance(before, int)
            assert isinstance(after, int)
            kept = value[:, :before][:, :after]
            fresh = value.new_zeros(1, after - kept.shape[1], value.shape[-1])
            value = torch.cat([kept, fresh, value[:, before:]], 1)
            notes.append(f"positions of class tokens: {before} -> {after}")
        if value is None or value.shape != target.shape:
            notes.append(f"trunk.{name} starts anew")
            value = target
        ready[name] = value
    made.trunk.load_state_dict(ready)
    made.stated = dict(model.stated)
    return made.train(model.training), notes
