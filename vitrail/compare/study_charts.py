"""Curves of variants over epochs, as SVG like `vitrail.report.charts`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from vitrail.quantities import number, shorten
from vitrail.report.charts import CHARACTER, Scale, Series, _apart, _grid, _line, _svg, _text, spread, thin, ticks

COLOURS = 8
LONGEST_NAME = 18


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
    """One line a variant, the mean over its seeds, in a band from its lowest to its highest seed.

    `curves` has one mapping from epoch to figure a seed; epochs that not every seed of a variant has are left out.
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
    x_low, x_high = spread([v for trio in lines.values() for v in trio[1].x] + [0.0])
    x, y = Scale(x_low, x_high, left, right), Scale(y_ticks[0], y_ticks[-1], bottom, 14)
    parts = [_grid(y(v), left, right, tell_axis(v)) for v in y_ticks]
    whole = all(v == int(v) for trio in lines.values() for v in trio[1].x)  # there is no layer 0.5
    shown = [v for v in ticks(x_low, x_high, 6) if not whole or v == int(v)]
    parts += [_text(x(v), bottom + 16, f"{v:g}", "axis", "middle") for v in shown]
    parts.append(_text((left + right) / 2, height - 4, x_label, "axis", "middle"))
    for name, (low, mean, high) in lines.items():
        kind = f"v{chosen[name] % COLOURS}"
        if any(a != b for a, b in zip(low.y, high.y, strict=True)) and len(low.x) > 1:
            there = [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(high.x, high.y, strict=True)]
            back = [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(low.x, low.y, strict=True)]
            parts.append(Markup('<path class="band {}" d="M{}z"/>').format(kind, "L".join(there + back[::-1])))
        parts.append(_line(mean, x, y, kind))
        for a, b, c, d in zip(mean.x, mean.y, low.y, high.y, strict=True):
            told = f"{name}, {x_label} {a:.4g}: {tell(b)}" + (f" ({tell(c)} to {tell(d)})" if c != d else "")
            parts.append(
                Markup('<circle class="hit {}" cx="{:.1f}" cy="{:.1f}" r="5"><title>{}</title></circle>').format(
                    kind, x(a), y(b), told
                )
            )
    ends = _apart([y(trio[1].y[-1]) for trio in lines.values()], 14)
    shift = max(0.0, max(ends) - (bottom + 4))  # many names: the stack moves up into the frame
    for name, place in zip(lines, ends, strict=True):
        parts.append(_text(right + 8, place - shift + 4, tags[name], f"tag v{chosen[name] % COLOURS}"))
    return _svg(size, title, *parts)
