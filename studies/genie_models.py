"""Images and models of the study of GeNIe: everything lies on the device once, and every model is trained once.

diffusion   class-conditional U-Net of all training images of all classes, with their labels
oracle      judges what made images show: weights that were given, or a ResNet-56 with all training labels
backbone    MoCo without labels on a ResNet-18; its frozen features serve few-shot classifiers and GeNIe-Ada
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from row_table import Row, Rows
from torch import Tensor

from vitrail.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, SupervisedConfig
from vitrail.data.augment.host import Augment, view_augments
from vitrail.data.batch import Batch
from vitrail.data.config import PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.loading.device_loader import DeviceImages, DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.run_folder import RunFolder
from vitrail.engine.step import TrainStep
from vitrail.generate.diffusion_model import OwnDiffuser
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.teacher import features, load_teacher
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import NoiseScheduleName
from vitrail.model.heads.config import Projected
from vitrail.recipes import recipe, with_values
from vitrail.run.evaluate import load
from vitrail.run.train import build_model, resume, train

SIDE = 32
STEPS = 50  # of a whole run of the sampler
R_SCHEDULE: NoiseScheduleName = "scaled_linear"  # r means as much noise as in the paper, whatever the model's schedule
ROWS = 1024  # images of a batch of the sampler; the network sees twice as many rows
EPOCHS = {"diffusion": 30.0, "oracle": 20.0, "backbone": 8.0}
CROPS = AugmentConfig(crop="pad", padding=4)
LABELS = RunConfig(
    data=DataConfig(uri="", batch=256, augment=CROPS),
    model=ModelConfig(name="cifar_resnet56"),
    optim=OptimConfig(name="sgd", lr=0.1, warmup=1, weight_decay=5e-4, floor=0.0),
    objective=SupervisedConfig(smoothing=0.1),
)
RESNET = {
    "model.name": "resnet18_32",
    "model.image_size": SIDE,
    "model.head": Projected(width=128, hidden=1024, norm=True),
    "data.crop_ratio": 1.0,
    "optim.weight_decay": 5e-4,
}
SMOKE: dict[str, Any] = {"data.batch": 20, "data.limit": 200, "data.check": "off", "optim.steps": 2}
SMOKE_MODELS: dict[str, dict[str, Any]] = {
    "diffusion": {"model.trunk": {"width": 8, "multipliers": (1, 2), "depth": 1, "heads": 2}},
    "oracle": {"model.name": "cifar_resnet20"},
    "backbone": {"model.name": "cifar_resnet20", "objective.bank": 64},
}
SMOKE_STEPS = 4


class Held(NamedTuple):
    """A split on the device."""

    pixels: Tensor  # [images, 3, 32, 32] bytes
    labels: Tensor  # [images]


class ReadyImages(DeviceImages):
    """Images that are on the device already, and may be of no file: those that a model made."""

    def __init__(self, split: Split, pixels: Tensor, config: RunConfig, preprocess: Preprocess) -> None:
        super().__init__(split, config.data.augment, preprocess, device=pixels.device)
        self._pixels = pixels


class Runs:
    """Data on the device, training runs on them, and what models say of images there."""

    def __init__(self, uri: str, *, limit: int | None = None, most: int | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.uri, self.data = uri, open_data(uri, limit=limit)
        self.most = most  # images of val and of test (none: all)
        self.fast = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.fast else None
        self._held: dict[str, Held] = {}
        torch.set_float32_matmul_precision("high")
        if self.fast:
            torch.backends.cudnn.benchmark = True
            torch._dynamo.config.recompile_limit = 64  # all networks are one piece of code to it

    @property
    def classes(self) -> int:
        return len(self.data.classes)

    def __getitem__(self, name: str) -> Held:
        """A split, at 32 pixels; it stays on the device."""
        if name not in self._held:
            split = self.data[name]
            if name != "train" and self.most is not None:
                split = split.take(range(min(self.most, len(split))))
            ready = Preprocess(PreprocessConfig(size=SIDE, crop_ratio=1.0))
            pixels = DeviceImages(split, None, ready, device=self.device).pixels
            self._held[name] = Held(pixels, torch.from_numpy(split.labels).to(self.device))
        return self._held[name]

    def trained(self, config: RunConfig, seed: int, split: Split, pixels: Tensor) -> Classifier:
        """What `config` describes, of a split and its pixels on the device; on CUDA every step is one graph."""
        torch.manual_seed(seed)
        model = build_model(config.model, config, self.data).to(memory_format=torch.channels_last)
        schedule = make_schedule(config.optim, config.data.batch, len(split))
        facts = TrainingFacts(split.labels, split.index, schedule.steps, config.data.augment, generated=split.generated)
        objective = build_objective(config.objective, model, facts)
        step = TrainStep(
            objective,
            config.optim,
            schedule,
            device=self.device,
            autocast=self.autocast,
            compile=False,
            graph=self.fast,
            ema=config.engine.ema,
        )
        own = model.preprocess
        preprocess = Preprocess(own)
        loader = DeviceLoader(
            LoaderSpec(
                split,
                BatchSampler(len(split), config.data.batch, seed, config.data.sampling, split.labels),
                Augment(config.data.augment, own),
                preprocess,
                classes=self.classes,
                multilabel=False,
                seed=seed,
                device=self.device,
                workers=0,
                start=0,
                stop=schedule.steps,
                views=view_augments(objective.views, config.data.augment, config.data.weak, own),
            ),
            ReadyImages(split, pixels, config, preprocess),
        )
        for batch in loader:
            step.feed(batch)
        made = cast("Classifier", step.model)
        del step, loader, objective
        gc.collect()  # the step's graph holds all of its memory, and dozens of runs follow one another
        return made

    def logits(self, model: Classifier, images: Tensor) -> Tensor:
        """[images, classes], of bytes."""
        return self._said(model, images, model)

    def embedded(self, model: Classifier, images: Tensor) -> Tensor:
        """What the trunk says, before a projector: [images, width]."""
        return self._said(model, images, lambda some: features(model, some))

    @torch.no_grad()
    def _said(self, model: Classifier, images: Tensor, say: Callable[[Tensor], Tensor]) -> Tensor:
        with evaluation_mode(model), torch.autocast(self.device.type, self.autocast, enabled=self.fast):
            found = [say(some.to(self.device)).float() for some in images.split(1000)]
        return torch.cat(found)

    def batches(self, name: str) -> list[Batch]:
        """A split as evaluators read it."""
        held = self[name]
        rows = torch.arange(len(held.labels), device=self.device).split(500)
        return [Batch((held.pixels[i],), held.labels[i], held.labels[i], i) for i in rows]

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What some work gives, and its seconds."""
        self.wait()
        began = time.perf_counter()
        made = work()
        self.wait()
        return made, time.perf_counter() - began

    def wait(self) -> None:
        if self.fast:
            torch.cuda.synchronize()


