"""Sections of `vitrail inspect`: what they compute over batches of images, and what page, terminal and JSON show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.measure.attention_maps import AttentionMaps, CapturedBatch
from vitrail.measure.evaluator import ResultTable
from vitrail.model.classifier import Classifier, Outputs
from vitrail.report.sheets import Pixels, Sheet

if TYPE_CHECKING:
    from vitrail.inspect.anchors import Anchors
    from vitrail.inspect.embeddings import EmbeddingStatistics, Projection
    from vitrail.inspect.evidence import Evidence
    from vitrail.inspect.kept import Selection
    from vitrail.inspect.weight_statistics import WeightStatistics


@dataclass(frozen=True)
class Chart:
    """An SVG, also written to a file that is named after `file`, or its heading."""

    heading: str
    svg: Markup
    hint: str = ""
    file: str = ""


@dataclass(frozen=True)
class Card:
    """A frame of the page: sheets, charts, tables, and text below them."""

    heading: str
    items: Sequence[Sheet | Chart | ResultTable | str | list[Chart]]
    wide: bool = False  # takes a row of its own


@dataclass(frozen=True)
class PagePart:
    """A heading of the page with the cards beneath it."""

    name: str
    heading: str
    lead: str
    cards: Sequence[Card]
    layout: str = "sheets"  # class in the style sheet: one card per row, or `pair`


def sheet_part(name: str, heading: str, lead: str, sheets: Sequence[Sheet], **hints: str) -> PagePart:
    """One card per sheet, with the hint whose name the file's name begins with; titles where there are several."""
    cards = [
        Card(
            sheet.title if len(sheets) > 1 else "",
            [sheet, *(hint for prefix, hint in hints.items() if sheet.name.startswith(prefix))],
        )
        for sheet in sheets
    ]
    return PagePart(name, heading, lead, cards)


def chart_cards(charts: Sequence[Chart]) -> list[Card]:
    """One card per chart."""
    return [Card(chart.heading, [chart, *([chart.hint] if chart.hint else [])]) for chart in charts]


@dataclass
class InspectedModel:
    """One model; sections fill in their results."""

    name: str
    path: str
    model: Classifier
    run: tuple[Path, RunConfig] | None = None
    pixels: list[Pixels] = field(default_factory=list)  # as the model takes them, [side, side, channels] each
    boxes: list[NDArray[np.float32] | None] = field(default_factory=list)  # of their objects, in sides
    guess: NDArray[np.int64] = field(init=False)  # [images], the predicted class of every image that was read
    attention: AttentionMaps = field(init=False)
    evidence: Evidence | None = None
    weights: WeightStatistics | None = None
    embedding: EmbeddingStatistics | None = None
    anchors: Anchors | None = None
    selection: Selection | None = None  # by another rule of sampling tokens
    attacked: AttentionMaps | None = None  # the same images under a patch
    attacked_pixels: list[Pixels] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        values = {"name": self.name, "path": self.path, "adaptive": self.attention.policy, **self.attention.to_json()}
        for name in ("evidence", "anchors", "attacked"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name).to_json()
        learned = [part.to_json() for part in (self.weights, self.embedding) if part is not None]
        if learned:
            notes = [note for part in learned for note in part.pop("notes")]
            values["learned"] = {key: value for part in learned for key, value in part.items()} | {"notes": notes}
        return values


@dataclass(frozen=True)
class ShownImage:
    """An image that is shown as a neighbour or as one of a cluster."""

    pixels: Pixels
    caption: str


