"""A chart of a page as a file of its own: an SVG that carries the page's style, in its light colours, on white.

An inspection as one self-contained HTML page, and its sheets as PNG and its charts as SVG files beside it.

An inspection as tables for the terminal; each fits 80 columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vitrail.compare.study_charts import curves_chart
from vitrail.files import replacing, write_text
from vitrail.inspect.heat_maps import counts_chart, likeness_chart
from vitrail.inspect.results import InspectedModel, Inspection
from vitrail.inspect.weight_sections import depth_rows, embedding_charts, inner_charts, learned_sheets, told
from vitrail.measure.attention_maps import Looks
from vitrail.quantities import MISSING, amount, number, percent, shorten
from vitrail.report.html import render_page, style_sheets
from vitrail.report.sheets import MOST_COLUMNS, Sheet, all_sheets, evenly, map_name, sheet_picture

DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", re.DOTALL)
MARGIN = 12  # on a page, names may stand out of their chart
BOX = re.compile(r'viewBox="0 0 (\d+) (\d+)"')


def standalone(chart: Markup, styles: Sequence[str]) -> str:
    """The text of an .svg file; `styles` are paths of style sheets below the package."""
    css = style_sheets(*styles)
    found = BOX.search(chart)
    assert found is not None
    width, height = (int(side) + 2 * MARGIN for side in found.groups())
    opened, _, rest = BOX.sub(f'viewBox="{-MARGIN} {-MARGIN} {width} {height}"', str(chart), count=1).partition(">")
    opened = opened.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"', 1)
    plain = f"{DARK.sub('', css)}.chart {{ width: auto; max-width: none; background: #fff; }}"
    return f"{opened}><style><![CDATA[{plain}]]></style>{rest}"


def named(charts: Iterable[tuple[str, Markup]]) -> dict[str, Markup]:
    """Charts by names for files, made of their headings; those of one heading are numbered.

    >>> list(named([("CKA of layers", Markup()), ("CKA, of layers", Markup())]))
    ['cka-of-layers', 'cka-of-layers-1']
    """
    made: dict[str, Markup] = {}
    for heading, chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        again = sum(other == name or re.fullmatch(rf"{name}-\d+", other) is not None for other in made)
        made[f"{name}-{again}" if again else name] = chart
    return made


STYLES = ("report/report.css", "report/compare.css", "report/sheet.css")


def write_inspection(folder: str | Path, found: Inspection, environment: Mapping[str, Any]) -> list[Path]:
    """Write `inspect.html`, a PNG a sheet and an SVG a chart into `folder`; returns what was written, page first."""
    folder = Path(folder)
    written = [folder / "inspect.html"]
    for sheets in sheets_of(found).values():
        for sheet in sheets:
            written.append(folder / f"{sheet.name}.png")
            with replacing(written[-1]) as temporary:
                sheet_picture(sheet).save(temporary, "png", optimize=True)
    for name, chart in charts_of(found).items():
        written.append(folder / f"{name}.svg")
        write_text(written[-1], standalone(chart, STYLES))
    write_text(written[0], render_inspection(found, environment))
    return written


def charts_of(found: Inspection) -> dict[str, Markup]:
    """Every chart of the sections that were asked for, by the name of its file."""
    likeness = _likeness(found) or {}
    several = len(found.subjects) > 1
    kept = [_how_many(s) for s in found.subjects if s.looks.counts is not None and "kept" in found.what]
    charts = [
        *(_layers(found) if "attention" in found.what else []),
        *(
            (f"{name} patches kept {told}" if several else f"patches kept {told}", c)
            for name, _, o in kept
            for told, c in o
        ),
        *((name, likeness[name]) for name in ("cka", "divergence") if likeness.get(name)),
        *((heading, chart) for heading, chart, _ in (*inner_charts(found), *embedding_charts(found))),
    ]
    return named(charts)


def render_inspection(found: Inspection, environment: Mapping[str, Any]) -> str:
    """The HTML of an inspection."""
    sheets, attention = sheets_of(found), "attention" in found.what
    adaptive = [s for s in found.subjects if s.looks.counts is not None] if "kept" in found.what else []
    sections: dict[str, Any] = {
        "attention": sheets["attention"],
        "evidence": sheets["evidence"],
        "judged": [(s.name, *judged(s)) for s in found.subjects if s.evidence is not None and s.evidence.quality],
        "kept": sheets["kept"],
        "how many": [_how_many(subject) for subject in adaptive],
        "layers": _layers(found) if attention else [],
        "heads": sheets["heads"],
        "saliency": sheets["saliency"],
        "likeness": _likeness(found),
        "learned": {"charts": inner, "sheets": sheets["learned"]} if (inner := inner_charts(found)) else None,
        "embedding": embedding_charts(found),
        "neighbours": sheets["neighbours"],
        "anchors": list(zip(sheets["anchors"], anchor_tables(found), strict=True)),
        "clusters": sheets["clusters"],
        "figures": [(s.name, *figures(s, found.cka_diagonal)) for s in found.subjects if s.looks.layers and attention],
        "notes": notes(found),
        "conditions": [(str(k), str(v)) for k, v in environment.items()],
    }
    return render_page(
        "inspect/inspect.html.jinja",
        STYLES,
        found=found,
        title=" and ".join(s.name for s in found.subjects),
        names=[s.name for s in found.subjects],
        verdict=verdict(found).replace(" %", "\N{NO-BREAK SPACE}%"),
        tiles=list(_tiles(found)),
        sections=sections,
        images=found.subjects[0].looks.images,
        mean_row=any(layer.row == "mean" for s in found.subjects for layer in s.looks.layers),
        head_column=any(s.looks.head_maps is not None for s in found.subjects),
        labelled=bool(found.classes),
        created=str(environment.get("started", "")),
    )


def sheets_of(found: Inspection) -> dict[str, list[Sheet]]:
    """Every sheet of the sections that were asked for."""
    made = all_sheets(found) | learned_sheets(found)
    return {name: sheets if name in found.what else [] for name, sheets in made.items()}


def verdict(found: Inspection) -> str:
    """What was found, in a few sentences."""
    said = []
    several = len(found.subjects) > 1
    for subject in found.subjects:
        looks, who = subject.looks, subject.name if several else "All heads together"
        if looks.layers and "attention" in found.what:
            first, last = looks.layers[0], looks.layers[-1]
            share = [percent(_mean(layer.entropy_share), 0) for layer in (first, last)]
            far = [number(_mean(layer.distance)) for layer in (first, last)]
            said.append(
                f"{who}: attention has {share[0]} of the greatest entropy in layer {first.layer} and {share[1]} in "
                f"layer {last.layer}; there patches look {far[0]} and {far[1]} patches far."
            )
        if looks.leaving and looks.counts is not None and "kept" in found.what:
            kept = float(looks.counts[:, -1].double().mean())
            patches = looks.grid[0] * looks.grid[1]
            spent = "" if looks.macs is None else f"; an image takes {amount(looks.macs)} MACs"
            whole = "" if not looks.macs_whole else f" of {amount(looks.macs_whole)}"
            where = "works on" if subject.kind == "adavit" else "is left with"
            it = subject.name if several else "it"
            said.append(f"In the end {it} {where} {kept:.1f} of {patches} patches on average{spent}{whole}.")
            if subject.attacked is not None and subject.attacked.counts is not None:
                kept = float(subject.attacked.counts[:, -1].double().mean())
                spent = "" if subject.attacked.macs is None else f" and {amount(subject.attacked.macs)} MACs"
                said.append(f"Under the patch it is {kept:.1f} patches{spent}.")
    known = [v for v in found.cka_diagonal if v is not None]
    if known:
        said.append(f"Features of equal layers have a CKA of {min(known):.2f} to {max(known):.2f}.")
    said += [f"{line if several else line[:1].upper() + line[1:]}." for line in told(found)]
    if said or "attention" not in found.what:
        return " ".join(said) or "What was asked for stands below."
    return "No layer has attention maps; what is known stands below."


def notes(found: Inspection) -> list[str]:
    """What a person should know, each with the model it is about where there are several."""
    several = len(found.subjects) > 1
    parts = [(s, part) for s in found.subjects for part in (s.looks, s.evidence, s.learned) if part is not None]
    own = [f"{s.name}: {note}" if several else note for s, part in parts for note in part.notes]
    account = found.transfer
    if account:
        own.append(
            f"Attention transfer from {found.subjects[0].name} to {found.subjects[1].name} would carry "
            f"{account['maps']:,} numbers an image as maps, or {account['queries_and_keys']:,} as queries and keys; "
            f"inference costs {amount(account['macs_copy'])} MACs with copied attention (both models) and "
            f"{amount(account['macs_distilled'])} after distillation."
        )
    return [*own, *found.notes, *found.lacking()]


def figures(subject: InspectedModel, cka: Sequence[float | None] = ()) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row of told numbers a layer; means over heads."""
    looks = subject.looks
    row = looks.layers[-1].row if looks.layers else "class"
    columns = ["layer", "entropy", "share", f"{row} row", "share", "distance", "pixels"]
    columns += (["tokens", "left"] if looks.entering else []) + (["CKA"] if cka else [])
    rows = []
    for layer in looks.layers:
        far = _mean(layer.distance)
        told = [f"{layer.layer}", _fixed(_mean(layer.entropy)), percent(_mean(layer.entropy_share))]
        told += [_fixed(_mean(layer.class_entropy)), percent(_mean(layer.class_entropy_share))]
        told += [_fixed(far), number(far * looks.pitch)]
        if looks.entering:
            told += [f"{looks.entering[layer.layer]:.1f}", f"{looks.leaving[layer.layer]:.1f}"]
        if cka:
            value = cka[layer.layer] if layer.layer < len(cka) else None
            told.append(MISSING if value is None else f"{value:.3f}")
        rows.append(told)
    return columns, rows


