"""The recipe of `vitrail train DATA`: chosen by the weights, the images and the machine that are there.

Fine-tuning needs far fewer images than training from scratch, so published weights come first. A CPU gets a small
network, and as many epochs as fit into some minutes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vitrail.config import RunConfig, from_mapping
from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.open import open_source
from vitrail.engine.device import choose_device
from vitrail.model.build import create_model
from vitrail.model.cost import cost
from vitrail.model.trunks.timm_trunk import local_weights
from vitrail.model.zoo import ZOO
from vitrail.recipes import recipe, with_values
from vitrail.recipes.row import flat

SMALL = 64  # pixels of the shorter side up to which images are no photographs
MINUTES, CORE_SPEED = 5.0, 1e10  # of training on a CPU; multiply-accumulates per second and core, loading included
EPOCHS, SAMPLES = (15, 100), 16  # fewest and most epochs that are chosen by time; images whose size is read


PHOTOS_ON_CPU = {  # by count of operations, Muon's steps would cost more than the network
    "data": {"batch": 32, "augment": {"mixup": 0.0, "cutmix": 0.0}},
    "model": {"name": "timm:resnet18", "image_size": 64},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
    "engine": {"ema": 0.98, "evaluate_every": 5.0, "checkpoint_every": 5.0},
}
SMALL_IMAGES = ("demo", {"data.augment": {"padding": 3, "flip": 0.5}})
CHOICES: dict[tuple[str, str, str], tuple[str, Mapping[str, Any]]] = {  # images, weights, device: recipe, changes to it
    ("photographs", "published", "accelerator"): ("finetune", {}),
    ("photographs", "published", "CPU"): ("finetune", {"data.batch": 32, "model.name": "deit_tiny"}),
    ("photographs", "none", "accelerator"): ("scratch", {}),
    ("photographs", "none", "CPU"): ("scratch", PHOTOS_ON_CPU),
    ("small images", "none", "accelerator"): SMALL_IMAGES,
    ("small images", "none", "CPU"): SMALL_IMAGES,
}


def choose_run(uri: str, values: Mapping[str, Any]) -> tuple[RunConfig, tuple[str, str]]:
    """The configuration for these data, with nested settings over it, and two lines: the choice and its reasons.

    Settings in `values` win; a model that they name replaces the chosen one. Raises `ValueError` for data that are no
    images with labels: they want a recipe by name.
    """
    data = open_source(uri)
    if data.holds_texts or data.unlabelled:
        what = "texts" if data.holds_texts else "images without labels"
        raise ValueError(f"{uri} holds {what}: name a recipe for them (vitrail list recipes)")
    images, side = sum(map(len, data.splits.values())), _side(data)
    device = "CPU" if choose_device(str(dict(values.get("engine") or {}).get("device", "auto"))).type == "cpu" else ""
    kind, device = "small images" if side <= SMALL else "photographs", device or "accelerator"
    weights, reason = "none", "small images are trained from scratch"
    if kind == "photographs":
        model = recipe("finetune", "deit_tiny" if device == "CPU" else None).model.name
        file, problem = local_weights(ZOO[model].timm or "")
        weights = "none" if problem else "published"
        where = "in the local cache" if file else "to be downloaded"
        reason = f"the weights of {model} are {where}" if not problem else "no published weights without a network"
    name, settings = CHOICES[kind, weights, device]
    changes = flat(settings)
    if data.numeric:
        values = {**values, "objective": {"kind": "regression", **dict(values.get("objective") or {})}}
    if kind == "small images":
        changes["model.image_size"] = 7 * max(3, round(side / 7))  # of vit_micro_28, whose patches have 7 pixels
    named = dict(values.get("model") or {}).get("name")
    if named:
        changes = {path: value for path, value in changes.items() if not path.startswith("model.")}
    config = from_mapping(values, with_values(recipe(name, named), {**changes, "data.uri": uri}))
    if device == "CPU" and not {"epochs", "steps"} & dict(values.get("optim") or {}).keys():
        config = with_values(config, {"optim.epochs": _epochs(config, images, len(data.classes))})
    wanted = "values to predict" if data.numeric else f"{len(data.classes)} classes"
    found = f"{images:,} {kind} (shorter side {side} pixels), {wanted}, {device}; {reason}"
    chosen = f"recipe {name}: {config.model.name} at {config.model.image_size or 'its own'} pixels"
    chosen += f", {config.optim.epochs:g} epochs"
    return config, (f"found: {found}", f"chosen: {chosen}; choose otherwise: vitrail train RECIPE --data {uri}")


def _side(data: DataSet) -> int:
    """Median of the shorter side of some images."""
    rows = next(iter(data.splits.values()))
    sides = []
    for row in range(0, len(rows), max(1, len(rows) // SAMPLES)):
        with suppress(BadImage, OSError, ValueError):  # reported when data are checked
            sides.append(min(rows.read(row).size))
    return int(statistics.median(sides)) if sides else SMALL + 1


def _epochs(config: RunConfig, images: int, classes: int) -> int:
    """Epochs for `MINUTES` on this CPU by the model's cost; counted, not timed, so that a restart chooses the same."""
    chosen = config.model
    model = create_model(
        chosen.name, classes=classes, image_size=chosen.image_size, head=chosen.head, device="meta", **chosen.trunk
    )
    work = 3 * cost(model, chosen.image_size).macs * max(1, images)  # a backward pass costs two forward ones
    fits = 60 * MINUTES * CORE_SPEED * (os.cpu_count() or 1) / work
    return int(min(max(fits, EPOCHS[0]), EPOCHS[1]))
