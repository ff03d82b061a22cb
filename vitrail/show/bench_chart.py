"""A benchmark as a picture: accuracy, or else multiply-accumulates, against the time of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitrail.measure.bench import Bench, BenchRow
from vitrail.show.quantities import shorten

INK, SOFT, LINE = "#1c1e24", "#5b606b", "#e4e1da"
COLOURS = {"vitrail": "#2a4d9c", "timm": "#b23a48"}  # as in the report
SUFFIXES = (".png", ".svg")
CHARACTER, LINE_HEIGHT = 4.9, 9.0  # of a name, in points
SHIFTS = (5, -12, 15, -22, 25, -32)  # heights of a name beside its point, in points


def chart_path(path: str | Path) -> Path:
    """`path`, if a picture can have that name; for asking before anything is measured. Raises `ValueError`."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: pictures are written as {' or '.join(SUFFIXES)}")
    return path


def save_chart(bench: Bench, path: str | Path) -> Path:
    """Write the picture as .png or .svg; a point a row, with the quartiles of its time.

    Raises `ValueError` for another ending and for a benchmark without rows.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path = chart_path(path)
    if not bench.rows:
        raise ValueError("there is nothing to draw: no model was measured")
    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    accurate = all(row.top1 is not None for row in bench.rows)
    for family, colour in COLOURS.items():
        rows = [row for row in bench.rows if row.family == family]
        for form, filled in (("eager", False), ("optimized", True)):
            drawn = [row for row in rows if row.form == form]
            if drawn:
                x = [1e3 * row.seconds_per_image for row in drawn]
                axes.errorbar(
                    x,
                    [_height(row, accurate) for row in drawn],
                    xerr=_whiskers(drawn),
                    fmt="o",
                    elinewidth=1,
                    color=colour,
                    markerfacecolor=colour if filled else "white",
                    capsize=2,
                    label=f"{family}, {form}",
                )
    _scale(axes.xaxis, axes.set_xscale, [1e3 * row.seconds_per_image for row in bench.rows])
    if not accurate:
        _scale(axes.yaxis, axes.set_yscale, [row.macs / 1e9 for row in bench.rows])
    what = "training step" if bench.train else "inference"
    axes.set_xlabel(f"milliseconds an image, {what}", color=SOFT)
    axes.set_ylabel("top-1 accuracy, %" if accurate else "MACs of an image, 10⁹", color=SOFT)
    axes.set_title(f"{bench.device}, {bench.precision}", loc="left", fontsize=10, color=INK)
    axes.grid(color=LINE, linewidth=0.6)
    axes.margins(0.15)
    axes.tick_params(colors=SOFT)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LINE)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _name_points(figure, axes, bench.rows, accurate)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)
    return path


def _name_points(figure: Any, axes: Any, rows: Sequence[BenchRow], accurate: bool) -> None:
    """Each model's name beside its eager point, at the nearest height where no other name is."""
    figure.draw_without_rendering()  # fixes where points lie
    taken: list[tuple[float, float, float]] = []  # left, right and height, in points of the page
    for row in rows:
        if row.form != "eager":
            continue
        at = (1e3 * row.seconds_per_image, _height(row, accurate))
        name = shorten(row.model, 32)
        x, y = axes.transData.transform(at) * 72 / figure.dpi
        left, right = x + 6, x + 6 + CHARACTER * len(name)
        free = (
            beside
            for beside in SHIFTS
            if all(abs(y + beside - h) >= LINE_HEIGHT or right < low or left > high for low, high, h in taken)
        )
        beside = next(free, SHIFTS[0])
        taken.append((left, right, y + beside))
        axes.annotate(name, at, (6, beside), textcoords="offset points", fontsize=8, color=COLOURS[row.family])


def _scale(axis: Any, choose: Callable[[str], object], values: Sequence[float]) -> None:
    """Logarithmic with plain numbers where the values differ much."""
    if max(values) < 3 * min(values):
        return
    from matplotlib.ticker import LogLocator

    choose("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def _height(row: BenchRow, accurate: bool) -> float:
    return 100 * row.top1 if accurate and row.top1 is not None else row.macs / 1e9


def _whiskers(rows: Sequence[BenchRow]) -> list[list[float]]:
    """Distances of the quartiles from the median, in milliseconds an image: to the left, to the right."""
    left, right = [], []
    for row in rows:
        low, high = row.timing.quartiles
        middle = 1e3 * row.seconds_per_image
        left.append(max(0.0, middle - 1e3 / high))
        right.append(max(0.0, 1e3 / low - middle))
    return [left, right]
