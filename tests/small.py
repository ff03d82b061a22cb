"""Tiny models, recipes and weights that several test files use."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vitrail.config import RunConfig
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import CifarResNet, DenoiserConfig, TimmBackbone, TrunkConfig
from vitrail.model.heads.config import ClassAttention, Gramian
from vitrail.model.zoo import ZOO
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.recipes.text_models import LANGUAGE, SEQUENCES, TEXT

TEXTS = (*TEXT, *SEQUENCES, *LANGUAGE)
"""Recipes on text, trained in test_text.py, test_seq2seq.py and test_language_model.py."""
MODELS = [n for n, spec in ZOO.items() if not isinstance(spec.trunk, TimmBackbone)]  # those are large
SMALLER: dict[str, dict[str, object]] = {  # settings of objectives
    "mae": {"decoder_width": 48, "decoder_depth": 1, "decoder_heads": 3},
    "clusters": {"clusters": 4},
    "dino": {"prototypes": 32, "local_size": 16},
    "attack": {"size": 8, "layer_weights": ()},
    "defence": {"every": 1, "inner_steps": 2, "attack.size": 8},
}
SMALL = {"depth": 1, "width": 48, "heads": 3, "patch": 8}


def quick_of(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Cases of a parametrised test: those that are not among the quick ones are of the slow set."""
    listed = list(cases)
    assert all(case in listed for case in quick)
    rows = [(case if isinstance(case, tuple) else (case,), case in quick) for case in listed]
    return [pytest.param(*values, marks=() if is_quick else pytest.mark.slow) for values, is_quick in rows]


def shake(model: nn.Module) -> None:
    """Random weights and statistics everywhere, so that nothing hides behind a start of 0, 1 or 1e-6."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)


def small(name: str, **changes: object) -> Classifier:
    options = {"classes": 5, "depth": 2, "width": 64, "heads": 2, "image_size": 64, "patch": 16, **changes}
    model = create_model(name, **options).eval()
    shake(model)
    return model


def reduced_model(name: str) -> tuple[dict[str, Any], int]:
    """Keyword arguments that make a row small, and its image size."""
    spec = ZOO[name]
    options: dict[str, Any] = {"classes": ["a", "b", "<c>"]}
    if isinstance(spec.head, Gramian):
        small = replace(spec.head, heads=2, gram_width=16, attention_width=16, attention_heads=2, embed_groups=2)
        options["head"] = small
    if isinstance(spec.head, ClassAttention):
        options["head"] = replace(spec.head, heads=2)
    if isinstance(spec.trunk, TrunkConfig):
        size = 4 * spec.trunk.patch
        heads = 1 if spec.trunk.heads == 1 else 2
        return {**options, "depth": 2, "width": 64, "heads": heads, "image_size": size}, size
    if isinstance(spec.trunk, CifarResNet):
        return {**options, "depth": 11 if spec.trunk.block == "bottleneck" else 8}, 32
    if isinstance(spec.trunk, DenoiserConfig):
        return {**options, "depth": 1, "width": 16, "multipliers": (1, 2), "image_size": 16}, 16
    return options, 64


@cache
def different_models() -> list[str]:
    """The first of all models that are the same once reduced (sizes of one family mostly are)."""
    first: dict[str, str] = {}
    for name in MODELS:
        options, size = reduced_model(name)
        spec = create_model(name, device="meta", **options).spec
        free = {"drop_path": 0, "drop_path_rule": 0, "layerscale": spec["trunk"].get("layerscale") is not None}
        key = {**spec, "name": "", "trunk": {**spec["trunk"], **free}}
        first.setdefault(repr((key, size)), name)
    return list(first.values())


@cache
def covering_models() -> list[str]:
    """Models that have, among them, every choice that any has: stems, mixers, norms, heads, and their switches."""
    covered: set[tuple[str, object]] = set()
    chosen = []
    for name in different_models():
        spec = create_model(name, device="meta", **reduced_model(name)[0]).spec
        parts = {part: value for part in ("trunk", "head") for part, value in _flat(spec[part], part)}
        choices = {row for row in parts.items() if isinstance(row[1], str | bool)}
        if choices - covered:
            covered |= choices
            chosen.append(name)
    return chosen


def _flat(settings: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Settings of a part and of those in it, by their paths."""
    rows = [(f"{prefix}.{name}", value) for name, value in settings.items()]
    inner = [row for path, value in rows if isinstance(value, dict) for row in _flat(value, path)]
    return [row for row in rows if not isinstance(row[1], dict)] + inner


