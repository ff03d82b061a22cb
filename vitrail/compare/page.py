"""A comparison as one self-contained HTML page, and as tables for the terminal.

Each table fits 80 columns; in fewer, names are cut before numbers are. Classes of the charts besides those of
`vitrail.report.charts`: `v0` ... `v7` give a variant its colour, the same in every chart; `gain`, `loss`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.catalogue import WIDE
from vitrail.compare.comparison import Comparison, Price, StudyRow
from vitrail.compare.statistics import pareto
from vitrail.files import write_text
from vitrail.quantities import MISSING, amount, duration, memory, number, percent, shorten
from vitrail.report.charts import CHARACTER, COLOURS, Scale, _box, _svg, _text, curves_chart
from vitrail.report.html import render_page
from vitrail.report.pareto import Point, pareto_chart

METRICS = {"top1": "top-1", "map": "mAP"}
MOST_VARIANTS = 8  # whose per-class gains are drawn
MOST_CLASSES = 24  # of a chart of gains: the best and the worst half
ENOUGH = 5  # seeds from which a rank correlation is worth a chart: of three it is 1, a half or their negatives
LONGEST_NAME, LONGEST_CHART_NAME = 16, 18
PER_TABLE = 4  # further metrics in 80 columns

Chart = tuple[str, Markup]  # with its heading
COSTS: tuple[tuple[str, str, Callable[[Price], tuple[float | None, float]], Callable[[float], str]], ...] = (
    ("Multiply-accumulates", "multiply-accumulates per image", lambda p: (p.macs, 0.0), amount),
    ("Parameters", "parameters", lambda p: (p.parameters, 0.0), amount),
    (
        "Time of inference",
        "milliseconds per image, inference",
        lambda p: (None if p.images_per_second is None else 1e3 / p.images_per_second, p.speed_noise),
        number,
    ),
    ("Time of training", "seconds of training", lambda p: (p.seconds, p.seconds_noise), number),
)


def write_comparison(path: str | Path, comparison: Comparison, environment: Mapping[str, Any]) -> None:
    """Write the report; a reader sees the old file or the new one."""
    write_text(Path(path), render_comparison(comparison, environment))


def render_comparison(comparison: Comparison, environment: Mapping[str, Any]) -> str:
    """The HTML of a comparison."""
    rows, metric = comparison.rows, comparison.metric
    sections: dict[str, Any] = {
        "results": [_result(row, index, comparison) for index, row in enumerate(rows)],
        "further metrics": _further(comparison),
        "cost": _cost_charts(comparison),
        "training curves": _curves(comparison),
        "disagreement": _disagreement(comparison),
        "classes": _gains(comparison),
        "seeds": _seeds(comparison),
        "runs": [(m.variant, m.seed, m.metrics[metric], m.seconds, m.path) for r in rows for m in r.members],
        "conditions": [(str(k), str(v)) for k, v in environment.items()],
    }
    return render_page(
        "compare/compare.html.jinja",
        ("report/report.css", "report/compare.css"),
        comparison=comparison,
        metric=METRICS[metric],
        verdict=verdict(comparison).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=_tiles(comparison),
        sections=sections,
        several=sum(row.against is not None for row in rows) > 1,
        created=str(environment.get("started", "")),
    )


def verdict(comparison: Comparison) -> str:
    """The result in a few sentences."""
    known = [(row, row.spread) for row in comparison.rows if row.spread is not None]
    best, spread = max(known, key=lambda pair: pair[1].mean)
    metric, baseline = METRICS[comparison.metric], comparison.baseline
    if len(comparison.rows) == 1:
        low, high = percent(spread.low, 2), percent(spread.high, 2)
        seeds = f"{spread.count} seeds" if spread.count > 1 else "one seed"
        return f"{metric} on {comparison.split} is {mean_and_std(best)} over {seeds}, from {low} to {high}."
    text = f"{best.variant} has the best {metric}: {mean_and_std(best)} on {comparison.split}"
    text += f", the mean of {spread.count} {comparison.repeats}." if spread.count > 1 else ", with one seed only."
    if all(row.variant != baseline for row, _ in known):
        return text + f" The baseline {baseline} has no finished run, so nothing is tested against it."
    text += _clear_differences(comparison) or (
        f" No variant differs clearly from {baseline}." if len(known) > 1 else ""
    )
    if len(known) > 1 and max(spread.count for _, spread in known) == 1:
        text += " With one seed, intervals are over test images alone: training again may turn the order around."
    failed = len(comparison.failures)
    return text + (f" {failed} {'run' if failed == 1 else 'runs'} failed." if failed else "")


def _clear_differences(comparison: Comparison) -> str:
    """Which variants differ from the baseline beyond chance; of few images an interval alone would not do."""
    tests = {row.variant: row.against for row in comparison.rows if row.against is not None and row.against.clear}
    clear = {n: test.difference for n, test in tests.items() if test.p_images is None or test.p_images <= 0.05}
    text = ""
    for word, sign in (("above", 1), ("below", -1)):
        names = [name for name, difference in clear.items() if sign * difference > 0]
        if names:
            text += f" Clearly {word} {comparison.baseline} {'is' if len(names) == 1 else 'are'} {', '.join(names)}."
    explanation = " Clearly: the 95 % interval of the difference leaves out zero, and p over images is at most 0.05."
    return text and text + explanation


def mean_and_std(row: StudyRow, digits: int = 2) -> str:
    """`86.12 ± 0.31 %`, one standard deviation over seeds."""
    if row.spread is None:
        return MISSING
    if math.isnan(row.spread.std):
        return percent(row.spread.mean, digits)
    return f"{100 * row.spread.mean:.{digits}f} ± {100 * row.spread.std:.{digits}f} %"


def share_and_std(value: tuple[float, float] | None) -> str:
    """`0.512 ± 0.004`, without the second where there is one seed."""
    if value is None:
        return MISSING
    return f"{value[0]:.3f}" + ("" if math.isnan(value[1]) else f" ± {value[1]:.3f}")


def points(share: float | None, digits: int = 2) -> str:
    """A difference of shares in percentage points, with its sign."""
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{100 * share:+.{digits}f}".replace("-", "−")  # noqa: RUF001


def p_value(p: float | None) -> str:
    """A p-value.

    >>> p_value(0.0312), p_value(0.00001)
    ('0.031', '< 0.001')
    """
    if p is None or not math.isfinite(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p >= 0.1 else f"{p:.3f}"


# The page


def _tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    known = [(row.spread.mean, row.variant) for row in comparison.rows if row.spread is not None]
    mean, best = max(known, key=lambda pair: pair[0])
    members = [m for row in comparison.rows for m in row.members]
    seeds = sorted({m.seed for m in members})
    failed = len(comparison.failures)
    tiles = [
        (f"best {METRICS[comparison.metric]}", percent(mean, 2), best),
        ("variants", f"{len(comparison.rows)}", f"against {comparison.baseline}"),
        ("seeds", f"{len(seeds)}", shorten(", ".join(map(str, seeds)), 24)),
        ("runs", f"{len(members)}", f"{failed} failed" if failed else "all finished"),
    ]
    times = [m.seconds for m in members if m.seconds is not None]
    return [*tiles, ("training", duration(sum(times)), "all runs together")] if times else tiles


def _result(row: StudyRow, index: int, comparison: Comparison) -> dict[str, Any]:
    test = row.against
    return {
        "name": row.variant,
        "colour": index % COLOURS,
        "baseline": row.variant == comparison.baseline,
        "front": row.front,
        "metric": mean_and_std(row),
        "seeds": row.spread.count if row.spread else 0,
        "length": row.length,
        "difference": None if test is None else points(test.difference),
        "direction": "" if test is None or not test.clear else "better" if test.difference > 0 else "worse",
        "interval": "" if test is None or test.interval is None else " to ".join(map(points, test.interval)),
        "p": [] if test is None else [(p_value(p), p_value(corrected)) for p, corrected in test.p_values],
        "price": row.price,
        "failures": row.failures,
    }


def _further(comparison: Comparison) -> dict[str, Any] | None:
    metrics = comparison.further()
    rows = [(r.variant, [share_and_std(metrics[n].get(r.variant)) for n in metrics]) for r in comparison.rows]
    return {"names": list(metrics), "rows": rows} if metrics else None


def _cost_charts(comparison: Comparison) -> list[Chart]:
    charts = []
    for heading, label, cost_of, tell in COSTS:
        rows = [(i, r, cost_of(r.price)) for i, r in enumerate(comparison.rows) if r.price and r.spread is not None]
        known = [(i, r, float(cost), noise) for i, r, (cost, noise) in rows if cost is not None]
        costs = [cost for _, _, cost, _ in known]
        if len(known) < 2 or max(costs) <= 1.01 * min(costs):  # no axis without a difference
            continue
        halves, accuracy = [cost * noise for *_, cost, noise in known], [r.noise for _, r, *_ in known]
        front = pareto(costs, [r.spread.mean for _, r, *_ in known if r.spread], halves, accuracy)
        drawn = [
            Point(r.variant, i, cost, r.spread.mean, r.spread.std, on, _interval(cost, noise))
            for (i, r, cost, noise), on in zip(known, front, strict=True)
            if r.spread is not None
        ]
        title = f"{METRICS[comparison.metric]} against {label}"
        charts.append((heading, pareto_chart(drawn, title=title, x_label=label, tell_cost=tell)))
    return charts


def _interval(cost: float, noise: float) -> tuple[float, float] | None:
    return (cost / (1 + noise), cost * (1 + noise)) if noise else None


def _curves(comparison: Comparison) -> list[Chart]:
    def whole(share: float) -> str:
        return f"{100 * share:.4g} %"

    colours = {row.variant: i for i, row in enumerate(comparison.rows)}
    charts = []
    for heading, metric, split, tell, axis in (
        (f"Validation {METRICS[comparison.metric]}", comparison.metric, "val", percent, whole),
        ("Validation loss", "loss", "val", number, "{:g}".format),
        ("Training loss", "loss", "train", number, "{:g}".format),
    ):
        curves = {row.variant: [m.course(metric, split) for m in row.members] for row in comparison.rows if row.members}
        if any(len(seed) > 1 for seeds in curves.values() for seed in seeds):
            chart = curves_chart(curves, title=f"{heading} over epochs", tell=tell, tell_axis=axis, colours=colours)
            charts.append((heading, chart))
    return charts


def _disagreement(comparison: Comparison) -> dict[str, Any] | None:
    rates, names = comparison.disagreement, comparison.predicted
    if rates is None or not np.isfinite(rates).any():
        return None
    upper = [(i, j) for i, j in zip(*np.triu_indices(len(names), 1), strict=True) if math.isfinite(rates[i, j])]
    pairs = sorted(((names[i], names[j], float(rates[i, j])) for i, j in upper), key=lambda pair: -pair[2])
    chart = disagreement_chart(rates, names, title="Share of images that two classify differently, in percent")
    return {"chart": chart, "pairs": pairs[:10], "seeds": np.isfinite(rates.diagonal()).any()}


def disagreement_chart(rates: NDArray[np.float64], names: Sequence[str], *, title: str) -> Markup:
    """A square of shares [variants, variants], darker where two classify differently more often."""
    count = len(names)
    cell = min(84.0, max(46.0, 480 / count))
    short = [shorten(n, LONGEST_CHART_NAME) for n in names]
    longest = CHARACTER * max(map(len, short))
    left, top = 14 + longest, 14 + 0.75 * longest
    size = (round(left + cell * count + max(0.75 * longest - cell / 2, 4)), round(top + cell * count + 4))
    highest = float(np.nanmax(rates)) if np.isfinite(rates).any() else 1.0
    leaning = Markup('<text class="axis" transform="translate({:.1f} {:.1f}) rotate(-45)">{}</text>')
    parts = [_text(left - 6, top + cell * (i + 0.5) + 4, name, "axis", "end") for i, name in enumerate(short)]
    parts += [leaning.format(left + cell * (i + 0.5), top - 6, name) for i, name in enumerate(short)]
    shaded = Markup('<g><title>{}</title><rect class="{}" {} fill-opacity="{:.2f}"/>{}</g>')
    for i, j in np.argwhere(np.isfinite(rates)).tolist():
        rate, x, y = float(rates[i, j]), left + cell * j, top + cell * i
        pair = f"two seeds of {names[i]}" if i == j else f"{names[i]} and {names[j]}"
        parts.append(
            shaded.format(
                f"{pair} classify {percent(rate, 2)} of the images differently",
                "wrong" if i == j else "right",
                _box(x, y, cell - 1, cell - 1),
                0.05 + 0.5 * rate / max(highest, 1e-9),
                _text(x + cell / 2, y + cell / 2 + 4, f"{100 * rate:.1f}", "count", "middle"),
            )
        )
    return _svg(size, title, *parts)


def _gains(comparison: Comparison) -> list[Chart]:
    variants = [row.variant for row in comparison.rows if row.variant != comparison.baseline]
    gains = {name: values for name in variants if (values := comparison.class_gains(name)) is not None}
    title = "Gain of {} over {}, class by class".format
    return [
        (name, gains_chart(values, comparison.classes, title=title(name, comparison.baseline)))
        for name, values in list(gains.items())[:MOST_VARIANTS]
    ]


def gains_chart(gains: NDArray[np.float64], names: Sequence[str], *, title: str, width: int = 440) -> Markup:
    """One bar per class to the right (gained) or to the left (lost), best first; of many classes both ends."""
    order = [int(i) for i in np.argsort(-gains, kind="stable") if math.isfinite(gains[i])]
    if len(order) > MOST_CLASSES:
        order = order[: MOST_CLASSES // 2] + order[-MOST_CLASSES // 2 :]
    if not order:
        return _svg((width, 40), title, _text(width / 2, 24, "nothing to compare", "axis", "middle"))
    short, labels = [shorten(names[i], 22) for i in order], [points(float(gains[i]), 1) for i in order]
    left, end = 12 + CHARACTER * max(map(len, short)), width - 8.0
    middle, room = (left + end) / 2, 8 + CHARACTER * max(map(len, labels))
    length = Scale(0, max(1e-9, float(np.abs(gains[order]).max())), 0, (end - left) / 2 - room)
    parts = [Markup('<path class="grid" d="M{0:.1f} 2V{1:.1f}"/>').format(middle, 20 * len(order) + 2)]
    bar = Markup('<g><title>{}</title>{}<rect class="{}" {}/>{}</g>')
    for row, i in enumerate(order):
        long, better = length(abs(float(gains[i]))), gains[i] >= 0
        start, at, anchor = (
            (middle, middle + long + 6, "start") if better else (middle - long, middle - long - 6, "end")
        )
        parts.append(
            bar.format(
                f"{names[i]}: {labels[row]} points",
                _text(left - 6, 20 * row + 14, short[row], "axis", "end"),
                "gain" if better else "loss",
                _box(start, 20 * row + 4, long, 13),
                _text(at, 20 * row + 14, labels[row], "axis", anchor),
            )
        )
    return _svg((width, 20 * len(order) + 4), title, *parts)


def _seeds(comparison: Comparison) -> dict[str, Any] | None:
    studies = comparison.seed_study
    if not studies:
        return None
    early: dict[str, Sequence[Mapping[float, float]]] = {}
    for variant, study in studies.items():
        course = {e["epoch"]: e["spearman"] for e in study.get("early", ()) if e["spearman"] is not None}
        if len(course) > 1 and len(study["seeds"]) >= ENOUGH:
            early[variant] = [course]
    colours = {row.variant: i for i, row in enumerate(comparison.rows)}
    title = "Rank correlation of early evaluations with the final metric"
    return {
        "rows": [
            (variant, name, values) for variant, study in studies.items() for name, values in study["sets"].items()
        ],
        "between": [(variant, pair) for variant, study in studies.items() for pair in study.get("between", ())],
        "early": curves_chart(early, title=title, colours=colours) if early else None,
        "enough": ENOUGH,
    }


# Tables for the terminal


def comparison_tables(comparison: Comparison) -> Group:
    """Accuracy, cost, spread over seeds, failures and notes."""
    parts: list[Table | Text] = [accuracy(comparison), Text(), costs(comparison), Text(lengths(comparison))]
    parts += [part for table in further(comparison) for part in (Text(), table)]
    if comparison.seed_study:
        parts += [Text(), seeds(comparison)]
    parts += [Text(line, style="red") for line in failures(comparison)]
    parts += [Text(), Text(verdict(comparison)), *map(Text, comparison.notes)]
    tests = sum(row.against is not None for row in comparison.rows)
    if tests > 1:
        parts.append(Text(f"p is of each comparison alone; the report also has it corrected for all {tests} (Holm)"))
    return Group(*parts)


def accuracy(comparison: Comparison) -> Table:
    """Mean and spread of each variant, and the evidence for a difference from the baseline."""
    metric = METRICS[comparison.metric]
    title = f"{comparison.name}: {metric} on {comparison.split} in percent, points against {comparison.baseline}"
    repeats = comparison.repeats
    names = ("mean ± std", repeats, "points", "95 % interval", f"p {repeats}", "p images")
    shown = names[: None if shutil.get_terminal_size().columns >= WIDE else -2]  # the report has them all
    table = _table(title, *shown)
    for row in comparison.rows:
        cells = [MISSING] * 4
        if (test := row.against) is not None:
            interval = MISSING if test.interval is None else " to ".join(points(v, 1) for v in test.interval)
            cells = [points(test.difference), interval, *(p_value(p) for p, _ in test.p_values)]
        cells = [mean_and_std(row).removesuffix(" %"), f"{len(row.members)}", *cells]
        table.add_row(_name(row.variant), *cells[: len(shown)])
    return table


def further(comparison: Comparison) -> list[Table]:
    """Metrics of evaluators other than classification, as many per table as fit."""
    metrics = comparison.further()
    names, tables = list(metrics), []
    for start in range(0, len(names), PER_TABLE):
        shown = names[start : start + PER_TABLE]
        table = _table("further metrics, mean ± std over seeds", *(shorten(name, 15) for name in shown))
        for row in comparison.rows:
            table.add_row(_name(row.variant), *(share_and_std(metrics[n].get(row.variant)) for n in shown))
        tables.append(table)
    return tables


def costs(comparison: Comparison) -> Table:
    """Size, speed, memory and training time of each variant."""
    title = "cost" + (f": {comparison.conditions}" if comparison.conditions else "")
    table = _table(title, "parameters", "MACs", "img/s", "memory", "training")
    for row in comparison.rows:
        price = row.price
        cells = [MISSING] * 5
        if price is not None:
            cells = [amount(price.parameters), amount(price.macs), number(price.images_per_second)]
            cells += [memory(price.peak_memory), duration(price.seconds)]
        table.add_row(_name(row.variant), *cells)
    return table


def lengths(comparison: Comparison) -> str:
    """How long each variant trained, once where that is the same for all."""
    texts = {row.variant: row.length for row in comparison.rows if row.length}
    rule = f" ({comparison.budget})" if comparison.budget else ""
    if len(set(texts.values())) == 1:
        return f"length: {next(iter(texts.values()))}{rule}"
    return f"length{rule}: " + ", ".join(f"{name} {length}" for name, length in texts.items()) if texts else ""


def seeds(comparison: Comparison) -> Table:
    """Effect of the seed alone."""
    table = _table("over seeds, in percent", "images", "seeds", "mean", "std", "lowest", "highest", "range")
    table.columns[1].justify = "left"
    for variant, study in comparison.seed_study.items():
        for name, spread in study["sets"].items():
            values = (spread[key] for key in ("mean", "std", "low", "high", "range"))
            cells = [MISSING if v is None else f"{100 * v:.2f}" for v in values]
            table.add_row(_name(variant), Text(shorten(name, 16)), f"{spread['count']}", *cells)
    return table


def failures(comparison: Comparison) -> list[str]:
    """One line per variant and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for failure in comparison.failures:
        groups.setdefault((failure.variant, failure.reason), []).append(str(failure.seed))
    return [
        f"{variant} failed (seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}): {reason}"
        for (variant, reason), seeds in groups.items()
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")  # the one that is cut where the terminal is narrow
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _name(name: str) -> Text:
    return Text(shorten(name, LONGEST_NAME), no_wrap=True, overflow="ellipsis")
