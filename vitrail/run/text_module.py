"""Texts in a run: batches, and the report of a text classifier or a language model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from markupsafe import Markup, escape

from vitrail.config import RunConfig
from vitrail.data.batch import ViewSpec
from vitrail.data.dataset import DataSet, Split
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.loading.text_loader import TextEvalLoader, TextTrainLoader
from vitrail.data.sources.text import Text, texts_of
from vitrail.data.tokenizer import PADDING, TOKENIZER, EncodedTexts, encode_completions
from vitrail.engine.device import ProcessGroup
from vitrail.measure.classification import SingleLabelFigures, matthews
from vitrail.measure.evaluator import worst_mistakes
from vitrail.measure.language import LanguageFigures
from vitrail.measure.saliency import word_influence
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import writes_texts
from vitrail.model.trunks.text_trunk import TextTrunk
from vitrail.quantities import number, percent, shorten
from vitrail.report.html import Fragment, ModelCost, write_report
from vitrail.run.data_module import DataModule
from vitrail.run.page import RunSummary, adapter_rows

EVALUATION_BATCH = 64


def encode_split(model: Classifier, split: Split) -> EncodedTexts:
    """The texts of a split as a text model reads them."""
    tokeniser, texts = cast("TextTrunk", model.trunk).tokeniser(model.files[TOKENIZER]), texts_of(split)
    return encode_completions(tokeniser, texts) if writes_texts(model) else tokeniser(texts)


def evaluation_texts(model: Classifier, split: Split, batch: int, device: torch.device) -> TextEvalLoader:
    """Every text of a split once."""
    return TextEvalLoader(encode_split(model, split), split, batch=batch, device=device)


class TextModule(DataModule):
    """Texts."""

    compiles = False  # batches differ in length, and masks of transformers may be decided on the host

    def __init__(
        self, config: RunConfig, data: DataSet, model: Classifier, device: torch.device, group: ProcessGroup
    ) -> None:
        super().__init__(config, data, model, device, group)
        self.trunk = cast("TextTrunk", model.trunk)
        self.tokenizer = hashlib.sha256(model.files[TOKENIZER].encode()).hexdigest()[:16]
        self.texts = {name: encode_split(model, split) for name, split in data.splits.items()}
        self.length = self.trunk.config.length if config.data.pad == "length" else None
        cut = {name: f"{texts.cut:,} of {len(texts):,} of {name}" for name, texts in self.texts.items() if texts.cut}
        note = f"longer than {self.trunk.config.length} tokens, and cut: {', '.join(cut.values())} (model.trunk.length)"
        self.notes: tuple[str, ...] = (note,) if cut else ()

    def prepare(self, views: ViewSpec, sampler: BatchSampler) -> None:
        chosen = self.config.data
        if views.views != 1:
            raise ValueError(
                f"objective {self.config.objective.kind} wants {views.views} views of an example, and a text has one; "
                "use supervised"
            )
        if chosen.augment.mixup or chosen.augment.cutmix:
            raise ValueError("data.augment: mixup and CutMix mix pixels; set both to 0 for texts")
        self.sampler = sampler

    def batches(self, start: int, stop: int) -> TextTrainLoader:
        return TextTrainLoader(
            self.texts["train"],
            self.data["train"],
            self.sampler,
            device=self.device,
            start=start,
            stop=stop,
            accumulate=self.config.engine.accumulate or 1,
            rank=self.group.rank,
            world=self.group.world,
            length=self.length,
        )

    def evaluation(self, split: str | Split) -> TextEvalLoader:
        return TextEvalLoader(
            self.texts[split] if isinstance(split, str) else encode_split(self.model, split),
            self.data[split] if isinstance(split, str) else split,
            batch=EVALUATION_BATCH,
            device=self.device,
            rank=self.group.rank,
            world=self.group.world,
            length=self.length,
        )

    def facts(self) -> Mapping[str, Any]:
        # Numbers of tokens mean nothing without the words they stand for, which may come from the data themselves.
        return {"texts": self.texts["train"].digest(), "tokenizer": self.tokenizer}

    def report(self, summary: RunSummary) -> None:
        (report_language if writes_texts(summary.model) else report_texts)(summary, self.texts[summary.split])


STRONG, WEAK = (46, 125, 80), (214, 224, 242)  # green, pale blue


@dataclass(frozen=True)
class Strip:
    """One text, its words, and rows of influence per word: green is strong, blue weak (SoT, Xie et al., 2021, arXiv
    2104.10935, supplement E)."""

    caption: str
    words: Sequence[str]
    rows: Mapping[str, Sequence[float]]  # name -> influence of each word; its sign is not shown


def word_strips(strips: Sequence[Strip]) -> Markup:
    """The strips one below the other; within a row colours go from its weakest to its strongest word."""
    cards = []
    for strip in strips:
        rows = [
            f'<tr><th scope="row" style="text-align:left;padding-right:12px;font-weight:normal">{escape(name)}</th>'
            f"<td>{_row(strip.words, values)}</td></tr>"
            for name, values in strip.rows.items()
        ]
        table = f"<table><tbody>{''.join(rows)}</tbody></table>"
        cards.append(f'<div class="card wide"><h3>{escape(strip.caption)}</h3>{table}</div>')
    return Markup("".join(cards))  # every part is escaped


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


def report_texts(run: RunSummary, texts: EncodedTexts) -> None:
    """Write `report.html` of a run; `texts` are those of the evaluated split."""
    tiles = []
    if isinstance(run.figures, SingleLabelFigures):
        tiles = [("Matthews correlation", number(matthews(run.figures.confusion)), "0: no better than chance")]
    trunk = cast("TextTrunk", run.model.trunk)
    described = (
        f"{trunk.config.name}, {trunk.depth} blocks of width {trunk.width}, class token {trunk.config.class_token}"
    )
    rows = [*adapter_rows(run.adapter), ("Encoder", described), ("Texts cut", f"{texts.cut:,} of {len(texts):,}")]
    write_report(
        run.folder.report,
        run.report(
            things="texts",
            tiles=tiles,
            cost=ModelCost(
                parameters=sum(p.numel() for p in run.model.parameters()), training_seconds=run.seconds, rows=rows
            ),
            fragments=[
                Fragment("surest errors", "Most confident errors", text_mistakes(run)),
                Fragment("word influence", "Word influence", influence(run, texts)),
            ],
            unfit=("most confident errors", "attention maps"),
        ),
    )


def text_mistakes(run: RunSummary) -> Markup:
    """The surest errors as a table."""
    split, classes = run.data[run.split], run.data.classes
    rows = {int(index): row for row, index in enumerate(split.index)}
    texts = texts_of(split)
    lines = []
    for mistake in worst_mistakes(run.predictions, MISTAKES):
        truth = ", ".join(classes[c] for c in mistake.truth) or "none of the classes"
        cells = (_said(texts[rows[mistake.index]]), truth, classes[mistake.guess], percent(mistake.probability, 0))
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    if not lines:
        return Markup("<p>No text is misclassified.</p>")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("text", "true", "predicted", "confidence"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return Markup(f'<div class="card wide">{table}</div>')  # cells are escaped


def influence(run: RunSummary, texts: EncodedTexts) -> Markup:
    """Strips of a few texts: half of them right, half wrong where there are so many."""
    split, classes = run.data[run.split], run.data.classes
    if run.data.multilabel:
        return Markup("")
    rows = {int(index): row for row, index in enumerate(split.index)}
    guess = run.predictions.guess
    right = (guess == run.predictions.target).tolist()
    places = [i for i, hit in enumerate(right) if hit][: STRIPS // 2]
    places += [i for i, hit in enumerate(right) if not hit][: STRIPS - len(places)]
    model, strips = run.model, []
    tokeniser = cast("TextTrunk", model.trunk).tokeniser(model.files[TOKENIZER])
    for i in places:
        batch = texts.batch([rows[int(run.predictions.index[i])]]).to(run.device)
        real = batch[0, 2] != PADDING
        influences = word_influence(model, batch)
        mark = "\N{CHECK MARK}" if right[i] else "\N{BALLOT X}"
        truth, predicted = classes[int(run.predictions.target[i])], classes[int(guess[i])]
        caption = f"{mark} {predicted}" if right[i] else f"{mark} {predicted}, is {truth}"
        words = tokeniser.pieces(batch[0, 0][real].tolist())
        strips.append(Strip(caption, words, {name: values[0][real].tolist() for name, values in influences.items()}))
    intro = Markup("<p>Green words change the decision most, pale ones hardly (gradient times input).</p>")
    return intro + word_strips(strips)


def _said(text: Text) -> str:
    return f"{text.text}  /  {text.pair}" if text.pair else text.text


SHOWN, LONGEST = 12, 400
UNFIT_FOR_TEXT = (
    "confusion matrix",
    "per-class metrics",
    "calibration",
    "most confident errors",
    "attention maps",
)


def report_language(run: RunSummary, texts: EncodedTexts) -> None:
    """Write `report.html` of a run; `texts` are those of the evaluated split."""
    figures, trunk = cast("LanguageFigures", run.figures), cast("TextTrunk", run.model.trunk)
    verdict = (
        f"A token of {figures.count:,} {run.split} completions is as uncertain as a choice of "
        f"{number(figures.perplexity)} (perplexity, over {figures.tokens:,} tokens)"
    )
    tiles = [(f"{run.split} perplexity", number(figures.perplexity, 4), "a token of a completion")]
    if figures.bleu is not None:
        verdict += (
            f"; what the model writes after {len(figures.written):,} prompts has a BLEU of {percent(figures.bleu)}"
        )
        tiles.append((f"{run.split} BLEU", percent(figures.bleu), f"{len(figures.written):,} prompts"))
    if figures.sequence_accuracy is not None:
        verdict += f", and {percent(figures.sequence_accuracy)} of it is right word for word"
        tiles.append((f"{run.split} sequence accuracy", percent(figures.sequence_accuracy), "right word for word"))
    tiles.append(("loss", number(figures.loss), "nats per token"))
    described = f"{trunk.config.name}, {trunk.depth} blocks of width {trunk.width}"
    rows = [*adapter_rows(run.adapter), ("Decoder", described), ("Texts cut", f"{texts.cut:,} of {len(texts):,}")]
    write_report(
        run.folder.report,
        run.report(
            things="texts",
            verdict=f"{verdict}.",
            tiles=tiles,
            cost=ModelCost(
                parameters=sum(p.numel() for p in run.model.parameters()), training_seconds=run.seconds, rows=rows
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
    lines = []
    for example in figures.written[:SHOWN]:
        cells = (shorten(text, LONGEST) for text in (example.prompt, example.completion, example.references[0]))
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return Markup(f'<div class="card wide">{table}</div>')  # cells are escaped
