"""Charts of what models learned, as SVG: lines by depth, PCA energy, the map of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitrail.show.charts import CHARACTER, Scale, _svg, _text, spread
from vitrail.show.compare_charts import COLOURS
from vitrail.show.quantities import shorten

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
