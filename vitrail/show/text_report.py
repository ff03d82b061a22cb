"""The report of a finished run on texts."""

from __future__ import annotations

from typing import cast

from markupsafe import Markup, escape

from vitrail.data.texts import Text, texts_of
from vitrail.data.tokenise import PADDING, TOKENIZER, Encoded
from vitrail.measure.classification import SingleLabelFigures, matthews
from vitrail.measure.evaluate import worst_mistakes
from vitrail.measure.word_influence import word_influence
from vitrail.model.text_trunk import TextTrunk
from vitrail.show.quantities import number, percent
from vitrail.show.report import Cost, Fragment, write_report
from vitrail.show.run_report import Told, adapter_rows
from vitrail.show.word_strips import Strip, word_strips

MISTAKES, STRIPS = 12, 6


def report_texts(told: Told, texts: Encoded) -> None:
    """Write `report.html` of a run; `texts` are those of the split that is judged."""
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
            cost=Cost(
                parameters=sum(p.numel() for p in told.model.parameters()), training_seconds=told.seconds, rows=rows
            ),
            fragments=[
                Fragment("surest errors", "Where it was sure, and wrong", mistakes(told)),
                Fragment("word influence", "Which words it hangs on", influence(told, texts)),
            ],
            unfit=("most confident errors", "attention pictures"),
        ),
    )


def mistakes(told: Told) -> Markup:
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


def influence(told: Told, texts: Encoded) -> Markup:
    """Strips of a few texts: half of them right, half wrong where there are so many."""
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
