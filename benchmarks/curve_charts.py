"""Charts of benchmarks/curves.py: speed and memory over logarithmic axes, one SVG per part."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vitrail.report.charts import Scale, _grid, _svg, _text, ticks

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from charts import LETTER, Line, _names, _path, _rect, style

Row = Mapping[str, Any]
AXES = {"resolution": "pixels", "batch": "batch", "classes": "classes", "bank": "rows"}
AXIS_NAMES = {"resolution": "pixels", "batch": "images per batch", "classes": "classes", "bank": "rows of the bank"}
TITLES = {
    "resolution": "Resolution: training and inference at batch {batch}",
    "batch": "Batch size: training and inference at {pixels} pixels",
    "classes": "Classes: training steps of DeiT-S and of its head alone with cross entropy (CE) and BCE, batch {batch}",
    "bank": "Memory bank: training steps of ResNet-18, batch {batch}, {pixels} pixels",
}
COLOURS = {
    **{"DeiT-S": 0, "CaiT-XXS24": 1, "ResMLP-S24": 2, "PatchConvNet-S60": 3, "XCiT-S12/16": 4, "ResNet-50": 7},
    **{"step, CE": 0, "step, BCE": 1, "head, CE": 2, "head, BCE": 3},
    **{"MSF, k = 5": 2, "MoCo": 1},
}
NETWORK_PANELS = {  # title: work and key of the rows
    "Training, images/s": ("training", "images_per_second"),
    "Inference, images/s": ("inference", "images_per_second"),
    "Training, peak memory, GiB": ("training", "peak_gib"),
    "Inference, peak memory, GiB": ("inference", "peak_gib"),
}
STEP_PANELS = {"Milliseconds per step": ("training", "ms"), "Peak memory, GiB": ("training", "peak_gib")}
WIDTH, HEIGHT, TOP = 420, 320, 44  # of a panel; height of the title
SHOWN = 800  # width of a drawing in pixels where there is room
BOLD = 8.2  # width of a letter in the name of a line


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write PART.svg for each part that has rows. Raises `ValueError` where no row has a result."""
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for part in AXES:
        if any(row["part"] == part and "error" not in row for row in rows):
            drawn.append(folder / f"{part}.svg")
            drawn[-1].write_text(chart(part, [row for row in rows if row["part"] == part]) + "\n", encoding="utf-8")
    if not drawn:
        raise ValueError("no row has a result to draw; measure some points first, or name the --compile of the rows")
    return drawn


def chart(part: str, rows: Sequence[Row]) -> Markup:
    """All panels of a part, two side by side, and below them the points that failed and the machine."""
    wanted = NETWORK_PANELS if part in ("resolution", "batch") else STEP_PANELS
    panels = {title: lines_of(part, rows, *what) for title, what in wanted.items()}
    shown = [panel(title, AXIS_NAMES[part], lines) for title, lines in panels.items() if lines]
    notes = [line for note in notes_of(part, rows) for line in textwrap.wrap(note, int(2 * WIDTH / LETTER))]
    width, below = 2 * WIDTH, TOP + HEIGHT * math.ceil(len(shown) / 2)
    height = below + 12 + 16 * len(notes)
    title = TITLES[part].format(**rows[0])
    parts = [Markup("<style>{}</style>").format(style()), _rect(width, height), _text(12, 26, title, "name title")]
    for i, drawing in enumerate(shown):
        place = Markup('<g transform="translate({} {})">{}</g>')
        parts.append(place.format(i % 2 * WIDTH, TOP + i // 2 * HEIGHT, drawing))
    parts += [_text(12, below + 14 + 16 * i, note, "axis") for i, note in enumerate(notes)]
    size = Markup('<svg xmlns="http://www.w3.org/2000/svg" width="{}" ').format(SHOWN)
    return _svg((width, height), title, *parts).replace("<svg ", size, 1)


def lines_of(part: str, rows: Sequence[Row], work: str, key: str) -> list[Line]:
    """A line per name, of the rows with a value."""
    values: dict[str, list[tuple[float, float, None]]] = {}
    for row in rows:
        if row["work"] == work and row.get(key) is not None:
            values.setdefault(row["name"], []).append((row[AXES[part]], row[key], None))
    return [Line(name, COLOURS[name], sorted(values[name])) for name in COLOURS if name in values]


def notes_of(part: str, rows: Sequence[Row]) -> list[str]:
    failed: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            kind = "Out of memory" if row["error"].startswith("OutOfMemoryError") else "Failed"
            failed.setdefault(kind, []).append(f"{row['name']}, {row['work']}, {row[AXES[part]]:,}")
    compiled = {"off": "not compiled", "auto": "compiled"}[rows[0]["compile"]]
    return [f"{kind}: {'; '.join(of)}." for kind, of in failed.items()] + [f"{rows[0]['machine']}, {compiled}."]


def panel(title: str, axis: str, lines: Sequence[Line]) -> Markup:
    """Lines over two logarithmic axes, each named at its end."""
    xs = sorted({x for line in lines for x, *_ in line.points})
    ys = [y for line in lines for _, y, _ in line.points]
    low, high = min(ys) / 1.1, max(ys) * 1.1
    left, right, bottom = 52.0, WIDTH - 28 - BOLD * max(len(line.name) for line in lines), HEIGHT - 52.0
    across, up = (
        Scale(*map(math.log10, (xs[0] / 1.01, xs[-1] * 1.01)), left + 10, right),
        Scale(math.log10(low), math.log10(high), bottom, 48),
    )

    def at(point: tuple[float, float, float | None]) -> tuple[float, float]:
        return across(math.log10(point[0])), up(math.log10(point[1]))

    parts = [_text(12, 24, title, "name")]
    parts += [_grid(up(math.log10(v)), left, right, label(v)) for v in log_ticks(low, high)]
    for x in xs:
        parts.append(_path("tick", f"M{across(math.log10(x)):.1f} {bottom:.1f}v4"))
        parts.append(_text(across(math.log10(x)), bottom + 18, label(x), "axis", "middle"))
    parts.append(_text((left + right) / 2, bottom + 36, axis, "axis", "middle"))
    dot = Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="3.5"><title>{}, {:,}: {:,.4g}</title></circle>')
    for line in lines:
        places = "L".join("{:.1f} {:.1f}".format(*at(point)) for point in line.points)
        parts.append(_path(f"line {line.kind}", f"M{places}"))
        parts += [dot.format(line.kind, *at(point), line.name, *point[:2]) for point in line.points]
    ends = [at(line.points[-1]) for line in lines]
    return Markup("").join(parts + _names(lines, ends, right + 18, bottom))


def log_ticks(low: float, high: float) -> list[float]:
    """Round values in [low, high]: powers of ten, 2 and 5 times them where there is room; a narrow range evenly.

    >>> log_ticks(0.9, 12), log_ticks(21, 24)
    ([1.0, 2.0, 5.0, 10.0], [21.0, 22.0, 23.0, 24.0])
    """
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    fine, coarse = ([m * p for p in powers for m in steps if low <= m * p <= high] for steps in ((1, 2, 5), (1,)))
    return ticks(low, high) if len(fine) < 3 else fine if len(fine) <= 9 else coarse


def label(value: float) -> str:
    """A value of an axis.

    >>> label(224), label(21_000), label(4096), label(0.05)
    ('224', '21k', '4,096', '0.05')
    """
    return f"{value / 1000:g}k" if value and value % 1000 == 0 else f"{value:,.10g}"
