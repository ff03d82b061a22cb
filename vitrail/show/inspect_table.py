"""An inspection as tables for the terminal; each fits 80 columns."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.measure.inspection import Inspection, Subject
from vitrail.show.inspect_report import figures, judged, notes
from vitrail.show.learned_report import depth_rows, told
from vitrail.show.quantities import amount, number, percent, shorten


def inspection_tables(found: Inspection) -> Group:
    """Layer by layer, one table a model; what adaptive ones spend; the two side by side; what to know."""
    parts: list[Group | Text] = []
    for place, subject in enumerate(found.subjects):
        if subject.looks.layers and "attention" in found.what:
            parts += [_layers(subject, found if place == 0 else None), Text()]
        if subject.looks.macs is not None and subject.looks.macs_whole:
            share = percent(subject.looks.macs / subject.looks.macs_whole)
            said = f"{subject.name}: {amount(subject.looks.macs)} MACs an image, {share} of the whole model's"
            parts.append(Text(said))
            if subject.attacked is not None and subject.attacked.macs is not None:
                share = percent(subject.attacked.macs / subject.looks.macs_whole)
                parts.append(Text(f"under the patch: {amount(subject.attacked.macs)}, {share}"))
            parts.append(Text())
        if subject.evidence is not None and subject.evidence.quality:
            columns, rows = judged(subject)
            images = subject.evidence.quality[0]["images"]
            title = f"{shorten(subject.name, 30)}: how good its maps are, {images} images (deletion: low is good)"
            parts += [_table(title, columns, rows), Text()]
        if subject.learned is not None and "learned" in found.what:
            columns, rows = depth_rows(subject.learned)
            title = f"{shorten(subject.name, 30)}: gains and lengths of branches beside the stream"
            parts += [_table(title, columns, rows), Text()] if rows else []
    if found.divergence:
        parts += [_divergence(found), Text()]
    parts += [Text(line) for line in told(found)]
    parts += [Text(note) for note in notes(found)]
    return Group(*parts)


def _layers(subject: Subject, found: Inspection | None) -> Group:
    title = f"{shorten(subject.name, 40)}, {subject.looks.images} images; entropy in nats, distance in patches"
    columns, rows = figures(subject, found.cka_diagonal if found is not None else ())
    return _table(title, columns, rows)


def _divergence(found: Inspection) -> Group:
    names = list(found.divergence)
    rows = [
        [f"{layer}", *(number(found.divergence[name][i]) for name in names)]
        for i, layer in enumerate(found.divergence_layers)
    ]
    title = f"divergence of attention maps in nats, {found.divergence_images} images"
    return _table(title, ["layer", *names], rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Group:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="italic"), table)  # a table's own title would be broken at the table's width
