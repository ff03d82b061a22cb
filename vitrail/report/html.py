"""The report of a run as one self-contained HTML page: metrics, errors, attention maps, cost, data, configuration."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitrail.files import write_text
from vitrail.measure.attention_maps import AttentionMaps
from vitrail.measure.classification import (
    MATRIX_CLASSES,
    Figures,
    MultiLabelFigures,
    SingleLabelFigures,
    prior_loss,
)
from vitrail.measure.evaluator import Mistake
from vitrail.quantities import MISSING, amount, duration, memory, number, percent, shorten
from vitrail.report.charts import Series, bar_chart, heat_map, line_chart, reliability, whole_percent
from vitrail.report.sheets import Picture, Sheet, data_uri
from vitrail.report.tables import CALIBRATION

HERE = Path(__file__).parent
PACKAGE = HERE.parent
STYLES = ("report/report.css", "report/compare.css", "report/sheet.css")  # of pages with charts of every kind
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", re.DOTALL)
BOX = re.compile(r'viewBox="0 0 (\d+) (\d+)"')
MARGIN = 12  # on a page, names may stand out of their chart

MOST_SKIPPED = 50  # bad images that are listed one by one
SHOWN_CLASSES = 200  # of very many, in a chart


@dataclass(frozen=True)
class ErrorPicture:
    """An image about which the model was wrong."""

    image: Picture
    truth: str
    guess: str
    probability: float  # of the guess
    truth_probability: float
    key: str = ""  # path or number of the image
    missed: bool = False  # multi-label: `guess` is there, and the model did not see it

    @classmethod
    def of(cls, mistake: Mistake, classes: Sequence[str], image: Picture, key: str = "") -> ErrorPicture:
        """From one of `worst_mistakes`."""
        return cls(
            image=image,
            truth=", ".join(classes[c] for c in mistake.truth) or "none of the classes",
            guess=classes[mistake.guess],
            probability=mistake.probability,
            truth_probability=mistake.truth_probability,
            key=key,
            missed=mistake.guess in mistake.truth,
        )


@dataclass(frozen=True)
class AttentionPicture:
    """An image and its attention map laid over it."""

    image: Picture
    overlay: Picture
    caption: str = ""  # the predicted class
    probability: float = 0.0
    truth: str = ""  # empty where images have no labels
    wrong: bool = False


@dataclass(frozen=True)
class ModelCost:
    """Cost of a model; whatever is unknown is left out."""

    parameters: float | None = None
    macs: float | None = None  # multiply-accumulates of one image
    images_per_second: float | None = None
    peak_memory: float | None = None  # bytes
    training_seconds: float | None = None
    conditions: str = ""  # of speed and memory: "batch 128, 224 px, bfloat16, NVIDIA A100"
    rows: Sequence[tuple[str, str]] = ()  # anything else worth a line of the cost table


@dataclass(frozen=True)
class DataSummary:
    """What the run read."""

    uri: str
    classes: Sequence[str]
    counts: Mapping[str, Sequence[int]]  # images (multi-label: positive labels) of each class in each split
    images: Mapping[str, int] = field(default_factory=dict)  # of each split, where not the sum of `counts`
    notes: Sequence[str] = ()
    skipped: Sequence[tuple[str, str]] = ()  # (image, reason) of every image that could not be used


@dataclass(frozen=True)
class Fragment:
    """A section with content of its own."""

    name: str
    heading: str
    content: Markup


@dataclass(frozen=True)
class Report:
    """Everything a report can tell. Any part may be absent; its section is then left out and named at the end."""

    title: str
    figures: Figures | None = None
    split: str = "test"  # which images `figures` speak of
    verdict: str = ""  # one or two sentences (empty: written from the figures)
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    cost: ModelCost | None = None
    errors: Sequence[ErrorPicture] = ()
    attention: Sequence[AttentionPicture] = ()
    kept: tuple[Sheet, AttentionMaps] | None = None  # of an adaptive model: a few images stage by stage
    things: str = "images"  # what is classified
    tiles: Sequence[tuple[str, str, str]] = ()  # (name, value, remark) of further headline metrics
    fragments: Sequence[Fragment] = ()
    unfit: Sequence[str] = ()  # sections that a report of these things cannot have
    data: DataSummary | None = None
    config: str = ""  # YAML
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    inside: str = ""  # the command that writes inspect/inspect.html, which the page links to
    outcome: Sequence[str] = ()  # sentences on early stopping and the weights that were selected
    trust: Mapping[str, Any] | None = None  # what was fitted on val for probabilities (`measure.trust.Fitted.facts`)


def write_report(path: str | Path, report: Report) -> None:
    """Write `report` to `path` as one HTML file that needs nothing else; a reader sees the old file or the new one."""
    write_text(Path(path), render(report))


def style_sheets(*names: str) -> str:
    """The text of style sheets, paths below the package such as `report/report.css`."""
    return "".join((PACKAGE / name).read_text(encoding="utf-8") for name in names)


def standalone(chart: Markup) -> str:
    """The text of an .svg file: the chart with the page's style, in its light colours, on white."""
    box = BOX.search(chart)
    assert box is not None
    width, height = (int(side) + 2 * MARGIN for side in box.groups())
    tag, _, rest = BOX.sub(f'viewBox="{-MARGIN} {-MARGIN} {width} {height}"', str(chart), count=1).partition(">")
    tag = tag.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"', 1)
    style = f"{DARK.sub('', style_sheets(*STYLES))}.chart {{ width: auto; max-width: none; background: #fff; }}"
    return f"{tag}><style><![CDATA[{style}]]></style>{rest}"