def judged(subject: InspectedModel) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row of told numbers a kind of map; what tells nothing of the model stands last."""
    assert subject.evidence is not None
    rows = subject.evidence.quality
    names = [name for name in ("pointing", "inside", "deletion", "insertion") if name in rows[0]]
    told = [[map_name(row["kind"]), *(percent(row[name]) for name in names)] for row in rows]
    return ["map", *names], told


def anchor_tables(found: Inspection) -> list[tuple[str, list[str], list[list[str]]]]:
    """What stands below the anchors of each model that has some: a line, names of columns, a row an image."""
    made = []
    for ranked in (s.anchors for s in found.subjects if s.anchors is not None):
        first = ranked.rows.shape[1]
        columns = ["image", "likeliest, T", "S", f"first {first}, T", "S", "divergence"]
        rows = []
        for image, caption in enumerate(found.captions[: len(ranked.rows)]):
            by = (ranked.teacher[image], ranked.student[image])
            told = [percent(float(p)) for p in (*(b[0] for b in by), *(b.sum() for b in by))]
            rows.append([caption, *told, _fixed(float(ranked.divergences[image]))])
        heat = (
            f"temperature {ranked.temperature:g}"
            if ranked.temperature == ranked.teacher_temperature
            else f"temperatures {ranked.teacher_temperature:g} and {ranked.temperature:g}"
        )
        own = "This is what the run learned." if ranked.learned else "The run learned from it otherwise."
        made.append((f"Teacher: {ranked.who}; {heat}. {own}", columns, rows))
    return made


def _tiles(found: Inspection) -> Iterator[tuple[str, str, str]]:
    first = found.subjects[0].looks
    yield "images", f"{first.images:,}", found.source
    for subject in found.subjects:
        looks, who = subject.looks, subject.name if len(found.subjects) > 1 else ""
        if looks.entering:
            whole = looks.entering[0] * len(looks.entering)
            yield "tokens worked on", percent(sum(looks.entering) / whole, 0), who or "mean over blocks"
        if looks.macs is not None:
            remark = f"{who}, mean" if who and looks.entering else who or ("mean" if looks.entering else "")
            yield "MACs an image", amount(looks.macs), remark
    known = [v for v in found.cka_diagonal if v is not None]
    if known:
        yield "CKA of equal layers", f"{sum(known) / len(known):.2f}", "mean"


def _how_many(subject: InspectedModel) -> tuple[str, str, list[tuple[str, Markup]]]:
    looks = subject.looks
    assert looks.counts is not None
    patches = looks.grid[0] * looks.grid[1]
    word = "in" if subject.kind == "adavit" else "after"
    charts = []
    for stage in evenly(subject.stages, MOST_COLUMNS):
        counts = looks.counts[:, stage].numpy()
        heading = f"{word} block {stage}"
        charts.append((heading, counts_chart(counts, patches, title=f"Patches kept {heading}")))
    said = _tokens_told(looks)
    if subject.attacked is not None:
        said += f" Under the patch: {_tokens_told(subject.attacked)}"
    return subject.name, said, charts


def _tokens_told(looks: Looks) -> str:
    said = f"Tokens that enter each block, mean: {', '.join(f'{n:.1f}' for n in looks.entering)}."
    if looks.macs is not None and looks.macs_whole:
        share = percent(looks.macs / looks.macs_whole, 0)
        said += f" {amount(looks.macs)} MACs an image, {share} of the whole model's."
    return said


def _layers(found: Inspection) -> list[tuple[str, Markup]]:
    colours = {s.name: i for i, s in enumerate(found.subjects)}
    made = []
    for heading, name, tell in (
        ("Entropy of all rows, as a share of the greatest", "entropy_share", _whole),
        ("Entropy of the class token's row, as a share", "class_entropy_share", _whole),
        ("Mean attention distance, patches", "distance", number),
    ):
        curves = {s.name: _by_head(s, name) for s in found.subjects if s.looks.layers}
        if curves:
            axis = tell if tell is _whole else "{:g}".format
            chart = curves_chart(curves, title=heading, x_label="layer", tell=tell, tell_axis=axis, colours=colours)
            made.append((heading, chart))
    tokens = {s.name: [dict(enumerate(s.looks.entering))] for s in found.subjects if s.looks.entering}
    for subject in found.subjects:
        if subject.attacked is not None:
            colours[f"{subject.name}, attacked"] = len(colours)
            tokens[f"{subject.name}, attacked"] = [dict(enumerate(subject.attacked.entering))]
    if tokens:
        chart = curves_chart(tokens, title="Tokens that enter each block", x_label="block", colours=colours)  # type: ignore[arg-type]
        made.append(("Tokens that enter each block, mean", chart))
    return made


def _by_head(subject: InspectedModel, name: str) -> list[Mapping[float, float]]:
    layers = subject.looks.layers
    heads = len(layers[0].distance)
    return [
        {float(one.layer): getattr(one, name)[h] for one in layers if math.isfinite(getattr(one, name)[h])}
        for h in range(heads)
    ]


def _likeness(found: Inspection) -> dict[str, Any] | None:
    if found.cka is None and not found.divergence:
        return None
    first, second = found.subjects[:2]
    chart = None
    if found.cka is not None:
        chart = likeness_chart(found.cka.numpy(), first.name, second.name, title="Linear CKA of layers")
    lines = {}
    for name, values in found.divergence.items():
        known = {float(i): v for i, v in zip(found.divergence_layers, values, strict=True) if v is not None}
        if known:
            lines[name] = [known]
    divergence = curves_chart(lines, title="Divergence of attention maps", x_label="layer") if lines else None
    width = max((f.shape[1] for s in (first, second) for f in s.looks.features), default=0)
    return {"cka": chart, "divergence": divergence, "few": first.looks.images <= width, "width": width}


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _fixed(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else MISSING


def _whole(share: float) -> str:
    return f"{100 * share:.4g} %"


def inspection_tables(found: Inspection) -> Group:
    """Layer by layer, one table a model; what adaptive ones spend; the two side by side; what to know."""
    parts: list[Group | Text] = []
    for place, subject in enumerate(found.subjects):
        if subject.looks.layers and "attention" in found.what:
            parts += [_layer_list(subject, found if place == 0 else None), Text()]
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


def _layer_list(subject: InspectedModel, found: Inspection | None) -> Group:
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
