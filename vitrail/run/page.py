"""The report of a finished run, from what the run knows.

A strip of words, coloured by their influence: green is strong, blue weak (SoT, Xie et al., 2021, arXiv
2104.10935, supplement E).

The report of a finished run on texts.

The report of a finished run of a language model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from markupsafe import Markup, escape
from torch import Tensor

from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.text import Text, texts_of
from vitrail.data.tokenizer import PADDING, TOKENIZER, EncodedTexts
from vitrail.engine.run_folder import RunFolder
from vitrail.measure.attention_maps import AttentionCollector, AttentionMaps, map_layers
from vitrail.measure.classification import Figures, SingleLabelFigures, matthews
from vitrail.measure.compute import worst_case
from vitrail.measure.evaluator import Predictions, UnlabelledFigures, worst_mistakes
from vitrail.measure.language import LanguageFigures
from vitrail.measure.speed import throughput
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.trunks.text_trunk import TextTrunk
from vitrail.quantities import memory, number, percent, shorten
from vitrail.report.html import (
    AttentionPicture,
    DataSummary,
    ErrorPicture,
    Fragment,
    ModelCost,
    Report,
    write_report,
)
from vitrail.report.sheets import Sheet, kept_sheet, overlay

UNFIT = ("confusion matrix", "figures of each class", "calibration", "most confident errors")  # without labels
KEPT_IMAGES = 64  # images whose tokens are counted
SLOW_IMAGE = 3e10  # multiply-accumulates of an image, from which on a CPU is timed with one at a time


@dataclass(frozen=True)
class RunSummary:
    """What a finished run tells its report."""

    folder: RunFolder
    model: Classifier
    data: DataSet
    predictions: Predictions
    figures: Figures
    split: str
    skipped: Sequence[tuple[str, str]]
    seconds: float
    device: torch.device
    autocast: torch.dtype | None
    title: str
    config: str
    adapter: Mapping[str, Any] | None = None
    """What the file of one holds."""

    def report(self, **parts: Any) -> Report:
        """What reports of images and of texts have in common, and these parts."""
        environment = json.loads((self.folder.path / "environment.json").read_text(encoding="utf-8"))
        return Report(
            title=self.title,
            figures=self.figures,
            split=self.split,
            history=self.folder.read_metrics(),
            data=summary(self.data, self.skipped),
            config=self.config,
            environment=environment,
            command=str(environment.get("command", "")),
            created=time.strftime("%Y-%m-%d %H:%M"),
            **parts,
        )


def report_run(told: RunSummary) -> None:
    """Write `report.html` of a run on images."""
    model, data, split, device = told.model, told.data, told.split, told.device
    figures, without = told.figures, {}
    if isinstance(figures, UnlabelledFigures):
        said = f"{figures.count:,} {split} images have no labels, so nothing is right or wrong. Their embeddings "
        said += f"differ in about {number(figures.rank, 3)} directions, with a spread of {number(figures.spread, 3)}; "
        tiles = [("spread", number(figures.spread, 3), "0: all alike"), ("rank", number(figures.rank, 3), "directions")]
        without = {"verdict": f"{said}neighbours are on the page of vitrail inspect.", "tiles": tiles, "unfit": UNFIT}
    write_report(
        told.folder.report,
        told.report(
            cost=measured_cost(model, device, told.autocast, told.seconds, adapter_rows(told.adapter)),
            errors=[] if without else mistakes(data, split, told.predictions),
            attention=attention_pictures(model, data, split, device),
            kept=kept_tokens(model, data, split, device),
            inside=f"vitrail inspect {told.folder.path}",
            **without,
        ),
    )


def adapter_rows(adapter: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Lines of the cost table for a model that was trained as an adapter."""
    if adapter is None:
        return []
    whole = adapter["of_these_whole"]
    apart = f" (classifier and norms: {whole:,})" if whole else ""
    bits = "" if adapter["bits"] == 32 else f", {adapter['bits']} bits a coefficient"
    return [
        ("Numbers trained", f"{adapter['trained']:,}{apart}, by {adapter['kind']}"),
        ("Numbers stored", f"{adapter['stored']:,}, in a file of {adapter['bytes']:,} bytes{bits}"),
        ("Base", f"{adapter['base']['architecture']}, hash {adapter['base']['hash']}"),
    ]


