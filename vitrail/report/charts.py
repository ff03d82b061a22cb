"""Small SVG charts: text stays crisp, colours come from the page's style sheet, values are told by tooltips.

Every function returns one `<svg>` element, safe to put into HTML. Classes used: `axis`, `grid`, `line`, `dot`, `hit`,
`tag`, `bar`, `right`, `wrong`, `ideal`, and `s0`, `s1`, ... for the series of a chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from vitrail.quantities import number, percent, shorten

CHARACTER = 6.1  # mean width of a character of the 11 px text, in the same units as the charts
MOST_POINTS = 120  # of a line; more cannot be seen at this size


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] linearly to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Series:
    """One line; a y that is not finite is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def ticks(low: float, high: float, most: int = 5, *, outward: bool = False) -> list[float]:
    """At most `most` round numbers, evenly spaced inside [low, high], or just around it where `outward`.

    >>> ticks(0, 10), ticks(0.3, 9.7, outward=True)
    ([0.0, 2.5, 5.0, 7.5, 10.0], [0.0, 2.5, 5.0, 7.5, 10.0])
    """
    down, up = (math.floor, math.ceil) if outward else (math.ceil, math.floor)
    slack = 1e-9 if outward else -1e-9  # a bound that is round but for rounding counts as round
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * m for m in (1, 2, 2.5, 5, 10, 20, 25, 50)):
        first, last = down(low / step + slack), up(high / step - slack)
        if last - first < most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest finite value, set apart where they are equal so that a scale exists."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite), max(finite)
    if low == high:
        room = abs(low) * 0.1 or 0.5
        return low - room, high + room
    return low, high


def thin(series: Series, most: int = MOST_POINTS) -> Series:
    """Means of at most `most` runs of neighbouring points; a run with a gap in it is a gap."""
    if len(series.x) <= most:
        return series
    runs = np.array_split(np.arange(len(series.x)), most)
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    y = np.where(np.isfinite(y), y, np.nan)
    return Series(series.name, [float(x[r].mean()) for r in runs], [float(y[r].mean()) for r in runs])


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    x_from: float = math.inf,
    tell: Callable[[float], str] = number,
    tell_axis: Callable[[float], str] = "{:g}".format,
    size: tuple[int, int] = (380, 230),
) -> Markup:
    """Lines over a common x, each labelled at its end with its last value.

    `tell` writes a value of y, `tell_axis` a round one. x begins at `x_from` or the first point, whichever is less; y
    begins and ends at round numbers.
    """
    drawn = [thin(s) for s in series if any(map(math.isfinite, s.y))]
    width, height = size
    if not drawn:
        return _svg(size, title, _text(width / 2, height / 2, "nothing was recorded", "axis", "middle"))
    last = [next(i for i in reversed(range(len(s.y))) if math.isfinite(s.y[i])) for s in drawn]
    tags = [f"{s.name} {tell(s.y[i])}" for s, i in zip(drawn, last, strict=True)]
    bottom, right = height - 36, width - 12 - CHARACTER * max(map(len, tags))
    x_low, x_high = spread([v for s in drawn for v in s.x] + [x_from])
    y_ticks = ticks(*spread([v for s in drawn for v in s.y]), outward=True)
    left = 12 + CHARACTER * max(len(tell_axis(v)) for v in y_ticks)
    x, y = Scale(x_low, x_high, left, right), Scale(y_ticks[0], y_ticks[-1], bottom, 14)
    parts = [_grid(y(v), left, right, tell_axis(v)) for v in y_ticks]
    parts += [_text(x(v), bottom + 16, f"{v:g}", "axis", "middle") for v in ticks(x_low, x_high, 5)]
    parts.append(_text((left + right) / 2, height - 4, x_label, "axis", "middle"))
    for k, s in enumerate(drawn):
        parts.append(_line(s, x, y, f"s{k}"))
        parts += [
            Markup('<circle class="hit s{}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>').format(
                k, x(a), y(b), f"{s.name}, {x_label} {a:.4g}: {tell(b)}"
            )
            for a, b in zip(s.x, s.y, strict=True)
            if math.isfinite(b)
        ]
    for k, place in enumerate(_apart([y(s.y[i]) for s, i in zip(drawn, last, strict=True)], 14)):
        parts.append(_text(right + 8, place + 4, tags[k], f"tag s{k}"))
    return _svg(size, title, *parts)


