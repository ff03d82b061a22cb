"""Texts of a run: tokenised once, padded batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from vitrail.config import RunConfig
from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.completion_tokens import encode_completions
from vitrail.data.order import Order
from vitrail.data.source import DataSet, Split
from vitrail.data.text_loader import TextEvalLoader, TextTrainLoader
from vitrail.data.texts import texts_of
from vitrail.data.tokenise import TOKENIZER, Encoded
from vitrail.engine.distributed import Group
from vitrail.model.classifier import Classifier
from vitrail.model.heads.next_token import writes_texts
from vitrail.model.text_trunk import TextTrunk
from vitrail.show.language_report import report_language
from vitrail.show.run_report import Told
from vitrail.show.text_report import report_texts

JUDGED_AT_ONCE = 64


def encode_split(model: Classifier, split: Split) -> Encoded:
    """The texts of a split as a text model reads them."""
    tokeniser, texts = cast("TextTrunk", model.trunk).tokeniser(model.files[TOKENIZER]), texts_of(split)
    return encode_completions(tokeniser, texts) if writes_texts(model) else tokeniser(texts)


class TextFeed:
    """`Feed` of texts."""

    compiles = False  # batches differ in length, and masks of transformers may be decided on the host

    def __init__(self, config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: Group) -> None:
        self.config, self.data, self.device, self.group = config, data, device, group
        self.trunk = cast("TextTrunk", model.trunk)
        self.tokenizer = hashlib.sha256(model.files[TOKENIZER].encode()).hexdigest()[:16]
        self.texts = {name: encode_split(model, split) for name, split in data.splits.items()}
        self.length = self.trunk.config.length if config.data.pad == "length" else None
        cut = {name: f"{texts.cut:,} of {len(texts):,} of {name}" for name, texts in self.texts.items() if texts.cut}
        said = f"longer than {self.trunk.config.length} tokens, and cut: {', '.join(cut.values())} (model.trunk.length)"
        self.notes: tuple[str, ...] = (said,) if cut else ()

    def prepare(self, views: ViewSpec, order: Order) -> None:
        chosen = self.config.data
        if views.views != 1:
            raise ValueError(
                f"objective {self.config.objective.kind} wants {views.views} views of an example, and a text has one; "
                "use supervised"
            )
        if chosen.augment.mixup or chosen.augment.cutmix:
            raise ValueError("data.augment: mixup and CutMix mix pixels; set both to 0 for texts")
        self.order = order

    def batches(self, start: int, stop: int) -> TextTrainLoader:
        return TextTrainLoader(
            self.texts["train"],
            self.data["train"],
            self.order,
            device=self.device,
            start=start,
            stop=stop,
            accumulate=self.config.engine.accumulate,
            rank=self.group.rank,
            world=self.group.world,
            length=self.length,
        )

    def judged(self, split: str) -> TextEvalLoader:
        return TextEvalLoader(
            self.texts[split],
            self.data[split],
            batch=JUDGED_AT_ONCE,
            device=self.device,
            rank=self.group.rank,
            world=self.group.world,
            length=self.length,
        )

    def once(self) -> Iterator[Batch]:
        yield from self.judged("train")

    def facts(self) -> Mapping[str, Any]:
        # Numbers of tokens mean nothing without the words they stand for, which may come from the data themselves.
        return {"texts": self.texts["train"].digest(), "tokenizer": self.tokenizer}

    def report(self, told: Told) -> None:
        (report_language if writes_texts(told.model) else report_texts)(told, self.texts[told.split])
