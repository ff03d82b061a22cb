"""The page of a fit: what was chosen and why, accuracy against latency of everything tried, how to use the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.compare.statistics import pareto
from vitrail.files import json_text, write_text
from vitrail.fit.finished_file import FitResult
from vitrail.quantities import MISSING, number, percent
from vitrail.report.html import render_page
from vitrail.report.pareto import Point, pareto_chart

CODE = """# {file} and predict.py need numpy, pillow and onnxruntime, and nothing of vitrail:
#   python predict.py {file} photo.jpg --json
import vitrail

model = vitrail.load("{run}")
print(model.predict("photo.jpg"))"""


def write_fit(fitted: FitResult, environment: Mapping[str, Any]) -> Path:
    """Write `report.html` and `result.json` into the folder of the search; returns the page."""
    page = fitted.folder / "report.html"
    write_text(
        fitted.folder / "result.json", json_text({**fitted.to_json(), "environment": dict(environment)}, indent=1)
    )
    write_text(page, render_fit(fitted, environment))
    return page


def render_fit(fitted: FitResult, environment: Mapping[str, Any]) -> str:
    """The HTML of the page."""
    low, high = fitted.interval
    tiles = [
        (f"accuracy on {fitted.split}", percent(fitted.accuracy), f"95 % interval {percent(low)} to {percent(high)}"),
        (
            "latency of the file",
            f"{1e3 * fitted.latency:.3g} ms",
            f"median; budget {1e3 * fitted.budget.latency:.3g} ms",
        ),
        (
            "size of the file",
            f"{fitted.bytes / 1e6:.3g} MB",
            "" if fitted.budget.bytes is None else f"budget {fitted.budget.bytes / 1e6:.3g} MB",
        ),
        ("models trained", str(len(fitted.trials)), f"of {len(fitted.measured)} measured"),
    ]
    return render_page(
        "fit/fit.html.jinja",
        ("report/report.css", "report/compare.css"),
        title=fitted.chosen.form.name,
        verdict=verdict(fitted).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=tiles,
        chart=chart(fitted),
        rows=rows(fitted),
        metric=fitted.metric,
        unmeasured=[(m.candidate.name, m.reason) for m in fitted.measured if m.latency is None],
        code=CODE.format(file=fitted.file.name, run=fitted.chosen.path),
        notes=fitted.notes,
        created=str(environment.get("started", "")),
        conditions=[(str(key), str(value)) for key, value in environment.items()],
    )


def verdict(fitted: FitResult) -> str:
    """What was chosen and why, and what a larger budget would buy, in a few sentences."""
    chosen = fitted.chosen
    text = f"{chosen.form.name} is right in {percent(fitted.accuracy)} of {fitted.images:,} {fitted.split} images, in "
    text += f"{1e3 * fitted.latency:.3g} ms per image ({fitted.budget.text} allowed). "
    others = [t for t in fitted.trials if t.rung == chosen.rung and t.form.name != chosen.form.name]
    others = [t for t in others if t.value <= chosen.value]  # a better one had a file over the budget
    if others:
        second = max(others, key=lambda t: t.value)
        gap = chosen.value - second.value
        clear = "more" if gap > 2 * chosen.error else "less"
        text += f"On val it was ahead of {second.form.name} by {clear} than twice the standard error: "
        text += f"{percent(chosen.value)} and {percent(second.value)}. "
    if fitted.split == "val":
        text += "Val also chose the model, so its accuracy is optimistic; give test images for an honest figure. "
    return text + _larger(fitted)


def _larger(fitted: FitResult) -> str:
    over = [t for t in fitted.trials if t.rung == 0 and (t.form.measured.latency or 0) > fitted.budget.latency]
    same = [t for t in fitted.trials if t.rung == 0 and t not in over]
    if not over or not same:
        return "What a larger budget would buy was not measured."
    more, best = max(over, key=lambda t: t.value), max(same, key=lambda t: t.value)
    gain, milliseconds = more.value - best.value, 1e3 * (more.form.measured.latency or 0)
    if gain <= 2 * best.error:
        return f"With {milliseconds:.3g} ms, {more.form.name} was not better in equally long first trials."
    return (
        f"With {milliseconds:.3g} ms, {more.form.name} was {100 * gain:.1f} points better in equally long first trials."
    )


def chart(fitted: FitResult) -> Any:
    """Accuracy on val against latency; the longest training of each form."""
    longest: dict[str, Any] = {}
    for trial in sorted(fitted.trials, key=lambda t: t.rung):
        longest[trial.form.name] = trial
    trials = list(longest.values())
    noise = [1.96 * t.error for t in trials]
    front = pareto([t.form.measured.latency for t in trials], [t.value for t in trials], value_noise=noise)
    points = [
        Point(t.form.name, i % 8, 1e3 * t.form.measured.latency, t.value, t.error, front[i], hollow=t.rung == 0)
        for i, t in enumerate(trials)
    ]
    x_label = f"milliseconds per image, {fitted.budget.on}"
    return pareto_chart(
        points,
        title="accuracy against latency",
        x_label=x_label,
        y_label=f"{fitted.metric} on val",
        limit=1e3 * fitted.budget.latency,
        size=(720, 380),
    )


def rows(fitted: FitResult) -> list[dict[str, str]]:
    """A row for each training, the last rung first."""
    order = sorted(fitted.trials, key=lambda t: (-t.rung, -t.value))
    rungs = sorted({t.rung for t in order})  # one may have been left out
    return [
        {
            "name": t.form.name,
            "chosen": "chosen" if t is fitted.chosen else "",
            "rung": str(1 + rungs.index(t.rung)),
            "value": f"{percent(t.value)} ± {100 * t.error:.1f}",
            "latency": number(1e3 * (t.form.measured.latency or 0)),
            "size": number(t.form.measured.bytes / 1e6),
            "epochs": number(t.epochs),
            "seconds": number(t.seconds) if t.seconds else MISSING,
        }
        for t in order
    ]


def fit_tables(fitted: FitResult) -> Group:
    """For the terminal."""
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(("model", "rung", "val", "ms", "MB", "epochs", "s")):
        table.add_column(name, justify="right" if i else "left", no_wrap=bool(i))
    for row in rows(fitted):
        style = "bold" if row["chosen"] else ""
        table.add_row(*(row[k] for k in ("name", "rung", "value", "latency", "size", "epochs", "seconds")), style=style)
    return Group(Text(verdict(fitted)), Text(), table, *[Text(note) for note in fitted.notes])