def bar_chart(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    title: str,
    width: int = 440,
    named: int = 40,
) -> Markup:
    """One stacked bar a name: horizontal and labelled up to `named` of them, thin columns beyond."""
    totals = [sum(values[i] for values in parts.values()) for i in range(len(names))]
    top = max([*totals, 1e-12])
    told = [
        f"{name}: " + ", ".join(f"{number(values[i])} {part}" for part, values in parts.items())
        for i, name in enumerate(names)
    ]
    out: list[Markup] = []
    if len(names) <= named:
        short = [shorten(n, 22) for n in names]
        left = 10 + CHARACTER * max(map(len, short))
        length = Scale(0, top, 0, width - left - 12 - CHARACTER * max(len(number(t)) for t in totals))
        for i, name in enumerate(short):
            at = left
            out.append(Markup("<g><title>{}</title>").format(told[i]))
            out.append(_text(left - 6, 20 * i + 14, name, "axis", "end"))
            for k, values in enumerate(parts.values()):
                out.append(_rect(at, 20 * i + 4, length(values[i]), 13, f"bar s{k}"))
                at += length(values[i])
            out.append(_text(at + 6, 20 * i + 14, number(totals[i]), "axis"))
            out.append(Markup("</g>"))
        return _svg((width, 20 * len(names) + 4), title, *out)
    left, bottom = 12 + CHARACTER * len(number(top)), 150.0
    across, up = Scale(0, len(names), left, width - 4), Scale(0, top, bottom, 12)
    out += [_grid(up(v), left, width - 4, number(v)) for v in ticks(0, top, 4)]
    for i in range(len(names)):
        floor = 0.0
        out.append(Markup("<g><title>{}</title>").format(told[i]))
        for k, values in enumerate(parts.values()):
            high, low = up(floor + values[i]), up(floor)
            out.append(_rect(across(i), high, 0.8 * (across(1) - across(0)), low - high, f"bar s{k}"))
            floor += values[i]
        out.append(Markup("</g>"))
    out.append(_text((left + width) / 2, 168, f"{len(names)} classes", "axis", "middle"))
    return _svg((width, 174), title, *out)


def heat_map(counts: NDArray[np.int64], names: Sequence[str], *, title: str) -> Markup:
    """A confusion matrix [true, predicted], shaded by share of the true class.

    Cells carry numbers up to 16 classes and names up to 40; beyond that shades speak and the worst have tooltips.
    """
    classes = len(names)
    cell = min(84.0, max(480 / classes, 12.0 if classes <= 40 else 2.4))
    short = [shorten(n, 18) for n in names] if classes <= 40 else []
    longest = CHARACTER * max(map(len, short), default=2)
    left = top = 24.0
    over = 0.0
    if short:  # column names lean to the right by 45 degrees
        left, top, over = 26 + longest, 30 + 0.75 * longest, 0.75 * longest
    size = (round(left + cell * classes + max(over - cell / 2, 4)), round(top + cell * classes + 4))
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    out = [
        Markup('<rect class="frame" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            left, top, cell * classes, cell * classes
        ),
        _text(left + cell * classes / 2, 12, "predicted", "axis", "middle"),
        Markup(
            '<text class="axis" text-anchor="middle" transform="translate(12 {:.1f}) rotate(-90)">true</text>'
        ).format(top + cell * classes / 2),
    ]
    for i, name in enumerate(short):
        middle = cell * (i + 0.5)
        out.append(_text(left - 6, top + middle + 4, name, "axis", "end"))
        out.append(
            Markup('<text class="axis" transform="translate({:.1f} {:.1f}) rotate(-45)">{}</text>').format(
                left + middle, top - 6, name
            )
        )
    if classes > 40:
        return _svg(size, title, *out, *_shades(counts, share, names, (left, top, cell)))
    for i, j in np.argwhere(counts > 0):
        at = (left + cell * j, top + cell * i)
        told = f"true {names[i]}, predicted {names[j]}: {counts[i, j]:,} images ({percent(share[i, j])})"
        shade = 0.06 + 0.5 * share[i, j] ** 0.7  # stays light enough for the page's ink
        out.append(
            Markup('<g><title>{}</title><rect class="{}" {} fill-opacity="{:.2f}"/>').format(
                told, "right" if i == j else "wrong", _box(*at, cell - 1, cell - 1), shade
            )
        )
        if classes <= 16:
            out.append(_text(at[0] + cell / 2, at[1] + cell / 2 + 4, f"{counts[i, j]:,}", "count", "middle"))
        out.append(Markup("</g>"))
    return _svg(size, title, *out)


