"""Sections of attention maps: the class token by layer and by head, entropy and distance, saliency of SimA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vitrail.inspect.section import (
    Card,
    Chart,
    ImageBatch,
    InspectedModel,
    Inspection,
    PagePart,
    Section,
    chart_cards,
    sheet_part,
)
from vitrail.measure.attention_maps import AttentionCollector, AttentionMaps
from vitrail.measure.classification import wilson_interval
from vitrail.measure.evaluator import ResultTable
from vitrail.quantities import MISSING, amount, number, percent, shorten
from vitrail.report.charts import curves_chart, whole_percent
from vitrail.report.sheets import MOST_COLUMNS, Cell, Pixels, Row, Sheet, enlarged, evenly, image_rows, overlay

MOST_HEADS = 16
HEAD_PICTURES = 4  # images whose heads are shown one by one
SPREAD = {0.9: "almost uniform", 0.6: "spread over much of the image", 0.0: "on few patches"}  # from an entropy share


class AttentionSection(Section):
    """Attention over the image; the collector also counts kept tokens and MACs, and predicts."""

    names: ClassVar = {
        "attention": "what the class token attends to, by layer",
        "heads": "the same head by head",
        "saliency": "what SimA marks",
    }

    def __init__(self, inspection: Inspection) -> None:
        super().__init__(inspection)
        what = set(inspection.what) - (set() if inspection.several else {"likeness"})
        parts = ["maps"] if what & {"attention", "heads", "likeness"} else []
        parts += [part for part, section in (("features", "likeness"), ("saliency", "saliency")) if section in what]
        self.collectors = [AttentionCollector(s.model, inspection.count, parts) for s in inspection.subjects]
        self.guesses: list[list[Tensor]] = [[] for _ in inspection.subjects]

    def add(self, batch: ImageBatch) -> None:
        batch.captured = [each.add(images) for each, images in zip(self.collectors, batch.inputs, strict=True)]
        for guesses, captured in zip(self.guesses, batch.captured, strict=True):
            guesses.append(captured.probabilities.argmax(1))

    def finish(self) -> None:
        for subject, collector, guesses in zip(self.inspection.subjects, self.collectors, self.guesses, strict=True):
            subject.attention, subject.guess = collector.result(), torch.cat(guesses).numpy()

    def parts(self) -> Iterator[PagePart]:
        inspection, subjects = self.inspection, self.inspection.subjects
        if "attention" in inspection.what:
            sheet = attention_sheet(inspection)
            if sheet is not None:
                lead = "What the class token attends to, mean over heads: bright is most, dark is least, each picture "
                lead += "by its own scale. Layers count from 0."
                if any(layer.row == "mean" for s in subjects for layer in s.attention.layers):
                    lead += " Where there is no class token, what patches attend to on average."
                if any(s.attention.head_maps is not None for s in subjects):
                    lead += " “head”: the maps of the classifier's own attention."
                yield sheet_part("attention", "Attention maps", lead, [sheet])
            if charts := self._charts():
                lead = f"Means over {subjects[0].attention.images} images; bands span the heads. An entropy share of "
                lead += "100 % is even attention to all tokens; distance is from a patch to those it attends to."
                layout = "charts" if len(charts) == 3 else "pair"
                yield PagePart("layers", "Attention entropy and distance", lead, chart_cards(charts), layout)
            if tables := [self._table(s) for s in subjects if s.attention.layers]:
                yield PagePart("figures", "Attention metrics", "", [Card(t.title, [t]) for t in tables])
        if "heads" in inspection.what and (sheets := head_sheets(inspection)):
            cards = [Card(sheet.title, [sheet]) for sheet in sheets]
            lead = "The same attention, one picture per head."
            yield PagePart("heads", "Attention maps by head", lead, cards)
        salient = [s for s in subjects if s.attention.saliency is not None]
        if "saliency" in inspection.what and salient:
            lead = "Attention without softmax has no row of shares. Shown is the norm of each token's normalised query "
            lead += "and key in the last such layer."
            sheets = [saliency_sheet(s, inspection.captions, inspection.colours[s.name]) for s in salient]
            yield sheet_part("saliency", "SimA saliency", lead, sheets)

    def _charts(self) -> list[Chart]:
        """Statistics by layer, and tokens that enter each block."""
        subjects, colours = self.inspection.subjects, self.inspection.colours
        charts = []
        size = (520, 300) if any(s.attention.entering for s in subjects) else (336, 240)  # three in a row
        for heading, name, tell in (
            ("Entropy of all rows", "entropy_share", percent),
            ("Entropy of the class token's row", "class_entropy_share", percent),
            ("Mean attention distance, patches", "distance", number),
        ):
            curves = {s.name: _by_head(s.attention, name) for s in subjects if s.attention.layers}
            if curves:
                axis = whole_percent if tell is percent else "{:g}".format
                style = {"x_label": "layer", "tell": tell, "tell_axis": axis, "colours": colours, "size": size}
                svg = curves_chart(curves, title=heading, **style)  # type: ignore[arg-type]
                charts.append(Chart(heading, svg))
        views = [(s.name, s.attention) for s in subjects]
        views += [(f"{s.name}, attacked", s.attacked) for s in subjects if s.attacked is not None]
        tokens = {name: [dict(enumerate(maps.entering))] for name, maps in views if maps.entering}
        if tokens:
            colours |= {name: len(subjects) + i for i, (name, _) in enumerate(views[len(subjects) :])}
            svg = curves_chart(tokens, title="Tokens that enter each block", x_label="block", colours=colours)  # type: ignore[arg-type]
            charts.append(Chart("Tokens that enter each block, mean", svg))
        return charts

    def _table(self, subject: InspectedModel, cka: Sequence[float | None] | None = None) -> ResultTable:
        """One row per layer, means over heads."""
        maps = subject.attention
        cka = self.inspection.cka_diagonal if cka is None else cka
        row = maps.layers[-1].row if maps.layers else "class"
        columns = ["layer", "entropy", "share", f"{row} row", "share", "distance", "pixels"]
        columns += (["tokens", "left"] if maps.entering else []) + (["CKA"] if cka else [])
        rows = []
        for layer in maps.layers:
            far = _mean(layer.distance)
            cells = [f"{layer.layer}", fixed(_mean(layer.entropy)), percent(_mean(layer.entropy_share))]
            cells += [fixed(_mean(layer.class_entropy)), percent(_mean(layer.class_entropy_share))]
            cells += [fixed(far), number(far * maps.pitch)]
            if maps.entering:
                cells += [f"{maps.entering[layer.layer]:.1f}", f"{maps.leaving[layer.layer]:.1f}"]
            if cka:
                value = cka[layer.layer] if layer.layer < len(cka) else None
                cells.append(MISSING if value is None else f"{value:.3f}")
            rows.append(tuple(cells))
        return ResultTable(subject.name, tuple(columns), rows)

    def verdict(self) -> Iterator[str]:
        inspection = self.inspection
        for subject in inspection.subjects:
            layers, accuracy = subject.attention.layers, inspection.accuracy(subject)
            if accuracy is not None:
                images = f"{subject.attention.images:,} images, {inspection.source},"
                low, high = wilson_interval(round(accuracy * subject.attention.images), subject.attention.images)
                interval = f"(95 % confidence: {percent(low)} to {percent(high)})"
                yield f"{inspection.of(subject)}{percent(accuracy)} of {images} are classified correctly {interval}."
            if layers and "attention" in inspection.what:
                first, last = layers[0], layers[-1]
                share, far = _mean(last.entropy_share), [number(_mean(layer.distance)) for layer in (first, last)]
                kind = next((words for least, words in SPREAD.items() if share >= least), "")
                yield (
                    f"{inspection.of(subject)}Attention of the last layer is {kind} ({percent(share, 0)} of the "
                    f"maximum entropy); mean attention distance: {far[0]} patches in the first layer and {far[1]} in "
                    "the last."
                )

    def tables(self) -> Iterator[ResultTable | str]:
        for subject in self.inspection.subjects:
            maps = subject.attention
            if maps.layers and "attention" in self.inspection.what:
                title = f"{shorten(subject.name, 40)}, {maps.images} images; entropy in nats, distance in patches"
                first = subject is self.inspection.subjects[0]
                yield self._table(subject, None if first else ())._replace(title=title)
            if maps.macs is not None and maps.macs_whole:
                share = percent(maps.macs / maps.macs_whole)
                yield f"{subject.name}: {amount(maps.macs)} MACs per image, {share} of the whole model's"
                if subject.attacked is not None and subject.attacked.macs is not None:
                    share = percent(subject.attacked.macs / maps.macs_whole)
                    yield f"under the patch: {amount(subject.attacked.macs)}, {share}"
                yield ""


def attention_sheet(inspection: Inspection) -> Sheet | None:
    """Attention of the class token, mean over heads: one column per layer; models below each other for every image."""
    subjects = [s for s in inspection.subjects if s.attention.layers or s.attention.head_maps is not None]
    if not subjects:
        return None
    known = sorted({layer.layer for s in subjects for layer in s.attention.layers})
    layers = list(inspection.layers) or evenly(known, MOST_COLUMNS)
    heads = any(s.attention.head_maps is not None for s in subjects)
    rows: list[Row] = []
    for image, caption in enumerate(inspection.captions):
        for subject in subjects:
            pixels, maps = enlarged(subject.pixels[image]), subject.attention
            at = {layer.layer: i for i, layer in enumerate(maps.layers)}
            shown = [maps.class_maps[image, at[layer]].mean(0) if layer in at else None for layer in layers]
            if heads:
                shown.append(None if maps.head_maps is None else maps.head_maps[image])
            first = Cell(pixels, shorten(caption, 18)) if subject is subjects[0] else None
            cells = [None if values is None else Cell(_over(pixels, values, maps.grid)) for values in shown]
            name = f"predicted {maps.prediction(image)}"
            rows.append((f"{subject.name} {name}" if len(subjects) > 1 else name, [first, *cells]))
    columns = ["image", *(f"layer {i}" for i in layers), *(["head"] if heads else [])]
    return Sheet("attention", "Attention of the class token, mean over heads", columns, rows)


def head_sheets(inspection: Inspection) -> list[Sheet]:
    """One sheet per model: for a few images, one row per layer and one column per head."""
    sheets = []
    for number_, subject in enumerate(s for s in inspection.subjects if s.attention.layers):
        maps = subject.attention
        at = {layer.layer: i for i, layer in enumerate(maps.layers)}
        layers = [i for i in inspection.layers if i in at] or evenly(list(at), 3)
        heads = maps.class_maps.shape[2]
        shown = evenly(range(heads), MOST_HEADS)
        rows: list[Row] = []
        for image, caption in enumerate(inspection.captions[:HEAD_PICTURES]):
            pixels = enlarged(subject.pixels[image])
            for layer in layers:
                first = Cell(pixels, shorten(caption, 18)) if layer == layers[0] else None
                weights = maps.class_maps[image, at[layer]]
                rows.append((f"layer {layer}", [first, *(Cell(_over(pixels, weights[h], maps.grid)) for h in shown)]))
        title = f"Attention by head, {subject.name}" + (f" ({len(shown)} of {heads})" if len(shown) < heads else "")
        sheets.append(Sheet(f"heads-{number_}", title, ["image", *(f"head {h}" for h in shown)], rows))
    return sheets


def saliency_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet:
    """Norms of q̂ and k̂ of SimA's last layer over the image (Koohpayegani and Pirsiavash 2022, arXiv 2206.08898)."""
    maps = subject.attention

    def cells(image: int, pixels: Pixels) -> list[Cell]:
        return [Cell(_over(pixels, values[image], maps.grid)) for values in maps.saliency or ()]

    rows = image_rows(subject.pixels, captions, cells, lambda image: f"predicted {maps.prediction(image)}")
    return Sheet(f"saliency-{number}", f"Saliency of {subject.name}", ["image", "norm of q̂", "norm of k̂"], rows)


def _over(pixels: Pixels, values: Tensor, grid: tuple[int, int]) -> Pixels:
    return overlay(pixels, values.float().reshape(grid))


def _by_head(maps: AttentionMaps, name: str) -> list[dict[float, float]]:
    values = np.array([getattr(layer, name) for layer in maps.layers])  # [layers, heads]
    layers = [float(layer.layer) for layer in maps.layers]
    return [{i: v for i, v in zip(layers, head.tolist(), strict=True) if math.isfinite(v)} for head in values.T]


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def fixed(value: float) -> str:
    """With two decimals."""
    return f"{value:.2f}" if math.isfinite(value) else MISSING
