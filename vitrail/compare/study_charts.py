"""Charts of a comparison, as SVG like `vitrail.report.charts`: accuracy against cost, curves, disagreement, gains.

Classes used besides those: `v0` ... `v7` give a variant its colour, the same in every chart; `band`, `point`,
`whisker`, `front`, `gain`, `loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitrail.quantities import number, percent, shorten
from vitrail.report.charts import CHARACTER, COLOURS, LONGEST_NAME, Scale, _box, _grid, _svg, _text, spread, ticks
from vitrail.report.charts import curves_chart as curves_chart  # noqa: PLC0414

MOST_CLASSES = 24  # of a chart of gains: the best and the worst half


@dataclass(frozen=True)
class Point:
    """A variant in the plane of cost and figure."""

    name: str
    colour: int
    cost: float
    value: float
    deviation: float = math.nan  # over seeds
    front: bool = False  # nothing is cheaper and better


def pareto_chart(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    tell_cost: Callable[[float], str] = number,
    size: tuple[int, int] = (520, 320),
) -> Markup:
    """A point a variant with one standard deviation up and down, and a line through those that nothing beats.

    Costs that differ by more than three times are drawn on a logarithmic axis.
    """
    drawn = [p for p in points if math.isfinite(p.cost) and p.cost > 0 and math.isfinite(p.value)]
    width, height = size
    if not drawn:
        return _svg(size, title, _text(width / 2, height / 2, "nothing was measured", "axis", "middle"))
    reach = {p.name: p.deviation if math.isfinite(p.deviation) else 0.0 for p in drawn}
    ends = [p.value + sign * reach[p.name] for p in drawn for sign in (-1, 1)]
    y_ticks = ticks(*spread(ends), outward=True)
    left, right, bottom = 12 + CHARACTER * max(len(_whole(v)) for v in y_ticks), width - 14.0, height - 40.0
    logarithmic = max(p.cost for p in drawn) > 3 * min(p.cost for p in drawn)
    low, high = spread([_place(p.cost, logarithmic) for p in drawn])
    room = 0.12 * (high - low)
    x = Scale(low - room, high + room, left, right)
    y = Scale(y_ticks[0], y_ticks[-1], bottom, 16)
    parts = [_grid(y(v), left, right, _whole(v)) for v in y_ticks]
    parts += [
        _text(x(_place(v, logarithmic)), bottom + 17, tell_cost(v), "axis", "middle")
        for v in _cost_ticks(low - room, high + room, logarithmic)
    ]
    parts.append(_text((left + right) / 2, height - 6, x_label, "axis", "middle"))
    best = sorted((p for p in drawn if p.front), key=lambda p: p.cost)
    if len(best) > 1:
        path = "L".join(f"{x(_place(p.cost, logarithmic)):.1f} {y(p.value):.1f}" for p in best)
        parts.append(Markup('<path class="front" d="M{}"/>').format(path))
    for p in drawn:
        across, up, half = x(_place(p.cost, logarithmic)), y(p.value), abs(y(reach[p.name]) - y(0))
        told = f"{p.name}: {percent(p.value, 2)} at {tell_cost(p.cost)}"
        if reach[p.name]:
            told += f", ± {percent(reach[p.name], 2)} over seeds"
        bar = Markup('<path class="whisker" d="M{0:.1f} {1:.1f}V{2:.1f}"/>').format(across, up - half, up + half)
        parts.append(
            Markup(
                '<g class="v{}"><title>{}</title>{}<circle class="point" cx="{:.1f}" cy="{:.1f}" r="5"/></g>'
            ).format(p.colour % COLOURS, told, bar if half > 5 else "", across, up)
        )
    parts += _names(drawn, [(x(_place(p.cost, logarithmic)), y(p.value)) for p in drawn], right)
    return _svg(size, title, *parts)


def disagreement_chart(rates: NDArray[np.float64], names: Sequence[str], *, title: str) -> Markup:
    """A square of shares [variants, variants], darker where two decide differently more often."""
    count = len(names)
    cell = min(84.0, max(46.0, 480 / count))
    short = [shorten(n, LONGEST_NAME) for n in names]
    longest = CHARACTER * max(map(len, short))
    left, top = 14 + longest, 14 + 0.75 * longest
    size = (round(left + cell * count + max(0.75 * longest - cell / 2, 4)), round(top + cell * count + 4))
    most = float(np.nanmax(rates)) if np.isfinite(rates).any() else 1.0
    out = []
    for i, name in enumerate(short):
        middle = cell * (i + 0.5)
        out.append(_text(left - 6, top + middle + 4, name, "axis", "end"))
        out.append(
            Markup('<text class="axis" transform="translate({:.1f} {:.1f}) rotate(-45)">{}</text>').format(
                left + middle, top - 6, name
            )
        )
    for i, j in np.ndindex(count, count):
        rate = float(rates[i, j])
        if not math.isfinite(rate):
            continue
        pair = f"two seeds of {names[i]}" if i == j else f"{names[i]} and {names[j]}"
        shade = 0.05 + 0.5 * rate / max(most, 1e-9)
        at = (left + cell * j, top + cell * i)
        out.append(
            Markup('<g><title>{}</title><rect class="{}" {} fill-opacity="{:.2f}"/>').format(
                f"{pair} decide differently about {percent(rate, 2)} of the images",
                "wrong" if i == j else "right",
                _box(*at, cell - 1, cell - 1),
                shade,
            )
        )
        out.append(_text(at[0] + cell / 2, at[1] + cell / 2 + 4, f"{100 * rate:.1f}", "count", "middle"))
        out.append(Markup("</g>"))
    return _svg(size, title, *out)


def gains_chart(gains: NDArray[np.float64], names: Sequence[str], *, title: str, width: int = 440) -> Markup:
    """A bar a class to the right (gained) or to the left (lost), best first; of many classes both ends."""
    order = [int(i) for i in np.argsort(-gains, kind="stable") if math.isfinite(gains[i])]
    if len(order) > MOST_CLASSES:
        order = order[: MOST_CLASSES // 2] + order[-MOST_CLASSES // 2 :]
    if not order:
        return _svg((width, 40), title, _text(width / 2, 24, "nothing to compare", "axis", "middle"))
    short = [shorten(names[i], 22) for i in order]
    told = [_points(gains[i]) for i in order]
    left, end = 12 + CHARACTER * max(map(len, short)), width - 8.0
    room = 8 + CHARACTER * max(map(len, told))
    most = max([1e-9, *(abs(float(gains[i])) for i in order)])
    middle = (left + end) / 2
    length = Scale(0, most, 0, (end - left) / 2 - room)
    out = [Markup('<path class="grid" d="M{0:.1f} 2V{1:.1f}"/>').format(middle, 20 * len(order) + 2)]
    for row, i in enumerate(order):
        long = length(abs(float(gains[i])))
        better = gains[i] >= 0
        out.append(Markup("<g><title>{}</title>").format(f"{names[i]}: {told[row]} points"))
        out.append(_text(left - 6, 20 * row + 14, short[row], "axis", "end"))
        box = _box(middle if better else middle - long, 20 * row + 4, long, 13)
        out.append(Markup('<rect class="{}" {}/>').format("gain" if better else "loss", box))
        at = middle + long + 6 if better else middle - long - 6
        out.append(_text(at, 20 * row + 14, told[row], "axis", "start" if better else "end"))
        out.append(Markup("</g>"))
    return _svg((width, 20 * len(order) + 4), title, *out)


def _points(gain: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * gain:+.1f}".replace("-", "−")  # noqa: RUF001


def _whole(share: float) -> str:
    return f"{100 * share:.4g} %"


def _place(cost: float, logarithmic: bool) -> float:
    return math.log10(cost) if logarithmic else cost


def _cost_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round costs inside the axis, whose ends are exponents where it is logarithmic."""
    if not logarithmic:
        return [v for v in ticks(low, high, 5) if v >= 0]
    powers = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [s * 10.0**p for p in powers for s in steps if low <= math.log10(s) + p <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 6)]


def _names(points: Sequence[Point], places: Sequence[tuple[float, float]], right: float) -> list[Markup]:
    """Each name beside its point: to the right where there is room, moved up or down where another is."""
    taken: list[tuple[float, float, float]] = []  # left, right, height of names and of points
    made = []
    for p, (x, y) in zip(points, places, strict=True):
        name = shorten(p.name, LONGEST_NAME + 6)
        long = CHARACTER * len(name)
        start = x + 9 if x + 9 + long <= right else x - 9 - long
        others = taken + [(a - 6, a + 6, b + 4) for a, b in places if (a, b) != (x, y)]
        free = (
            y + 4 + move
            for move in (0, -13, 13, -26, 26, -39, 39)
            if all(abs(y + 4 + move - h) >= 11 or start + long < a or start > b for a, b, h in others)
        )
        height = next(free, y + 4)
        taken.append((start, start + long, height))
        made.append(_text(start, height, name, f"tag v{p.colour % COLOURS}"))
    return made
