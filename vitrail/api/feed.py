"""The parts of a run that depend on the kind of its examples: batches, validation of settings, and the report.

`ImageFeed` and `TextFeed` are the two kinds; everything else of a run (engine, objectives, evaluators, checkpoints)
takes a `Batch` and does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vitrail.config import RunConfig
from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.completions import holds_completions
from vitrail.data.order import Order
from vitrail.data.source import DataSet, Split
from vitrail.data.texts import holds_texts
from vitrail.engine.distributed import Group
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import writes_texts

if TYPE_CHECKING:
    from vitrail.show.run_report import Told


class Batches(Protocol):
    """What is iterated over, closed at the end, and tells what it had to leave out."""

    skipped: list[tuple[str, str]]

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None: ...


class JudgedBatches(Batches, AbstractContextManager[Any], Protocol):
    """Every example of a split once."""


class Feed(Protocol):
    """Batches of one kind of examples, for one model."""

    config: RunConfig  # with what was left to choose filled in, once `prepare` was called
    compiles: bool  # whether steps are compiled and captured as a graph where nothing is said
    notes: tuple[str, ...]  # what a person should hear of the examples before the run

    def prepare(self, views: ViewSpec, order: Order) -> None:
        """Make ready what `batches` needs. Raises `ValueError` for settings that do not fit."""

    def batches(self, start: int, stop: int) -> Batches:
        """Of these training steps."""

    def judged(self, split: str) -> JudgedBatches:
        """Of a split, for evaluation."""

    def once(self) -> Iterator[Batch]:
        """Every training example once, as evaluation sees it."""

    def facts(self) -> Mapping[str, Any]:
        """What must be the same when a run is resumed, besides labels and their order."""

    def report(self, told: Told) -> None:
        """Write the report of the finished run."""


def make_feed(config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: Group) -> Feed:
    """The feed for this kind of data. Raises `ValueError` where the model is for the other kind."""
    refuse_other_kind(reads_texts(model), data)
    refuse_other_task(writes_texts(model), data)
    if holds_texts(data):
        from vitrail.api.text_feed import TextFeed

        return TextFeed(config, data, model, device, group)
    from vitrail.api.image_feed import ImageFeed

    return ImageFeed(config, data, model, device, group)


def reads_texts(model: Classifier) -> bool:
    """Whether a model is for texts."""
    return hasattr(model.trunk, "tokeniser")


def refuse_other_kind(texts: bool, data: DataSet) -> None:
    """Raises `ValueError` for a model of texts (`texts`) with images, and the other way round."""
    if holds_texts(data) and not texts:
        raise ValueError(f"{data.uri} holds texts, the model reads images; use --model.name text:FOLDER or text:bert")
    if texts and not holds_texts(data):
        raise ValueError(f"{data.uri} holds images, the model reads texts; name texts with --data, or another model")


def refuse_other_task(writes: bool, data: DataSet) -> None:
    """Raises `ValueError` for a language model (`writes`) with classes, and for a classifier with completions."""
    if writes and not holds_completions(data):
        raise ValueError(f"{data.uri} has classes, and the model writes; name prompts and completions with --data")
    if holds_completions(data) and not writes:
        raise ValueError(
            f"{data.uri} holds prompts and completions, the model classifies; use --model.head next_token with "
            "--objective language_model (vitrail train small-gpt2), or name texts with classes"
        )


def judged_batches(
    model: Classifier, rows: Split, preprocess: Any, *, batch: int, device: torch.device, workers: int | None
) -> JudgedBatches:
    """Every example of a split once, as `model` is evaluated; `preprocess` is of images."""
    if reads_texts(model):
        from vitrail.api.text_feed import encode_split
        from vitrail.data.text_loader import TextEvalLoader

        return TextEvalLoader(encode_split(model, rows), rows, batch=batch, device=device)
    from vitrail.data.loader import EvalLoader, auto_workers
    from vitrail.data.preprocess import Preprocess

    count = auto_workers(rows) if workers is None else workers
    return EvalLoader(rows, Preprocess(preprocess), batch=batch, device=device, workers=count)
