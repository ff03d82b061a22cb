"""Charts put values where they belong, and survive what training logs contain."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from vitrail.measure.classification import classification
from vitrail.report.charts import (
    Scale,
    Series,
    bar_chart,
    heat_map,
    line_chart,
    reliability,
    spread,
    thin,
    ticks,
)
from vitrail.report.html import columns
from vitrail.report.sheets import STRENGTH, Cell, Sheet, colours, overlay
from vitrail.report.tables import confused, headline, per_class


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart)


def points(chart: str) -> list[list[tuple[float, float]]]:
    """Coordinates of each line of a chart."""
    lines = [e.get("d", "") for e in parsed(chart).iter("path") if "line" in e.get("class", "").split()]
    return [[tuple(map(float, p.split())) for p in d[1:].split("L")] for d in lines]


def test_a_scale_is_linear_and_meets_its_ends() -> None:
    scale = Scale(2, 6, 100, 20)
    assert [scale(v) for v in (2, 3, 4, 6)] == [100, 80, 60, 20]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.013, 0.87), (-3, 12), (1e-6, 1e-3), (0, 30), (5, 5.001), (0, 1e7)]
)
@pytest.mark.parametrize("most", [3, 4, 5, 8])
def test_ticks_are_even_few_and_inside_or_around_their_range(low: float, high: float, most: int) -> None:
    inside, around = ticks(low, high, most), ticks(low, high, most, outward=True)
    room = 1e-6 * (high - low)
    assert 1 <= len(inside) <= most
    assert 2 <= len(around) <= most
    assert low - room <= inside[0]
    assert inside[-1] <= high + room
    assert around[0] <= low + room
    assert high - room <= around[-1]
    for found in (inside, around):
        np.testing.assert_allclose(np.diff(found, 2), 0, atol=room)


def test_lines_map_values_to_coordinates() -> None:
    chart = line_chart([Series("a", [0, 1, 2, 4], [0.0, 1.0, 0.5, 1.0])], title="t", size=(400, 200))
    (line,) = points(chart)
    xs, ys = zip(*line, strict=True)
    left, right, top, bottom = xs[0], xs[3], 14, 200 - 36
    assert ys == pytest.approx([bottom, top, (top + bottom) / 2, top], abs=0.051)
    assert xs == pytest.approx([left, left + (right - left) / 4, (left + right) / 2, right], abs=0.051)
    assert 0 < left < right < 400


def test_x_can_begin_before_the_first_point() -> None:
    (line,) = points(line_chart([Series("a", [1, 2], [0.0, 1.0])], title="t", x_from=0))
    texts = parsed(line_chart([Series("a", [1, 2], [0.0, 1.0])], title="t", x_from=0)).iter("text")
    zero = next(float(e.get("x", "")) for e in texts if e.text == "0" and e.get("text-anchor") == "middle")
    assert line[0][0] == pytest.approx((zero + line[1][0]) / 2, abs=0.11)


def test_a_constant_series_is_a_level_line_inside_the_chart() -> None:
    (line,) = points(line_chart([Series("a", [0, 1, 2], [0.7] * 3)], title="t"))
    assert len({y for _, y in line}) == 1
    assert 14 < line[0][1] < 230 - 36
    assert spread([0.0, 0.0]) == (-0.5, 0.5)


def test_a_single_point_is_a_dot_without_a_line() -> None:
    chart = line_chart([Series("a", [3], [2.0])], title="t")
    assert points(chart) == []
    dots = [e for e in parsed(chart).iter("circle") if "dot" in e.get("class", "")]
    assert len(dots) == 1
    assert math.isfinite(float(dots[0].get("cx", "nan")))


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_values_that_are_not_finite_are_gaps(gap: float) -> None:
    chart = line_chart([Series("a", range(7), [1, 2, gap, 3, gap, 4, 5])], title="t")
    assert [len(line) for line in points(chart)] == [2, 2]
    assert sum("dot" in e.get("class", "") for e in parsed(chart).iter("circle")) == 1
    assert not re.search(r"\b(nan|inf)\b", chart)


def test_a_series_without_values_says_so() -> None:
    assert "nothing was recorded" in line_chart([Series("a", [0, 1], [math.nan, math.nan])], title="t")
    assert "nothing was recorded" in line_chart([], title="t")


def test_labels_at_the_end_tell_the_last_finite_value_and_do_not_overlap() -> None:
    chart = line_chart([Series("a", [0, 1], [0.0, 1.0]), Series("b", [0, 1, 2], [0.0, 1.0, math.nan])], title="t")
    tags = [e for e in parsed(chart).iter("text") if "tag" in e.get("class", "")]
    assert [e.text for e in tags] == ["a 1", "b 1"]
    assert abs(float(tags[0].get("y", "0")) - float(tags[1].get("y", "0"))) >= 11


def test_thinning_keeps_means_and_gaps() -> None:
    y = np.arange(1000.0)
    y[505] = math.nan
    made = thin(Series("a", list(range(1000)), list(y)), 100)
    assert made.x == pytest.approx([10 * i + 4.5 for i in range(100)])
    assert math.isnan(made.y[50])
    assert made.y[7] == pytest.approx(74.5)


@pytest.mark.parametrize("count", [3, 60])
def test_bars_are_as_long_as_their_values(count: int) -> None:
    values = {"train": [float(4 * i) for i in range(count)], "val": [float(i) for i in range(count)]}
    chart = parsed(bar_chart([f"c{i}" for i in range(count)], values, title="t"))
    side = "width" if count == 3 else "height"
    lengths = {
        kind: [float(e.get(side, "")) for e in chart.iter("rect") if e.get("class") == f"bar {kind}"]
        for kind in ("s0", "s1")
    }
    unit = lengths["s0"][-1] / values["train"][-1]
    assert lengths["s0"] == pytest.approx([unit * v for v in values["train"]], abs=0.1)
    assert lengths["s1"] == pytest.approx([unit * v for v in values["val"]], abs=0.1)


def test_bars_of_nothing_have_no_length() -> None:
    chart = parsed(bar_chart(["a"], {"train": [0.0]}, title="t"))
    assert [e.get("width") for e in chart.iter("rect")] == ["0.0"]


@pytest.mark.parametrize("classes", [2, 10, 16, 30])
def test_each_filled_cell_of_a_confusion_matrix_tells_its_count(classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 3, (classes, classes))
    chart = heat_map(counts, [f"k{i}" for i in range(classes)], title="t")
    told = {tuple(map(int, m)) for m in re.findall(r"<title>true k(\d+), predicted k(\d+): (\d+) images", chart)}
    assert told == {(i, j, counts[i, j]) for i, j in np.argwhere(counts)}
    numbers = [e.text for e in parsed(chart).iter("text") if e.get("class") == "count"]
    assert len(numbers) == (np.count_nonzero(counts) if classes <= 16 else 0)


def test_cells_lie_in_the_row_of_their_true_class() -> None:
    counts = np.array([[0, 5], [0, 0]])
    frame, cell = [
        {k: float(e.get(k, "")) for k in ("x", "y", "width", "height")}
        for e in parsed(heat_map(counts, ["a", "b"], title="t")).iter("rect")
    ]
    assert cell["y"] == frame["y"]
    assert cell["x"] == frame["x"] + frame["width"] / 2


def test_many_classes_are_shades_with_a_cell_for_every_count_and_stay_small() -> None:
    counts = np.random.default_rng(0).integers(0, 2, (200, 200)) + 50 * np.eye(200, dtype=int)
    chart = heat_map(counts, [f"class {i}" for i in range(200)], title="t")
    cells = sum(e.get("d", "").count("M") for e in parsed(chart).iter("path"))
    assert cells == np.count_nonzero(counts)
    assert len(chart) < 1_000_000


def test_reliability_bars_are_as_high_as_their_accuracy() -> None:
    count, confidence, accuracy = [0, 10, 30], [math.nan, 0.5, 0.9], [math.nan, 0.4, 1.0]
    chart = parsed(reliability(count, confidence, accuracy, title="t"))
    heights = [float(e.get("height", "")) for e in chart.iter("rect") if e.get("class") == "bar s0"]
    assert heights == pytest.approx([0.4 * 246, 246], abs=0.051)
    gaps = [float(e.get("height", "")) for e in chart.iter("rect") if e.get("class") == "gap"]
    assert gaps == pytest.approx([0.1 * 246, 0.1 * 246], abs=0.051)
    below = [float(e.get("height", "")) for e in chart.iter("rect") if e.get("class") == "bar s1"]
    assert below[0] / below[1] == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("name", ["<b>bold</b>", 'quo"te & co', "🪑 émoji", "x" * 60])
def test_names_cannot_break_out_of_a_chart(name: str) -> None:
    matrix = np.array([[3, 1], [0, 2]])
    for chart in (
        heat_map(matrix, [name, "b"], title=name),
        bar_chart([name, "b"], {name: [1.0, 2.0]}, title=name),
        line_chart([Series(name, [0, 1], [0, 1])], title=name),
    ):
        root = parsed(chart)
        assert root.get("aria-label") == name
        assert not list(root.iter("b"))
        assert any(name in (e.text or "") for e in root.iter("title"))


def test_overlay_is_bright_where_attention_is_and_keeps_the_size() -> None:
    image = np.full((40, 60, 3), 100, np.uint8)
    made = overlay(image, np.array([[0.0, 0.0], [0.0, 5.0]]))
    assert made.shape == image.shape
    assert made.dtype == np.uint8
    assert made[-1, -1].sum() > made[0, 0].sum()
    assert made[0, 0] == pytest.approx([(1 - STRENGTH) * 100] * 3, abs=3)  # the darkest colour is almost black


def test_a_constant_map_is_dark_everywhere() -> None:
    made = overlay(np.zeros((8, 8, 3), np.uint8), torch.full((2, 2), 0.3))
    assert made.max() <= 3


@pytest.mark.parametrize("name", ["inferno", "RdBu_r"])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_colour_maps_are_those_of_matplotlib(name: str, kind: type) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    levels = np.linspace(0, 1, 1001, dtype=kind)
    assert (colours(levels, name) == matplotlib.colormaps[name](levels)[..., :3] * 255).all()


def test_overlay_refuses_what_is_no_map() -> None:
    with pytest.raises(ValueError, match=r"\[rows, columns\]"):
        overlay(np.zeros((8, 8, 3), np.uint8), np.zeros(4))


@pytest.mark.parametrize("multilabel", [False, True])
def test_tables_fit_eighty_columns_and_show_names_as_they_are(multilabel: bool) -> None:
    from rich.console import Console

    names = ["[red]", "x" * 60, "two\nlines", "🪑"]
    target = torch.eye(4, dtype=torch.long) if multilabel else torch.tensor([1, 0, 1, 3])
    figures = classification(torch.eye(4) * 4 - 2, target, names)
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    tables = [headline(figures), per_class(figures), per_class(figures, 2)] + (
        [] if multilabel else [confused(figures)]
    )  # type: ignore[arg-type]
    with console.capture() as captured:
        for table in tables:
            assert console.measure(table).maximum <= 80
            console.print(table)
    text = captured.get()
    assert "[red]" in text
    assert "two lines" in text
    assert "x" * 27 + "…" in text


def test_gaps_of_the_reliability_chart_never_lie_on_a_bar() -> None:
    """Between a bar and the gap there is the ground, so that a gap has one colour whichever way it goes."""
    parts = parsed(reliability([5, 5], [0.2, 0.8], [0.6, 0.3], title="t")).iter("rect")
    kinds = [e.get("class") for e in parts if e.get("class") in ("bar s0", "ground", "gap")]
    assert kinds == ["bar s0", "ground", "gap"] * 2


@pytest.mark.parametrize(("tiles", "width"), [(3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 4), (9, 3), (10, 5)])
def test_tiles_fill_their_rows(tiles: int, width: int) -> None:
    assert columns(range(tiles)) == width


def test_a_sheet_of_few_columns_stands_in_two_halves_that_keep_images_whole() -> None:
    cell = Cell(np.zeros((4, 4, 3), np.uint8))
    rows = [(name, [cell if name.endswith("0") else None, cell]) for name in ("a0", "a1", "b0", "b1", "c0", "c1")]
    halves = Sheet("s", "t", ["image", "map"], rows).halves
    assert [[name for name, _ in half] for half in halves] == [["a0", "a1", "b0", "b1"], ["c0", "c1"]]
    assert len(Sheet("s", "t", ["image", *"abcdef"], rows).halves) == 1
