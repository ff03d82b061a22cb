"""Training runs of a study in one process: data go to the device once, and what is compiled serves every seed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vitrail.config import RunConfig
from vitrail.data.augment.host import Augment
from vitrail.data.loading.device_loader import DeviceEvalLoader, DeviceImages, DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.model.classifier import Classifier
from vitrail.run.train import build_model


class DeviceRuns:
    """Data on the device, and runs on it. All models of one object share one preprocessing and one crop."""

    def __init__(self, uri: str, *, val_fraction: float = 0.1, limit: int | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.data = open_data(uri, val_fraction=val_fraction, limit=limit)
        self.images: DeviceImages | None = None
        self._loaders: dict[str, DeviceEvalLoader] = {}
        self.fast = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.fast else None
        torch.set_float32_matmul_precision("high")

    def trained(
        self,
        config: RunConfig,
        seed: int,
        *,
        most: int | None = None,
        compiled: bool = True,
        objective: Callable[[Classifier], Objective] | None = None,
    ) -> tuple[TrainStep, int]:
        """What `config` describes after its steps (the first `most` of them), and how many all are.

        `objective` builds the objective in place of the configuration. On CUDA a step is one graph; `compiled=False`
        spares short runs the half minute that compilation takes.
        """
        torch.manual_seed(seed)
        train, augment = self.data["train"], config.data.augment
        model = build_model(config.model, config, self.data)
        schedule = make_schedule(config.optim, config.data.batch, len(train))
        facts = TrainingFacts(train.labels, train.index, schedule.steps)
        step = TrainStep(
            build_objective(config.objective, model, facts) if objective is None else objective(model),
            config.optim,
            schedule,
            device=self.device,
            autocast=self.autocast,
            compile=self.fast and compiled,
            graph=self.fast,
            ema=config.engine.ema,
        )
        preprocess = Preprocess(model.preprocess)
        if self.images is None:
            self.images = DeviceImages(train, augment, preprocess, device=self.device, workers=0)
        loader = DeviceLoader(
            LoaderSpec(
                train,
                BatchSampler(len(train), config.data.batch, seed),
                Augment(augment, model.preprocess),
                preprocess,
                classes=len(self.data.classes),
                multilabel=False,
                seed=seed,
                device=self.device,
                workers=0,
                start=0,
                stop=min(schedule.steps, most or schedule.steps),
            ),
            self.images,
        )
        for batch in loader:
            step.feed(batch)
        return step, schedule.steps

    def loader(self, split: str, model: Classifier) -> DeviceEvalLoader:
        """Images of a split as evaluation sees them; they stay on the device."""
        if split not in self._loaders:
            preprocess = Preprocess(model.preprocess)
            loader = DeviceEvalLoader(self.data[split], preprocess, batch=1000, device=self.device, workers=0)
            for _ in loader:  # leaves its batches on the device
                pass
            self._loaders[split] = loader
        return self._loaders[split]

    def wait(self) -> None:
        if self.fast:
            torch.cuda.synchronize()
