"""Charts of an inspection, as SVG: likeness of layers, counts of kept patches.

Charts of what models learned, as SVG: lines by depth, PCA energy, the map of embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitrail.compare.study_charts import COLOURS
from vitrail.quantities import shorten
from vitrail.report.charts import CHARACTER, Scale, _box, _grid, _rect, _svg, _text, spread, ticks

MOST_NUMBERS = 12  # layers up to which a cell carries its value


def likeness_chart(table: NDArray[np.float64], first: str, second: str, *, title: str, unit: str = "layer") -> Markup:
    """Likeness [layers, other layers] as shades: a row a layer of the first model, a column one of the second.

    `unit` is what a row is, where it is no layer.
    """
    rows, columns = table.shape
    cell = min(64.0, 440 / max(rows, columns))
    left, top = 46.0, 40.0
    size = (left + cell * columns + 8, top + cell * rows + 8)
    out = [
        _text(left + cell * columns / 2, 12, shorten(second, 40), "axis", "middle"),
        Markup('<text class="axis" text-anchor="middle" transform="translate(12 {:.1f}) rotate(-90)">{}</text>').format(
            top + cell * rows / 2, shorten(first, 40)
        ),
    ]
    step = max(1, math.ceil(max(rows, columns) / 16))
    out += [_text(left + cell * (j + 0.5), top - 7, f"{j}", "axis", "middle") for j in range(0, columns, step)]
    out += [_text(left - 7, top + cell * (i + 0.5) + 4, f"{i}", "axis", "end") for i in range(0, rows, step)]
    for i, j in np.ndindex(rows, columns):
        value = float(table[i, j])
        if not math.isfinite(value):
            continue
        at = (left + cell * j, top + cell * i)
        out.append(
            Markup('<g><title>{}</title><rect class="right" {} fill-opacity="{:.2f}"/>').format(
                f"{unit} {i} of {first}, {unit} {j} of {second}: {value:.3f}"
                if first != second
                else f"{unit}s {i} and {j}: {value:.3f}",
                _box(*at, cell - 1, cell - 1),
                0.04 + 0.6 * max(value, 0.0) ** 1.5,
            )
        )
        if max(rows, columns) <= MOST_NUMBERS:
            out.append(_text(at[0] + cell / 2, at[1] + cell / 2 + 4, f"{value:.2f}", "count", "middle"))
        out.append(Markup("</g>"))
    return _svg(size, title, *out)


def counts_chart(counts: NDArray[np.int64], patches: int, *, title: str, bins: int = 28) -> Markup:
    """How many images keep how many of `patches`: columns of a histogram, and a line at the mean."""
    wide = max(1, math.ceil((patches + 1) / bins))
    edges = np.arange(0, patches + 1 + wide, wide)
    found, _ = np.histogram(counts, edges)
    left, right, top, bottom = 34.0, 250.0, 16.0, 104.0
    x, y = Scale(0, float(edges[-1]), left, right), Scale(0, float(max(found.max(), 1)), bottom, top)
    out = [_grid(y(v), left, right, f"{v:g}") for v in ticks(0, float(max(found.max(), 1)), 3)]
    for start, images in zip(edges, found, strict=False):
        if not images:
            continue
        told = f"{start}" if wide == 1 else f"{start} to {min(start + wide - 1, patches)}"
        out.append(Markup("<g><title>{}</title>").format(f"{images:,} images keep {told} patches"))
        high = y(float(images))
        out.append(_rect(x(float(start)) + 0.5, high, x(wide) - x(0) - 1, bottom - high, "bar s0"))
        out.append(Markup("</g>"))
    middle = x(float(counts.mean()) + wide / 2)
    out.append(Markup('<path class="ideal" d="M{0:.1f} {1:.1f}V{2:.1f}"/>').format(middle, top - 8, bottom))
    out.append(_text(middle, top - 10, f"mean {counts.mean():.1f}", "count", "middle"))
    out += [_text(x(v + wide / 2), bottom + 15, f"{v:g}", "axis", "middle") for v in (0, patches // 2, patches)]
    return _svg((260, 126), title, *out)


NAMED = 2 * COLOURS  # classes that have a colour and a shape of their own
SIDE = 440.0
LINE = 13.0  # height of a name


def plane_chart(
    points: NDArray[np.float64], labels: NDArray[np.int64] | None, classes: Sequence[str], *, title: str
) -> Markup:
    """Images [images, 2] as points, classes by colour and, beyond eight, by shape; names stand at their middle."""
    margin = 14.0
    x = Scale(*spread(points[:, 0].tolist()), margin, SIDE - margin)
    y = Scale(*spread(points[:, 1].tolist()), SIDE - margin, margin)
    kinds = np.zeros(len(points), dtype=np.int64) if labels is None else labels
    told = sorted({int(k) for k in kinds})
    by_class = labels is not None and len(told) <= NAMED
    out = []
    for (a, b), kind in zip(points, kinds, strict=True):
        place = told.index(int(kind)) if by_class else 0
        name = classes[int(kind)] if labels is not None else ""
        out.append(_mark(x(float(a)), y(float(b)), place, name))
    if by_class:
        middles = [np.median(points[kinds == kind], axis=0) for kind in told]
        places = _free(
            [(x(float(a)), y(float(b)), shorten(classes[k], 18)) for (a, b), k in zip(middles, told, strict=True)]
        )
        out += [
            _text(a, b + 4, shorten(classes[kind], 18), f"tag v{place % COLOURS}", "middle")
            for place, ((a, b), kind) in enumerate(zip(places, told, strict=True))
        ]
    return _svg((SIDE, SIDE), title, *out)


def _free(names: Sequence[tuple[float, float, str]]) -> list[tuple[float, float]]:
    """Places of names (x, y, text), moved down one by one until no two lie on each other."""
    placed: list[tuple[float, float, float]] = []  # x, y, half the width
    for x, y, text in names:
        half, low = CHARACTER * len(text) / 2, y
        inside = min(max(x, half), SIDE - half)
        while any(abs(low - b) < LINE and abs(inside - a) < half + other for a, b, other in placed):
            low += 2
        placed.append((inside, low, half))
    return [(x, y) for x, y, _ in placed]


def _mark(x: float, y: float, place: int, name: str) -> Markup:
    told = Markup("<title>{}</title>").format(name) if name else Markup("")
    if place < COLOURS:
        return Markup('<circle class="spot v{}" cx="{:.1f}" cy="{:.1f}" r="3.2">{}</circle>').format(place, x, y, told)
    return Markup('<rect class="spot v{}" x="{:.1f}" y="{:.1f}" width="5.6" height="5.6">{}</rect>').format(
        place % COLOURS, x - 2.8, y - 2.8, told
    )
