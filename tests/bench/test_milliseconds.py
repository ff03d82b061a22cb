"""The benchmark of accuracy against milliseconds, on a tiny model and a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study_calls import call

import vitrail
from vitrail.model.build import create_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "milliseconds.py"
DATA = "synthetic:shapes?n=200&size=32"


@pytest.mark.slow
def test_every_policy_is_a_row_and_a_second_call_measures_what_is_missing(tmp_path: Path) -> None:
    shape = {"depth": 4, "width": 32, "heads": 2, "patch": 4, "image_size": 32}
    run = create_model("deit_tiny", classes=vitrail.open_data(DATA).classes, **shape).save(tmp_path / "dense")
    file = tmp_path / "rows.jsonl"
    words = [str(run), "--data", DATA, "--device", "cpu", "--batch", "1", "4", "--rounds", "2"]
    words += ["--seconds_each", "0.01", "--json", str(file), "--threads", "1"]
    # 0.02 of the cost is out of reach, and a row all the same.
    text = call(SCRIPT, *words, "--shares", "0.7", "0.02")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["policy"] == "dense"
    done = [row for row in rows if "error" not in row]
    policies = ["tome-3", "evit", "tome", "ats-uniform", "ats-inverse", "tome-4", "tome-6", "tome-3-late", "ats-top"]
    assert [row["policy"] for row in done] == ["dense", *policies, "tome-decreasing", "tome-plain-attention"]
    failed = [row for row in rows if "error" in row]
    assert {row["share"] for row in failed} == {0.02}
    assert all("out of reach" in row["error"] for row in failed)
    for row in done[1:]:
        assert row["mac_share"] == pytest.approx(0.7, abs=0.02)
        assert 0 <= row["top1"] <= 1
        assert row["adaptive"]["kind"] == row["policy"].partition("-")[0]
        assert set(row["batches"]) == {"1", "4"}
        for times in row["batches"].values():
            assert min(times["ms"], times["speedup"], times["images_per_second"]) > 0
    assert "| tome | 0.7 | off | 1 |" in text.replace("*", "")
    assert "batch 4, within 0.5 points of dense" in text

    call(SCRIPT, *words, "--shares", "0.7", "0.9", "--policies", "tome")
    rows = [json.loads(line) for line in file.read_text().splitlines()][len(rows) :]
    assert [(row["policy"], row["share"]) for row in rows] == [("tome", 0.9)]


@pytest.mark.slow
def test_several_runs_are_one_row_of_the_table_with_mean_and_deviation(tmp_path: Path) -> None:
    shape = {"depth": 4, "width": 32, "heads": 2, "patch": 4, "image_size": 32}
    classes, file = vitrail.open_data(DATA).classes, tmp_path / "rows.jsonl"
    runs = [str(create_model("deit_tiny", classes=classes, **shape).save(tmp_path / name)) for name in "ab"]
    words = [*runs, "--data", DATA, "--device", "cpu", "--batch", "2", "--rounds", "2", "--seconds_each", "0.01"]
    text = call(SCRIPT, *words, "--json", str(file), "--shares", "0.7", "--policies", "tome-3").replace("*", "")
    top1 = [row["top1"] for row in map(json.loads, file.read_text().splitlines()) if row["policy"] == "tome-3"]
    assert len(top1) == 2
    mean, deviation = 50 * sum(top1), 100 * abs(top1[0] - top1[1]) / 2**0.5
    assert f"| tome-3 | 0.7 | off | 2 | {mean:.2f} ± {deviation:.2f} |" in text

    again = call(SCRIPT, *words, "--json", str(tmp_path / "other"), "--seconds", "0")
    assert "0 seconds are over" in again
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_files_are_timed_beside_the_file_of_the_dense_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    shape = {"depth": 2, "width": 32, "heads": 2, "patch": 4, "image_size": 32}
    run = create_model("deit_tiny", classes=vitrail.open_data(DATA).classes, **shape).save(tmp_path / "dense")
    file = tmp_path / "rows.jsonl"
    words = [str(run), "--data", DATA, "--device", "cpu", "--batch", "1", "4", "--rounds", "2", "--threads", "1"]
    words += ["--seconds_each", "0.01", "--json", str(file), "--shares", "0.7", "--policies", "tome", "ats-uniform"]
    text = call(SCRIPT, *words, "--runtimes", "torch", "onnxruntime", "int8")
    rows = {(row["policy"], row["compile"]): row for row in map(json.loads, file.read_text().splitlines())}
    assert {kind for _, kind in rows} == {"off", "onnxruntime", "int8"}
    assert rows["tome", "onnxruntime"]["top1"] == pytest.approx(rows["tome", "off"]["top1"], abs=0.02)
    precisions = {kind: row["batches"]["4"]["precision"] for (policy, kind), row in rows.items() if policy == "tome"}
    assert precisions == {"off": "float32", "onnxruntime": "float32", "int8": "int8"}
    assert rows["tome", "onnxruntime"]["batches"]["1"]["dense_ms"] > 0
    uniform = rows["ats-uniform", "onnxruntime"]["batches"]
    assert all("draws tokens at random" in row["error"] for row in uniform.values())
    assert "| tome | 0.7 | int8 | 1 |" in text.replace("*", "")
