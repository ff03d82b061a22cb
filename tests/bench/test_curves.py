"""The benchmark of speed and memory against resolution, batch size, classes and bank rows, at the smallest size."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from study_calls import call, script_module

from vitrail.measure.speed import Timing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "curves.py"
NETWORKS = ["DeiT-S", "CaiT-XXS24", "ResMLP-S24", "PatchConvNet-S60", "XCiT-S12/16", "ResNet-50"]
NAMESPACE = "{http://www.w3.org/2000/svg}"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def smoke(file: Path, *words: str) -> list[dict[str, Any]]:
    call(SCRIPT, "--smoke", "--device", "cpu", "--json", str(file), *words)
    return read(file)


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        patch.setattr(sys, "path", [*sys.path])  # the script adds tools/
        return script_module(SCRIPT)


@pytest.fixture
def fake(curves: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`fake(file, failures)` makes a call of the script whose points are not measured, and gives those it began."""

    def run(file: Path, *words: str, failures: dict[int, Exception] | None = None) -> list[Any]:
        begun: list[Any] = []

        def measured(point: Any, bench: Any) -> dict[str, float]:
            begun.append(point)
            if failures and point.rows in failures:
                raise failures[point.rows]
            return {"ms": 1.0, "images_per_second": 2.0}

        monkeypatch.setattr(curves, "measured", measured)
        monkeypatch.setattr(curves, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(curves, "prepare", lambda *settings: None)
        monkeypatch.setattr(sys, "argv", ["curves.py", "--device", "cpu", "--json", str(file), *words])
        curves.main()
        return begun

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("part", "axis", "values"), [("resolution", "pixels", (32, 64)), ("batch", "batch", (1, 2))])
def test_every_network_is_trained_and_used_at_every_value(
    tmp_path: Path, part: str, axis: str, values: tuple[int, ...]
) -> None:
    rows = smoke(tmp_path / "rows.jsonl", "--part", part)
    assert [row.get("error") for row in rows] == [None] * len(rows)
    works = ("training", "inference")
    points = [(value, name, work) for value in values for name in NETWORKS for work in works]
    assert [(row[axis], row["name"], row["work"]) for row in rows] == points
    for row in rows:
        assert row["ms"] > 0
        low, high = row["quartiles"]
        assert low <= row["images_per_second"] <= high
        assert row["peak_gib"] is None  # only CUDA counts it


@pytest.mark.slow
def test_steps_and_heads_are_trained_with_every_number_of_classes_and_both_losses(tmp_path: Path) -> None:
    rows = smoke(tmp_path / "rows.jsonl", "--part", "classes")
    names = ["step, CE", "step, BCE", "head, CE", "head, BCE"]
    assert [(row["classes"], row["name"]) for row in rows] == [(count, name) for count in (10, 20) for name in names]
    assert all(row.get("ms", 0) > 0 for row in rows)


@pytest.mark.slow
def test_banks_are_searched_at_every_size_and_one_too_small_for_the_batch_is_a_row_with_its_error(
    tmp_path: Path,
) -> None:
    rows = smoke(tmp_path / "rows.jsonl", "--part", "bank", "--values", "2", "16", "64")
    assert [(row["rows"], row["name"]) for row in rows] == [(n, b) for n in (2, 16, 64) for b in ("MSF, k = 5", "MoCo")]
    assert all("raise --objective.bank" in row["error"] for row in rows[:2])
    assert all(row["ms"] > 0 for row in rows[2:])


def test_a_head_is_trained_without_its_trunk(curves: ModuleType) -> None:
    point = curves.Point("classes", "head, CE", "training", 32, 4, 10)
    bench = curves.Bench(torch.device("cpu"), compile=False, smoke=True)
    alone = curves.objective(point, bench)
    held = curves.batches(point, bench)[0]
    loss = alone(held)["loss"]
    logits = alone.tokens[:, 0] @ alone.model.head.fc.weight.T + alone.model.head.fc.bias
    picked = logits.log_softmax(1)[range(4), held.label.tolist()]
    torch.testing.assert_close(loss, -picked.mean())
    loss.backward()
    trained = {name for name, p in alone.named_parameters() if p.grad is not None}
    assert trained == {"tokens", "model.head.fc.weight", "model.head.fc.bias"}


