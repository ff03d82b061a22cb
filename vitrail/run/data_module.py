"""The parts of a run that depend on the kind of its examples: batches, validation of settings, and the report.

Images are decoded and augmented by workers or on the device, or all of them lie there; texts are tokenised once and
padded batch by batch. Everything else of a run (engine, objectives, evaluators, checkpoints) takes a `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from vitrail.config import RunConfig
from vitrail.data.augment.host import Augment, stored_alike, view_augments
from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.dataset import DataSet, Split
from vitrail.data.loading.device_loader import HOST_SIDE, DeviceEvalLoader, DeviceImages, DeviceLoader, fits
from vitrail.data.loading.loader import EvalLoader, LoaderSpec, TrainLoader, auto_workers
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.packed import FAR_MORE, of_files, pays_to_shrink, side_needed
from vitrail.data.stack import form_in
from vitrail.engine.device import ProcessGroup, evaluation_batch
from vitrail.files import cache_folder
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import writes_texts
from vitrail.run.page import RunSummary, report_run

if TYPE_CHECKING:
    from vitrail.data.jpeg import EncodedImages


class Batches(AbstractContextManager[Any], Protocol):
    """Batches that are iterated over and closed at the end, and the examples that had to be left out."""

    skipped: list[tuple[str, str]]

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None: ...


class DataModule:
    """Batches of one kind of examples, for one model."""

    compiles = True  # whether steps are compiled and captured as a graph where nothing is said
    notes: tuple[str, ...] = ()  # about the examples, before the run
    complete = False  # whether a training batch must have all of its images
    quiet = False

    def __init__(
        self, config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: ProcessGroup
    ) -> None:
        self.config = config  # with what was left to choose filled in, once `prepare` was called
        self.data, self.model, self.device, self.group = data, model, device, group

    def prepare(self, views: ViewSpec, sampler: BatchSampler) -> None:
        """Make ready what `batches` needs. Raises `ValueError` for settings that do not fit."""
        raise NotImplementedError

    def batches(self, start: int, stop: int) -> Batches:
        """Of these training steps."""
        raise NotImplementedError

    def evaluation(self, split: str | Split) -> Batches:
        """Every example of a split of these data, or of a part of one, once, as evaluation sees it."""
        raise NotImplementedError

    def training_once(self) -> Iterator[Batch]:
        """Every training example once, as evaluation sees it."""
        with self.evaluation("train") as loader:
            yield from loader

    def facts(self) -> Mapping[str, Any]:
        """What must be the same when a run is resumed, besides labels and their order."""
        return {}

    def report(self, summary: RunSummary) -> None:
        """Write the report of the finished run."""
        raise NotImplementedError


def make_data_module(
    config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: ProcessGroup
) -> DataModule:
    """The data module for this kind of data. Raises `ValueError` where the model is for the other kind."""
    reject_other_kind(reads_texts(model), data)
    reject_other_task(writes_texts(model), data)
    if data.holds_texts:
        from vitrail.run.text_module import TextModule

        return TextModule(config, data, model, device, group)
    return ImageModule(config, data, model, device, group)


def reads_texts(model: Classifier) -> bool:
    """Whether a model is for texts."""
    return hasattr(model.trunk, "tokeniser")


def reject_other_kind(texts: bool, data: DataSet) -> None:
    """Raises `ValueError` for a model of texts (`texts`) with images, and the other way round."""
    if data.holds_texts and not texts:
        raise ValueError(f"{data.uri} holds texts, the model reads images; use --model.name text:FOLDER or text:bert")
    if texts and not data.holds_texts:
        raise ValueError(f"{data.uri} holds images, the model reads texts; name texts with --data, or another model")


def reject_other_task(writes: bool, data: DataSet) -> None:
    """Raises `ValueError` for a language model (`writes`) with classes, and for a classifier with completions."""
    if writes and not data.holds_completions:
        raise ValueError(f"{data.uri} has classes, and the model writes; name prompts and completions with --data")
    if data.holds_completions and not writes:
        raise ValueError(
            f"{data.uri} holds prompts and completions, the model classifies; use --model.head next_token with "
            "--objective language_model (vitrail train small-gpt2), or name texts with classes"
        )


def evaluation_batches(
    model: Classifier, rows: Split, preprocess: Any, *, batch: int | None, device: torch.device, workers: int | None
) -> Batches:
    """Every example of a split once, as `model` is evaluated; `preprocess` is of images."""
    batch = batch or evaluation_batch(device)
    if reads_texts(model):
        from vitrail.run.text_module import evaluation_texts

        return evaluation_texts(model, rows, batch, device)
    count = auto_workers(rows) if workers is None else workers
    return EvalLoader(rows, Preprocess(preprocess), batch=batch, device=device, workers=count)


class ImageModule(DataModule):
    """Images; `config.data.loader` is stored as chosen, so that the run repeats and resumes as it was."""

    def __init__(
        self, config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: ProcessGroup
    ) -> None:
        super().__init__(config, data, model, device, group)
        wanted = config.data.workers
        self.workers = auto_workers(data["train"]) if wanted is None else wanted
        self.preprocess = Preprocess(model.preprocess)
        self.copies: dict[str, Callable[[int], Any]] = {}  # readers of train and val, shrunk
        self.images: DeviceImages | None = None
        self.encoded: EncodedImages | None = None

    def prepare(self, views: ViewSpec, sampler: BatchSampler) -> None:
        self.sampler = sampler
        self.augment = Augment(self.config.data.augment, self.model.preprocess)
        self.augments = view_augments(views, self.config.data.augment, self.config.data.weak, self.model.preprocess)
        self._decode()
        chosen, train = self.config.data, self._copied(self.data["train"])
        if form_in(self.data) and chosen.loader in ("device", "jpeg"):
            raise ValueError(f"data.loader: {chosen.loader} keeps RGB of eight bits; set host for other channels")
        if chosen.loader == "auto":
            loader, reason = self._choice()
            self.notes = (*self.notes, f"data.loader: {loader}, since {reason}")
            chosen = replace(chosen, loader=loader)
            self.config = replace(self.config, data=chosen)
        if chosen.loader == "device":
            self.images = DeviceImages(train, chosen.augment, self.preprocess, device=self.device, workers=self.workers)
        elif chosen.loader == "jpeg":
            from vitrail.data.jpeg import EncodedImages

            self.encoded = EncodedImages(train, self.device)

    def _decode(self) -> None:
        """Read train and val from a shrunk copy where that pays or is asked for; the choice is stored."""
        chosen, train = self.config.data, self.data["train"]
        if not of_files(train) or chosen.loader == "jpeg":
            return
        side = side_needed([augment.config for augment in (self.augment, *self.augments)], self.model.preprocess)
        once = chosen.decode == "once" or (chosen.decode == "auto" and pays_to_shrink(train, side))
        if once:
            from vitrail.data.pack import shrunk_copy

            line = f"data.decode: once, at {side} pixels in {cache_folder()} (or --data.decode always)"
            self.group.say(self.quiet, line)
            try:
                splits = [split for name, split in self.data.splits.items() if name != "test"]
                self.copies = {split.name: shrunk_copy(split, side).reader for split in splits}
                # What evaluates and predicts from files need not spend time on all of their pixels, either.
                self.model.preprocess = replace(self.model.preprocess, reducing_gap=FAR_MORE)
                self.preprocess = Preprocess(self.model.preprocess)
            except OSError as error:
                if chosen.decode == "once":
                    raise
                once = False
                self.notes = (f"data.decode: always, since there can be no copy: {error}",)
        self.config = replace(self.config, data=replace(chosen, decode="once" if once else "always"))

    def _copied(self, rows: Split) -> Split:
        """Images of train and val as they are in the copy, where there is one."""
        own = self.data.splits.get(rows.name)
        if own is None or rows.name not in self.copies or rows.reader is not own.reader:
            return rows
        return replace(rows, reader=self.copies[rows.name])

    def _choice(self) -> tuple[Literal["host", "device", "jpeg"], str]:
        """The loader that suits these images and this device, and why."""
        train, device = self._copied(self.data["train"]), self.device.type
        if form_in(self.data):
            return "host", "the other loaders keep RGB of eight bits"
        alike = stored_alike([self.augment, *self.augments])
        if alike and fits(train, self.preprocess, self.device, self.config.data.augment):
            return "device", f"the decoded images fit on {device}"
        reason = f"the decoded images do not fit on {device}"
        if device == "cpu":
            reason = f"on a CPU only images of up to {HOST_SIDE} pixels, and 1 GiB, are decoded once for all epochs"
        if getattr(train.reader, "form", None):
            reason = "the images are no RGB of eight bits"
        elif not alike:
            reason = "the views want images in several forms"
        if self.copies or device != "cuda" or any(augment.config.crop == "evaluation" for augment in self.augments):
            return "host", reason
        from vitrail.data.jpeg import EncodedImages
        from vitrail.data.loading.jpeg_loader import MOSTLY, compared_with_host

        if self.group.world > 1:  # each might measure something else
            return "host", f"{reason}, and several processes do not measure; --data.loader jpeg decodes on {device}"
        encoded = EncodedImages(train, self.device)
        if (share := encoded.share()) < MOSTLY:
            return "host", f"{reason}, and {100 * share:.0f} % are JPEG that it decodes"
        try:
            faster, speeds = compared_with_host(self._spec(0, 0), encoded)
        except RuntimeError as error:  # torchvision without nvJPEG, for one
            return "host", f"{reason}, and it decodes no JPEG ({str(error).splitlines()[0]})"
        return "jpeg" if faster else "host", f"{reason}; JPEG decoded there makes {speeds}"

    def batches(self, start: int, stop: int) -> TrainLoader:
        spec = self._spec(start, stop)
        if self.encoded is not None:
            from vitrail.data.loading.jpeg_loader import JpegLoader

            return JpegLoader(spec, self.encoded)
        return TrainLoader(spec) if self.images is None else DeviceLoader(spec, self.images)

    def _spec(self, start: int, stop: int) -> LoaderSpec:
        return LoaderSpec(
            self._copied(self.data["train"]),
            self.sampler,
            self.augment,
            self.preprocess,
            classes=len(self.data.classes),
            multilabel=self.data.multilabel,
            seed=self.config.seed,
            device=self.device,
            workers=self.workers,
            start=start,
            stop=stop,
            accumulate=self.config.engine.accumulate or 1,
            rank=self.group.rank,
            world=self.group.world,
            views=self.augments,
            complete=self.complete,
        )

    def evaluation(self, split: str | Split, on_device: bool | None = None) -> EvalLoader:
        rows = self._copied(self.data[split] if isinstance(split, str) else split)
        if on_device is None:  # pixels are the host's in any case, so that metrics do not depend on the loader
            on_device = bool(self.images) or (self.encoded is not None and fits(rows, self.preprocess, self.device))
        return (DeviceEvalLoader if on_device else EvalLoader)(
            rows,
            self.preprocess,
            batch=min(evaluation_batch(self.device), max(1, len(rows))),
            device=self.device,
            workers=self.workers,
            rank=self.group.rank,
            world=self.group.world,
        )

    def training_once(self) -> Iterator[Batch]:
        with self.evaluation("train", on_device=False) as loader:
            yield from loader

    def report(self, summary: RunSummary) -> None:
        report_run(summary)