@dataclass
class Inspection:
    """One or several models on the same images: what was asked for, and the results."""

    subjects: list[InspectedModel]
    source: str  # of the images
    what: tuple[str, ...]  # sections that were asked for
    everything: bool  # whether those are all
    device: torch.device
    count: int = 8  # images that become pictures
    layers: tuple[int, ...] = ()  # that pictures show (none: evenly chosen)
    judge: int | None = None  # images that maps are evaluated on (none: as many as take about a minute)
    projection: Projection = "pca"
    attack: Path | None = None
    classes: tuple[str, ...] = ()  # of the data; none where images have no labels
    levels: tuple[str, ...] = ()  # names of the levels of their taxonomy, finest first
    captions: tuple[str, ...] = ()  # of the pictures: class or file name
    label: NDArray[np.int64] | None = None  # [images], of all that were read
    level: NDArray[np.int64] | None = None  # [images, levels]
    shown: set[int] = field(default_factory=set)  # rows of images that sections show besides
    more: dict[int, ShownImage] = field(default_factory=dict)  # those images
    cka: Tensor | None = None  # [layers, other layers], of the first two models
    divergence: dict[str, list[float | None]] = field(default_factory=dict)  # nats by matching, one per common layer
    divergence_layers: tuple[int, ...] = ()
    divergence_images: int = 0
    transfer: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sections: list[Section] = field(default_factory=list)

    @property
    def several(self) -> bool:
        return len(self.subjects) > 1

    @property
    def colours(self) -> dict[str, int]:
        """The colour of every model, the same in all charts."""
        return {subject.name: i for i, subject in enumerate(self.subjects)}

    def accuracy(self, subject: InspectedModel) -> float | None:
        """Top-1 on the images that were read; none where they have no labels of the model's classes."""
        known = self.label is not None and self.classes == tuple(subject.model.classes) and not subject.model.multilabel
        return float((subject.guess == self.label).mean()) if known else None

    def of(self, subject: InspectedModel) -> str:
        """The model that a sentence is about, where there are several."""
        return f"{subject.name}: " if self.several else ""

    @property
    def cka_diagonal(self) -> list[float | None]:
        """CKA of layer i of the first with layer i of the second, as far as both have it."""
        values = [] if self.cka is None else self.cka.diagonal().tolist()
        return [v if math.isfinite(v) else None for v in values]

    @cached_property
    def parts(self) -> list[PagePart]:
        """The page, once all sections have finished."""
        return [part for section in self.sections for part in section.parts()]

    def lacking(self) -> list[str]:
        """Sections that were asked for by name and that no model here has, in words."""
        present = {part.name for part in self.parts}
        lines = []
        for section in () if self.everything else self.sections:
            for name, about in section.names.items():
                if name in self.what and name not in present and not section.explains:
                    lines.append(f"{name}: there is nothing to show here ({about})")
        return lines

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"source": self.source, "models": [subject.to_json() for subject in self.subjects]}
        if self.cka is not None:
            values["cka"] = [[v if math.isfinite(v) else None for v in row] for row in self.cka.tolist()]
        if self.divergence:
            values["divergence"] = {"layers": list(self.divergence_layers), "images": self.divergence_images}
            values["divergence"] |= self.divergence
        if self.transfer:
            values["transfer"] = self.transfer
        return values | {"notes": [*self.notes, *self.lacking()]}


@dataclass
class ImageBatch:
    """A batch of images as each of the models takes them, and what earlier sections computed of it."""

    inputs: list[Tensor]  # one [batch, 3, height, width] per model
    captured: list[CapturedBatch] = field(default_factory=list)
    outputs: list[Outputs] = field(default_factory=list)


class Section:
    """Sections that share a computation: it runs over batches, then they are shown."""

    names: ClassVar[Mapping[str, str]]  # section of --what: what it shows
    explains: ClassVar[bool] = False  # whether notes say why there is nothing to show

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection

    def add(self, batch: ImageBatch) -> None:
        """Compute what is needed of a batch."""

    def finish(self) -> None:
        """Put results into the models."""

    def parts(self) -> Iterator[PagePart]:
        """What the page shows."""
        return iter(())

    def verdict(self) -> Iterator[str]:
        """Sentences of the summary."""
        for line in self.lines():
            yield f"{line if self.inspection.several else line[:1].upper() + line[1:]}."

    def lines(self) -> Iterator[str]:
        """The same for the terminal."""
        return iter(())

    def tables(self) -> Iterator[ResultTable | str]:
        """Tables for the terminal, and single lines."""
        return iter(())
