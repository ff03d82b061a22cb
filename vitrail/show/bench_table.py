"""A benchmark as tables for the terminal; each fits 80 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.measure.bench import Bench, BenchRow
from vitrail.measure.hardware_checks import NEEDS_GPU
from vitrail.show.quantities import MISSING, amount, memory, number, percent

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
