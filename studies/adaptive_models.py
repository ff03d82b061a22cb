"""The models of the study of adaptive computation, each trained once and kept.

base       plain ViT                                  from scratch
ats        samples tokens, share 1                    from base
avit       tokens halt                                from base
adavit     drops patches, heads and branches          from base
defended   avit, on images with its own patches       from avit
control    as many further steps without patches      from avit

Images may be larger than they are stored (`--pixels`): 56 makes 196 tokens of four pixels a side, 128 as many tokens as
32, of sixteen pixels a side, so that a patch of four tokens has 3,072 values and not 192.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device_runs import DeviceRuns
from found import Found, KeptModels
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.data.augment.pixel_ops import CropBoxes, resampled
from vitrail.data.config import AugmentConfig, Interpolation, PreprocessConfig
from vitrail.data.loading.device_loader import DeviceImages, stored_size
from vitrail.data.preprocess import Preprocess
from vitrail.learn.attack_config import DefenceConfig
from vitrail.measure.compute import Change, spent, worst_case
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import Adavit, Ats, Avit
from vitrail.recipes import recipe, with_values

EPOCHS = {"base": 30, "longer": 15, "ats": 10, "avit": 15, "adavit": 15, "defended": 8, "control": 8}
TUNED = {"optim.lr": 3e-4, "optim.warmup": 1.0}  # of every run that does not begin from scratch
FIRST_PONDER, FURTHER, TRIES = 0.05, 4.0, 4  # where the search for a ponder weight begins, its factor, how long
SAVED = (0.3, 0.5)  # of all multiply-accumulates, wanted of A-ViT
SMOKE = {
    "data.batch": 50,
    "optim.steps": 4,
    "model.trunk": {"depth": 3, "width": 48, "heads": 3},
}
SMOKE_DEFENCE = {"every": 1, "inner_steps": 1}
PATCH = {32: 4, 56: 4, 128: 16}  # side of a token by side of an image
CHUNK = 1000  # images that are resized at once


class ResizedImages(DeviceImages):
    """Images resized on the device, once: a processor would take a minute for them."""

    @property
    def pixels(self) -> Tensor:
        """[rows, 3, size, size] bytes."""
        if self._pixels is None:
            config = self.preprocess.config
            own = stored_size(self.split, AugmentConfig(crop="resized"), self.preprocess)
            assert own is not None, "no image could be read"
            small = Preprocess(replace(config, size=min(own), crop_ratio=1.0))
            stored = DeviceImages(self.split, None, small, device=self.device).pixels
            made = [_resized(images, config.size, config.interpolation) for images in stored.split(CHUNK)]
            self._pixels = torch.cat(made)
        return self._pixels


def _resized(images: Tensor, size: int, interpolation: Interpolation) -> Tensor:
    """Bytes [images, 3, size, size] of whole images."""
    zero = torch.zeros(len(images), device=images.device)
    whole = CropBoxes(zero, zero, zero + images.shape[2], zero + images.shape[3])
    return resampled(images.float(), whole, size, interpolation).to(torch.uint8)


class Models(KeptModels):
    """Those of this study."""

    def __init__(self, runs: DeviceRuns, folder: Path, found: Found, smoke: bool, pixels: int = 32) -> None:
        super().__init__(folder, found, runs.device)
        self.runs, self.smoke, self.pixels = runs, smoke, pixels

    def __call__(self, name: str, seed: int) -> Classifier:
        if (name, seed) == ("avit", 0):  # was trained when the weight was chosen
            name = f"avit-{self.ponder():.4g}"
        model = super().__call__(name, seed)
        if model.preprocess.size != self.pixels and not self.smoke:
            raise ValueError(f"{self.place(name, seed)} is a model of {model.preprocess.size} pixels")
        return model

    def training(self, name: str, seed: int) -> Callable[[], Classifier]:
        start = self._start(name, seed)
        return lambda: self._trained(self.config(name), start, seed, compiled=name in ("base", "longer"))

    def config(self, name: str) -> RunConfig:
        """How a model is trained."""
        config = recipe("small-defence" if name in ("defended", "control") else "small-deit")
        changes = {"optim.epochs": float(EPOCHS[name.partition("-")[0]]), **({} if name == "base" else TUNED)}
        config = with_values(config, {**changes, "model.head": None})  # policies ask the class token
        config = with_values(config, SMOKE) if self.smoke else config
        if self.pixels != 32:
            config = with_values(config, self._sized(config))
        if isinstance(config.objective, DefenceConfig):
            attack = replace(config.objective.attack, size=config.objective.attack.size * self.pixels // 32)
            defence = replace(config.objective, attack=attack, **(SMOKE_DEFENCE if self.smoke else {}))
            config = replace(config, objective=defence if name == "defended" else defence.labels)
        return config

    def _sized(self, config: RunConfig) -> dict[str, Any]:
        """Settings of images of another size: the same crops, in other pixels."""
        return {
            "model.image_size": self.pixels,
            "model.trunk": {**config.model.trunk, "patch": PATCH[self.pixels]},
            "data.crop_ratio": 1.0,
            "data.augment.padding": config.data.augment.padding * self.pixels // 32,
        }

    def _trained(self, config: RunConfig, start: Classifier | None, seed: int, compiled: bool = False) -> Classifier:
        """Only where one shape serves several long runs does compilation pay: elsewhere it takes what it saves."""
        self.keep_resized(config)
        step, _ = self.runs.trained(config, seed, model=start, compiled=compiled)
        model = step.model
        assert isinstance(model, Classifier)
        return model

    def _start(self, name: str, seed: int) -> Classifier | None:
        if name == "base":
            return None
        if name in ("longer", "defended", "control"):
            return copy.deepcopy(self("base" if name == "longer" else "avit", seed)).requires_grad_(True)
        policy: Ats | Avit | Adavit = Ats() if name == "ats" else Adavit()
        if name.startswith("avit"):
            weight = name.partition("-")[2]
            policy = replace(self.gates(seed), ponder=float(weight) if weight else self.ponder())
        return make_adaptive(self("base", seed), policy)

    def keep_resized(self, config: RunConfig) -> None:
        """Let runs of this configuration share training images that were resized on the device."""
        if self.pixels == 32:
            return
        train, ready = self.runs.data["train"], Preprocess(PreprocessConfig(size=self.pixels, crop_ratio=1.0))
        shared = next(iter(self.runs.images.values()), None) or ResizedImages(
            train, None, ready, device=self.runs.device
        )
        self.runs.images.setdefault((config.data.augment.crop, config.data.augment.padding), shared)

    @contextmanager
    def cast(self) -> Iterator[None]:
        """No gradients, and the precision of evaluation."""
        kind, autocast = self.runs.device.type, self.runs.autocast
        with torch.no_grad(), torch.autocast(kind, autocast, enabled=autocast is not None):
            yield

    def some(self, split: str) -> Tensor:
        """One batch of images."""
        return next(iter(self.runs.judged(split, self("base", 0)))).images

    def spend(self, model: Classifier, split: str = "test", change: Change | None = None) -> dict[str, Any]:
        """Accuracy and cost of an adaptive model on a split."""
        few = 5 * self.runs.batch if split == "train" else None
        loader = self.runs.judged(split, model, few)
        found, most = spent(model, loader, change=change, autocast=self.runs.autocast), worst_case(model)
        tokens = sum(found.tokens) / len(found.tokens)
        figures = {"split": split, "top1": found.top1, "macs": found.macs, "share": found.macs / most, "tokens": tokens}
        return {**figures, "worst_case": most}

    def gates(self, seed: int) -> Avit:
        """A-ViT with a gate through which nothing goes at the start, as far open as that allows.

        The published scale of 10 would leave a trained stream far out on the sigmoid, where nothing can be learned: the
        scale is one over the standard deviation of the first channel, and the centre the lowest that holds at least 99
        of 100 tokens until the last block.
        """

        def make() -> dict[str, Any]:
            model = self("base", seed)
            names = [f"tokens.{i}" for i in range(len(model.trunk.blocks) - 1)]  # type: ignore[arg-type]
            with self.cast():
                captured = model.outputs(self.some("val"), want=set(names)).captured
            first = torch.stack([captured[name][..., 0].float() for name in names])  # [blocks, batch, tokens]
            scale = min(10.0, 1 / float(first.std().clamp(min=1e-3)))
            for above in range(1, 41):
                center = scale * float(first.mean()) + above / 4
                halting = (torch.sigmoid(scale * first - center).sum(0) > 1 - Avit.eps).float().mean()
                if float(halting) < 0.01:
                    break
            return {"gate_scale": round(scale, 4), "gate_center": round(center, 4), "halting": float(halting)}

        row = self.found.row("choice", "avit gate", "first channel", seed, make)
        assert row is not None, "the gate of A-ViT could not be found"
        return Avit(gate_scale=row["gate_scale"], gate_center=row["gate_center"])

    def ponder(self) -> float:
        """A weight of the ponder loss that saves 30 to 50 % of the cost; seed 0, validation images."""
        weight, low, high, tried = FIRST_PONDER, 0.0, math.inf, {}
        middle = sum(SAVED) / 2
        for _ in range(TRIES):
            name = f"avit-{weight:.4g}"
            row = self.found.row("choice", name, "on val", 0, lambda n=name: self.spend(self(n, 0), "val"))
            assert row is not None, f"A-ViT with a ponder weight of {weight:.4g} could not be trained"
            saved = 1 - row["share"]
            tried[weight] = saved
            if SAVED[0] <= saved <= SAVED[1]:
                break
            low, high = (weight, high) if saved < SAVED[0] else (low, weight)
            weight = math.sqrt(low * high) if low and high < math.inf else FURTHER * low or high / FURTHER
        return min(tried, key=lambda w: abs(tried[w] - middle))
