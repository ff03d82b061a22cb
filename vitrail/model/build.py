"""Classifiers from names, specifications and configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from vitrail.data.config import PreprocessConfig
from vitrail.model.classifier import Classifier
from vitrail.model.config import TrunkConfig
from vitrail.model.heads.build import build_head
from vitrail.model.heads.config import HeadConfig
from vitrail.model.trunk import Trunk
from vitrail.model.zoo import ZOO
from vitrail.schema import build, near, plain


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
    classes: int | Sequence[str] = 1000,
    image_size: int | None = None,
    head: str | HeadConfig | None = None,
    weights: str = "none",
    device: str | torch.device | None = None,
    multilabel: bool = False,
    preprocess: PreprocessConfig | None = None,
    **overrides: Any,
) -> Classifier:
    """A classifier by name.

    Everything the name fixes can be overridden by keyword (`depth=4`, `width=64`, `drop_path=0.1`, ...). `weights` is
    `none`, `timm` (published weights), a run or model folder, or a weights file; a head of another size starts anew.
    `device="meta"` builds without memory. Raises `ValueError` for an unknown name or override, with near matches.

    >>> create_model("deit_tiny", classes=10, depth=2).head.fc.out_features
    10
    """
    if name.startswith("timm:"):
        from vitrail.model.timm import create_timm

        model = create_timm(
            name.removeprefix("timm:"), class_names(classes), image_size, head, weights == "timm", device, overrides
        )
        model.multilabel = multilabel
        if preprocess is not None:
            model.preprocess = preprocess
        if weights not in ("none", "timm"):
            _start_from(model, name, weights)
        return model
    if name not in ZOO:
        raise ValueError(f"no model {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    spec = ZOO[name]
    known = {f.name for f in fields(TrunkConfig)}
    for key in overrides:
        if key not in known:
            raise ValueError(f"{name} has no part {key!r}{near(key, known)}")
    trunk = replace(spec.trunk, **overrides)
    if image_size is not None:
        trunk = replace(trunk, image_size=image_size)
    chosen = spec.head if head is None else _head_config(head)
    described = {"name": name, "trunk": plain(trunk), "head": plain(chosen)}
    model = from_spec(
        described,
        classes=class_names(classes),
        multilabel=multilabel,
        preprocess=preprocess or default_preprocess(trunk.image_size),
        device=device,
    )
    if weights != "none":
        _start_from(model, name, weights)
    return model


def default_preprocess(size: int) -> PreprocessConfig:
    """Small images are already cropped to their object, so nothing more is cut off."""
    return PreprocessConfig(size=size, crop_ratio=1.0 if size <= 64 else 0.875)


def from_spec(
    spec: dict[str, Any],
    *,
    classes: Sequence[str],
    multilabel: bool,
    preprocess: PreprocessConfig,
    device: str | torch.device | None,
) -> Classifier:
    """The architecture that `spec` describes, with new weights."""
    if "timm" in spec:
        from vitrail.model.timm import from_timm_spec

        return from_timm_spec(spec, classes, multilabel, preprocess, device)
    trunk_config = build(TrunkConfig, spec["trunk"])
    head_config = _head_config(spec["head"])
    with torch.device(device or "cpu"):
        head = build_head(head_config, trunk_config.width, len(classes))
        trunk = Trunk(trunk_config, prefix=head.prefix, final_norm=not head.own_norm)
    return Classifier(trunk, head, spec=spec, classes=classes, preprocess=preprocess, multilabel=multilabel)


def _head_config(head: Any) -> HeadConfig:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Holder:
        head: HeadConfig

    Holder.__annotations__["head"] = HeadConfig
    return build(Holder, {"head": head}).head


def _start_from(model: Classifier, name: str, weights: str) -> None:
    from vitrail.model.weights import start_from

    start_from(model, name, weights)
