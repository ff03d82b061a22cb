"""The report of a finished run of a language model."""

from __future__ import annotations

from typing import cast

from markupsafe import Markup, escape

from vitrail.data.tokenise import Encoded
from vitrail.measure.language import LanguageFigures
from vitrail.model.text_trunk import TextTrunk
from vitrail.show.quantities import number, percent, shorten
from vitrail.show.report import Cost, Fragment, write_report
from vitrail.show.run_report import Told, adapter_rows

SHOWN, LONGEST = 12, 400
UNFIT = ("confusion matrix", "figures of each class", "calibration", "most confident errors", "attention pictures")


def report_language(told: Told, texts: Encoded) -> None:
    """Write `report.html` of a run; `texts` are those of the split that is judged."""
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
    tiles.append(("loss", number(figures.loss), "nats a token"))
    described = f"{trunk.config.name}, {trunk.depth} blocks of width {trunk.width}"
    rows = [*adapter_rows(told.adapter), ("Decoder", described), ("Texts cut", f"{texts.cut:,} of {len(texts):,}")]
    write_report(
        told.folder.report,
        told.report(
            things="texts",
            verdict=f"{said}.",
            tiles=tiles,
            cost=Cost(
                parameters=sum(p.numel() for p in told.model.parameters()), training_seconds=told.seconds, rows=rows
            ),
            fragments=[Fragment("completions", "What it writes", completions(figures))],
            unfit=UNFIT,
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
