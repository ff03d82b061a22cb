"""Benchmarks of latency and of training on a CPU, at the smallest size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_script
from study_calls import call

from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.model.build import create_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rows_of(script: str, folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    file = folder / "rows.jsonl"
    text = call(BENCHMARKS / script, "--smoke", "--device", "cpu", "--json", str(file), *words)
    return [json.loads(line) for line in file.read_text().splitlines()], text


@pytest.mark.slow
def test_the_latency_benchmark_compares_every_runtime_and_names_the_fastest(tmp_path: Path) -> None:
    rows, text = rows_of("latency.py", tmp_path, "--files", str(tmp_path / "files"))
    assert [(row["model"], row["batch"]) for row in rows] == [
        (model, batch) for model in ("DeiT-Ti", "DeiT-S, ATS sampled", "MobileNetV4-S") for batch in (1, 8)
    ]
    by_model = {row["model"]: set(row["p50_ms"]) | set(row["not_measured"]) for row in rows}
    exported = {"onnxruntime", "OpenVINO", "int8"}
    assert by_model["DeiT-Ti"] == {"ours", "ours optimized", "timm", *exported}
    assert by_model["DeiT-S, ATS sampled"] == {"ours", "ours optimized", *exported}  # timm has no such model
    assert by_model["MobileNetV4-S"] == {"timm", *exported}
    for row in rows:
        p50, p99 = row["p50_ms"], row["p99_ms"]
        assert row["fastest"] == min(p50, key=p50.get)
        assert all(p99[way] >= p50[way] > 0 for way in p50)
        assert row["threads"] == 1
    assert rows[2]["gmacs"] < rows[2]["dense_gmacs"]  # tokens were dropped
    assert "| DeiT-Ti | 1 |" in text
    assert (tmp_path / "files" / "deit_tiny-96.onnx").is_file()


@pytest.mark.slow
def test_models_that_are_prepared_together_have_the_same_rows(tmp_path: Path) -> None:
    rows, _ = rows_of("latency.py", tmp_path, "--together", "--only", "Ti", "--files", str(tmp_path / "files"))
    assert sorted((row["model"], row["batch"]) for row in rows) == [("DeiT-Ti", 1), ("DeiT-Ti", 8)]
    assert all(min(row["p50_ms"].values()) > 0 for row in rows)


@pytest.mark.slow
def test_the_int8_benchmark_has_the_accuracy_of_the_model_and_of_its_files(tmp_path: Path) -> None:
    data = open_data("embedded:fashion")
    model = create_model("cifar_resnet20", classes=data.classes, image_size=28).eval()
    model.save(tmp_path / "net")
    file = tmp_path / "rows.jsonl"
    call(BENCHMARKS / "int8.py", str(tmp_path / "net"), "--data", data.uri, "--smoke", "--json", str(file))
    rows = {row["file"]: row for row in map(json.loads, file.read_text().splitlines())}
    test = data["test"].take([n * (len(data["test"]) - 1) // 39 for n in range(40)])
    preprocess = Preprocess(model.preprocess)
    with torch.inference_mode():
        logits = model(torch.stack([preprocess(test.read(row)) for row in range(40)]))
    assert rows["float32"]["top1"] == pytest.approx(float((logits.argmax(1) == test.labels).float().mean()))
    assert rows["int8"]["mb"] < rows["float32"]["mb"] / 2
    assert rows["int8"]["top1"] - rows["float32"]["top1"] == pytest.approx(rows["int8"]["change"])
    assert rows["int8"]["interval"][0] <= rows["int8"]["change"] <= rows["int8"]["interval"][1]


def test_processor_time_of_several_threads_is_rejected() -> None:
    done = run_script(BENCHMARKS / "latency.py", "--blocks", "--device", "cpu", "--threads", "2", "--clock", "cpu")
    assert done.code == 2
    assert "use --threads 1" in done.err


@pytest.mark.slow
def test_the_latency_benchmark_of_blocks_covers_the_shapes_of_the_table_of_edge_devices(tmp_path: Path) -> None:
    rows, _ = rows_of("latency.py", tmp_path, "--blocks")
    assert {(row["tokens"], row["width"], row["heads"]) for row in rows} >= {(256, 512, 8), (64, 2048, 8)}
    mixers = {"softmax", "softmax, map stored", "SimA", "SimA, q kᵀ first", "ELU", "XCA"}
    assert all(set(row["p50_ms"]) == mixers and row["fastest"] in mixers for row in rows)


@pytest.mark.slow
def test_the_benchmark_of_training_compares_both_loops_part_by_part(tmp_path: Path) -> None:
    rows, text = rows_of("cpu_training.py", tmp_path)
    parts = ("training", "loading", "step")
    assert [(row["setting"], row["measured"]) for row in rows] == [
        (s, p) for s in ("demo", "photos", "scratch") for p in parts
    ]
    assert [row["loader"] for row in rows[::3]] == ["device", "host", "host"]
    for row in rows:
        assert min(row["ours_images_per_second"], row["timm_images_per_second"]) > 0
        assert row["fastest"] == ("ours" if row["ratio"] > 1 else "timm")
    assert "| demo | training | 50 |" in text
    assert "| photos | training | 4 |" in text
    assert "| scratch | training | 4 |" in text


def test_the_benchmark_of_training_leaves_photos_out_where_there_are_none(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    text = call(BENCHMARKS / "cpu_training.py", "--only", "photos", "--data", missing)
    assert "photos are left out: no folder" in text
    assert "name one with --data" in text


def test_talking_heads_with_and_without_maps_take_turns(tmp_path: Path) -> None:
    rows, text = rows_of("talking_heads.py", tmp_path)
    assert [(row["tokens"], row["backward"]) for row in rows] == [(4, False), (4, True), (9, False), (9, True)]
    assert all(set(row["ms"]) == {"always", "never"} and min(row["ratio"]) > 0 for row in rows)
    assert text.count("| CaiT-XXS24 |") == 4
