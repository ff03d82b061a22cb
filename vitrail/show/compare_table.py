"""A comparison as tables for the terminal; each fits 80 columns. In fewer, names are cut before numbers are."""

from __future__ import annotations

import shutil

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.measure.comparison import Comparison
from vitrail.show.catalogue import WIDE
from vitrail.show.compare_report import FIGURES, chance, mean_and_spread, points, share_and_spread, verdict
from vitrail.show.quantities import MISSING, amount, duration, memory, number, shorten

LONGEST_NAME = 16
SIDE_BY_SIDE = 4  # further figures in 80 columns


def comparison_tables(found: Comparison) -> Group:
    """Accuracy, cost, spread over seeds, failures and what a person should know."""
    parts: list[Table | Text] = [accuracy(found), Text(), costs(found), Text(lengths(found))]
    parts += [part for table in further(found) for part in (Text(), table)]
    if found.seed_study:
        parts += [Text(), seeds(found)]
    parts += [Text(line, style="red") for line in failures(found)]
    parts += [Text(), Text(verdict(found)), *map(Text, found.notes)]
    tested = sum(row.against is not None for row in found.rows)
    if tested > 1:
        parts.append(Text(f"p is of each comparison alone; the report also has it raised for all {tested} (Holm)"))
    return Group(*parts)


def accuracy(found: Comparison) -> Table:
    """Mean and spread of each variant, and what speaks for a difference from the baseline."""
    table = _table(
        f"{found.name}: {FIGURES[found.figure]} on {found.split} in percent, points against {found.baseline}"
    )
    names = ("mean ± std", "seeds", "points", "95 % interval", "p seeds", "p images")
    shown = names[: None if shutil.get_terminal_size().columns >= WIDE else -2]  # the report has them all
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        against = row.against
        cells = [MISSING] * 4
        if against is not None:
            interval = MISSING if against.interval is None else " to ".join(points(v, 1) for v in against.interval)
            cells = [points(against.difference), interval, *(chance(p) for p, _ in against.chances)]
        cells = [mean_and_spread(row).removesuffix(" %"), f"{len(row.members)}", *cells]
        table.add_row(_name(row.variant), *cells[: len(shown)])
    return table


def further(found: Comparison) -> list[Table]:
    """What evaluators found beside classification, as many figures side by side as fit."""
    figures = found.further()
    names, tables = list(figures), []
    for start in range(0, len(names), SIDE_BY_SIDE):
        some = names[start : start + SIDE_BY_SIDE]
        table = _table("further figures, mean ± std over seeds")
        for name in some:
            table.add_column(shorten(name, 15), justify="right", no_wrap=True)
        for row in found.rows:
            table.add_row(_name(row.variant), *(share_and_spread(figures[n].get(row.variant)) for n in some))
        tables.append(table)
    return tables


def costs(found: Comparison) -> Table:
    """What each variant takes."""
    table = _table("cost" + (f": {found.conditions}" if found.conditions else ""))
    for name in ("parameters", "MACs", "img/s", "memory", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        price = row.price
        cells = [MISSING] * 5
        if price is not None:
            cells = [amount(price.parameters), amount(price.macs), number(price.images_per_second)]
            cells += [memory(price.peak_memory), duration(price.seconds)]
        table.add_row(_name(row.variant), *cells)
    return table


def lengths(found: Comparison) -> str:
    """How long each variant trained, in a word where that is the same for all."""
    told = {row.variant: row.length for row in found.rows if row.length}
    rule = f" ({found.budget})" if found.budget else ""
    if len(set(told.values())) == 1:
        return f"length: {next(iter(told.values()))}{rule}"
    return f"length{rule}: " + ", ".join(f"{name} {length}" for name, length in told.items()) if told else ""


def seeds(found: Comparison) -> Table:
    """What only the seed changed."""
    table = _table("over seeds, in percent")
    for name in ("images", "seeds", "mean", "std", "lowest", "highest", "range"):
        table.add_column(name, justify="left" if name == "images" else "right", no_wrap=True)
    for variant, study in found.seed_study.items():
        for name, one in study["sets"].items():
            values = (one["mean"], one["std"], one["low"], one["high"], one["range"])
            cells = [MISSING if v is None else f"{100 * v:.2f}" for v in values]
            table.add_row(_name(variant), Text(shorten(name, 16)), f"{one['count']}", *cells)
    return table


def failures(found: Comparison) -> list[str]:
    """One line a variant and reason."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in found.failures:
        seeds.setdefault((one.variant, one.reason), []).append(str(one.seed))
    return [
        f"{variant} failed (seed{'s' if len(which) > 1 else ''} {', '.join(which)}): {reason}"
        for (variant, reason), which in seeds.items()
    ]


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")  # the one that is cut where the terminal is narrow
    return table


def _name(name: str) -> Text:
    return Text(shorten(name, LONGEST_NAME), no_wrap=True, overflow="ellipsis")
