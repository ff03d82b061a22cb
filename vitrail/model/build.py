"""Classifiers by name, and from one another: under another adaptive policy or another head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from vitrail.data.config import PreprocessConfig
from vitrail.model.assemble import Parts, assemble, class_names, head_config
from vitrail.model.classifier import Classifier
from vitrail.model.config import AdaptiveConfig, TimmBackbone, TrunkConfig
from vitrail.model.heads.config import HeadConfig, Own
from vitrail.model.parts.modules import without_adapters
from vitrail.model.zoo import ZOO
from vitrail.schema import build, near, plain


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
    is `none`, `timm` (published weights), a run or model folder, a weights file or a folder of the hub that holds one;
    a head of another size starts anew.
    `device="meta"` builds without memory. `text:FOLDER` is a classifier of texts, see `model/text_build.py`. Raises
    `ValueError` for an unknown name or override, with near matches.

    >>> create_model("deit_tiny", classes=10, depth=2).head.fc.out_features
    10
    """
    pretrained = False
    if name.startswith("text:"):
        from vitrail.model.text_build import create_text_model

        if image_size is not None:
            raise ValueError(f"model.image_size: {name} reads texts; its size is --model.trunk.length")
        options: dict[str, Any] = {"head": head, "weights": weights, "device": device, "multilabel": multilabel}
        model = create_text_model(name, classes=class_names(2 if classes is None else classes), **options, **overrides)
    else:
        parts, default_classes = _parts(name, image_size, head, overrides)
        pretrained = weights == "timm" and isinstance(parts.trunk, TimmBackbone)
        model = assemble(parts, class_names(classes or default_classes), multilabel, preprocess, device, pretrained)
    if weights != "none":
        from vitrail.model.weights import start_from, state_published

        state_published(model) if pretrained else start_from(model, name, weights)
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
    changes = overrides if image_size is None else {**overrides, "image_size": image_size}
    trunk = build(type(spec.trunk), {k: plain(v) for k, v in changes.items()}, spec.trunk)
    return Parts(trunk, spec.head if head is None else head_config(head), name), spec.classes


def make_adaptive(model: Classifier, adaptive: str | AdaptiveConfig | Mapping[str, Any] | None) -> Classifier:
    """The same weights under another adaptive policy: a kind of `AdaptiveConfig` or one with options (none: without).

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
    parts = replace(parts, trunk=build(TrunkConfig, {"adaptive": plain(adaptive)}, parts.trunk))
    first = next(model.parameters())
    adapted = assemble(parts, model.classes, model.multilabel, model.preprocess, first.device)
    learned = {name: value for name, value in adapted.state_dict().items() if name.startswith("trunk.policy.")}
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("trunk.policy.")}
    adapted.load_state_dict({**learned, **weights})
    adapted.stated = {name: value for name, value in model.stated.items() if name != "figures"}  # of another model
    return adapted.to(first.dtype).train(model.training)


def replace_head(
    model: Classifier, head: str | HeadConfig, classes: int | Sequence[str] | None = None
) -> tuple[Classifier, list[str]]:
    """The same trunk, weights included, under another head; returns it and notes on what was adapted.

    Class tokens that the new head needs and the old trunk lacks start anew, with positions of zero. An adapter in use
    is merged.
    """
    model = without_adapters(model)
    parts = replace(build(Parts, model.spec), head=head_config(head))
    names = model.classes if classes is None else class_names(classes)
    new = assemble(parts, names, model.multilabel, model.preprocess, next(model.parameters()).device)
    notes: list[str] = []
    state, ready = model.trunk.state_dict(), new.trunk.state_dict()
    for name, target in ready.items():
        value = state.get(name)
        if name == "pos_embed" and value is not None and value.shape != target.shape:
            before, after = int(model.trunk.placed_prefix), int(new.trunk.placed_prefix)  # type: ignore[arg-type]
            kept = value[:, :before][:, :after]
            fresh = value.new_zeros(1, after - kept.shape[1], value.shape[-1])
            value = torch.cat([kept, fresh, value[:, before:]], 1)
            notes.append(f"positions of class tokens: {before} -> {after}")
        if value is not None and value.shape == target.shape:
            ready[name] = value
        else:
            notes.append(f"trunk.{name} starts anew")
    new.trunk.load_state_dict(ready)
    new.stated = dict(model.stated)
    return new.train(model.training), notes