def render_page(template: str, styles: Sequence[str], **values: Any) -> str:
    """The HTML of a template (a path below the package), with style sheets and the filters that all pages share."""
    loader = FileSystemLoader((PACKAGE, HERE))
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for name in (percent, number, amount, memory, duration, shorten, columns):
        pages.filters[name.__name__] = name
    pages.filters["picture"] = data_uri
    page = pages.get_template(template).render(style=Markup(style_sheets(*styles)), missing=MISSING, **values)
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):  # only the template's own may run
        digest = base64.b64encode(hashlib.sha256(script.encode(errors="readable")).digest()).decode()
        page = page.replace("script-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", 1)
    return page


def columns(tiles: Sequence[Any], most: int = 7) -> int:
    """Columns in which tiles fill their rows evenly, or nearly so: 4 of 8 tiles, 6 of 11."""
    return next((n for n in range(most, 0, -1) if n > 2 and len(tiles) % n == 0), min(6, len(tiles)))


def render(report: Report) -> str:
    """The HTML of `report`."""
    sections: dict[str, Any] = {
        "training curves": _curves(report.history),
        "confusion matrix": _confusion(report.figures),
        "per-class metrics": _class_rows(report.figures),
        "calibration": _calibration(report.figures, report.trust),
        "most confident errors": report.errors,
        "attention maps": report.attention,
        "kept patches": _kept(report.kept),
        "cost": _cost_rows(report.cost),
        "data": report.data and _data(report.data, report.things),
        "configuration": report.config,
        "environment": _flat(report.environment) + ([("command", report.command)] if report.command else []),
    }
    sections |= {fragment.name: fragment.content for fragment in report.fragments}
    return render_page(
        "report/report.html.jinja",
        ("report/report.css", "report/sheet.css"),
        report=report,
        verdict=" ".join(filter(None, (report.verdict or verdict(report), believable(report)))).replace(
            " %", "\N{NO-BREAK SPACE}%"
        ),
        tiles=_tiles(report),
        sections=sections,
        # Most models keep everything: not worth a word.
        absent=[n for n, content in sections.items() if not content and n not in ("kept patches", *report.unfit)],
        multilabel=isinstance(report.figures, MultiLabelFigures),
    )


