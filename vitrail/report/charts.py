"""Small SVG charts: text stays crisp, colours come from the page's style sheet, tooltips show values.

Every function returns one `<svg>` element, safe to put into HTML. Classes used: `axis`, `grid`, `line`, `dot`, `hit`,
`tag`, `bar`, `right`, `wrong`, `ideal`, `band`, `spot`, `s0`, `s1`, ... for the series of a chart, and `v0` ... `v7`
for the variants or classes of a page, which have the same colour in every chart.
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

CHARACTER = 6.6  # mean width of a character of the 12 px text, in the same units as the charts
MOST_POINTS = 120  # of a line; more cannot be seen at this size
COLOURS = 8  # v0 ... v7
LONGEST_NAME = 18
MOST_VALUES = 12  # rows or columns of a matrix up to which a cell shows its value
SCATTER, LINE = 440.0, 13.0  # side of a scatter plot, height of a name in it


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


def whole_percent(share: float) -> str:
    """A share without needless zeros, for axes and the ends of lines."""
    return f"{100 * share:.4g} %"


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
    size: tuple[int, int] = (336, 220),
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
        points = [(a, b) for a, b in zip(s.x, s.y, strict=True) if math.isfinite(b)]
        parts += [_hit(f"s{k}", x(a), y(b), f"{s.name}, {x_label} {a:.4g}: {tell(b)}") for a, b in points]
    for k, end in enumerate(_apart([y(s.y[i]) for s, i in zip(drawn, last, strict=True)], 14)):
        parts.append(_text(right + 8, end + 4, tags[k], f"tag s{k}"))
    return _svg(size, title, *parts)


def curves_chart(
    curves: Mapping[str, Sequence[Mapping[float, float]]],
    *,
    title: str,
    x_label: str = "epoch",
    tell: Callable[[float], str] = number,
    tell_axis: Callable[[float], str] = "{:g}".format,
    colours: Mapping[str, int] | None = None,
    size: tuple[int, int] = (520, 300),
) -> Markup:
    """One line per variant, the mean over its seeds, in a band from its lowest to its highest seed.

    `curves` has one mapping from epoch to value per seed; epochs that not every seed of a variant has are left out.
    """
    lines: dict[str, tuple[Series, Series, Series]] = {}
    for name, seeds in curves.items():
        shared = sorted(set.intersection(*(set(s) for s in seeds))) if seeds else []
        if shared:
            table = np.array([[s[e] for e in shared] for s in seeds])
            low, middle, high = (
                thin(Series(name, shared, f(table, axis=0).tolist())) for f in (np.min, np.mean, np.max)
            )
            lines[name] = (low, middle, high)
    width, height = size
    values = [v for trio in lines.values() for s in trio for v in s.y if math.isfinite(v)]
    if not values:
        return _svg(size, title, _text(width / 2, height / 2, "nothing was recorded", "axis", "middle"))
    chosen = colours or {name: i for i, name in enumerate(curves)}
    tags = {name: f"{shorten(name, LONGEST_NAME)} {tell(trio[1].y[-1])}" for name, trio in lines.items()}
    y_ticks = ticks(*spread(values), outward=True)
    left, bottom = 12 + CHARACTER * max(len(tell_axis(v)) for v in y_ticks), height - 36.0
    right = width - 12 - CHARACTER * max(map(len, tags.values()))
    positions = [v for trio in lines.values() for v in trio[1].x]
    x_low, x_high = spread([*positions, 0.0])
    x, y = Scale(x_low, x_high, left, right), Scale(y_ticks[0], y_ticks[-1], bottom, 14)
    parts = [_grid(y(v), left, right, tell_axis(v)) for v in y_ticks]
    whole = all(v == int(v) for v in positions)  # there is no layer 0.5
    shown = [v for v in ticks(x_low, x_high, 6) if not whole or v == int(v)]
    parts += [_text(x(v), bottom + 16, f"{v:g}", "axis", "middle") for v in shown]
    parts.append(_text((left + right) / 2, height - 4, x_label, "axis", "middle"))
    for name, (low, mean, high) in lines.items():
        kind = f"v{chosen[name] % COLOURS}"
        if any(a != b for a, b in zip(low.y, high.y, strict=True)) and len(low.x) > 1:
            forth, back = ([f"{x(a):.1f} {y(b):.1f}" for a, b in zip(s.x, s.y, strict=True)] for s in (high, low))
            parts.append(Markup('<path class="band {}" d="M{}z"/>').format(kind, "L".join(forth + back[::-1])))
        parts.append(_line(mean, x, y, kind))
        for a, b, c, d in zip(mean.x, mean.y, low.y, high.y, strict=True):
            tooltip = f"{name}, {x_label} {a:.4g}: {tell(b)}" + (f" ({tell(c)} to {tell(d)})" if c != d else "")
            parts.append(_hit(kind, x(a), y(b), tooltip))
    ends = _apart([y(trio[1].y[-1]) for trio in lines.values()], 14)
    shift = max(0.0, max(ends) - (bottom + 4))  # many names: the stack moves up into the frame
    for name, end in zip(lines, ends, strict=True):
        parts.append(_text(right + 8, end - shift + 4, tags[name], f"tag v{chosen[name] % COLOURS}"))
    return _svg(size, title, *parts)


def bar_chart(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], *, title: str, width: int = 440, named: int = 40
) -> Markup:
    """One stacked bar per name: horizontal and labelled up to `named` of them, thin columns beyond."""
    totals = [sum(values[i] for values in parts.values()) for i in range(len(names))]
    top = max([*totals, 1e-12])
    tooltips = [
        f"{name}: " + ", ".join(f"{number(values[i])} {part}" for part, values in parts.items())
        for i, name in enumerate(names)
    ]
    out: list[Markup] = []
    if len(names) <= named:
        short = [shorten(n, 22) for n in names]
        left = 10 + CHARACTER * max(map(len, short))
        length = Scale(0, top, 0, width - left - 12 - CHARACTER * max(len(number(t)) for t in totals))
        for i, name in enumerate(short):
            at, bars = left, []
            for k, values in enumerate(parts.values()):
                bars.append(_rect(at, 20 * i + 4, length(values[i]), 13, f"bar s{k}"))
                at += length(values[i])
            label, total = (
                _text(left - 6, 20 * i + 14, name, "axis", "end"),
                _text(at + 6, 20 * i + 14, number(totals[i]), "axis"),
            )
            out.append(_group(tooltips[i], label, *bars, total))
        return _svg((width, 20 * len(names) + 4), title, *out)
    left, bottom = 12 + CHARACTER * len(number(top)), 150.0
    across, up = Scale(0, len(names), left, width - 4), Scale(0, top, bottom, 12)
    out += [_grid(up(v), left, width - 4, number(v)) for v in ticks(0, top, 4)]
    for i in range(len(names)):
        floor, bars = 0.0, []
        for k, values in enumerate(parts.values()):
            high, low = up(floor + values[i]), up(floor)
            bars.append(_rect(across(i), high, 0.8 * (across(1) - across(0)), low - high, f"bar s{k}"))
            floor += values[i]
        out.append(_group(tooltips[i], *bars))
    out.append(_text((left + width) / 2, 168, f"{len(names)} classes", "axis", "middle"))
    return _svg((width, 174), title, *out)


def heat_map(counts: NDArray[np.int64], names: Sequence[str], *, title: str) -> Markup:
    """A confusion matrix [true, predicted], shaded by share of the true class.

    Cells carry numbers up to 16 classes and names up to 40; beyond that shades speak and the worst have tooltips.
    """
    classes = len(names)
    cell = min(84.0, max(440 / classes, 12.0 if classes <= 40 else 2.4))
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
        _upright(top + cell * classes / 2, "true"),
    ]
    leaning = Markup('<text class="axis" transform="translate({:.1f} {:.1f}) rotate(-45)">{}</text>')
    for i, name in enumerate(short):
        middle = cell * (i + 0.5)
        out += [_text(left - 6, top + middle + 4, name, "axis", "end"), leaning.format(left + middle, top - 6, name)]
    if classes > 40:
        return _svg(size, title, *out, *_shades(counts, share, names, (left, top, cell)))
    for i, j in np.argwhere(counts > 0):
        at = (left + cell * j, top + cell * i)
        tooltip = f"true {names[i]}, predicted {names[j]}: {counts[i, j]:,} images ({percent(share[i, j])})"
        shade = 0.06 + 0.5 * share[i, j] ** 0.7  # stays light enough for the page's ink
        value = f"{counts[i, j]:,}" if classes <= 16 else ""
        out.append(_shaded(*at, cell, shade, "right" if i == j else "wrong", tooltip, value))
    return _svg(size, title, *out)


def matrix_chart(table: NDArray[np.float64], first: str, second: str, *, title: str, unit: str = "layer") -> Markup:
    """Similarity [layers, other layers] as shades: one row per layer of `first`, one column per layer of `second`.

    `unit` names what a row is, where it is no layer.
    """
    rows, columns = table.shape
    cell, left, top = min(64.0, 440 / max(rows, columns)), 46.0, 40.0
    out = [
        _text(left + cell * columns / 2, 12, shorten(second, 40), "axis", "middle"),
        _upright(top + cell * rows / 2, shorten(first, 40)),
    ]
    step = max(1, math.ceil(max(rows, columns) / 16))
    out += [_text(left + cell * (j + 0.5), top - 7, f"{j}", "axis", "middle") for j in range(0, columns, step)]
    out += [_text(left - 7, top + cell * (i + 0.5) + 4, f"{i}", "axis", "end") for i in range(0, rows, step)]
    for i, j in np.argwhere(np.isfinite(table)):
        value = float(table[i, j])
        pair = f"{unit}s {i} and {j}" if first == second else f"{unit} {i} of {first}, {unit} {j} of {second}"
        shade = 0.04 + 0.6 * max(value, 0.0) ** 1.5
        words = f"{value:.2f}" if max(rows, columns) <= MOST_VALUES else ""
        out.append(_shaded(left + cell * j, top + cell * i, cell, shade, "right", f"{pair}: {value:.3f}", words))
    return _svg((left + cell * columns + 8, top + cell * rows + 8), title, *out)


def histogram(counts: NDArray[np.int64], patches: int, *, title: str, bins: int = 28) -> Markup:
    """How many images keep how many of `patches`: columns of a histogram, and a line at the mean."""
    wide = max(1, math.ceil((patches + 1) / bins))
    edges = np.arange(0, patches + 1 + wide, wide)
    images, _ = np.histogram(counts, edges)
    left, right, top, bottom = 34.0, 250.0, 16.0, 104.0
    x, y = Scale(0, float(edges[-1]), left, right), Scale(0, float(max(images.max(), 1)), bottom, top)
    out = [_grid(y(v), left, right, f"{v:g}") for v in ticks(0, float(max(images.max(), 1)), 3)]
    for start, many in zip(edges, images, strict=False):
        if many:
            values = f"{start}" if wide == 1 else f"{start} to {min(start + wide - 1, patches)}"
            bar = _rect(x(float(start)) + 0.5, y(float(many)), x(wide) - x(0) - 1, bottom - y(float(many)), "bar s0")
            out.append(_group(f"{many:,} images keep {values} patches", bar))
    middle = x(float(counts.mean()) + wide / 2)
    out.append(Markup('<path class="ideal" d="M{0:.1f} {1:.1f}V{2:.1f}"/>').format(middle, top - 8, bottom))
    out.append(_text(middle, top - 10, f"mean {counts.mean():.1f}", "count", "middle"))
    out += [_text(x(v + wide / 2), bottom + 15, f"{v:g}", "axis", "middle") for v in (0, patches // 2, patches)]
    return _svg((260, 126), title, *out)


def scatter_chart(
    points: NDArray[np.float64], labels: NDArray[np.int64] | None, classes: Sequence[str], *, title: str
) -> Markup:
    """Images [images, 2] as points, classes by colour and, beyond eight, by shape; names stand at their median."""
    margin = 14.0
    x = Scale(*spread(points[:, 0].tolist()), margin, SCATTER - margin)
    y = Scale(*spread(points[:, 1].tolist()), SCATTER - margin, margin)
    kinds = np.zeros(len(points), dtype=np.int64) if labels is None else labels
    present = sorted({int(k) for k in kinds})
    by_class = labels is not None and len(present) <= 2 * COLOURS
    out = []
    for (a, b), kind in zip(points, kinds, strict=True):
        k = present.index(int(kind)) if by_class else 0
        tooltip = Markup("<title>{}</title>").format(classes[int(kind)]) if labels is not None else Markup("")
        across, up = x(float(a)), y(float(b))
        circle = Markup('<circle class="spot v{}" cx="{:.1f}" cy="{:.1f}" r="3.2">{}</circle>')
        square = Markup('<rect class="spot v{}" x="{:.1f}" y="{:.1f}" width="5.6" height="5.6">{}</rect>')
        out.append(
            circle.format(k, across, up, tooltip)
            if k < COLOURS
            else square.format(k % COLOURS, across - 2.8, up - 2.8, tooltip)
        )
    placed: list[tuple[float, float, float]] = []  # x, y and half the width of names
    for k, kind in enumerate(present if by_class else ()):
        name, (a, b) = shorten(classes[kind], 18), np.median(points[kinds == kind], axis=0)
        half, low = CHARACTER * len(name) / 2, y(float(b))
        inside = min(max(x(float(a)), half), SCATTER - half)
        while any(abs(low - other) < LINE and abs(inside - a) < half + wide for a, other, wide in placed):
            low += 2
        placed.append((inside, low, half))
        out.append(_text(inside, low + 4, name, f"tag v{k % COLOURS}", "middle"))
    return _svg((SCATTER, SCATTER), title, *out)


def parity_chart(true: NDArray[np.float64], predicted: NDArray[np.float64], *, title: str) -> Markup:
    """Predicted against true values, a point per image (of many some), and the diagonal on which both are equal."""
    chosen = np.linspace(0, len(true) - 1, min(len(true), 1000)).astype(int)
    low, high = spread([*true.tolist(), *predicted.tolist()])
    x, y = Scale(low, high, 60.0, 426.0), Scale(low, high, 380.0, 14.0)
    out = [_grid(y(v), 60, 426, f"{v:g}") for v in ticks(low, high)]
    out += [_text(x(v), 398, f"{v:g}", "axis", "middle") for v in ticks(low, high)]
    out.append(
        Markup('<path class="ideal" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(x(low), y(low), x(high), y(high))
    )
    spot = Markup(
        '<circle class="spot v0" cx="{:.1f}" cy="{:.1f}" r="3.2"><title>{:g}, predicted {:g}</title></circle>'
    )
    out += [spot.format(x(a), y(b), a, b) for a, b in zip(true[chosen], predicted[chosen], strict=True)]
    out += [_text(243, 416, "true value", "axis", "middle"), _upright(197, "predicted value")]
    return _svg((440, 424), title, *out)


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
        tooltip = f"{count[k]:,} images with confidence {percent(confidence[k])}: {percent(accuracy[k])} are right"
        tall = (foot - bottom - 14) * count[k] / most
        bars = [
            _rect(at, y(accuracy[k]), wide, bottom - y(accuracy[k]), "bar s0"),
            _rect(at, gap[0], wide, gap[1] - gap[0], "ground"),  # over a bar, the gap would have another colour
            _rect(at, gap[0], wide, gap[1] - gap[0], "gap"),
            Markup('<path class="level" d="M{:.1f} {:.1f}h{:.1f}"/>').format(at, y(accuracy[k]), wide),
            _rect(at, foot - tall, wide, tall, "bar s1"),
        ]
        out.append(_group(tooltip, *bars))
    out.append(Markup('<path class="ideal" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(x(0), y(0), x(1), y(1)))
    out.append(_text(left - 6, foot, "images", "axis", "end"))
    return _svg((380, 356), title, *out)


def _shades(
    counts: NDArray[np.int64], share: NDArray[np.float64], names: Sequence[str], frame: tuple[float, float, float]
) -> list[Markup]:
    left, top, cell = frame
    # One path per shade in place of one rectangle per cell keeps 200 classes small; tooltips for the worst only.
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
            tooltip = f"true {names[i]}, predicted {names[j]}: {counts[i, j]:,} images ({percent(share[i, j])})"
            box = _box(left + cell * j, top + cell * i, cell, cell)
            out.append(Markup('<rect class="hit" {}><title>{}</title></rect>').format(box, tooltip))
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


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The heights, moved down where needed so that no two are closer than `least`."""
    moved = list(heights)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def _svg(size: tuple[float, float], title: str, *parts: Markup) -> Markup:
    width, height = size
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {0:.0f} {1:.0f}" style="--w:{0:.0f}px" aria-label="{2}">{3}</svg>'
    ).format(width, height, title, Markup("").join(parts))


