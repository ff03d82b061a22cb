"""The stored charts of results are what their files say, and can be read."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from study_calls import script_module

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
STORED = sorted((FOLDER / "charts").glob("*.svg"))
NAMESPACE = "{http://www.w3.org/2000/svg}"
CHART = {
    "title": "data: top-1 against epochs",
    "metric": "top-1",
    "x": "epochs",
    "range": [10, 1000],
    "ticks": [10, 1000],
    "ours": [{"name": "ViT", "colour": "ViT", "rows": {"short": "a", "long": "a"}}],
    "peers": ["board"],
}
PEERS = {
    "board": {
        "selection": "best epoch on test",
        "columns": ["method", "batch", "epochs", "minutes", "value"],
        "rows": [["BYOL", 128, 100, 60, 50.0], ["BYOL", 512, 100, 40, 60.0], ["BYOL", 512, 800, 320, 70.0]],
    }
}


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    script_module(ROOT / "tools" / "claims.py")  # the script imports its neighbour
    return script_module(ROOT / "tools" / "charts.py", "result_charts")


def drawn(charts: ModuleType, **changes: Any) -> ET.Element:
    chart = {**CHART, **changes}
    lines = [
        {"study": "short", "epochs": 10, "minutes": {"a": 2}},
        {"study": "long", "epochs": 100, "minutes": {}},
        {"study": "short", "row": "a", "seeds": 3, "metrics": {"top-1": 40.0}, "std": {"top-1": 5.0}},
        {"study": "long", "row": "a", "seed": 0, "metrics": {"top-1": 80.0}},
    ]
    ours = charts.our_lines(chart, charts.Rows(lines))
    peers = charts.peer_lines(chart, PEERS)
    return ET.fromstring(str(charts.draw(chart, ours, peers, charts.legend(chart, PEERS))))


def points(svg: ET.Element, hollow: bool) -> list[tuple[float, float]]:
    circles = [c for c in svg.iter(f"{NAMESPACE}circle") if ("hollow" in c.attrib["class"]) == hollow]
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles]


def texts(svg: ET.Element) -> list[tuple[str, ET.Element]]:
    return [(text.text or "", text) for text in svg.iter(f"{NAMESPACE}text")]


def test_stored_charts_are_what_their_files_say(charts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["charts.py", "--check"])
    assert charts.main() == 0, "run: python tools/charts.py"


def test_a_changed_or_a_left_over_chart_is_found_and_replaced(
    charts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rows.jsonl", "charts.yaml", "peers.yaml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "charts").mkdir()
    monkeypatch.setattr(charts, "FOLDER", tmp_path)

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["charts.py", *words])
        return int(charts.main())

    assert call("--check") == 1
    assert (call(), call("--check")) == (0, 0)
    for damage in (STORED[0].name, "left-over.svg"):
        (tmp_path / "charts" / damage).write_text("<svg/>")
        assert call("--check") == 1
        assert (call(), call("--check")) == (0, 0)


def test_every_chart_is_shown_on_a_page_and_every_source_has_an_address() -> None:
    pages = "".join(path.read_text() for path in FOLDER.glob("*.md"))
    assert STORED
    assert [path.name for path in STORED if f"](charts/{path.name})" not in pages] == []
    for source in yaml.safe_load((FOLDER / "peers.yaml").read_text()).values():
        assert source["url"].startswith("https://")
        assert {"data", "metric", "selection"} <= set(source)


def test_ours_and_peers_share_data_and_metric() -> None:
    peers = yaml.safe_load((FOLDER / "peers.yaml").read_text())
    lines = [json.loads(line) for line in (FOLDER / "rows.jsonl").read_text().splitlines()]
    data = {line["study"]: line["data"] for line in lines if "row" not in line}
    for chart in yaml.safe_load((FOLDER / "charts.yaml").read_text()).values():
        studied = {data[study] for line in chart["ours"] for study in line["rows"]}
        assert {peers[name]["data"] for name in chart["peers"]} <= studied
        assert len(studied) == 1
        assert {peers[name]["metric"] for name in chart["peers"]} <= {chart["metric"]}


def test_points_lie_where_their_figures_are(charts: ModuleType) -> None:
    svg = drawn(charts)
    (short, long), (hundred, eight_hundred) = points(svg, hollow=False), points(svg, hollow=True)
    assert eight_hundred[0] - hundred[0] == pytest.approx((long[0] - short[0]) * math.log10(8), abs=0.2)
    assert hundred[0] - long[0] == pytest.approx(6)  # one length: next to each other
    assert (short[1] - hundred[1]) / (short[1] - long[1]) == pytest.approx((60 - 40) / (80 - 40), abs=0.01)


def test_a_whisker_is_as_long_as_the_standard_deviation(charts: ModuleType) -> None:
    svg = drawn(charts)
    (whisker,) = [p for p in svg.iter(f"{NAMESPACE}path") if "whisker" in p.attrib["class"]]
    (short, long) = points(svg, hollow=False)
    length = float(re.findall(r"v([\d.]+)", whisker.attrib["d"])[0])
    assert length == pytest.approx((short[1] - long[1]) * 10 / 40, abs=0.2)


def test_the_best_of_several_published_rows_of_a_length_is_drawn_with_its_minutes(charts: ModuleType) -> None:
    (line,) = charts.peer_lines({**CHART, "x": "minutes"}, PEERS)
    assert line.points == [(40, 60.0, None), (320, 70.0, None)]


def test_the_key_says_how_a_source_chose_its_epoch(charts: ModuleType) -> None:
    assert "○ board: best epoch on test" in [text for text, _ in texts(drawn(charts))]


def test_a_row_without_minutes_is_named(charts: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"'long' in rows\.jsonl gives no minutes of 'a'"):
        drawn(charts, x="minutes")


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_names_do_not_overlap_and_stay_inside(path: Path) -> None:
    svg = ET.fromstring(path.read_text())
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    boxes = []
    for name, text in texts(svg):
        x, y, long = float(text.attrib["x"]), float(text.attrib["y"]), 6.7 * len(name)
        start = x - {"start": 0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
        boxes.append((name, start, start + long, y))
        assert start >= 0, name
        assert start + long <= width, name
        assert 10 <= y <= height, name
    for one, other in combinations(boxes, 2):
        assert abs(one[3] - other[3]) >= 11 or one[2] <= other[1] or other[2] <= one[1], (one, other)


def test_charts_have_colours_for_light_and_dark_pages() -> None:
    for path in STORED:
        light, _, dark = path.read_text().partition("@media (prefers-color-scheme: dark)")
        card = [re.findall(r"--card: (#\w+);", part) for part in (light, dark)]
        assert len(card[0]) == len(card[1]) == 1
        assert card[0] != card[1]
        assert '<rect class="page"' in dark  # its own background, whatever the page's
