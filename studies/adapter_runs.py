"""The runs of the study of adapters: a base, and everything that adapts it or begins from nothing."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_runs import DeviceRuns
from found import Found, KeptModels

from vitrail.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, SupervisedConfig
from vitrail.engine.optimizer import choose_tuned
from vitrail.engine.step import WARM_UP_STEPS
from vitrail.measure.speed import Way as Timed
from vitrail.measure.speed import in_turns
from vitrail.model.adapters.adapter_file import load_adapter, save_adapter
from vitrail.model.adapters.apply import adapters_of, counts, quantise
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc
from vitrail.model.classifier import Classifier
from vitrail.model.parts.modules import without_adapters
from vitrail.recipes import recipe, with_values
from vitrail.run.train import build_model

VIT = ModelConfig(name="vit_tiny_32")
CROPS = AugmentConfig(crop="pad", padding=4)
BASE = RunConfig(
    data=DataConfig(uri="", batch=500, augment=replace(CROPS, mixup=0.2, cutmix=1.0)),
    model=VIT,
    optim=OptimConfig(lr=1e-3, epochs=40, warmup=3, weight_decay=0.05, clip=1.0),
    objective=SupervisedConfig(smoothing=0.1),
)
ADAPT = RunConfig(
    data=DataConfig(uri="", batch=500, augment=CROPS),
    model=VIT,
    optim=OptimConfig(epochs=4, warmup=0.3, weight_decay=0.0, floor=0.0, clip=1.0),
)
FEW = {"data.batch": 50, "optim.steps": 100, "optim.warmup": 0.0}
SCRATCH = RunConfig(
    data=DataConfig(uri="", batch=256, augment=CROPS),
    model=ModelConfig(name="cifar_resnet20"),
    optim=OptimConfig(name="adam", epochs=15, warmup=0, weight_decay=0.0, floor=0.0),
)
RATES: dict[
    str, tuple[float, ...]
] = {  # of several the best on val, with seed 0, by the way that stands for its family
    "full": (2e-4, 5e-4, 1.2e-3, 3e-3),
    "linear": (2e-3, 1e-2, 5e-2, 0.2),
    "lora": (2e-3, 1e-2, 5e-2, 0.15),
    "nola": (5e-3, 2e-2, 5e-2, 0.15, 0.4),
    "dense": (3e-3,),
    "scratch-lora": (1e-3, 5e-3, 2e-2, 8e-2),
    "scratch-pranc": (5e-3, 2e-2, 8e-2, 0.3),
    "scratch-nola": (5e-3, 2e-2, 8e-2, 0.3),
}
FEW_RATES = (5e-4, 1e-3, 5e-3)  # of few shots (Koohpayegani et al., arXiv 2310.02556), beside those of the family
CHOOSING = 1000  # the sampling that chooses rates; reported ones count from 0
BATCHES = 8  # that steps are timed with, again and again
SMOKE: dict[str, Any] = {"data.batch": 20, "optim.steps": 2}
SMOKE_TRUNK = {"depth": 2, "width": 48, "heads": 3}


@dataclass(frozen=True)
class Way:
    """How a model is adapted or trained, and where its figures go."""

    part: str
    subject: str
    what: str
    family: str  # whose learning rate it has
    stands: bool = False  # the family's rate is chosen with it
    adapter: AdapterConfig | None = None


def nola(k: int, **more: Any) -> Nola:
    return Nola(rank=8, coefficients=k, targets=("mlp",), **more)


def lora(rank: int, **more: Any) -> Lora:
    return Lora(rank=rank, targets=("qv",), **more)


WAYS: dict[str, Way] = {
    "full": Way("main", "full fine-tuning", "all weights", "full", True),
    "linear": Way("main", "linear", "classifier alone", "linear", True),
    "lora-1": Way("main", "LoRA, q and v", "rank 1", "lora", adapter=lora(1)),
    "lora-4": Way("main", "LoRA, q and v", "rank 4", "lora", True, lora(4)),
    "nola-60": Way("main", "NOLA, MLP, rank 8", "k = l = 60", "nola", adapter=nola(60)),
    "nola-250": Way("main", "NOLA, MLP, rank 8", "k = l = 250", "nola", True, nola(250)),
    "nola-1000": Way("main", "NOLA, MLP, rank 8", "k = l = 1000", "nola", adapter=nola(1000)),
    "lora-4-bits-3": Way("bits", "LoRA, rank 4", "trained in 3 bits", "lora", adapter=lora(4, bits=3)),
    "lora-4-bits-2": Way("bits", "LoRA, rank 4", "trained in 2 bits", "lora", adapter=lora(4, bits=2)),
    "nola-250-bits-3": Way("bits", "NOLA, k = l = 250", "trained in 3 bits", "nola", adapter=nola(250, bits=3)),
    "nola-250-bits-2": Way("bits", "NOLA, k = l = 250", "trained in 2 bits", "nola", adapter=nola(250, bits=2)),
    "dense": Way("scratch", "dense", "all weights", "dense", True),
    "scratch-pranc": Way(
        "scratch",
        "PRANC",
        "500 a convolution, 2000",
        "scratch-pranc",
        True,
        Pranc(coefficients=500, head_coefficients=2000, targets=("all",), train_head=False, train_norms=True),
    ),
    "scratch-lora": Way(
        "scratch",
        "LoRA",
        "rank 3",
        "scratch-lora",
        True,
        Lora(rank=3, targets=("all",), train_head=False, train_norms=True),
    ),
    "scratch-nola": Way(
        "scratch",
        "NOLA, rank 8",
        "250 + 250 a convolution, 2000",
        "scratch-nola",
        True,
        recipe("nola-resnet").model.adapter,
    ),
}
ROUNDED = {"lora-4": "LoRA, rank 4", "nola-250": "NOLA, k = l = 250"}  # after training
FEW_WAYS = ("full", "linear", "lora-4", "nola-250")


class Models(KeptModels):
    """The base, trained once."""

    def __init__(self, runs: Runs, folder: Path, found: Found) -> None:
        super().__init__(folder, found, runs.source.device)
        self.runs = runs

    def training(self, name: str, seed: int) -> Callable[[], Classifier]:
        config = self.runs.small(BASE)

        def train() -> Classifier:
            made = self.runs.source.trained(config, seed)[0].model
            assert isinstance(made, Classifier)
            return made

        return train


class Runs:
    """Data, and what is trained on them. Adapters are kept as files, which the next call goes on from."""

    def __init__(self, source: str, target: str, other: str | None, folder: Path, found: Found, smoke: bool) -> None:
        self.uris = {"source": source, "target": target, "other": other}
        self.folder, self.found, self.smoke = folder, found, smoke
        self.models = Models(self, folder, found)
        self._tried: dict[
            tuple[str, float], tuple[Classifier, dict[str, Any]]
        ] = {}  # of seed 0, when a rate was chosen

    def _runs(self, which: str) -> DeviceRuns:
        uri = self.uris[which]
        assert uri is not None
        return DeviceRuns(uri, limit=120, most=40, batch=20) if self.smoke else DeviceRuns(uri)

    @cached_property
    def source(self) -> DeviceRuns:
        return self._runs("source")

    @cached_property
    def target(self) -> DeviceRuns:
        return self._runs("target")

    @cached_property
    def other(self) -> DeviceRuns:
        return self._runs("other")

    def small(self, config: RunConfig) -> RunConfig:
        if not self.smoke:
            return config
        trunk = {} if config.model.name.startswith("cifar") else {"model.trunk": SMOKE_TRUNK}
        return with_values(config, {**SMOKE, **trunk})

    def base(self) -> str:
        """Where the base is; it is trained now where it is not there."""
        self.models("base", 0)
        return str(self.models.place("base", 0))

    def file(self, name: str, seed: int, on: str) -> Path:
        return self.folder / "adapters" / f"{name}-{on}-seed{seed}.safetensors"

    def config(self, way: Way, rate: float, seed: int) -> RunConfig:
        config = SCRATCH if way.part == "scratch" else ADAPT
        adapter = way.adapter
        if adapter is not None and not isinstance(adapter, Lora):  # LoRA's start is random by itself
            adapter = replace(adapter, seed=seed)
        if self.smoke and isinstance(adapter, Pranc):  # its bases are as large as the weights
            adapter = replace(adapter, coefficients=4, head_coefficients=4)
        model = replace(config.model, adapter=adapter)
        if way.part != "scratch":
            model = replace(model, weights=self.base())
        return self.small(with_values(config, {"model": model, "optim.lr": rate}))

    def rate(self, family: str) -> float:
        """The learning rate of a family: the best one on validation images of the target."""
        rates = RATES[family][:2] if self.smoke else RATES[family]
        if len(rates) == 1:
            return rates[0]
        name = next(name for name, way in WAYS.items() if way.family == family and way.stands)
        found = {}
        for rate in rates:

            def make(rate: float = rate) -> dict[str, Any]:
                model, cost = self._tried[name, rate] = self.trained(name, 0, rate=rate)
                return {"split": "val", "top1": self.target.top1(without_adapters(model), "val"), **cost}

            row = self.found.row("choice", family, f"rate {rate:g}", 0, make)
            if row is None:
                raise RuntimeError(f"{name} could not be trained")
            found[rate] = row["top1"]
        return max(found, key=lambda rate: found[rate])

    def trained(
        self, name: str, seed: int, *, runs: DeviceRuns | None = None, rate: float | None = None, **changes: Any
    ) -> tuple[Classifier, dict[str, Any]]:
        """A model trained in one of the ways, and what that took."""
        runs = self.target if runs is None else runs
        model, config = self._begun(name, seed, runs, self.rate(WAYS[name].family) if rate is None else rate)
        if not self.smoke:
            config = with_values(config, changes)
        if runs.fast:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated() if runs.fast else 0, time.monotonic()
        made = runs.trained(config, seed, model=model, compiled=False)[0].model
        runs.wait()
        assert isinstance(made, Classifier)
        cost: dict[str, Any] = {"train_seconds": time.monotonic() - began, **numbers(made)}
        if runs.fast:
            cost["memory"] = torch.cuda.max_memory_allocated() - before
        return made.eval(), cost

    def _begun(self, name: str, seed: int, runs: DeviceRuns, rate: float) -> tuple[Classifier, RunConfig]:
        """A model of one of the ways before its first step, and how it is trained."""
        config = self.config(WAYS[name], rate, seed)
        torch.manual_seed(seed)
        model = build_model(config.model, config, runs.data)
        if name == "linear":
            choose_tuned(model, "head")
        gc.collect()  # the graph of the run before holds all of its memory
        return model, config

    def timed(self, name: str) -> dict[str, Any]:
        """Milliseconds of a step, its batch ready."""
        model, config = self._begun(name, 0, self.target, rate=1e-3)
        step, loader, _ = self.target.prepared(config, 0, model=model, most=BATCHES, compiled=False)
        batches = list(loader)
        work = Timed(lambda i: step.feed(batches[i % len(batches)]), config.data.batch)
        # The first steps are captured as a graph, which is not to be timed.
        seconds, first = (1.0, WARM_UP_STEPS + 1) if self.target.fast else (0.01, 1)
        found = in_turns({name: work}, self.target.device, seconds=seconds, warm_up=first)[name]
        return {"step_ms": 1000 * config.data.batch / found.images_per_second}

    def keep(self, model: Classifier, name: str, seed: int, on: str) -> dict[str, Any]:
        """Write the file of an adapter; its size."""
        if adapters_of(model) is None:
            return {}
        return {"bytes": save_adapter(model, "default", self.file(name, seed, on))}

    def judged(self, name: str, seed: int, on: str = "target") -> dict[str, Any]:
        """The figures of one way."""
        runs: DeviceRuns = getattr(self, on)
        tried = self._tried.get((name, self.rate(WAYS[name].family))) if seed == 0 and on == "target" else None
        model, cost = tried or self.trained(name, seed, runs=runs)
        flat = without_adapters(model)
        found = {"split": "test", "top1": runs.top1(flat, "test"), "val_top1": runs.top1(flat, "val")}
        found["rate"] = self.rate(WAYS[name].family)
        return {**found, **cost, **self.keep(model, name, seed, on)}

    def rounded(self, name: str, seed: int, bits: int) -> dict[str, Any]:
        """The figures of an adapter after training, in few bits: from its file, on the base."""
        path = self.file(name, seed, "target")
        if not path.is_file():
            self.keep(self.trained(name, seed)[0], name, seed, "target")
        config = self.config(replace(WAYS[name], adapter=None), 1.0, seed)
        model = build_model(config.model, config, self.target.data).to(self.target.device)
        quantise(load_adapter(model, path), bits)
        size = save_adapter(model, "default", self.folder / "adapters" / "packed.safetensors", bits=bits)
        return {"split": "test", "top1": self.target.top1(model.eval(), "test"), "bytes": size}

    def few(self, name: str, shots: int, sampling: int) -> dict[str, Any]:
        """The figures of one way with so many images a class of the target, drawn anew in every sampling."""
        rate = self.few_rate(name, shots)
        runs = sampled(self.target, shots, sampling)
        model, cost = self.trained(name, sampling, runs=runs, rate=rate, **FEW)
        return {"split": "test", "top1": runs.top1(without_adapters(model), "test"), "rate": rate, **cost}

    def few_rate(self, name: str, shots: int) -> float:
        """The best learning rate of a way with so few images, on other classes than those that are reported.

        Other classes are those of the third data set; without one, a draw of its own of the target chooses, by
        validation images.
        """
        family = WAYS[name].family
        rates = sorted({*RATES[family], *FEW_RATES})
        rates = rates[:2] if self.smoke else rates
        found = {}
        for rate in rates:

            def make(rate: float = rate) -> dict[str, Any]:
                runs = sampled(self.target if self.uris["other"] is None else self.other, shots, CHOOSING)
                model, _ = self.trained(name, CHOOSING, runs=runs, rate=rate, **FEW)
                return {"split": "val", "top1": runs.top1(without_adapters(model), "val")}

            row = self.found.row("few choice", f"{family}, {shots} images a class", f"rate {rate:g}", 0, make)
            if row is None:
                raise RuntimeError(f"{name} could not be trained")
            found[rate] = row["top1"]
        return max(found, key=lambda rate: found[rate])


def sampled(whole: DeviceRuns, shots: int, sampling: int) -> DeviceRuns:
    """The same data with so many training images a class."""
    runs = copy.copy(whole)
    rows, draw = runs.data["train"], np.random.default_rng(sampling)
    each = [draw.permutation(np.flatnonzero(rows.labels == c))[:shots] for c in range(len(runs.data.classes))]
    splits = {**runs.data.splits, "train": rows.take(np.concatenate(each))}
    runs.data, runs.images = replace(runs.data, splits=splits), {}
    return runs


def numbers(model: Classifier) -> dict[str, int]:
    """How many numbers were trained and must be stored."""
    if adapters_of(model) is None:
        many = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {"trained": many, "stored": many}
    found = counts(model)
    return {"trained": found.trained, "adapter": found.adapter, "stored": found.stored}