def test_a_step_that_cannot_be_captured_is_measured_without_a_graph(
    curves: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(point: Any, bench: Any, held: Any, graph: bool) -> tuple[Timing, int]:
        if graph:
            raise RuntimeError("cannot be captured")
        return Timing(4, (2.0, 2.0), (1.0,) * 4), 2**29

    monkeypatch.setattr(curves, "batches", lambda point, bench: [])
    monkeypatch.setattr(curves, "tidy", lambda bench: None)
    monkeypatch.setattr(curves, "timed", timed)
    point = curves.Point("bank", "MoCo", "training", 32, 4, 10, 16)
    row = curves.measured(point, curves.Bench(torch.device("cuda"), compile=False, smoke=False))
    assert row["no_graph"] == "RuntimeError: cannot be captured"
    assert (row["ms"], row["images_per_second"], row["peak_gib"]) == (1000.0, 4.0, 0.5)


def test_the_middle_and_the_ends_of_every_curve_come_first(curves: ModuleType) -> None:
    every = curves.points(curves.FULL)
    assert len(every) == len(set(every)) == 6 * 7 * 2 + 6 * 5 * 2 + 4 * 5 + 2 * 5
    first = every[: 3 * (12 + 12 + 4 + 2)]
    assert {point.pixels for point in first if point.part == "resolution"} == {96, 224, 512}
    assert {point.batch for point in first if point.part == "batch"} == {1, 32, 512}
    assert {point.classes for point in first if point.part == "classes"} == {10, 1000, 21_000}
    assert {point.rows for point in first if point.part == "bank"} == {4096, 65_536, 1_048_576}


def test_a_second_call_measures_only_what_is_missing(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("--part", "bank", "--only", "MoCo", "--values")
    assert [p.rows for p in fake(file, *words, "16", "64")] == [16, 64]
    assert [p.rows for p in fake(file, *words, "64", "256", "16")] == [256]
    assert [row["rows"] for row in read(file)] == [16, 64, 256]


def test_compiled_points_are_rows_of_their_own(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    words = (tmp_path / "rows.jsonl", "--part", "bank", "--only", "MoCo", "--values", "16")
    assert len(fake(*words)) == len(fake(*words, "--compile", "auto")) == 1
    assert fake(*words, "--compile", "auto") == []


def test_a_failing_point_is_a_row_and_the_others_are_measured(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("--part", "bank", "--only", "MoCo", "--values", "16", "64", "256")
    failures: dict[int, Exception] = {16: RuntimeError("broken"), 64: torch.OutOfMemoryError("too large")}
    fake(file, *words, failures=failures)
    assert [row.get("error") for row in read(file)] == ["RuntimeError: broken", "OutOfMemoryError: too large", None]
    assert [p.rows for p in fake(file, *words)] == [16]  # what ran out of memory would do so again


def test_a_row_that_was_cut_off_is_measured_again(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("--part", "bank", "--only", "MoCo", "--values", "16", "64")
    fake(file, *words)
    file.write_text(file.read_text()[:-20])
    assert [p.rows for p in fake(file, *words)] == [64]
    assert fake(file, *words) == []


def test_no_point_begins_after_the_time_is_over(
    fake: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake(tmp_path / "rows.jsonl", "--seconds", "-1") == []
    assert "174 points are left for another call" in capsys.readouterr().out


def test_rows_of_another_machine_are_not_completed(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("--part", "bank", "--only", "MoCo", "--values")
    fake(file, *words, "16")
    file.write_text(json.dumps({**read(file)[0], "machine": "another"}) + "\n")
    with pytest.raises(SystemExit, match="rows of another; name another file"):
        fake(file, *words, "64")


def test_values_of_several_axes_are_rejected(
    fake: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fake(tmp_path / "rows.jsonl", "--part", "bank", "classes", "--values", "16")
    assert "name one --part" in capsys.readouterr().err


def made_up(curves: ModuleType) -> list[dict[str, Any]]:
    rows = []
    for i, point in enumerate(curves.points(curves.FULL)):
        row = {**vars(point), "compile": "off", "machine": "a machine"}
        row |= {"ms": 1.0 + i, "images_per_second": 1000.0 + i, "peak_gib": 0.5 + i}
        rows.append(row)
    return rows


def drawn(file: Path) -> ET.Element:
    return ET.fromstring(file.read_text())


def test_every_part_is_drawn_with_the_names_of_its_lines(curves: ModuleType, tmp_path: Path) -> None:
    curves.draw(made_up(curves), tmp_path)
    lines = {"resolution": NETWORKS, "batch": NETWORKS, "classes": list(curves.STEPS), "bank": list(curves.BANKS)}
    for part, names in lines.items():
        tags = [t.text for t in drawn(tmp_path / f"{part}.svg").iter(f"{NAMESPACE}text") if "tag" in t.attrib["class"]]
        assert sorted(tags) == sorted(names * (4 if names is NETWORKS else 2))


def test_both_axes_are_logarithmic(curves: ModuleType, tmp_path: Path) -> None:
    rows = [row for row in made_up(curves) if row["part"] == "bank" and row["name"] == "MoCo"]
    for row in rows:
        row["ms"] = row["rows"] ** 0.5
    curves.draw(rows, tmp_path)
    circles = list(drawn(tmp_path / "bank.svg").iter(f"{NAMESPACE}circle"))[:5]
    xs, ys = ([float(c.attrib[side]) for c in circles] for side in ("cx", "cy"))
    for places in (xs, ys):  # rows are factors of 4, milliseconds of 2: equal steps
        steps = [b - a for a, b in pairwise(places)]
        assert steps == pytest.approx([steps[0]] * 4, abs=0.2)


def test_what_ran_out_of_memory_is_named_below_its_chart(curves: ModuleType, tmp_path: Path) -> None:
    rows = made_up(curves)
    full = {key: value for key, value in rows[0].items() if key not in ("ms", "images_per_second", "peak_gib")}
    curves.draw([{**full, "error": "OutOfMemoryError: CUDA"}, *rows[1:]], tmp_path)
    texts = [text.text for text in drawn(tmp_path / "resolution.svg").iter(f"{NAMESPACE}text")]
    assert "Out of memory: DeiT-S, training, 224." in texts
    assert "a machine, not compiled." in texts


def test_texts_of_the_charts_stay_inside(curves: ModuleType, tmp_path: Path) -> None:
    for path in curves.draw(made_up(curves), tmp_path):
        svg = drawn(path)
        width = float(svg.attrib["viewBox"].split()[2])
        for group in svg.iter(f"{NAMESPACE}g"):
            shift = float(group.attrib["transform"].removeprefix("translate(").split()[0])
            for text in group.iter(f"{NAMESPACE}text"):
                long = (8 if "tag" in text.attrib["class"] else 6.7) * len(text.text or "")
                start = (
                    float(text.attrib["x"]) - {"start": 0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
                )
                assert start >= 0, text.text
                assert shift + start + long <= width, text.text


def test_rows_without_a_result_are_not_drawn(fake: Callable[..., list[Any]], tmp_path: Path) -> None:
    words = ("--draw", str(tmp_path / "missing.jsonl"), "--out", str(tmp_path))
    with pytest.raises(ValueError, match="measure some points first"):
        fake(tmp_path / "rows.jsonl", *words)


def test_the_charts_of_the_results_are_drawn_from_their_rows(curves: ModuleType, tmp_path: Path) -> None:
    stored = SCRIPT.parents[1] / "docs" / "results" / "curves"
    for path in curves.draw(curves.rows_of(stored / "rows.jsonl"), tmp_path):
        assert path.read_text() == (stored / path.name).read_text()
