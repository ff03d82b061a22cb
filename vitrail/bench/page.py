"""A benchmark as a picture: accuracy, or else multiply-accumulates, against the time of an image.

A benchmark as tables for the terminal; each fits 80 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.bench.claims import NEEDS_GPU
from vitrail.bench.measurements import Bench, BenchRow
from vitrail.quantities import MISSING, amount, memory, number, percent, shorten

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


SHOWN_PERCENTILES = (50, 99)
QUANTITIES = {"speed": "img/s", "memory": "memory", "macs": "MACs"}

Column = tuple[str, Callable[[BenchRow], str]]


def bench_tables(bench: Bench) -> Group:
    """Speed, cost, checks and what a person should know, as far as the benchmark has them."""
    parts: list[Table | Text] = []
    where = f"{bench.precision}, {bench.device}"
    if bench.rows:
        batches = {row.batch for row in bench.rows}
        what = "training steps" if bench.train else "inference"
        size = f", batch {bench.rows[0].batch}" if len(batches) == 1 else ""
        parts += [Text(f"{what}{size}, {where}", style="italic"), speed(bench), Text(), costs(bench), Text()]
    if bench.checks:
        title = f"claims of the literature as ratios, batch {bench.check_batch}, {where}"
        parts += [Text(title, style="italic"), checks(bench), Text()]
    return Group(*parts, *map(Text, remarks(bench)))


def speed(bench: Bench) -> Table:
    """Images a second and milliseconds a call, a row for each model and form."""
    columns: list[Column] = [
        ("img/s", lambda row: number(row.timing.images_per_second)),
        ("spread", lambda row: percent(row.timing.spread, 0)),
        *((f"p{p} ms", _latency(p)) for p in SHOWN_PERCENTILES),
        ("of peak", lambda row: percent(row.product_share, 0)),
    ]
    if any(row.ratio is not None for row in bench.rows):
        columns.append((f"x {bench.against or 'first'}, quartiles", _ratio))
    if len({row.batch for row in bench.rows}) > 1:
        columns.insert(0, ("batch", lambda row: f"{row.batch}"))
    return _table(columns, bench)


def costs(bench: Bench) -> Table:
    """What a model is and takes: counts, memory, energy, stated accuracy."""
    columns: list[Column] = [
        ("parameters", lambda row: amount(row.parameters)),
        ("MACs", lambda row: amount(row.macs)),
        ("px", lambda row: f"{row.image_size}"),
        ("memory", lambda row: memory(row.peak_memory)),
        ("of copy", lambda row: percent(row.copy_share, 0)),
        ("J/img", lambda row: number(row.joules_per_image)),
    ]
    if any(row.top1 is not None for row in bench.rows):
        columns.append(("top-1", lambda row: percent(row.top1)))
    return _table(columns, bench)


def checks(bench: Bench) -> Table:
    """Hardware-relative claims of the DeiT, CaiT and PatchConvNet papers: published and measured ratios."""
    table = Table(box=None, pad_edge=False)
    table.add_column("of", no_wrap=True)
    table.add_column("claim", no_wrap=True)
    for name in ("says", "here", "holds"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in bench.checks:
        here = None if check.measured is None else check.measured.median
        holds = MISSING if check.holds is None else "yes" if check.holds else "no"
        told = Text(check.claim.text)
        doubt = "" if check.holds is None or check.sure else " ?"
        table.add_row(QUANTITIES[check.claim.quantity], told, number(check.claim.says), number(here), holds + doubt)
    return table


def remarks(bench: Bench) -> list[str]:
    """Sentences below the tables: ceilings, noise, what was left out."""
    said = []
    if bench.ceiling is not None:
        product, copy = bench.ceiling.product / 1e12, bench.ceiling.copy / 1e9
        said.append(
            f"of peak: share of {number(product)} TFLOP/s, a {bench.ceiling.precision} matrix product measured here"
        )
        said.append(
            f"of copy: share of {number(copy)} GB/s, a copy measured here, that weights and images take at least"
        )
    if bench.noise is not None:
        off = "" if bench.noise.control is None else f"; a model against itself: {1 + bench.noise.control:.3f}"
        said.append(f"noisy machine: {'; '.join(bench.noise.reasons)}" if bench.noise.noisy else f"quiet machine{off}")
    said += [
        f"{name}: fastest batch {one['best']}, largest tried {one['largest']} (then: {one['limit']})"
        for name, one in bench.searches.items()
    ]
    if any(check.holds is not None and not check.sure for check in bench.checks):
        said.append("?: the quartiles of the rounds do not agree")
    said += sorted({check.note for check in bench.checks if check.note and check.note != NEEDS_GPU})
    if any(check.note == NEEDS_GPU for check in bench.checks):
        said.append(f"memory: {NEEDS_GPU}")
    return said + list(bench.notes)


def _table(columns: list[Column], bench: Bench) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model")  # the one that is cut where the terminal is narrow
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in bench.rows:
        again = row.model == before
        told = Text(f"  {row.form}" if again else row.model, no_wrap=True, overflow="ellipsis")
        table.add_row(told, *(tell(row) for _, tell in columns))
        before = row.model
    return table


def _ratio(row: BenchRow) -> str:
    if row.ratio is None:
        return ""
    return f"{row.ratio.median:.3f} {row.ratio.low:.3f}-{row.ratio.high:.3f}"


def _latency(percentile: int) -> Callable[[BenchRow], str]:
    return lambda row: number(1e3 * row.timing.latency(percentile))
