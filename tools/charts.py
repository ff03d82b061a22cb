"""docs/results/charts/*.svg: accuracy against epochs or minutes, ours next to published rows.

    python tools/charts.py                 write the charts
    python tools/charts.py --check         exit code 1 where a stored chart is not what the files say

`docs/results/charts.yaml` lists the charts: `metric` and `x` (epochs or minutes, on a logarithmic axis over `range`),
our lines (`rows` maps a study of `rows.jsonl` to its row; minutes are of the study) and the sources in `peers.yaml`
whose rows are drawn. A published method has one point for each length, its best where there are several. Filled points
are ours, the mean over seeds with its standard deviation; hollow ones are published. Names stand next to the last point
of a line, on the given `side`; names of peers in a column at the right where `column` is set. `key` is a last remark.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from claims import Rows
from markupsafe import Markup

from vitrail.report.charts import Scale, _apart, _grid, _svg, _text, ticks

FOLDER = Path(__file__).parents[1] / "docs" / "results"
STYLES = Path(__file__).parents[1] / "vitrail" / "report"
COLOURS = {"BYOL": 0, "ViT": 0, "MoCo": 1, "MSF": 2, "CMSF": 3, "ISD": 4, "DINO": 5}
OTHER = 7  # grey
WIDTH, HEIGHT, SHOWN = 420, 400, 630  # units of the drawing, and its width in pixels where there is room
LETTER, LINE = 6.7, 14.0  # size of the 12 px text
RULES = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
.page { fill: var(--card); } .grid, .tick { stroke: var(--line); fill: none; }
.line { stroke: var(--c); stroke-width: 1.8; fill: none; } .hollow.line { stroke-width: 1; stroke-opacity: .55; }
.point { fill: var(--c); stroke: var(--card); }
.hollow.point { fill: var(--card); stroke: var(--c); stroke-width: 1.5; }
.whisker { stroke: var(--c); stroke-width: 1.5; fill: none; }
.lead { stroke: var(--c); stroke-opacity: .45; fill: none; }
.tag { fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.hollow.tag { font-weight: 400; } .name { fill: var(--ink); font-weight: 600; }
"""


@dataclass(frozen=True)
class Line:
    """A method: its points (x, value, standard deviation or none) by x."""

    name: str
    colour: int
    points: list[tuple[float, float, float | None]]
    hollow: bool = False

    @property
    def kind(self) -> str:
        return f"v{self.colour}" + " hollow" * self.hollow


def our_lines(chart: Mapping[str, Any], rows: Rows) -> list[Line]:
    lines = []
    for line in chart["ours"]:
        points = []
        for study, row in line["rows"].items():
            place = rows.studies[study].get(chart["x"])
            place = place.get(row) if isinstance(place, dict) else place
            if place is None:
                raise ValueError(f"{study!r} in rows.jsonl gives no {chart['x']} of {row!r}: add them, or drop the row")
            result = rows.measured(study, row, chart["metric"])
            points.append((place, result.mean, result.std))
        lines.append(Line(line["name"], COLOURS[line["colour"]], sorted(points)))
    return lines


def peer_lines(chart: Mapping[str, Any], peers: Mapping[str, Any]) -> list[Line]:
    best: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for source in (peers[name] for name in chart["peers"]):
        for row in (dict(zip(source["columns"], values, strict=True)) for values in source["rows"]):
            name = row["method"] + (f", {row['gmacs']} G" if "gmacs" in row else "")
            known = best[name].get(row["epochs"])
            if known is None or row["value"] > known["value"]:
                best[name][row["epochs"]] = row
    ours = {COLOURS[line["colour"]] for line in chart["ours"]}
    lines = []
    for name, lengths in best.items():
        colour = COLOURS.get(name, OTHER)
        points = sorted((row[chart["x"]], row["value"], None) for row in lengths.values())
        lines.append(Line(name, colour if colour in ours else OTHER, points, hollow=True))
    return lines