def measured_cost(
    model: Classifier,
    device: torch.device,
    autocast: torch.dtype | None,
    seconds: float,
    rows: Sequence[tuple[str, str]] = (),
) -> ModelCost:
    """Parameters, multiply-accumulates and a short measurement of speed and memory."""
    size = model.preprocess.size
    # What an adaptive model spends depends on the image: here stands the most, beside what was kept the mean.
    macs: float | None = None
    if model.policy is None:
        macs = cost(model, size).macs
    else:
        with suppress(ValueError):  # not known for every mixer of adaptive models
            macs = worst_case(model, size)
    many = 1 if device.type == "cpu" and macs is not None and macs > SLOW_IMAGE else 64
    speed = throughput(model, size, many, device, seconds=1.0, autocast=autocast)
    return ModelCost(
        parameters=sum(p.numel() for p in model.parameters()),
        macs=macs,
        images_per_second=speed["images_per_second"],
        # On a CPU only the peak of the whole process is known, training included: another thing, said apart.
        peak_memory=None if device.type == "cpu" else speed["peak_memory"],
        rows=[
            *rows,
            *([("Peak memory of the whole run", memory(speed["peak_memory"]))] if device.type == "cpu" else []),
        ],
        training_seconds=seconds,
        conditions=f"batch {many}, {size} px, {speed['precision']}, {speed['device']}"
        + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""),
    )


def mistakes(data: DataSet, split: str, predictions: Predictions, most: int = 12) -> list[ErrorPicture]:
    """The surest errors, with their pictures."""
    rows = {int(index): row for row, index in enumerate(data[split].index)}
    found = []
    for mistake in worst_mistakes(predictions, most):
        row = rows[mistake.index]
        try:
            image = data[split].read(row)
        except BadImage:
            continue
        found.append(ErrorPicture.of(mistake, data.classes, image, data[split].keys[row]))
    return found


def attention_pictures(
    model: Classifier, data: DataSet, split: str, device: torch.device, most: int = 8
) -> list[AttentionPicture]:
    """Where the last layer looks, for a few images of different classes; none for models without attention maps."""
    images = _readable(model, data, split, _one_of_each(data[split].labels, most)) if map_layers(model) else []
    if not images:
        return []
    collector = AttentionCollector(model, most)
    for image in images:
        collector.add(image[None].to(device))
    maps, pictures = collector.result(), []
    for i, image in enumerate(images):
        pixels, guess = image.permute(1, 2, 0).numpy(), int(maps.probabilities[i].argmax())
        # The class token's row, mean over heads; without one, what patches attend to on average.
        attention = maps.class_maps[i, -1].mean(0).reshape(maps.grid)
        caption = f"{data.classes[guess]} {float(maps.probabilities[i, guess]):.0%}"
        pictures.append(AttentionPicture(pixels, overlay(pixels, attention), caption))
    return pictures


def kept_tokens(
    model: Classifier, data: DataSet, split: str, device: torch.device, most: int = 4
) -> tuple[Sheet, AttentionMaps] | None:
    """What an adaptive model keeps: a strip of a few images, and tokens of each block; none for other models."""
    if model.policy is None:
        return None
    labels = data[split].labels
    first = _one_of_each(labels, most)
    rows = first + [row for row in range(min(KEPT_IMAGES, len(labels))) if row not in first]
    images = _readable(model, data, split, rows)
    if not images:
        return None
    collector = AttentionCollector(model, most)
    for start in range(0, len(images), 16):
        collector.add(torch.stack(images[start : start + 16]).to(device))
    pixels = [image.permute(1, 2, 0).numpy() for image in images[:most]]
    maps = collector.result()
    return kept_sheet("the model", maps, pixels, [""] * len(pixels), most=8), maps


def _readable(model: Classifier, data: DataSet, split: str, rows: Sequence[int]) -> list[Tensor]:
    """These rows as the model takes them, bytes [3, size, size]; what cannot be read is left out."""
    preprocess, made = Preprocess(model.preprocess), []
    for row in rows:
        try:
            made.append(preprocess(data[split].read(row)))
        except BadImage:
            continue
    return made


