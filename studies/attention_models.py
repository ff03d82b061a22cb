"""The models of the study of attention transfer, each trained once and kept.

mae, mae-other, mae-shapes    masked autoencoders of all training images, without labels; one for all seeds
everything else               learned from few labels, in one of the WAYS: alike in all but what the way says
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from device_runs import DeviceRuns
from found import Found, KeptModels

from vitrail.config import (
    AttentionTransferConfig,
    AugmentConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SupervisedConfig,
)
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import LinearHead
from vitrail.recipes import recipe, with_values
from vitrail.run.train import build_model

FAMILIES = ("scratch", "tune", "copy", "distill")
AUTOENCODERS = {"mae": "whole", "mae-other": "other", "mae-shapes": "shapes"}  # name -> images
RATES = (1.7e-4, 5e-4, 1.5e-3, 4.5e-3)  # one is chosen for each family, on val, with seed 0
SHAPES, BOXES = "synthetic:shapes?size=32&n=10000", 800  # pictures in all, and those whose boxes are known
MODEL = ModelConfig(name="vit_tiny_32", drop_path=0.0, trunk={"depth": 8, "heads": 6})  # enough heads to choose from
MAE = {"optim.epochs": 150.0, "model": MODEL}
FEW = RunConfig(
    # No operations on single images: they would take longer than the model does.
    data=DataConfig(uri="", batch=300, augment=AugmentConfig(crop="pad", padding=4, mixup=0.8, cutmix=1.0)),
    model=MODEL,
    optim=OptimConfig(epochs=60, warmup=6, weight_decay=0.05, clip=1.0),
    objective=SupervisedConfig(smoothing=0.1),
    engine=EngineConfig(ema=0.99),
)
PARTLY = {"optim.betas": (0.9, 0.95)}  # of students that copy some layers or heads only, as the paper's
ON_BOXES = {"data.batch": 100, "optim.epochs": 80.0}
STILL = {"crop": "evaluation", "flip": 0.0, "mixup": 0.0, "cutmix": 0.0}  # boxes stay where they are
SMOKE: dict[str, Any] = {"data.batch": 20, "optim.steps": 2, "model.trunk": {"depth": 4, "width": 48, "heads": 3}}
SMOKE_SHAPES, SMOKE_BOXES = "synthetic:shapes?size=32&n=100", 40


@dataclass(frozen=True)
class Way:
    """How a student learns, and where its figures go."""

    part: str  # of the study
    subject: str
    what: str
    family: str  # whose learning rate it has
    teacher: str = ""  # whose attention it takes: a model, or random
    start: str = ""  # whose weights it begins with
    options: Mapping[str, Any] = field(default_factory=dict)  # of AttentionTransferConfig
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the configuration


def ways(depth: int, heads: int) -> dict[str, Way]:
    """All of them by name, in the order of their tables."""
    most = f"first:{round(0.75 * depth)}"  # three quarters of the layers, as the paper distils
    copy, distill = {"mode": "copy"}, {"mode": "distill", "layers": most}
    quarters = [depth // 4, depth // 2, 3 * depth // 4]
    some = sorted({max(1, heads * k // 6) for k in (1, 2, 4)})
    made = {
        "scratch": Way("main", "scratch", "no teacher", "scratch"),
        "tune": Way("main", "fine-tune", "pre-trained", "tune", start="mae"),
        "copy": Way("main", "copy", "pre-trained", "copy", "mae", options=copy),
        "distill": Way("main", "distill", "pre-trained", "distill", "mae", options=distill),
        "copy-tuned": Way("main", "copy", "fine-tuned", "copy", "tune", options=copy),
        "distill-tuned": Way("main", "distill", "fine-tuned", "distill", "tune", options=distill),
        "copy-random": Way("main", "copy", "random", "copy", "random", options=copy),
        "distill-random": Way("main", "distill", "random", "distill", "random", options=distill),
    }
    for what in ("q", "k", "v"):
        made[f"copy-{what}"] = Way("targets", "copy", what, "copy", "mae", options={**copy, "target": what})
    made["distill-q"] = Way("targets", "distill", "q", "distill", "mae", options={**distill, "target": "q"})
    features = {"mode": "distill", "target": "features", "layers": "last:1"}
    made["features"] = Way("targets", "distill", "features of the last block", "distill", "mae", options=features)
    for over in ("examples", "layers", "heads", "queries"):
        taken = {**copy, "aggregate": over}
        made[f"mean-{over}"] = Way("averages", "copy, averaged over", over, "copy", "mae", options=taken)
    for end in ("first", "last"):
        for k in quarters:
            taken = {**copy, "layers": f"{end}:{k}"}
            way = Way("layers", f"copy, {end} layers", str(k), "copy", "mae", options=taken, changes=PARTLY)
            made[f"copy-{end}-{k}"] = way
    for k in [*quarters[:2], depth]:
        taken = {**distill, "layers": f"first:{k}"}
        made[f"distill-first-{k}"] = Way("layers", "distill, first layers", str(k), "distill", "mae", options=taken)
    for k in some:
        taken = {**copy, "heads": f"first:{k}"}
        made[f"copy-heads-{k}"] = Way("heads", "copy, heads", str(k), "copy", "mae", options=taken, changes=PARTLY)
    for weight in (0.1, 0.3, 3.0, 10.0):
        taken = {**distill, "weight": weight}
        made[f"distill-weight-{weight:g}"] = Way(
            "weights", "distill, weight", f"{weight:g}", "distill", "mae", options=taken
        )
    made["tune-other"] = Way("other", "fine-tune", "pre-trained on other data", "tune", start="mae-other")
    for mode, options in (("copy", copy), ("distill", distill)):
        way = Way("other", mode, "pre-trained on other data", mode, "mae-other", options=options)
        made[f"{mode}-other"] = way
    for teacher, start in (("mae", "mae"), ("mae-other", "mae"), ("mae", "mae-other")):
        way = Way("mix", f"copy from {teacher}", f"student begins as {start}", "copy", teacher, start, copy)
        made[f"mix-{teacher}-{start}"] = way
    return made


class Data:
    """The images of the study, on the device once they are wanted."""

    def __init__(self, uri: str, other: str | None, fraction: float, smoke: bool) -> None:
        self.uri, self.other_uri, self.fraction, self.smoke = uri, other, fraction, smoke

    def _runs(self, uri: str, limit: int | None = None) -> DeviceRuns:
        if self.smoke:
            return DeviceRuns(uri, limit=min(limit or 120, 120), most=40, batch=20)
        return DeviceRuns(uri, limit=limit)

    @cached_property
    def whole(self) -> DeviceRuns:
        return self._runs(self.uri)

    @cached_property
    def few(self) -> DeviceRuns:
        """The same images for all seeds: as many as `fraction` of the labels is, of every class in proportion."""
        return self._runs(self.uri, round(self.fraction * len(self.whole.data["train"])))

    @cached_property
    def other(self) -> DeviceRuns:
        if self.other_uri is None:
            raise ValueError("say which images are the other ones: --other URI")
        return self._runs(self.other_uri)

    @cached_property
    def shapes(self) -> DeviceRuns:
        return self._runs(SMOKE_SHAPES if self.smoke else SHAPES)

    @cached_property
    def boxed(self) -> DeviceRuns:
        return self._runs(SMOKE_SHAPES, SMOKE_BOXES) if self.smoke else self._runs(SHAPES, BOXES)


class Models(KeptModels):
    """Those of this study."""

    def __init__(self, data: Data, folder: Path, found: Found) -> None:
        super().__init__(folder, found, data.few.device)
        self.data, self.smoke = data, data.smoke
        trunk = SMOKE["model.trunk"] if self.smoke else MODEL.trunk
        self.ways = ways(trunk["depth"], trunk["heads"])

    def resolved(self, name: str, seed: int) -> tuple[str, int]:
        """Under which name and seed a model is kept."""
        if name.startswith("mae"):
            return name, 0
        if name in FAMILIES and seed == 0:  # was trained when the rate was chosen
            return f"{name}-rate{self.rate(name):g}", 0
        return name, seed

    def __call__(self, name: str, seed: int) -> Classifier:
        return super().__call__(*self.resolved(name, seed))

    def folder_of(self, name: str, seed: int) -> str:
        """Where a model is kept; it is trained now where it is not there."""
        self(name, seed)
        return str(self.place(*self.resolved(name, seed)))

    def rate(self, family: str) -> float:
        """The learning rate of a family: the best one on validation images."""
        found = {}
        for rate in RATES[1:3] if self.smoke else RATES:
            name = f"{family}-rate{rate:g}"

            def make(name: str = name) -> dict[str, Any]:
                model = super(Models, self).__call__(name, 0)
                return {"split": "val", "top1": self.data.few.top1(model, "val")}

            row = self.found.row("choice", family, f"rate {rate:g}", 0, make)
            if row is None:
                raise RuntimeError(f"{name} could not be trained")
            found[rate] = row["top1"]
        return max(found, key=lambda rate: found[rate])

    def training(self, name: str, seed: int) -> Callable[[], Classifier]:
        if name.startswith("mae"):
            runs: DeviceRuns = getattr(self.data, AUTOENCODERS[name])
            return lambda: self.trained(runs, self._small(with_values(recipe("small-mae"), MAE)), seed, compiled=True)
        base, _, rate = name.partition("-rate")
        config, way = self.config(base, float(rate) if rate else None, seed), self.ways[base]
        return lambda: self.trained(self.data.few, config, seed, start=bool(way.start))

    def config(self, name: str, rate: float | None, seed: int) -> RunConfig:
        """How a student learns from few labels; its teacher and the model it begins as are trained where needed."""
        way = self.ways[name]
        chosen = self.rate(way.family) if rate is None else rate
        config = with_values(FEW, {"optim.lr": chosen, **way.changes})
        if way.start:
            config = with_values(config, {"model.weights": self.folder_of(way.start, seed)})
        if way.family == "tune":
            config = with_values(config, {"optim.layer_decay": 0.75})
        if way.teacher:
            teacher = "random" if way.teacher == "random" else self.folder_of(way.teacher, seed)
            assert isinstance(config.objective, SupervisedConfig)
            transfer = AttentionTransferConfig(teacher=teacher, labels=config.objective, **way.options)
            config = replace(config, objective=transfer)
        return self._small(config)

    def _small(self, config: RunConfig) -> RunConfig:
        return with_values(config, SMOKE) if self.smoke else config

    def trained(
        self, runs: DeviceRuns, config: RunConfig, seed: int, *, start: bool = False, compiled: bool = False
    ) -> Classifier:
        """Only autoencoders are compiled: in runs as short as all others compilation takes what it saves."""
        torch.manual_seed(seed)
        model = build_model(config.model, config, runs.data)
        if start and isinstance(model.head, LinearHead):
            model.head.reset_parameters()  # an autoencoder's is new as well, and would be the same for all seeds
        made = runs.trained(config, seed, model=model, compiled=compiled)[0].model
        assert isinstance(made, Classifier)
        gc.collect()  # the step's graph holds all of its memory, and dozens of runs follow one another
        return made