class Models:
    """The three models, each a run that is trained where it is not there, and the rows of the study."""

    def __init__(
        self,
        runs: Runs,
        folder: Path,
        *,
        factor: float,
        weights: Path | None,
        smoke: bool,
        schedule: NoiseScheduleName = "cosine",
        guidance: float = 2.0,
    ) -> None:
        self.runs, self.folder, self.device, self.rows = runs, folder, runs.device, Rows(folder / "rows.json")
        self.factor, self.weights, self.smoke = factor, weights, smoke
        self.schedule, self.guidance = schedule, guidance
        self._kept: dict[str, Classifier] = {}

    def row(self, table: str, subject: str, what: str, seed: int, make: Callable[[], Row]) -> Row:
        return self.rows.row(table, f"{subject}, {what}", seed, make)

    def __call__(self, name: str) -> Classifier:
        if name not in self._kept:
            path = self.folder / "runs" / name
            if (path / "config.yaml").is_file() and not RunFolder(path).finished:
                resume(path)
            elif not path.exists():
                train(replace(self.config(name), out=str(path)))
            self._kept[name] = load(path, self.device).eval()
        return self._kept[name]

    def config(self, name: str) -> RunConfig:
        base = {"diffusion": recipe("small-diffusion"), "oracle": LABELS}.get(name)
        config = with_values(recipe("small-moco"), RESNET) if base is None else base
        config = with_values(config, {"optim.epochs": self.factor * EPOCHS[name], "data.uri": self.runs.uri})
        if name == "diffusion":
            config = with_values(config, {"objective.schedule": self.schedule})
        return with_values(config, {**SMOKE, **SMOKE_MODELS[name]}) if self.smoke else config

    @cached_property
    def oracle(self) -> Classifier:
        if self.weights is None:
            return self("oracle")
        alike = create_model("cifar_resnet20", classes=self.runs.data.classes)
        return load_teacher(str(self.weights), alike).to(self.device).eval()

    @property
    def backbone(self) -> Classifier:
        return self("backbone")

    @cached_property
    def diffuser(self) -> OwnDiffuser:
        """The sampler. All its batches have one shape on CUDA, where the network is compiled."""
        model = self("diffusion")
        if model.trunk.schedule.name != self.schedule:  # type: ignore[union-attr]
            raise ValueError(f"{self.folder / 'runs' / 'diffusion'} was not trained with the schedule {self.schedule}")
        if self.runs.fast:
            model.to(memory_format=torch.channels_last)
            model.trunk.compile(dynamic=False)
        made = OwnDiffuser(
            model,
            steps=SMOKE_STEPS if self.smoke else STEPS,
            guidance=self.guidance,
            r_schedule=R_SCHEDULE,
            batch=ROWS,
            exact=self.runs.fast,
            autocast=self.runs.autocast,
        )
        if self.runs.fast:
            made.txt2img(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))  # compiles it
        return made

    def embed(self, images: Tensor) -> Tensor:
        """By the backbone."""
        return self.runs.embedded(self.backbone, images)
