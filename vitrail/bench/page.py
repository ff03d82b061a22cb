"""A benchmark as tables of 80 columns, and as a chart of accuracy, or else MACs, against time per image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.bench.claims import NEEDS_GPU
from vitrail.bench.run import Bench, BenchRow
from vitrail.files import write_text
from vitrail.quantities import MISSING, amount, memory, number, percent
from vitrail.report.html import standalone
from vitrail.report.pareto import Point, pareto_chart

FAMILIES = ("vitrail", "timm")  # in the order of their colours
SHOWN_PERCENTILES = (50, 99)
QUANTITIES = {"speed": "img/s", "memory": "memory", "macs": "MACs"}

Column = tuple[str, Callable[[BenchRow], str]]


def chart_path(path: str | Path) -> Path:
    """`path`, if a chart can have that name; for asking before anything is measured. Raises `ValueError`."""
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"{path}: charts are SVG now; name a file that ends in .svg")
    return path


def save_chart(bench: Bench, path: str | Path) -> Path:
    """Write the chart as .svg; one point per row, with the quartiles of its time.

    Raises `ValueError` for another ending and for a benchmark without rows.
    """
    path = chart_path(path)
    if not bench.rows:
        raise ValueError("there is nothing to draw: no model was measured")
    accurate = all(row.top1 is not None for row in bench.rows)
    points = [
        Point(
            row.model,
            FAMILIES.index(row.family),
            1e3 * row.seconds_per_image,
            row.top1 if accurate and row.top1 is not None else row.macs / 1e9,
            quartiles=(1e3 / row.timing.quartiles[1], 1e3 / row.timing.quartiles[0]),
            hollow=row.form == "eager",
            labelled=row.form == "eager",
        )
        for row in bench.rows
    ]
    quality = "top-1 accuracy" if accurate else "MACs per image, 10⁹"
    forms = "hollow: eager, filled: optimized" if any(row.form != "eager" for row in bench.rows) else "eager"
    axes: dict[str, Any] = {} if accurate else {"tell_value": number, "tell_axis": "{:g}".format}
    chart = pareto_chart(
        points,
        title=f"{quality} against time per image",
        x_label=f"milliseconds per image, {'training step' if bench.train else 'inference'}",
        y_label=f"{quality} ({bench.device}, {bench.precision}; {forms})",
        log_values=not accurate,
        size=(720, 460),
        **axes,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, standalone(chart))
    return path


def bench_tables(bench: Bench) -> Group:
    """Speed, cost, checks and remarks, as far as the benchmark has them."""
    parts: list[Table | Text] = []
    conditions = f"{bench.precision}, {bench.device}"
    if bench.rows:
        batches = {row.batch for row in bench.rows}
        what = "training steps" if bench.train else "inference"
        size = f", batch {bench.rows[0].batch}" if len(batches) == 1 else ""
        heading = Text(f"{what}{size}, {conditions}", style="italic")
        parts += [heading, _table(_speed(bench), bench), Text(), _table(_cost(bench), bench), Text()]
    if bench.checks:
        title = f"claims of the literature as ratios, batch {bench.check_batch}, {conditions}"
        parts += [Text(title, style="italic"), checks(bench), Text()]
    return Group(*parts, *map(Text, remarks(bench)))


def _speed(bench: Bench) -> list[Column]:
    """Images/s and milliseconds per call."""
    columns: list[Column] = [
        ("img/s", lambda row: number(row.timing.images_per_second)),
        ("spread", lambda row: percent(row.timing.spread, 0)),
        *((f"p{p} ms", lambda row, p=p: number(1e3 * row.timing.latency(p))) for p in SHOWN_PERCENTILES),
        ("of peak", lambda row: percent(row.product_share, 0)),
    ]
    if any(row.ratio is not None for row in bench.rows):
        columns.append((f"x {bench.against or 'first'}, quartiles", _ratio))
    if len({row.batch for row in bench.rows}) > 1:
        columns.insert(0, ("batch", lambda row: f"{row.batch}"))
    return columns


def _cost(bench: Bench) -> list[Column]:
    """Size, memory, energy, stated accuracy."""
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
    return columns


def _ratio(row: BenchRow) -> str:
    return "" if row.ratio is None else f"{row.ratio.median:.3f} {row.ratio.low:.3f}-{row.ratio.high:.3f}"


def _table(columns: list[Column], bench: Bench) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("model")  # the one that is cut where the terminal is narrow
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in bench.rows:
        name = f"  {row.form}" if row.model == before else row.model
        table.add_row(Text(name, no_wrap=True, overflow="ellipsis"), *(tell(row) for _, tell in columns))
        before = row.model
    return table


def checks(bench: Bench) -> Table:
    """Hardware-relative claims of the DeiT, CaiT and PatchConvNet papers: published and measured ratios."""
    table = Table(box=None, pad_edge=False)
    for name in ("of", "claim", "says", "here", "holds"):
        table.add_column(name, justify="left" if name in ("of", "claim") else "right", no_wrap=True)
    for check in bench.checks:
        here = None if check.measured is None else check.measured.median
        holds = MISSING if check.holds is None else "yes" if check.holds else "no"
        doubt = "" if check.holds is None or check.sure else " ?"
        claim = check.claim
        table.add_row(QUANTITIES[claim.quantity], Text(claim.text), number(claim.says), number(here), holds + doubt)
    return table


def remarks(bench: Bench) -> list[str]:
    """Sentences below the tables: ceilings, noise, models left out."""
    lines = []
    if bench.ceiling is not None:
        product, copy = number(bench.ceiling.product / 1e12), number(bench.ceiling.copy / 1e9)
        lines += [
            f"of peak: share of {product} TFLOP/s, a {bench.ceiling.precision} matrix product measured here",
            f"of copy: share of {copy} GB/s, a copy measured here, that weights and images take at least",
        ]
    if bench.noise is not None:
        off = "" if bench.noise.control is None else f"; a model against itself: {1 + bench.noise.control:.3f}"
        lines.append(f"noisy machine: {'; '.join(bench.noise.reasons)}" if bench.noise.noisy else f"quiet machine{off}")
    lines += [
        f"{name}: fastest batch {search['best']}, largest tried {search['largest']} (then: {search['limit']})"
        for name, search in bench.searches.items()
    ]
    if any(check.holds is not None and not check.sure for check in bench.checks):
        lines.append("?: the quartiles of the rounds do not agree")
    lines += sorted({check.note for check in bench.checks if check.note and check.note != NEEDS_GPU})
    if any(check.note == NEEDS_GPU for check in bench.checks):
        lines.append(f"memory: {NEEDS_GPU}")
    return lines + list(bench.notes)