def summary(data: DataSet, skipped: Sequence[tuple[str, str]]) -> DataSummary:
    """Classes, counts, notes and what was left out."""
    counts: dict[str, Any] = {}
    for name, split in data.splits.items():
        labels = split.labels
        per_class = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=len(data.classes))
        counts[name] = [int(n) for n in per_class]
    return DataSummary(
        uri=data.uri,
        classes=data.classes,
        counts=counts,
        images={name: len(split) for name, split in data.splits.items()},
        notes=data.notes,
        skipped=list(skipped),
    )


def _one_of_each(labels: Any, most: int) -> list[int]:
    first: dict[int, int] = {}
    kinds = labels.argmax(1) if labels.ndim == 2 else labels
    for row, kind in enumerate(kinds):
        first.setdefault(int(kind), row)
        if len(first) == most:
            break
    return list(first.values())


STRONG, WEAK = (46, 125, 80), (214, 224, 242)  # green, pale blue


@dataclass(frozen=True)
class Strip:
    """One text, its words, and rows of influence per word."""

    caption: str
    words: Sequence[str]
    rows: Mapping[str, Sequence[float]]  # name -> influence of each word; its sign is not shown


def word_strips(strips: Sequence[Strip]) -> Markup:
    """The strips one below the other; within a row colours go from its weakest to its strongest word."""
    made = []
    for strip in strips:
        rows = [
            f'<tr><th scope="row" style="text-align:left;padding-right:12px;font-weight:normal">{escape(name)}</th>'
            f"<td>{_row(strip.words, values)}</td></tr>"
            for name, values in strip.rows.items()
        ]
        table = f"<table><tbody>{''.join(rows)}</tbody></table>"
        made.append(f'<div class="card wide"><h3>{escape(strip.caption)}</h3>{table}</div>')
    return Markup("".join(made))  # every part is escaped


def _row(words: Sequence[str], values: Sequence[float]) -> str:
    sizes = [abs(value) for value in values]
    low, high = min(sizes, default=0.0), max(sizes, default=0.0)
    cells = []
    for word, size in zip(words, sizes, strict=True):
        share = (size - low) / (high - low) if high > low else 0.0
        red, green, blue = (round(w + (s - w) * share) for s, w in zip(STRONG, WEAK, strict=True))
        ink = "#fff" if share > 0.6 else "#111"
        cells.append(
            f'<span style="background:rgb({red},{green},{blue});color:{ink};padding:1px 5px;margin:1px;'
            f'display:inline-block;border-radius:3px" title="{size:.3g}">{escape(word)}</span>'
        )
    return "".join(cells)


MISTAKES, STRIPS = 12, 6


def report_texts(told: RunSummary, texts: EncodedTexts) -> None:
    """Write `report.html` of a run; `texts` are those of the evaluated split."""
    tiles = []
    if isinstance(told.figures, SingleLabelFigures):
        tiles = [("Matthews correlation", number(matthews(told.figures.confusion)), "0: no better than chance")]
    trunk = cast("TextTrunk", told.model.trunk)
    described = (
        f"{trunk.config.name}, {trunk.depth} blocks of width {trunk.width}, class token {trunk.config.class_token}"
    )
    rows = [*adapter_rows(told.adapter), ("Encoder", described), ("Texts cut", f"{texts.cut:,} of {len(texts):,}")]
    write_report(
        told.folder.report,
        told.report(
            things="texts",
            tiles=tiles,
            cost=ModelCost(
                parameters=sum(p.numel() for p in told.model.parameters()), training_seconds=told.seconds, rows=rows
            ),
            fragments=[
                Fragment("surest errors", "Most confident errors", text_mistakes(told)),
                Fragment("word influence", "Word influence", influence(told, texts)),
            ],
            unfit=("most confident errors", "attention pictures"),
        ),
    )


def text_mistakes(told: RunSummary) -> Markup:
    """The surest errors as a table."""
    split, classes = told.data[told.split], told.data.classes
    rows = {int(index): row for row, index in enumerate(split.index)}
    every = texts_of(split)
    made = []
    for mistake in worst_mistakes(told.predictions, MISTAKES):
        truth = ", ".join(classes[c] for c in mistake.truth) or "none of the classes"
        cells = (_said(every[rows[mistake.index]]), truth, classes[mistake.guess], percent(mistake.probability, 0))
        made.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    if not made:
        return Markup("<p>Not one text was taken for another class.</p>")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("text", "is", "taken for", "sure"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(made)}</tbody></table>"
    return Markup(f'<div class="card wide">{table}</div>')  # cells are escaped


