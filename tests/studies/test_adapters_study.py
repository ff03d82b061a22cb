"""The study of adapters makes every row once, goes on where it was, and counts what it trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import study_calls
from study_calls import STUDIES, found_in, rows

OF_STUDY = ("adapter_runs", "adapter_tables", "device_runs", "found", "found_tables")
ADAPTED = {
    "full fine-tuning": ["all weights"],
    "linear": ["classifier alone"],
    "LoRA, q and v": ["rank 1", "rank 4"],
    "NOLA, MLP, rank 8": ["k = l = 60", "k = l = 250", "k = l = 1000"],
}
BITS = ["8", "7", "6", "5", "4", "3", "2", "trained in 3 bits", "trained in 2 bits"]
FEW = [f"{subject}, {what[-1]}" for subject, what in ADAPTED.items() if "NOLA" not in subject]
# Rows of one seed of a smoke run by table and subject, in order.
ROWS: dict[str, dict[str, list[str]]] = {
    "main": ADAPTED,
    "bits": {"LoRA, rank 4": BITS, "NOLA, k = l = 250": BITS},
    "toy": {"dense": ["all weights"], "PRANC": ["32 a layer"], "NOLA": ["16 + 16 a layer"]},
    "shots": {f"{n} images a class": [*FEW, "NOLA, MLP, rank 8, k = l = 250"] for n in (5, 10)},
    "scratch": {
        "dense": ["all weights"],
        "PRANC": ["500 a convolution, 2000"],
        "LoRA": ["rank 3"],
        "NOLA, rank 8": ["250 + 250 a convolution, 2000"],
    },
    "other": ADAPTED,
    "choice": {
        "full": ["rate 0.0002", "rate 0.0005"],
        "linear": ["rate 0.002", "rate 0.01"],
        "lora": ["rate 0.002", "rate 0.01"],
        "nola": ["rate 0.005", "rate 0.02"],
        "scratch-pranc": ["rate 0.005", "rate 0.02"],
        "scratch-lora": ["rate 0.001", "rate 0.005"],
        "scratch-nola": ["rate 0.005", "rate 0.02"],
    },
    "few choice": {
        f"{family}, {n} images a class": [f"rate {rate}" for rate in rates]
        for n in (5, 10)
        for family, rates in {
            "full": ("0.0002", "0.0005"),
            **dict.fromkeys(("linear", "lora", "nola"), ("0.0005", "0.001")),
        }.items()
    },
}


call = partial(study_calls.call, STUDIES / "adapters.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the smoke run of one seed wrote."""
    out = tmp_path_factory.mktemp("study")
    call("--smoke", "--seeds", "1", "--out", str(out))
    return out


@pytest.mark.slow
def test_every_row_is_there_once(folder: Path) -> None:
    assert found_in(folder, ROWS) == ROWS


@pytest.mark.slow
def test_what_is_chosen_is_chosen_on_val_and_what_is_reported_is_of_test(folder: Path) -> None:
    splits = {row["table"]: row["split"] for row in rows(folder) if row["table"] in ROWS}
    assert splits.pop("choice") == "val"
    assert splits.pop("few choice") == "val"
    assert set(splits.values()) == {"test"}


@pytest.mark.slow
def test_fewer_bits_make_smaller_files(folder: Path) -> None:
    for subject in ROWS["bits"]:
        found = [row["bytes"] for row in rows(folder) if row["subject"] == subject and row["what"] in BITS[:7]]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == 7


@pytest.mark.slow
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = (folder / "found.jsonl").read_bytes()
    call("--smoke", "--seeds", "1", "--out", str(folder))
    assert (folder / "found.jsonl").read_bytes() == before


@pytest.mark.slow
def test_tables_have_every_row(folder: Path) -> None:
    text = call("--table", str(folder))
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| | |")]
    shown = [row for row in rows(folder) if row["table"] != "about"]
    assert len(lines) == len(shown)
    assert text.count("### ") == len({row["table"] for row in shown})


@pytest.fixture
def of_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The study's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(STUDIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in OF_STUDY:
            del sys.modules[name]


def test_from_scratch_all_adapters_have_about_as_many_numbers(of_study: None) -> None:
    """12,876 as the paper's NOLA; its LoRA has 13,295 by a rank that it does not give."""
    from adapter_runs import WAYS

    from vitrail.model.adapters.apply import apply, counts
    from vitrail.model.build import create_model

    found = {
        name: counts(apply(create_model("cifar_resnet20", classes=10, device="meta"), way.adapter)).trained
        for name, way in WAYS.items()
        if way.part == "scratch" and way.adapter is not None
    }
    assert found == {"scratch-pranc": 12_876, "scratch-lora": 13_316, "scratch-nola": 12_876}
