"""Training without labels and judging what was learned, in one process: data go to the device once for all runs.

Judged is what the trunk says, before the projector, as in the papers. Whatever a run was trained on (wrong labels,
coarse ones, few images of rare classes), the images that answers are read from are all training images with their true,
finest labels; validation images choose the linear probe, test images are judged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.data.augment.host import Augment, view_augments
from vitrail.data.config import DataConfig, PreprocessConfig
from vitrail.data.dataset import DataSet
from vitrail.data.loading.device_loader import DeviceEvalLoader, DeviceImages, DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.learn.selfsupervised import MomentumCopy, SelfSupervised, spread_and_rank
from vitrail.learn.teacher import features
from vitrail.measure.evaluator import evaluation_mode
from vitrail.measure.probe import ProbeSettings, linear_probe
from vitrail.measure.retrieval import knn_accuracy
from vitrail.model.classifier import Classifier
from vitrail.run.train import build_model

PROBE = ProbeSettings(learning_rates=(0.01, 0.03, 0.1, 0.3, 1.0), weight_decays=(1e-6, 1e-4), batch=1024)
RARE = 3  # the rarest of so many parts of the classes


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    model: Classifier  # what is kept: the moving average where there is one
    objective: Objective
    epochs: float
    images_per_second: float  # of training, compilation included, or without the first steps where these are left out

    def figures(self) -> dict[str, float]:
        return {"epochs": self.epochs, "images_per_second": self.images_per_second}


class Seen(NamedTuple):
    """A split as a trunk sees it."""

    features: Tensor  # [images, width]
    labels: Tensor  # [images]


class Runs:
    """Data on the device, and runs on it. All models take images of one size, uncropped.

    `limit` is the most training images, `most` the most of an evaluation (none: all).
    """

    def __init__(self, *, limit: int | None = None, most: int | None = None, probe: ProbeSettings = PROBE) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.limit, self.most, self.probe = limit, most, probe
        self.fast = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.fast else None
        self._data: dict[Any, DataSet] = {}
        self._images: dict[Any, DeviceImages] = {}
        self._judged: dict[tuple[str, str], DeviceEvalLoader] = {}
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        if self.fast:
            torch._dynamo.config.recompile_limit = 64  # all networks are one piece of code to it

    def data(self, chosen: DataConfig) -> DataSet:
        key = (chosen.uri, chosen.level, chosen.long_tail, chosen.label_noise)
        if key not in self._data:
            self._data[key] = open_data(
                chosen.uri,
                level=chosen.level,
                long_tail=chosen.long_tail,
                label_noise=chosen.label_noise,
                limit=self.limit,
            )
        return self._data[key]

    def trained(self, config: RunConfig, seed: int, *, compiled: bool = True, untimed: int = 0) -> Trained:
        """What a configuration describes; `compiled=False` spares short runs what compilation takes.

        The clock runs after `untimed` steps.
        """
        data = self.data(config.data)
        train = data["train"]
        model = self.untrained(config, seed)
        schedule = make_schedule(config.optim, config.data.batch, len(train))
        facts = TrainingFacts(train.labels, train.index, schedule.steps, config.data.augment)
        objective = build_objective(config.objective, model, facts)
        compiled = compiled and self.fast
        labels_only = isinstance(config.objective, SupervisedConfig)
        step = TrainStep(
            objective,
            config.optim,
            schedule,
            device=self.device,
            autocast=self.autocast,
            compile=compiled and labels_only,
            graph=self.fast,
            ema=config.engine.ema,
        )
        loader = self._loader(config, data, objective, seed, schedule.steps)
        loader.images.pixels  # noqa: B018, reads them before the clock runs
        began = time.perf_counter()
        with compiled_networks(objective, compiled and not labels_only):
            for number, batch in enumerate(loader):
                if untimed and number == untimed:
                    self.wait()
                    began = time.perf_counter()
                step.feed(batch)
        self.wait()
        seconds, size = time.perf_counter() - began, config.data.batch
        rate = (schedule.steps - untimed) * size / seconds
        return Trained(cast("Classifier", step.model), objective, schedule.steps * size / len(train), rate)

    def untrained(self, config: RunConfig, seed: int) -> Classifier:
        """The model that a run with this seed begins with."""
        torch.manual_seed(seed)
        model = build_model(config.model, config, self.data(config.data)).to(self.device)
        return model if config.model.name.startswith("vit") else model.to(memory_format=torch.channels_last)

    def _loader(self, config: RunConfig, data: DataSet, objective: Objective, seed: int, steps: int) -> DeviceLoader:
        train, augment, own = data["train"], config.data.augment, objective.model.preprocess
        return DeviceLoader(
            LoaderSpec(
                train,
                BatchSampler(len(train), config.data.batch, seed),
                Augment(augment, own),
                Preprocess(own),
                classes=len(data.classes),
                multilabel=False,
                seed=seed,
                device=self.device,
                workers=0,
                start=0,
                stop=steps,
                views=view_augments(objective.views, augment, config.data.weak, own),
            ),
            self.images(config.data, own),
        )

    def images(self, chosen: DataConfig, own: PreprocessConfig) -> DeviceImages:
        """Training images on the device; labels come with their split, so runs on wrong or coarse ones share them."""
        train, augment = self.data(chosen)["train"], chosen.augment
        key = (chosen.uri, train.index.tobytes(), own.size, augment.crop, augment.padding)
        if key not in self._images:
            self._images[key] = DeviceImages(train, augment, Preprocess(own), device=self.device)
        return self._images[key]

    def judged(self, uri: str, split: str, model: Classifier) -> DeviceEvalLoader:
        """Images of a split as evaluation sees them, with true labels of the finest level; they stay on the device."""
        if (uri, split) not in self._judged:
            rows = self.data(DataConfig(uri=uri))[split]
            if self.most is not None:
                rows = rows.take(range(min(self.most, len(rows))))
            self._judged[uri, split] = DeviceEvalLoader(
                rows, Preprocess(model.preprocess), batch=min(1000, len(rows)), device=self.device, workers=0
            )
        return self._judged[uri, split]

    @torch.no_grad()
    def seen(self, model: Classifier, uri: str, split: str) -> Seen:
        found, labels = [], []
        with evaluation_mode(model):
            for batch in self.judged(uri, split, model):
                with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                    found.append(features(model, batch.images).float())
                labels.append(batch.label)
        return Seen(torch.cat(found), torch.cat(labels))

    def worth(self, model: Classifier, uri: str, rare: bool = False) -> dict[str, float]:
        """Nearest neighbours and a linear probe on frozen features; `rare`: neighbours of the last third of classes."""
        train, val, test = (self.seen(model, uri, split) for split in ("train", "val", "test"))
        near = knn_accuracy(*test, *train, neighbours=(1, 20))
        classes = len(self.data(DataConfig(uri=uri)).classes)
        linear = linear_probe(train, test, classes, self.probe, val=val)
        spread, rank = spread_and_rank(test.features)
        found = {f"knn{k}": value for k, value in near.items()}
        found |= {"linear": linear.accuracy, "spread": float(spread), "rank": float(rank)}
        if rare:
            last = test.labels >= classes - classes // RARE
            of_rare = knn_accuracy(test.features[last], test.labels[last], *train, neighbours=(1, 20))
            found |= {f"knn{k}_rare": value for k, value in of_rare.items()}
        return found

    def neighbours(self, model: Classifier, uri: str, split: str = "test") -> float:
        """Accuracy of 20 neighbours alone."""
        train, judged = self.seen(model, uri, "train"), self.seen(model, uri, split)
        return knn_accuracy(*judged, *train, neighbours=(20,))[20]

    @torch.no_grad()
    def top1(self, model: Classifier, uri: str) -> float:
        """Share of right answers of the model's own classifier on test images."""
        right, count = 0, 0
        with evaluation_mode(model):
            for batch in self.judged(uri, "test", model):
                with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                    right += int((model(batch.images).argmax(1) == batch.label).sum())
                count += len(batch)
        return right / count

    def wait(self) -> None:
        if self.fast:
            torch.cuda.synchronize()


@contextmanager
def compiled_networks(objective: Objective, wanted: bool) -> Iterator[None]:
    """Compile the trunks of an objective's model and of its slow copies, and nothing else, until the end of the block.

    What stands on the trunks is small and differs from objective to objective; so all of them, whatever their classes,
    share what one trunk was compiled to, and evaluation compiles nothing.
    """
    found: list[Classifier] = []
    if wanted and isinstance(objective, SelfSupervised):
        copies = (getattr(objective, name, None) for name in ("target", "key"))
        found = [objective.model, *(copy.classifier for copy in copies if isinstance(copy, MomentumCopy))]
    for model in found:
        model.tokens = torch.compile(model.tokens, dynamic=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for model in found:
            del model.tokens