def reliability(count: Sequence[int], confidence: Sequence[float], accuracy: Sequence[float], *, title: str) -> Markup:
    """Accuracy of each bin of confidence beside the diagonal of perfect calibration; below, how many images it has."""
    left, right, top, bottom, foot = 50.0, 366.0, 14.0, 260.0, 318.0
    x, y = Scale(0, 1, left, right), Scale(0, 1, bottom, top)
    bins, most = len(count), max(*count, 1)
    quarters = [0, 0.25, 0.5, 0.75, 1]
    out = [_grid(y(v), left, right, percent(v, 0)) for v in quarters]
    out += [_text(x(v), foot + 16, percent(v, 0), "axis", "middle") for v in quarters]
    out.append(_text((left + right) / 2, foot + 32, "confidence", "axis", "middle"))
    for k in range(bins):
        if not count[k]:
            continue
        at, wide = x(k / bins) + 1, x(1 / bins) - x(0) - 2
        gap = sorted((y(accuracy[k]), y(confidence[k])))
        told = f"{count[k]:,} images with confidence {percent(confidence[k])}: {percent(accuracy[k])} are right"
        tall = (foot - bottom - 14) * count[k] / most
        out.append(Markup("<g><title>{}</title>").format(told))
        out.append(_rect(at, y(accuracy[k]), wide, bottom - y(accuracy[k]), "bar s0"))
        out.append(_rect(at, gap[0], wide, gap[1] - gap[0], "gap"))
        out.append(_rect(at, foot - tall, wide, tall, "bar s1"))
        out.append(Markup("</g>"))
    out.append(Markup('<path class="ideal" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(x(0), y(0), x(1), y(1)))
    out.append(_text(left - 6, foot, "images", "axis", "end"))
    return _svg((380, 356), title, *out)


def _shades(
    counts: NDArray[np.int64], share: NDArray[np.float64], names: Sequence[str], place: tuple[float, float, float]
) -> list[Markup]:
    left, top, cell = place
    # One path a shade in place of one rectangle a cell, so that 200 classes stay small; tooltips for the worst only.
    level = np.ceil(8 * share**0.5).astype(int)
    diagonal = np.eye(len(counts), dtype=bool)
    out = []
    for kind, where in (("right", diagonal), ("wrong", ~diagonal)):
        for k in range(1, 9):
            cells = "".join(
                f"M{left + cell * j:.1f} {top + cell * i:.1f}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z"
                for i, j in np.argwhere((level == k) & where)
            )
            if cells:
                out.append(Markup('<path class="{}" fill-opacity="{:.2f}" d="{}"/>').format(kind, k / 8, cells))
    worst = np.argsort(-np.where(diagonal, 0, counts), axis=None, kind="stable")[:150]
    for i, j in zip(*np.unravel_index(worst, counts.shape), strict=True):
        if i != j and counts[i, j]:
            told = f"true {names[i]}, predicted {names[j]}: {counts[i, j]:,} images ({percent(share[i, j])})"
            box = _box(left + cell * j, top + cell * i, cell, cell)
            out.append(Markup('<rect class="hit" {}><title>{}</title></rect>').format(box, told))
    return out


def _line(series: Series, x: Scale, y: Scale, kind: str) -> Markup:
    runs: list[list[str]] = [[]]
    for a, b in zip(series.x, series.y, strict=True):
        if math.isfinite(b):
            runs[-1].append(f"{x(a):.1f} {y(b):.1f}")
        elif runs[-1]:
            runs.append([])
    out = Markup("")
    for run in runs:
        if len(run) == 1:  # a point between gaps has no line
            out += Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.5"/>').format(kind, *run[0].split())
        elif run:
            out += Markup('<path class="line {}" d="M{}"/>').format(kind, "L".join(run))
    return out


def _apart(places: Sequence[float], least: float) -> list[float]:
    """The places, moved down where needed so that no two are closer than `least`."""
    moved = list(places)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def _svg(size: tuple[float, float], title: str, *parts: Markup) -> Markup:
    width, height = size
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {0:.0f} {1:.0f}" style="--w:{0:.0f}px" aria-label="{2}">{3}</svg>'
    ).format(width, height, title, Markup("").join(parts))


def _grid(height: float, left: float, right: float, told: str) -> Markup:
    line = Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, height, right)
    return line + _text(left - 6, height + 4, told, "axis", "end")


def _text(x: float, y: float, told: str, kind: str, anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, escape(told)
    )


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return Markup('<rect class="{}" {}/>').format(kind, _box(x, y, width, height))


def _box(x: float, y: float, width: float, height: float) -> Markup:
    return Markup('x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"').format(x, y, max(width, 0), max(height, 0))
