"""Models in the plane of cost and quality, as SVG like `vitrail.report.charts`.

Classes used besides those: `v0` ... `v7` give a model its colour; `point`, `hollow`, `whisker`, `front`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vitrail.quantities import number, percent, shorten
from vitrail.report.charts import CHARACTER, COLOURS, Scale, _grid, _svg, _text, spread, ticks

LONGEST_NAME = 32


@dataclass(frozen=True)
class Point:
    """A model in the plane of cost and quality."""

    name: str
    colour: int
    cost: float
    value: float
    deviation: float = math.nan  # of the value, over seeds
    front: bool = False  # nothing is cheaper and better
    quartiles: tuple[float, float] | None = None  # of the cost, or another interval
    hollow: bool = False
    labelled: bool = True


def pareto_chart(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    y_label: str = "",
    tell_cost: Callable[[float], str] = number,
    tell_value: Callable[[float], str] = lambda share: percent(share, 2),
    tell_axis: Callable[[float], str] = lambda share: f"{100 * share:.4g} %",
    log_values: bool = False,
    limit: float | None = None,
    size: tuple[int, int] = (520, 320),
) -> Markup:
    """One point per model with its spread, and a line through those that nothing beats.

    Costs (and with `log_values` values) that differ by more than three times are drawn on a logarithmic axis. A
    vertical line marks the largest cost allowed, where a `limit` is given.
    """
    drawn = [p for p in points if math.isfinite(p.cost) and p.cost > 0 and math.isfinite(p.value)]
    width, height = size
    if not drawn:
        return _svg(size, title, _text(width / 2, height / 2, "nothing was measured", "axis", "middle"))
    reach = [p.deviation if math.isfinite(p.deviation) else 0.0 for p in drawn]
    log_y = log_values and max(p.value for p in drawn) > 3 * min(p.value for p in drawn)
    ends = [_position(p.value + sign * r, log_y) for p, r in zip(drawn, reach, strict=True) for sign in (-1, 1)]
    low, high = spread(ends)
    if log_y:
        low, high = low - 0.12 * (high - low), high + 0.12 * (high - low)
        y_ticks = _log_ticks(low, high)
    else:
        y_ticks = ticks(low, high, outward=True)
        low, high = y_ticks[0], y_ticks[-1]
    left, right, bottom = 12 + CHARACTER * max(len(tell_axis(v)) for v in y_ticks), width - 14.0, height - 40.0
    top = 30.0 if y_label else 16.0
    y = Scale(low, high, bottom, top)
    log_x = max(p.cost for p in drawn) > 3 * min(p.cost for p in drawn)
    costs = [c for p in drawn for c in (p.cost, *(p.quartiles or ()))] + ([] if limit is None else [limit])
    low, high = spread([_position(c, log_x) for c in costs])
    low, high = low - 0.12 * (high - low), high + 0.12 * (high - low)
    x = Scale(low, high, left, right)
    x_ticks = _log_ticks(low, high) if log_x else [v for v in ticks(low, high, 5) if v >= 0]
    parts = [_grid(y(_position(v, log_y)), left, right, tell_axis(v)) for v in y_ticks]
    parts += [_text(x(_position(v, log_x)), bottom + 17, tell_cost(v), "axis", "middle") for v in x_ticks]
    parts += [_text((left + right) / 2, height - 6, x_label, "axis", "middle"), _text(4, 12, y_label, "axis")]
    if limit is not None:
        across = x(_position(limit, log_x))
        parts.append(Markup('<path class="front" d="M{:.1f} {:.1f}V{:.1f}"/>').format(across, top, bottom))
        parts.append(_text(across - 5, top + 9, "budget", "axis", "end"))
    places = [(x(_position(p.cost, log_x)), y(_position(p.value, log_y))) for p in drawn]
    best = sorted((p.cost, place) for p, place in zip(drawn, places, strict=True) if p.front)
    if len(best) > 1:
        path = "L".join(f"{a:.1f} {b:.1f}" for _, (a, b) in best)
        parts.append(Markup('<path class="front" d="M{}"/>').format(path))
    for p, r, (across, up) in zip(drawn, reach, places, strict=True):
        tooltip = f"{p.name}: {tell_value(p.value)} at {tell_cost(p.cost)}"
        tooltip += f", ± {tell_value(r)} over seeds" if r else ""
        half = abs(y(r) - y(0)) if r else 0.0
        whisker = f"M{across:.1f} {up - half:.1f}V{up + half:.1f}" if half > 5 else ""
        if p.quartiles is not None:
            start, end = (x(_position(cost, log_x)) for cost in p.quartiles)
            whisker += f"M{start:.1f} {up:.1f}H{end:.1f}"
        parts.append(
            Markup(
                '<g class="v{}"><title>{}</title>{}<circle class="point{}" cx="{:.1f}" cy="{:.1f}" r="5"/></g>'
            ).format(
                p.colour % COLOURS,
                tooltip,
                Markup('<path class="whisker" d="{}"/>').format(whisker) if whisker else "",
                " hollow" if p.hollow else "",
                across,
                up,
            )
        )
    return _svg(size, title, *parts, *_names(drawn, places, right))


def _position(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def _log_ticks(low: float, high: float) -> list[float]:
    """Round values between two exponents."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        values = [s * 10.0**p for p in powers for s in steps if low <= math.log10(s) + p <= high]
        if len(values) >= 3:
            break
    return values[:: math.ceil(len(values) / 6)]


def _names(points: Sequence[Point], places: Sequence[tuple[float, float]], right: float) -> list[Markup]:
    """Each name next to its point: to the right where there is room, moved up or down where another is."""
    taken: list[tuple[float, float, float]] = []  # left, right, height of names and of points
    names = []
    for p, (x, y) in zip(points, places, strict=True):
        if not p.labelled:
            continue
        name = shorten(p.name, LONGEST_NAME)
        long = CHARACTER * len(name)
        before = x + 9 + long > right
        start = x - 9 - long if before else x + 9
        others = taken + [(a - 6, a + 6, b + 4) for a, b in places if (a, b) != (x, y)]
        free = (
            y + 4 + move
            for move in (*(() if p.quartiles else (0,)), -13, 13, -26, 26, -39, 39)  # not on a whisker
            if all(abs(y + 4 + move - h) >= 11 or start + long < a or start > b for a, b, h in others)
        )
        height = next(free, y + 4)
        taken.append((start, start + long, height))
        anchor = (x - 9, "end") if before else (start, "start")
        names.append(_text(anchor[0], height, name, f"tag v{p.colour % COLOURS}", anchor[1]))
    return names
