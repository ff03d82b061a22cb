"""An inspection as one self-contained HTML page with its sheets and charts as files, and as tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.files import write_text
from vitrail.inspect.evidence import map_name
from vitrail.inspect.section import Chart, Inspection
from vitrail.quantities import amount, percent
from vitrail.report.html import STYLES, render_page, standalone
from vitrail.report.sheets import Sheet


def write_inspection(folder: str | Path, inspection: Inspection, environment: Mapping[str, Any]) -> list[Path]:
    """Write `inspect.html`, one PNG per sheet and one SVG per chart into `folder`; returns the files, page first."""
    folder = Path(folder)
    files = [folder / "inspect.html"]
    cards = [item for part in inspection.parts for card in part.cards for item in card.items]
    items = [item for each in cards for item in (each if isinstance(each, list) else [each])]
    for sheet in (item for item in items if isinstance(item, Sheet)):
        files.append(folder / f"{sheet.name}.png")
        sheet.save(files[-1])
    for name, chart in named((c.file or c.heading, c.svg) for c in items if isinstance(c, Chart)).items():
        files.append(folder / f"{name}.svg")
        write_text(files[-1], standalone(chart))
    write_text(files[0], render_inspection(inspection, environment))
    return files


def named(charts: Iterable[tuple[str, Markup]]) -> dict[str, Markup]:
    """Charts by names for files, made of their headings; those of one heading are numbered.

    >>> list(named([("CKA of layers", Markup()), ("CKA, of layers", Markup())]))
    ['cka-of-layers', 'cka-of-layers-1']
    """
    files: dict[str, Markup] = {}
    for heading, chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        again = sum(other == name or re.fullmatch(rf"{name}-\d+", other) is not None for other in files)
        files[f"{name}-{again}" if again else name] = chart
    return files


def render_inspection(inspection: Inspection, environment: Mapping[str, Any]) -> str:
    """The HTML of an inspection."""
    sentences = [line for section in inspection.sections for line in section.verdict()]
    nothing = "No layer has attention maps; what is known stands below."
    if "attention" not in inspection.what:
        nothing = "What was asked for stands below."
    return render_page(
        "inspect/inspect.html.jinja",
        STYLES,
        title=" and ".join(subject.name for subject in inspection.subjects),
        verdict=(" ".join(sentences) or nothing).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=list(_tiles(inspection)),
        parts=inspection.parts,
        notes=notes(inspection),
        environment={str(key): str(value) for key, value in environment.items()},
        created=str(environment.get("started", "")),
    )


def notes(inspection: Inspection) -> list[str]:
    """What a reader should know, each with the model it is about where there are several."""
    results = [(s, part) for s in inspection.subjects for part in (s.attention, s.evidence, s.weights, s.embedding)]
    lines = [f"{inspection.of(s)}{note}" for s, part in results if part is not None for note in part.notes]
    account = inspection.transfer
    if account:
        lines.append(
            f"Attention transfer from {inspection.subjects[0].name} to {inspection.subjects[1].name} would carry "
            f"{account['maps']:,} numbers per image as maps, or {account['queries_and_keys']:,} as queries and keys; "
            f"inference costs {amount(account['macs_copy'])} MACs with copied attention (both models) and "
            f"{amount(account['macs_distilled'])} after distillation."
        )
    return [*lines, *inspection.notes, *inspection.lacking()]


def _tiles(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    images = f"{inspection.subjects[0].attention.images:,}"
    for subject in inspection.subjects:
        maps, who = subject.attention, subject.name if inspection.several else ""
        if (accuracy := inspection.accuracy(subject)) is not None:
            yield "top-1 on these images", percent(accuracy), who or f"{images} images"
        if maps.layers and not who:
            shares = maps.layers[-1].entropy_share
            yield "attention entropy", percent(sum(shares) / len(shares), 0), "of the maximum, last layer"
        if subject.evidence is not None and (best := subject.evidence.best):
            yield "deletion, best map", percent(best["deletion"]), who or map_name(best["kind"])
        if subject.embedding is not None and subject.embedding.energy and not who:
            yield "principal components", f"{subject.embedding.components}", "for 90 % of the variance"
        if maps.entering:
            whole = maps.entering[0] * len(maps.entering)
            yield "tokens processed", percent(sum(maps.entering) / whole, 0), who or "mean over blocks"
        if maps.macs is not None:
            mean = "mean" if maps.entering else ""
            yield "MACs per image", amount(maps.macs), ", ".join(word for word in (who, mean) if word)
    known = [v for v in inspection.cka_diagonal if v is not None]
    if known:
        yield "CKA of equal layers", f"{sum(known) / len(known):.2f}", "mean"
    yield "images", images, inspection.source


def inspection_tables(inspection: Inspection) -> Group:
    """Tables of all sections for the terminal, then results that are no table, then notes."""
    lines: list[Group | Text] = []
    for item in (item for section in inspection.sections for item in section.tables()):
        if isinstance(item, str):
            lines.append(Text(item))
            continue
        table = Table(box=None, pad_edge=False)
        for i, name in enumerate(item.columns):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in item.rows:
            table.add_row(*row)
        # a table's own title would be broken at the table's width
        lines += [Group(Text(item.title, style="italic"), table), Text()]
    lines += [Text(line) for section in inspection.sections for line in section.lines()]
    return Group(*lines, *map(Text, notes(inspection)))