@cache
def quick_recipes() -> list[str]:
    """Recipes on images that cover every objective, kind of trunk, adapter, adaptive policy and part that is tuned.

    That of diffusion, which takes longer, is trained in test_diffusion.py.
    """
    covered: set[tuple[str, object]] = set()
    chosen = []
    for name in RECIPES:
        config = recipe(name)
        row = ZOO.get(config.model.name)
        kinds = {
            ("objective", config.objective.kind),
            ("trunk", type(row.trunk) if row else "timm"),
            ("adapter", getattr(config.model.adapter, "kind", None)),
            ("adaptive", getattr(config.model.trunk.get("adaptive"), "kind", None)),
            ("tune", config.optim.tune),
        }
        if name not in TEXTS and config.objective.kind != "diffusion" and kinds - covered:
            covered |= kinds
            chosen.append(name)
    return chosen


def reduced_recipe(name: str, teacher: Path, out: Path) -> RunConfig:
    """The recipe on a model and data small enough for two steps."""
    config = recipe(name)
    changes: dict[str, Any] = {
        "out": str(out),
        "data.uri": "synthetic:shapes?n=60&size=32",
        "data.batch": 12,
        "data.workers": 0,
        "data.check": "off",
        "optim.steps": 2,
        "engine.device": "cpu",
        "engine.accumulate": 1,
        "model.image_size": 32,
        "model.weights": "none",
    }
    if config.model.name.startswith("timm:"):
        changes["model.name"] = "timm:test_resnet"
    elif config.model.name.startswith("cifar_resnet"):
        changes["model.trunk"] = {"depth": 11 if "bottleneck" in config.model.name else 8}
    else:
        known = SMALL if "resmlp" not in config.model.name else {k: SMALL[k] for k in ("depth", "width", "patch")}
        changes["model.trunk"] = known
    if config.objective.kind == "diffusion":  # as a classifier it tries every class: the smallest there is
        changes["model.trunk"] = {"width": 8, "depth": 1, "multipliers": (1, 1), "heads": 1, "draws": 1}
        changes["model.image_size"] = 16
    if name == "gramian":  # its trunk is one of timm's large ones
        changes["model.name"] = "ga_vit_tiny_32"
    elif name == "sot":
        changes["model.name"] = "sot_7_32"
    if config.objective.kind in ("distillation", "compres", "simreg", "clusters", "crd"):
        changes["objective.teacher"] = str(teacher)
    if getattr(config.objective, "bank", 0):
        changes["objective.bank"] = 240
    changes |= {f"objective.{name}": value for name, value in SMALLER.get(config.objective.kind, {}).items()}
    if config.objective.kind == "attention_transfer":  # its layers are counted in a deeper model
        changes |= {"objective.teacher": str(teacher), "objective.layers": "all"}
    if config.optim.tune != "full":
        changes |= {"model.name": "vit_tiny_32", "model.trunk": SMALL, "model.weights": str(teacher)}
    if config.data.shots is not None:  # of the few images, fewer
        changes["data.shots"] = 2
    if config.data.level:
        changes["data.level"] = "coarse"
    adaptive = config.model.trunk.get("adaptive")
    if adaptive is not None:  # its layers are counted in a deeper model; gates leave the first block alone
        smaller = replace(adaptive, **({"layers": (), "cap": (1.0,)} if adaptive.kind == "ats" else {}))
        changes["model.trunk"] = {**SMALL, "depth": 2, "adaptive": smaller}
    return with_values(config, changes)