def _group(tooltip: str, *parts: Markup) -> Markup:
    return Markup("<g><title>{}</title>{}</g>").format(tooltip, Markup("").join(parts))


def _hit(kind: str, x: float, y: float, tooltip: str) -> Markup:
    return Markup('<circle class="hit {}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>').format(
        kind, x, y, tooltip
    )


def _shaded(x: float, y: float, cell: float, shade: float, kind: str, tooltip: str, value: str) -> Markup:
    """A cell of a matrix, with its value in the middle."""
    box = Markup('<rect class="{}" {} fill-opacity="{:.2f}"/>').format(kind, _box(x, y, cell - 1, cell - 1), shade)
    return _group(
        tooltip, box, _text(x + cell / 2, y + cell / 2 + 4, value, "count", "middle") if value else Markup("")
    )


def _grid(height: float, left: float, right: float, label: str) -> Markup:
    line = Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, height, right)
    return line + _text(left - 6, height + 4, label, "axis", "end")


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, x, y, anchor, escape(text)
    )


def _upright(y: float, text: str) -> Markup:
    """The name of a vertical axis."""
    return Markup(
        '<text class="axis" text-anchor="middle" transform="translate(12 {:.1f}) rotate(-90)">{}</text>'
    ).format(y, text)


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return Markup('<rect class="{}" {}/>').format(kind, _box(x, y, width, height))


def _box(x: float, y: float, width: float, height: float) -> Markup:
    return Markup('x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"').format(x, y, max(width, 0), max(height, 0))