def verdict(report: Report) -> str:
    """The metrics in one or two sentences."""
    figures = report.figures
    if figures is None:
        return "This run has not been tested yet."
    if isinstance(figures, MultiLabelFigures):
        scores = figures.scalars()
        words = (
            f"Mean average precision is {percent(scores['map'])} on {figures.count:,} {report.split} {report.things}; "
            f"{percent(scores['subset_accuracy'])} of them have every label right."
        )
        if figures.without_positives:
            words += f" Never seen there, and left out: {shorten(', '.join(figures.without_positives), 120)}."
        return words
    assert isinstance(figures, SingleLabelFigures)
    low, high = figures.top1_interval
    words = (
        f"{percent(figures.top1)} of {figures.count:,} {report.split} {report.things} are classified correctly "
        f"(95 % confidence: {percent(low)} to {percent(high)})"
    )
    commonest = figures.support.max() / figures.count
    words += f"; always naming the commonest class would give {percent(commonest)}."
    pairs = figures.confused_pairs(1)
    if pairs:
        true, guess, images = pairs[0]
        names = figures.classes
        share = percent(images / figures.support[true], 0)
        words += f" The most frequent error: {share} of “{names[true]}” are predicted as “{names[guess]}”."
    training = report.data.counts.get("train") if report.data is not None else None
    prior = math.inf if training is None else prior_loss(training, figures.support)
    if not figures.loss <= prior:
        words = (
            f"Its loss, {number(figures.loss)}, is worse than that of predicting class frequencies alone, "
            f"{number(prior)}: training diverged, or the model is far too confident. {words}"
        )
    return words


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the headline figures."""
    tiles: list[tuple[str, str, str]] = []
    figures, cost = report.figures, report.cost
    if isinstance(figures, SingleLabelFigures):
        low, high = figures.top1_interval
        interval = f"95 %: {100 * low:.1f} to {100 * high:.1f}"
        tiles = [
            (f"{report.split} top-1", percent(figures.top1), interval),
            *report.tiles,
            (f"{report.split} top-{min(5, len(figures.classes))}", percent(figures.top5), ""),
            ("loss", number(figures.loss), "cross-entropy"),
            ("calibration error", percent(figures.ece), "ECE, 15 bins"),
        ]
    elif isinstance(figures, MultiLabelFigures):
        scores = figures.scalars()
        tiles = [
            (f"{report.split} mAP", percent(scores["map"]), "mean over classes"),
            ("micro F1", percent(figures.micro_f1), "at one half"),
            ("macro F1", percent(scores["macro_f1"]), "at one half"),
            ("all labels right", percent(figures.subset_accuracy), ""),
            ("loss", number(figures.loss), "binary cross-entropy"),
        ]
    elif figures is not None:
        tiles = list(report.tiles)
    if cost is not None:
        known = [
            ("parameters", cost.parameters, amount, ""),
            ("MACs per image", cost.macs, amount, ""),
            ("images/s", cost.images_per_second, number, "inference"),
            ("peak memory", cost.peak_memory, memory, "inference"),
            ("training time", cost.training_seconds, duration, ""),
        ]
        tiles += [(name, tell(value), remark) for name, value, tell, remark in known if value is not None]
    return tiles


def _curves(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """(heading, chart) of what was logged during training."""

    def series(split: str, key: str, name: str = "") -> Series:
        lines = [line for line in history if line.get("split") == split and key in line]
        nan = math.nan  # a value that was NaN is null in strict JSON
        return Series(
            name or split,
            [float(line.get("epoch", line.get("step", i))) for i, line in enumerate(lines)],
            [nan if line[key] is None else float(line[key]) for line in lines],
        )

    curves = [
        ("Loss", [series("val", "loss"), series("train", "loss")], number, "{:g}".format),
        ("Validation top-1", [series("val", "top1", "top-1")], percent, whole_percent),
        ("Validation R2", [series("val", "r2", "R2")], number, "{:g}".format),
        ("Validation kNN", [series("val", "knn", "kNN")], percent, whole_percent),
        ("Validation mAP", [series("val", "map", "mAP")], percent, whole_percent),
        ("Validation perplexity", [series("val", "perplexity", "perplexity")], number, "{:g}".format),
        ("Learning rate", [series("train", "lr", "lr")], number, "{:g}".format),
    ]
    return [
        (
            heading,
            line_chart(lines, title=f"{heading} over epochs", x_label="epoch", x_from=0, tell=tell, tell_axis=axis),
        )
        for heading, lines, tell, axis in curves
        if any(line.x for line in lines)
    ]


def _confusion(figures: Figures | None) -> dict[str, Any] | None:
    if not isinstance(figures, SingleLabelFigures):
        return None
    names = figures.classes
    chart = None
    if len(names) <= MATRIX_CLASSES:
        chart = heat_map(figures.confusion, names, title=f"Confusion matrix of {len(names)} classes")
    pairs = [
        (names[true], names[guess], images, images / figures.support[true])
        for true, guess, images in figures.confused_pairs(12)
    ]
    return {"chart": chart, "pairs": pairs}


def _class_rows(figures: Figures | None) -> list[dict[str, Any]]:
    if figures is None:
        return []
    columns = {"precision": figures.precision, "recall": figures.recall, "F1": figures.f1}
    if isinstance(figures, MultiLabelFigures):
        columns = {"AP": figures.average_precision, **columns}
    shown: Sequence[tuple[int, str]] = list(enumerate(figures.classes))
    if len(shown) > MATRIX_CLASSES:  # the weakest
        order = np.argsort(np.where(figures.support > 0, figures.f1, np.inf), kind="stable")[:MATRIX_CLASSES]
        shown = [(int(i), figures.classes[i]) for i in order]
    return [
        {
            "name": name,
            "support": int(figures.support[i]),
            "shares": {
                k: float(v[i]) if np.isfinite(v[i]) and (figures.support[i] or k != "recall") else None
                for k, v in columns.items()
            },
        }
        for i, name in shown
    ]


def _calibration(figures: Figures | None, trust: Mapping[str, Any] | None) -> dict[str, Any] | None:
    section: dict[str, Any] = {"chart": None, "rows": [], "sets": [], "trust": trust}
    if isinstance(figures, SingleLabelFigures):
        bins = figures.bin_count.tolist(), figures.bin_confidence.tolist(), figures.bin_accuracy.tolist()
        mean = float(np.nansum(figures.bin_confidence * figures.bin_count) / figures.count)
        chart = reliability(*bins, title="Reliability: accuracy against confidence")
        section |= {"chart": chart, "confidence": mean, "accuracy": figures.top1, "ece": figures.ece}
    if trust and "after" in trust:
        pairs = ((trust["before"][name], trust["after"][name], *how) for name, how in CALIBRATION.items())
        section["rows"] = [(title, tell(before), tell(after)) for before, after, title, tell in pairs]
        section["sets"] = trust.get("sets", [])
    return section if section["chart"] or section["rows"] else None


BELIEVED = 0.02  # calibration error up to which probabilities are taken at their word


def believable(report: Report) -> str:
    """One sentence: whether probabilities can be believed, and for what share of images one class is enough."""
    trust = report.trust
    if not trust or "after" not in trust:
        return ""
    error, before = trust["after"]["ece"], trust["before"]["ece"]
    can = "can" if error <= max(BELIEVED, trust.get("chance", 0)) else "cannot"
    words = f"Its probabilities {can} be believed: they are {percent(error)} off on average ({percent(before)} before"
    words += " calibration on val)"
    single = [row["single"] for row in trust.get("sets", ()) if row["asked"] == 0.95 and not row["note"]]
    if single:
        words += ", and prediction sets that hold the label in 95 % of cases name one class for "
        words += f"{percent(single[0], 0)} of {report.things}"
    return f"{words}."


def _kept(kept: tuple[Sheet, AttentionMaps] | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    sheet, maps = kept
    names = [f"block {i}" for i in range(len(maps.entering))]
    chart = bar_chart(names, {"tokens": [round(n, 1) for n in maps.entering]}, title="Tokens that enter each block")
    hint = f"Means over {maps.images} images."
    if maps.macs is not None and maps.macs_whole:
        share = percent(maps.macs / maps.macs_whole, 0)
        hint += f" An image takes {amount(maps.macs)} multiply-accumulates, {share} of the whole model's."
    return {"sheet": sheet, "chart": chart, "hint": hint}


def _cost_rows(cost: ModelCost | None) -> list[tuple[str, str]]:
    if cost is None:
        return []
    known = [
        ("Parameters", None if cost.parameters is None else f"{cost.parameters:,.0f}"),
        ("Multiply-accumulates per image", None if cost.macs is None else amount(cost.macs)),
        ("Inference", None if cost.images_per_second is None else f"{number(cost.images_per_second)} images/s"),
        ("Peak memory of inference", None if cost.peak_memory is None else memory(cost.peak_memory)),
        ("Measured with", cost.conditions or None),
        ("Training time", None if cost.training_seconds is None else duration(cost.training_seconds)),
    ]
    return [(name, text) for name, text in known if text is not None] + list(cost.rows)


def _data(data: DataSummary, things: str) -> dict[str, Any]:
    images = {split: data.images.get(split, sum(counts)) for split, counts in data.counts.items()}
    title = f"{things.capitalize()} of each class"
    names, counts = data.classes, {split: np.asarray(values) for split, values in data.counts.items()}
    if len(names) > MATRIX_CLASSES:  # some of them, by frequency
        order = np.argsort(-next(iter(counts.values())), kind="stable")
        order = order[np.linspace(0, len(order) - 1, SHOWN_CLASSES).astype(int)]
        names, counts = [names[i] for i in order], {split: values[order] for split, values in counts.items()}
        title += f": {SHOWN_CLASSES} of {len(data.classes):,} classes, by frequency"
    parts = {split: values.tolist() for split, values in counts.items()}
    chart = bar_chart(names, parts, title=title) if names and parts else None
    return {"images": images, "chart": chart, "splits": list(data.counts), "skipped": data.skipped[:MOST_SKIPPED]}


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{before}{key} ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            rows.append((f"{before}{key}", text))
    return rows