def draw(chart: Mapping[str, Any], ours: Sequence[Line], published: Sequence[Line], key: Sequence[str]) -> Markup:
    """One chart; `key` are the lines of text below it."""
    everything = [*published, *ours]
    shared = {p[0] for line in ours for p in line.points} & {p[0] for line in published for p in line.points}
    apart = bool(shared)  # points of one length next to each other
    reach = [y + sign * (std or 0) for line in everything for _, y, std in line.points for sign in (-1, 1)]
    room = 0.03 * (max(reach) - min(reach))
    y_ticks = ticks(min(reach) - room, max(reach) + room, 9, outward=True)
    longest = LETTER * max((len(line.name) for line in published), default=0)
    left, right, bottom = 34.0, WIDTH - (22 + longest if chart.get("column") else 12), HEIGHT - 48.0
    across, y = Scale(*map(math.log10, chart["range"]), left, right), Scale(y_ticks[0], y_ticks[-1], bottom, 48)

    def at(point: tuple[float, float, float | None], line: Line) -> tuple[float, float]:
        return across(math.log10(point[0])) + (3 if line.hollow else -3) * apart, y(point[1])

    parts = [_rect(WIDTH, HEIGHT + 6 + 16 * len(key)), *_lines_of(chart["title"])]
    parts += [_grid(y(v), left, right, f"{v:g}") for v in y_ticks]
    for v in chart["ticks"]:
        parts.append(_path("tick", f"M{across(math.log10(v)):.1f} {bottom:.1f}v4"))
        parts.append(_text(across(math.log10(v)), bottom + 17, f"{v:g}", "axis", "middle"))
    parts.append(_text((left + right) / 2, bottom + 34, f"{chart['x']} (logarithmic)", "axis", "middle"))
    for line in everything:
        parts.append(
            _path(f"line {line.kind}", "M" + "L".join("{:.1f} {:.1f}".format(*at(p, line)) for p in line.points))
        )
    for line in everything:
        for point in line.points:
            a, b = at(point, line)
            half = abs(y(point[2] or 0) - y(0))
            if half:
                caps = f"M{a - 3:.1f} {b - half:.1f}h6m-3 0v{2 * half:.1f}m-3 0h6"
                parts.append(_path(f"whisker {line.kind}", caps))
            circle = '<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="4"/>'
            parts.append(Markup(circle).format(line.kind, a, b))
    ends = [at(line.points[-1], line) for line in ours]
    if chart.get("side") == "left":
        parts += _names(ours, ends, min(a for a, _ in ends) - 16, bottom, "end")
    else:
        parts += _names(ours, ends, max(a for a, _ in ends) + 16, bottom)
    columns: dict[float, list[Line]] = defaultdict(list)
    for line in published:
        columns[right + 12 if chart.get("column") else at(line.points[-1], line)[0] + 16].append(line)
    for column, lines in columns.items():
        places = [at(line.points[-1], line) for line in lines]
        if column + max(LETTER * len(line.name) for line in lines) <= WIDTH:
            parts += _names(lines, places, column, bottom)
        else:
            parts += [_below(line, [at(point, line) for point in line.points]) for line in lines]
    parts += [_text(12, HEIGHT + 10 + 16 * i, text, "axis") for i, text in enumerate(key)]
    svg = _svg((WIDTH, HEIGHT + 6 + 16 * len(key)), chart["title"], Markup("<style>{}</style>").format(style()), *parts)
    size = Markup('<svg xmlns="http://www.w3.org/2000/svg" width="{}" ').format(SHOWN)
    return svg.replace("<svg ", size, 1) + "\n"


def style() -> Markup:
    """Colours of the reports, for light and dark pages, and the rules of these charts."""
    text = "".join((STYLES / name).read_text().partition("@media print")[0] for name in ("report.css", "compare.css"))
    blocks = [
        re.findall(r"--(?:card|ink|soft|line|v\d): #\w+;", block)
        for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    ]
    light, dark = (" ".join(x + y) for x, y in zip(blocks[:2], blocks[2:], strict=True))
    colours = "\n".join(f".v{i} {{ --c: var(--v{i}); }}" for i in sorted({*COLOURS.values(), OTHER}))
    return Markup(
        f"\n:root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{colours}{RULES}"
    )


def legend(chart: Mapping[str, Any], peers: Mapping[str, Any]) -> list[str]:
    lines = ["● vitrail: last epoch, ± std where there are seeds"]
    by_name = {s.get("name", name): s["selection"] for name, s in ((n, peers[n]) for n in chart["peers"])}
    lines += [f"○ {name}: {selection}" for name, selection in by_name.items()]
    return lines + ([chart["key"]] if "key" in chart else [])


def _names(
    lines: Sequence[Line], ends: Sequence[tuple[float, float]], x: float, floor: float, anchor: str = "start"
) -> list[Markup]:
    """Names of lines in one column, apart from each other, each with a line to its point."""
    heights = [b for _, b in ends]
    moved = _apart(heights, LINE)
    up = min(sum(moved) / len(moved) - sum(heights) / len(heights), min(moved) - 52)
    up = max(up, max(moved) - floor)
    parts = []
    for line, (a, b), height in zip(lines, ends, moved, strict=True):
        sign = 1 if x > a else -1
        parts.append(_path(f"lead v{line.colour}", f"M{a + 6 * sign:.1f} {b:.1f}L{x - 3 * sign:.1f} {height - up:.1f}"))
        parts.append(_text(x, height - up + 4, line.name, f"tag {line.kind}", anchor))
    return parts


def _below(line: Line, places: Sequence[tuple[float, float]]) -> Markup:
    """The name of a line that ends at the right edge, under its last points."""
    end = places[-1][0] + 4
    lowest = max(b for a, b in places if a > end - LETTER * len(line.name) - 6)
    return _text(end, lowest + 20, line.name, f"tag {line.kind}", "end")


def _lines_of(title: str) -> list[Markup]:
    head, _, rest = title.partition(": ")
    return [_text(12, 18, head, "name"), _text(12, 34, f"{rest}, %", "axis")]


def _path(kind: str, path: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(kind, path)


def _rect(width: float, height: float) -> Markup:
    return Markup('<rect class="page" width="{}" height="{}" rx="8"/>').format(width, height)


def drawings() -> dict[Path, str]:
    """Each file of charts/ with what it holds."""
    rows = Rows([json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()])
    charts, peers = (yaml.safe_load((FOLDER / name).read_text()) for name in ("charts.yaml", "peers.yaml"))
    return {
        FOLDER / "charts" / f"{name}.svg": str(
            draw(chart, our_lines(chart, rows), peer_lines(chart, peers), legend(chart, peers))
        )
        for name, chart in charts.items()
    }


def main() -> int:
    wanted = drawings()
    stored = set((FOLDER / "charts").glob("*.svg"))
    if "--check" in sys.argv:
        return int(stored != set(wanted) or any(path.read_text() != text for path, text in wanted.items()))
    for path in stored - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
