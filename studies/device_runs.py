"""Training runs of a study in one process: data go to the device once, and what is compiled serves every seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Data on the device, and runs on it. All models of one object share one preprocessing."""

    def __init__(
        self,
        uri: str,
        *,
        val_fraction: float = 0.1,
        limit: int | None = None,
        most: int | None = None,
        batch: int = 1000,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.data = open_data(uri, val_fraction=val_fraction, limit=limit)
        self.most, self.batch = most, batch  # images of an evaluation (none: all), and of a batch of it
        self.images: dict[Any, DeviceImages] = {}
        self._judged: dict[tuple[str, int | None], DeviceEvalLoader] = {}
        self.fast = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.fast else None
        torch.set_float32_matmul_precision("high")

    def trained(self, config: RunConfig, seed: int, **how: Any) -> tuple[TrainStep, int]:
        """What `config` describes after its steps, and how many all are; `how` as for `prepared`."""
        step, loader, steps = self.prepared(config, seed, **how)
        for batch in loader:
            step.feed(batch)
        return step, steps

    def prepared(
        self,
        config: RunConfig,
        seed: int,
        *,
        model: Classifier | None = None,
        most: int | None = None,
        compiled: bool = True,
        objective: Callable[[Classifier], Objective] | None = None,
    ) -> tuple[TrainStep, DeviceLoader, int]:
        """Steps that wait for their batches, the first `most` of these (none: all), and how many all are.

        `model` is trained further, in place, instead of a new one; `objective` makes what it learns from, instead of
        the configuration. On CUDA a step is one graph; `compiled=False` spares short runs the half minute that
        compilation takes.
        """
        torch.manual_seed(seed)
        train = self.data["train"]
        model = build_model(config.model, config, self.data) if model is None else model
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
        key = (config.data.augment.crop, config.data.augment.padding)
        if key not in self.images:
            self.images[key] = DeviceImages(train, config.data.augment, preprocess, device=self.device, workers=0)
        loader = DeviceLoader(
            LoaderSpec(
                train,
                BatchSampler(len(train), config.data.batch, seed),
                Augment(config.data.augment, model.preprocess),
                preprocess,
                classes=len(self.data.classes),
                multilabel=False,
                seed=seed,
                device=self.device,
                workers=0,
                start=0,
                stop=min(schedule.steps, most or schedule.steps),
            ),
            self.images[key],
        )
        return step, loader, schedule.steps

    def judged(self, split: str, model: Classifier, most: int | None = None) -> DeviceEvalLoader:
        """Images of a split (the first `most`) as evaluation sees them; they stay on the device."""
        most = most or self.most
        if (split, most) not in self._judged:
            rows = self.data[split] if most is None else self.data[split].take(range(min(most, len(self.data[split]))))
            loader = DeviceEvalLoader(
                rows, Preprocess(model.preprocess), batch=self.batch, device=self.device, workers=0
            )
            for _ in loader:  # leaves its batches on the device
                pass
            self._judged[split, most] = loader
        return self._judged[split, most]

    @torch.inference_mode()
    def top1(self, model: Classifier, split: str) -> float:
        """Share of right answers."""
        model.eval()
        right, count = 0, 0
        for batch in self.judged(split, model):
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                right += int((model(batch.images).argmax(1) == batch.label).sum())
            count += len(batch)
        return right / count

    def wait(self) -> None:
        if self.fast:
            torch.cuda.synchronize()
