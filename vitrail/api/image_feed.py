"""Images of a run: decoded and augmented by workers, or all of them on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vitrail.config import RunConfig
from vitrail.data.augment import Augment
from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.device_images import DeviceImages, fits
from vitrail.data.device_loader import DeviceEvalLoader, DeviceLoader
from vitrail.data.loader import EvalLoader, TrainLoader, auto_workers
from vitrail.data.order import Order
from vitrail.data.preprocess import Preprocess
from vitrail.data.source import DataSet
from vitrail.data.views import stored_alike, view_augments
from vitrail.engine.distributed import Group
from vitrail.model.classifier import Classifier
from vitrail.show.run_report import Told, report_run


class ImageFeed:
    """`Feed` of images; `config.data.loader` is stored as chosen, so that the run repeats and resumes as it was."""

    compiles = True
    notes: tuple[str, ...] = ()

    def __init__(self, config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: Group) -> None:
        self.config, self.data, self.model, self.device, self.group = config, data, model, device, group
        wanted = config.data.workers
        self.workers = auto_workers(data["train"]) if wanted is None else wanted
        self.preprocess = Preprocess(model.preprocess)
        self.images: DeviceImages | None = None
        self.on_device = False

    def prepare(self, views: ViewSpec, order: Order) -> None:
        chosen, train, self.order = self.config.data, self.data["train"], order
        self.augment = Augment(chosen.augment, self.model.preprocess)
        self.augments = view_augments(views, chosen.augment, chosen.weak, self.model.preprocess)
        if chosen.loader == "auto":
            able = stored_alike([self.augment, *self.augments])
            able = able and fits(train, self.preprocess, self.device, chosen.augment)
            chosen = replace(chosen, loader="device" if able else "host")
            self.config = replace(self.config, data=chosen)
        self.on_device = chosen.loader == "device"
        if self.on_device:
            self.images = DeviceImages(train, chosen.augment, self.preprocess, device=self.device, workers=self.workers)

    def batches(self, start: int, stop: int) -> TrainLoader:
        options: dict[str, Any] = {"images": self.images} if self.on_device else {}
        return (DeviceLoader if self.on_device else TrainLoader)(
            self.data["train"],
            self.order,
            self.augment,
            self.preprocess,
            classes=len(self.data.classes),
            multilabel=self.data.multilabel,
            seed=self.config.seed,
            device=self.device,
            workers=self.workers,
            start=start,
            stop=stop,
            accumulate=self.config.engine.accumulate,
            rank=self.group.rank,
            world=self.group.world,
            views=self.augments,
            **options,
        )

    def judged(self, split: str) -> EvalLoader:
        return self._judged(split, self.on_device)

    def _judged(self, split: str, on_device: bool) -> EvalLoader:
        return (DeviceEvalLoader if on_device else EvalLoader)(
            self.data[split],
            self.preprocess,
            batch=min(256, max(1, len(self.data[split]))),
            device=self.device,
            workers=self.workers,
            rank=self.group.rank,
            world=self.group.world,
        )

    def once(self) -> Iterator[Batch]:
        with self._judged("train", on_device=False) as loader:
            yield from loader

    def facts(self) -> Mapping[str, Any]:
        return {}

    def report(self, told: Told) -> None:
        report_run(told)
