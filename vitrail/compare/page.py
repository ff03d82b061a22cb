"""A comparison as one self-contained HTML page: table, paired tests, cost, curves, disagreement, classes, seeds.

A comparison as tables for the terminal; each fits 80 columns. In fewer, names are cut before numbers are.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.catalogue import WIDE
from vitrail.compare.statistics import Against, Comparison, StudyRow, pareto
from vitrail.compare.study_charts import Point, curves_chart, disagreement_chart, gains_chart, pareto_chart
from vitrail.files import write_text
from vitrail.quantities import MISSING, amount, duration, memory, number, percent, shorten
from vitrail.report.html import render_page

FIGURES = {"top1": "top-1", "map": "mAP"}
MOST_GAINS = 8  # variants whose classes are drawn
ENOUGH = 5  # seeds from which a rank correlation is worth a picture: of three it is 1, a half or their negatives


def write_comparison(path: str | Path, found: Comparison, environment: Mapping[str, Any]) -> None:
    """Write the report; a reader sees the old file or the new one."""
    write_text(Path(path), render_comparison(found, environment))


def render_comparison(found: Comparison, environment: Mapping[str, Any]) -> str:
    """The HTML of a comparison."""
    sections: dict[str, Any] = {
        "results": [_result(row, place, found) for place, row in enumerate(found.rows)],
        "further figures": _further(found),
        "cost": _cost_charts(found),
        "learning curves": _curves(found),
        "disagreement": _disagreement(found),
        "classes": _gains(found),
        "seeds": _seeds(found),
        "runs": [
            (m.variant, m.seed, m.figures[found.figure], m.seconds, m.path) for r in found.rows for m in r.members
        ],
        "conditions": [(str(k), str(v)) for k, v in environment.items()],
    }
    return render_page(
        "compare/compare.html.jinja",
        ("report/report.css", "report/compare.css"),
        found=found,
        figure=FIGURES[found.figure],
        verdict=verdict(found).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=_tiles(found),
        sections=sections,
        several=sum(row.against is not None for row in found.rows) > 1,
        created=str(environment.get("started", "")),
    )


def verdict(found: Comparison) -> str:
    """What the comparison says, in a few sentences."""
    figure = FIGURES[found.figure]
    known = [row for row in found.rows if row.spread is not None]
    base = next((row for row in known if row.variant == found.baseline), None)
    best = max(known, key=lambda row: row.spread.mean if row.spread is not None else -1)
    assert best.spread is not None
    if len(found.rows) == 1:
        low, high = percent(best.spread.low, 2), percent(best.spread.high, 2)
        seeds = f"{best.spread.count} seeds" if best.spread.count > 1 else "one seed"
        return f"{figure} on {found.split} is {mean_and_spread(best)} over {seeds}, from {low} to {high}."
    said = f"{best.variant} has the best {figure}: {mean_and_spread(best)} on {found.split}"
    said += f", the mean of {best.spread.count} seeds." if best.spread.count > 1 else ", with one seed only."
    if base is None:
        return said + f" The baseline {found.baseline} has no finished run, so nothing is tested against it."
    sure = [(row, row.against.difference) for row in known if row.against is not None and _sure(row.against)]
    better, worse = ([row for row, gain in sure if sign * gain > 0] for sign in (1, -1))
    for rows, word in ((better, "above"), (worse, "below")):
        if rows:
            names = ", ".join(row.variant for row in rows)
            verb = "is" if len(rows) == 1 else "are"
            said += f" Clearly {word} {base.variant} {verb} {names}."
    if better or worse:
        said += " Clearly: the 95 % interval of the difference leaves out zero, and p over images is at most 0.05."
    if not better and not worse and len(known) > 1:
        said += f" No variant differs clearly from {base.variant}."
    alone = max(row.spread.count for row in known if row.spread is not None) == 1
    if alone and len(known) > 1:
        said += " With one seed, intervals are over test images alone: training again may turn the order around."
    if found.failures:
        said += f" {len(found.failures)} {'run' if len(found.failures) == 1 else 'runs'} failed."
    return said


def mean_and_spread(row: StudyRow, digits: int = 2) -> str:
    """`86.12 ± 0.31 %`, one standard deviation over seeds."""
    if row.spread is None:
        return MISSING
    if math.isnan(row.spread.std):
        return percent(row.spread.mean, digits)
    return f"{100 * row.spread.mean:.{digits}f} ± {100 * row.spread.std:.{digits}f} %"


def share_and_spread(value: tuple[float, float] | None) -> str:
    """`0.512 ± 0.004`, without the second where there is one seed."""
    if value is None:
        return MISSING
    return f"{value[0]:.3f}" + ("" if math.isnan(value[1]) else f" ± {value[1]:.3f}")


def points(share: float | None, digits: int = 2) -> str:
    """A difference of shares in percentage points, with its sign."""
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{100 * share:+.{digits}f}".replace("-", "−")  # noqa: RUF001


def chance(p: float | None) -> str:
    """A p-value.

    >>> chance(0.0312), chance(0.00001)
    ('0.031', '< 0.001')
    """
    if p is None or not math.isfinite(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p >= 0.1 else f"{p:.3f}"


def _tiles(found: Comparison) -> list[tuple[str, str, str]]:
    known = [row for row in found.rows if row.spread is not None]
    best = max(known, key=lambda row: row.spread.mean if row.spread is not None else -1)
    runs = sum(len(row.members) for row in found.rows)
    seeds = sorted({m.seed for row in found.rows for m in row.members})
    tiles = [
        (f"best {FIGURES[found.figure]}", percent(best.spread.mean, 2) if best.spread else MISSING, best.variant),
        ("variants", f"{len(found.rows)}", f"against {found.baseline}"),
        ("seeds", f"{len(seeds)}", shorten(", ".join(map(str, seeds)), 24)),
        ("runs", f"{runs}", f"{len(found.failures)} failed" if found.failures else "all finished"),
    ]
    times = [m.seconds for row in found.rows for m in row.members if m.seconds is not None]
    if times:
        tiles.append(("training", duration(sum(times)), "all runs together"))
    return tiles


def _result(row: StudyRow, place: int, found: Comparison) -> dict[str, Any]:
    against, price = row.against, row.price
    return {
        "name": row.variant,
        "colour": place % 8,
        "baseline": row.variant == found.baseline,
        "front": row.front,
        "figure": mean_and_spread(row),
        "seeds": row.spread.count if row.spread else 0,
        "length": row.length,
        "difference": None if against is None else points(against.difference),
        "way": "" if against is None or not against.clear else "better" if against.difference > 0 else "worse",
        "interval": "" if against is None or against.interval is None else " to ".join(map(points, against.interval)),
        "p": [] if against is None else [(chance(p), chance(raised)) for p, raised in against.chances],
        "price": price,
        "failures": row.failures,
    }


def _further(found: Comparison) -> dict[str, Any] | None:
    figures = found.further()
    if not figures:
        return None
    rows = [(r.variant, [share_and_spread(figures[n].get(r.variant)) for n in figures]) for r in found.rows]
    return {"names": list(figures), "rows": rows}


def _cost_charts(found: Comparison) -> list[tuple[str, Markup]]:
    priced = [(i, row) for i, row in enumerate(found.rows) if row.price is not None and row.spread is not None]
    charts = []
    for heading, cost_of, label, tell in (
        ("Multiply-accumulates", lambda p: p.macs, "multiply-accumulates of an image", amount),
        ("Parameters", lambda p: p.parameters, "parameters", amount),
        (
            "Time of inference",
            lambda p: None if p.images_per_second is None else 1e3 / p.images_per_second,
            "milliseconds an image, inference",
            number,
        ),
        ("Time of training", lambda p: p.seconds, "seconds of training", number),
    ):
        known = [(i, row, cost_of(row.price)) for i, row in priced]
        rows = [(i, row, float(cost)) for i, row, cost in known if cost is not None]
        costs = [cost for _, _, cost in rows]
        if len(rows) < 2 or max(costs) <= 1.01 * min(costs):  # no axis without a difference
            continue
        values = [row.spread.mean for _, row, _ in rows if row.spread is not None]
        drawn = [
            Point(row.variant, i, cost, value, row.spread.std if row.spread else math.nan, front)
            for (i, row, _), cost, value, front in zip(rows, costs, values, pareto(costs, values), strict=True)
        ]
        title = f"{FIGURES[found.figure]} against {label}"
        charts.append((heading, pareto_chart(drawn, title=title, x_label=label, tell_cost=tell)))
    return charts


def _curves(found: Comparison) -> list[tuple[str, Markup]]:
    colours = {row.variant: i for i, row in enumerate(found.rows)}

    def whole(share: float) -> str:
        return f"{100 * share:.4g} %"

    made = []
    for heading, figure, split, tell, axis in (
        (f"Validation {FIGURES[found.figure]}", found.figure, "val", percent, whole),
        ("Validation loss", "loss", "val", number, "{:g}".format),
        ("Training loss", "loss", "train", number, "{:g}".format),
    ):
        curves = {row.variant: [m.course(figure, split) for m in row.members] for row in found.rows if row.members}
        if any(len(seed) > 1 for seeds in curves.values() for seed in seeds):
            chart = curves_chart(curves, title=f"{heading} over epochs", tell=tell, tell_axis=axis, colours=colours)
            made.append((heading, chart))
    return made


def _sure(against: Against) -> bool:
    """Of few images an interval can leave out zero where an exact test does not."""
    return against.clear and (against.p_images is None or against.p_images <= 0.05)


def _disagreement(found: Comparison) -> dict[str, Any] | None:
    rates = found.disagreement
    if rates is None or not np.isfinite(rates).any():
        return None
    pairs = [
        (found.judged[i], found.judged[j], float(rates[i, j]))
        for i in range(len(found.judged))
        for j in range(i + 1, len(found.judged))
        if math.isfinite(rates[i, j])
    ]
    chart = disagreement_chart(rates, found.judged, title="Share of images on which two decide differently, in percent")
    return {
        "chart": chart,
        "pairs": sorted(pairs, key=lambda p: -p[2])[:10],
        "seeds": np.isfinite(rates.diagonal()).any(),
    }


def _gains(found: Comparison) -> list[tuple[str, Markup]]:
    made: list[tuple[str, Markup]] = []
    for row in found.rows:
        gains = found.class_gains(row.variant)
        if row.variant != found.baseline and gains is not None and len(made) < MOST_GAINS:
            title = f"Gain of {row.variant} over {found.baseline}, class by class"
            made.append((row.variant, gains_chart(gains, found.classes, title=title)))
    return made


def _seeds(found: Comparison) -> dict[str, Any] | None:
    if not found.seed_study:
        return None
    colours = {row.variant: i for i, row in enumerate(found.rows)}
    rows, between = [], []
    early: dict[str, Sequence[Mapping[float, float]]] = {}
    for variant, study in found.seed_study.items():
        for name, one in study["sets"].items():
            rows.append((variant, name, one))
        between += [(variant, pair) for pair in study.get("between", ())]
        course = {e["epoch"]: e["spearman"] for e in study.get("early", ()) if e["spearman"] is not None}
        if len(course) > 1 and len(study["seeds"]) >= ENOUGH:
            early[variant] = [course]
    chart = None
    if early:
        chart = curves_chart(early, title="Rank correlation of an early look with the final figure", colours=colours)
    return {"rows": rows, "between": between, "early": chart, "enough": ENOUGH}


LONGEST_NAME = 16
SIDE_BY_SIDE = 4  # further figures in 80 columns


def comparison_tables(found: Comparison) -> Group:
    """Accuracy, cost, spread over seeds, failures and what a person should know."""
    parts: list[Table | Text] = [accuracy(found), Text(), costs(found), Text(lengths(found))]
    parts += [part for table in further(found) for part in (Text(), table)]
    if found.seed_study:
        parts += [Text(), seeds(found)]
    parts += [Text(line, style="red") for line in failures(found)]
    parts += [Text(), Text(verdict(found)), *map(Text, found.notes)]
    tested = sum(row.against is not None for row in found.rows)
    if tested > 1:
        parts.append(Text(f"p is of each comparison alone; the report also has it raised for all {tested} (Holm)"))
    return Group(*parts)


def accuracy(found: Comparison) -> Table:
    """Mean and spread of each variant, and what speaks for a difference from the baseline."""
    table = _table(
        f"{found.name}: {FIGURES[found.figure]} on {found.split} in percent, points against {found.baseline}"
    )
    names = ("mean ± std", "seeds", "points", "95 % interval", "p seeds", "p images")
    shown = names[: None if shutil.get_terminal_size().columns >= WIDE else -2]  # the report has them all
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        against = row.against
        cells = [MISSING] * 4
        if against is not None:
            interval = MISSING if against.interval is None else " to ".join(points(v, 1) for v in against.interval)
            cells = [points(against.difference), interval, *(chance(p) for p, _ in against.chances)]
        cells = [mean_and_spread(row).removesuffix(" %"), f"{len(row.members)}", *cells]
        table.add_row(_name(row.variant), *cells[: len(shown)])
    return table


def further(found: Comparison) -> list[Table]:
    """What evaluators found beside classification, as many figures side by side as fit."""
    figures = found.further()
    names, tables = list(figures), []
    for start in range(0, len(names), SIDE_BY_SIDE):
        some = names[start : start + SIDE_BY_SIDE]
        table = _table("further figures, mean ± std over seeds")
        for name in some:
            table.add_column(shorten(name, 15), justify="right", no_wrap=True)
        for row in found.rows:
            table.add_row(_name(row.variant), *(share_and_spread(figures[n].get(row.variant)) for n in some))
        tables.append(table)
    return tables


def costs(found: Comparison) -> Table:
    """What each variant takes."""
    table = _table("cost" + (f": {found.conditions}" if found.conditions else ""))
    for name in ("parameters", "MACs", "img/s", "memory", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        price = row.price
        cells = [MISSING] * 5
        if price is not None:
            cells = [amount(price.parameters), amount(price.macs), number(price.images_per_second)]
            cells += [memory(price.peak_memory), duration(price.seconds)]
        table.add_row(_name(row.variant), *cells)
    return table


def lengths(found: Comparison) -> str:
    """How long each variant trained, in a word where that is the same for all."""
    told = {row.variant: row.length for row in found.rows if row.length}
    rule = f" ({found.budget})" if found.budget else ""
    if len(set(told.values())) == 1:
        return f"length: {next(iter(told.values()))}{rule}"
    return f"length{rule}: " + ", ".join(f"{name} {length}" for name, length in told.items()) if told else ""


def seeds(found: Comparison) -> Table:
    """What only the seed changed."""
    table = _table("over seeds, in percent")
    for name in ("images", "seeds", "mean", "std", "lowest", "highest", "range"):
        table.add_column(name, justify="left" if name == "images" else "right", no_wrap=True)
    for variant, study in found.seed_study.items():
        for name, one in study["sets"].items():
            values = (one["mean"], one["std"], one["low"], one["high"], one["range"])
            cells = [MISSING if v is None else f"{100 * v:.2f}" for v in values]
            table.add_row(_name(variant), Text(shorten(name, 16)), f"{one['count']}", *cells)
    return table


def failures(found: Comparison) -> list[str]:
    """One line a variant and reason."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in found.failures:
        seeds.setdefault((one.variant, one.reason), []).append(str(one.seed))
    return [
        f"{variant} failed (seed{'s' if len(which) > 1 else ''} {', '.join(which)}): {reason}"
        for (variant, reason), which in seeds.items()
    ]


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")  # the one that is cut where the terminal is narrow
    return table


def _name(name: str) -> Text:
    return Text(shorten(name, LONGEST_NAME), no_wrap=True, overflow="ellipsis")
