"""Who is measured: models by name or folder, and timm's model of the same architecture beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.api.bench_forms import Form, Ready
from vitrail.api.feed import reads_texts
from vitrail.measure.compute import Change
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import TrunkConfig
from vitrail.model.cost import Cost, cost
from vitrail.model.store import load_model
from vitrail.model.timm import to_timm
from vitrail.model.zoo import ZOO
from vitrail.schema import near


@dataclass
class Subject:
    """One model that is measured."""

    name: str
    module: nn.Module
    size: int  # of the images
    classes: int
    family: str = "vitrail"
    twin: str | None = None  # name of the timm model that is its reference
    multilabel: bool = False
    top1: float | None = None  # as its folder states
    of: str = ""  # the data that this was of
    batch: int = 0
    change: Change | None = None  # laid on its images
    macs: int | None = None  # an image, where it depends on the images and was measured
    forms: dict[Form, Ready] = field(default_factory=dict)

    @cached_property
    def cost(self) -> Cost:
        return cost(self.module, self.size)


def twin_of(name: str) -> str | None:
    """timm's name of the same architecture, as `timm:NAME`; none where timm does not have it."""
    known = ZOO[name].timm if name in ZOO else None
    return None if known is None else f"timm:{known}"


def choose_subjects(
    names: Sequence[str],
    against: str | None,
    image_size: int | None,
    device: torch.device,
    given: Mapping[str, Classifier] | None = None,
) -> tuple[list[Subject], list[str]]:
    """Every named model once, each with its twin behind it where that is asked for; and what a person should know.

    `given` has the models that are no names but themselves; copies of them are measured.
    """
    given = given or {}
    found: dict[str, Subject] = {}
    notes = []
    for name in dict.fromkeys(names):
        if name not in found:  # a twin that was named, too
            own = given.get(name)
            found[name] = subject(name, image_size, device) if own is None else _copied(name, own, image_size, device)
        one = found[name]
        if against is None or one.family == "timm":
            continue
        one.twin = None if name in given else twin_of(name)
        if one.twin is None:
            named = name in ZOO and name not in given
            why = "timm has no model of this architecture" if named else "only names of the zoo have one"
            notes.append(f"{name} has no timm twin: {why}")
        elif one.twin not in found:
            found[one.twin] = twin(one, device)
    return list(found.values()), notes


def subject(name: str, image_size: int | None, device: torch.device) -> Subject:
    """A model of the zoo, of timm, or of a folder. Raises `ValueError` with near matches."""
    if name.startswith("timm:"):
        return timm_subject(name, image_size, device)
    if name in ZOO:
        model = create_model(name, image_size=image_size, device=device)
    elif name.startswith("text:"):
        raise _reads_texts(name)
    elif Path(name).exists():
        model = load_model(name, device)
        if reads_texts(model):
            raise _reads_texts(name)
    else:
        raise ValueError(f"no model and no folder {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    return _of(name, model, image_size)


def _copied(name: str, model: Classifier, image_size: int | None, device: torch.device) -> Subject:
    """A copy: training steps change weights, and the model may live elsewhere."""
    if reads_texts(model):
        raise _reads_texts(name)
    return _of(name, copy.deepcopy(model).to(device), image_size)


def _of(name: str, model: Classifier, image_size: int | None) -> Subject:
    return Subject(
        name,
        model,
        image_size or model.preprocess.size,
        len(model.classes),
        multilabel=model.multilabel,
        top1=model.stated.get("figures", {}).get("top1"),
        of=str(model.stated.get("data", "")),
    )


def _reads_texts(name: str) -> ValueError:
    return ValueError(
        f"{name} reads texts, and bench measures models of images; how fast it trained stands in metrics.jsonl of its "
        "run"
    )


def timm_subject(name: str, image_size: int | None, device: torch.device, **options: Any) -> Subject:
    """timm's own module, without ours around it."""
    model = create_model(name, image_size=image_size, device=device, **options)
    return Subject(name, to_timm(model), model.preprocess.size, len(model.classes), family="timm")


def twin(one: Subject, device: torch.device) -> Subject:
    """timm's model of the same architecture with the same image size, classes and drop path."""
    assert one.twin is not None
    trunk = ZOO[one.name].trunk
    options: dict[str, Any] = {"classes": one.classes}
    if isinstance(trunk, TrunkConfig) and trunk.drop_path:
        options["drop_path_rate"] = trunk.drop_path
    return timm_subject(one.twin, one.size, device, **options)