def influence(told: RunSummary, texts: EncodedTexts) -> Markup:
    """Strips of a few texts: half of them right, half wrong where there are so many."""
    from vitrail.measure.saliency import word_influence

    split, classes = told.data[told.split], told.data.classes
    if told.data.multilabel:
        return Markup("")
    rows = {int(index): row for row, index in enumerate(split.index)}
    guess = told.predictions.logits.argmax(1)
    right = (guess == told.predictions.target).tolist()
    places = [i for i, hit in enumerate(right) if hit][: STRIPS // 2]
    places += [i for i, hit in enumerate(right) if not hit][: STRIPS - len(places)]
    model, strips = told.model, []
    tokeniser = cast("TextTrunk", model.trunk).tokeniser(model.files[TOKENIZER])
    for i in places:
        one = texts.batch([rows[int(told.predictions.index[i])]]).to(told.device)
        real = one[0, 2] != PADDING
        found = word_influence(model, one)
        mark = "\N{CHECK MARK}" if right[i] else "\N{BALLOT X}"
        truth, said = classes[int(told.predictions.target[i])], classes[int(guess[i])]
        caption = f"{mark} {said}" if right[i] else f"{mark} {said}, is {truth}"
        words = tokeniser.pieces(one[0, 0][real].tolist())
        strips.append(Strip(caption, words, {name: values[0][real].tolist() for name, values in found.items()}))
    intro = Markup("<p>Green words change the decision most, pale ones hardly (gradient times input).</p>")
    return intro + word_strips(strips)


def _said(text: Text) -> str:
    return f"{text.text}  /  {text.pair}" if text.pair else text.text


SHOWN, LONGEST = 12, 400
UNFIT_FOR_TEXT = (
    "confusion matrix",
    "figures of each class",
    "calibration",
    "most confident errors",
    "attention pictures",
)


def report_language(told: RunSummary, texts: EncodedTexts) -> None:
    """Write `report.html` of a run; `texts` are those of the evaluated split."""
    figures, trunk = cast("LanguageFigures", told.figures), cast("TextTrunk", told.model.trunk)
    said = (
        f"A token of {figures.count:,} {told.split} completions is as uncertain as a choice of "
        f"{number(figures.perplexity)} (perplexity, over {figures.tokens:,} tokens)"
    )
    tiles = [(f"{told.split} perplexity", number(figures.perplexity, 4), "a token of a completion")]
    if figures.bleu is not None:
        said += f"; what the model writes after {len(figures.written):,} prompts has a BLEU of {percent(figures.bleu)}"
        tiles.append((f"{told.split} BLEU", percent(figures.bleu), f"{len(figures.written):,} prompts"))
    if figures.sequence_accuracy is not None:
        said += f", and {percent(figures.sequence_accuracy)} of it is right word for word"
        tiles.append((f"{told.split} sequence accuracy", percent(figures.sequence_accuracy), "right word for word"))
    tiles.append(("loss", number(figures.loss), "nats per token"))
    described = f"{trunk.config.name}, {trunk.depth} blocks of width {trunk.width}"
    rows = [*adapter_rows(told.adapter), ("Decoder", described), ("Texts cut", f"{texts.cut:,} of {len(texts):,}")]
    write_report(
        told.folder.report,
        told.report(
            things="texts",
            verdict=f"{said}.",
            tiles=tiles,
            cost=ModelCost(
                parameters=sum(p.numel() for p in told.model.parameters()), training_seconds=told.seconds, rows=rows
            ),
            fragments=[Fragment("completions", "Completions", completions(figures))],
            unfit=UNFIT_FOR_TEXT,
        ),
    )


def completions(figures: LanguageFigures) -> Markup:
    """The first prompts, what was written after them, and one right answer, as a table."""
    if not figures.written:
        return Markup("")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("prompt", "written", "a right answer"))
    made = []
    for one in figures.written[:SHOWN]:
        cells = (shorten(text, LONGEST) for text in (one.prompt, one.completion, one.references[0]))
        made.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(made)}</tbody></table>"
    return Markup(f'<div class="card wide">{table}</div>')  # cells are escaped
