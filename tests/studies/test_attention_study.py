"""The study of attention transfer makes every row once, goes on where it was, and says what cannot be measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import study_calls
from PIL import Image
from study_calls import STUDIES, found_in, rows

OF_STUDY = ("attention_models", "attention_tables", "device_runs", "found", "found_tables")
# Rows of one seed of a smoke run (4 layers, 3 heads) by table and subject, in order.
ROWS: dict[str, dict[str, list[str]]] = {
    "main": {
        "scratch": ["no teacher"],
        "fine-tune": ["pre-trained"],
        "copy": ["pre-trained", "fine-tuned", "random"],
        "distill": ["pre-trained", "fine-tuned", "random"],
    },
    "targets": {"copy": ["q", "k", "v"], "distill": ["q", "features of the last block"]},
    "averages": {"copy, averaged over": ["examples", "layers", "heads", "queries"]},
    "layers": {
        "copy, first layers": ["1", "2", "3"],
        "copy, last layers": ["1", "2", "3"],
        "distill, first layers": ["1", "2", "4"],
    },
    "heads": {"copy, heads": ["1", "2"]},
    "weights": {"distill, weight": ["0.1", "0.3", "3", "10"]},
    "other": {name: ["pre-trained on other data"] for name in ("fine-tune", "copy", "distill")},
    "mix": {
        "copy from mae": ["student begins as mae", "student begins as mae-other"],
        "copy from mae-other": ["student begins as mae"],
    },
    "shift": {
        "scratch": ["no teacher"],
        "fine-tune": ["pre-trained"],
        "copy": ["pre-trained", "fine-tuned"],
        "distill": ["pre-trained", "fine-tuned"],
    },
    "ensemble": {
        "distill": ["fine-tune", "another seed of it"],
        "copy": ["fine-tune"],
        "scratch": ["fine-tune", "another seed of it"],
        "fine-tune": ["another seed of it"],
    },
    "boxes": {"scratch": ["no teacher"], "fine-tune": ["pre-trained"], "distill": ["pre-trained"]},
    "cka": {name: ["one to one"] for name in ("autoencoder", "scratch", "copy", "distilled")},
    "jsd": {
        name: ["direct", "bipartite", "minimum", "averaged"]
        for name in ("fine-tuned", "scratch", "distilled", "copied q", "copied k")
    },
    "choice": {name: ["rate 0.0005", "rate 0.0015"] for name in ("scratch", "tune", "copy", "distill")},
}


call = partial(study_calls.call, STUDIES / "attention_transfer.py")


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
    assert set(splits.values()) == {"test"}


@pytest.mark.slow
def test_a_second_call_makes_nothing_again(folder: Path) -> None:
    before = (folder / "found.jsonl").read_bytes()
    call("--smoke", "--seeds", "1", "--out", str(folder))
    assert (folder / "found.jsonl").read_bytes() == before


@pytest.mark.slow
def test_tables_have_every_row(folder: Path) -> None:
    text = call("--table", str(folder))
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| | |")]
    shown = [row for row in rows(folder) if row["table"] not in ("about", "pictures")]
    assert len(lines) == len(shown)
    assert text.count("### ") == len({row["table"] for row in shown})


@pytest.mark.slow
def test_pictures_can_be_looked_at(folder: Path) -> None:
    for name in ("cka", "jsd", "attention"):
        with Image.open(folder / "pictures" / f"{name}.png") as picture:
            assert min(picture.convert("RGB").size) > 100


@pytest.fixture
def of_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The study's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(STUDIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in OF_STUDY:
            del sys.modules[name]


def written(folder: Path, scratch: list[float], tune: list[float], other: list[float]) -> Path:
    """A study of which some rows of the main table are there."""
    made = {("scratch", "no teacher"): scratch, ("fine-tune", "pre-trained"): tune, ("copy", "pre-trained"): other}
    lines = [
        json.dumps({"table": "main", "subject": subject, "what": what, "seed": seed, "top1": value})
        for (subject, what), values in made.items()
        for seed, value in enumerate(values)
    ]
    (folder / "found.jsonl").write_text("\n".join(lines))
    return folder


def test_the_gap_is_that_of_means_over_seeds(of_study: None, tmp_path: Path) -> None:
    from attention_tables import tables

    # (0.35 - 0.30) / (0.50 - 0.30), and the deviation of 0.025 / 0.2 and 0.075 / 0.2
    text = tables(written(tmp_path, [0.29, 0.31], [0.49, 0.51], [0.325, 0.375]))
    assert "| copy | pre-trained | 35.0 ± 3.5 | 25 ± 18 | 2 |" in text
    assert "| fine-tune | pre-trained | 50.0 ± 1.4 | 100 ± 7 | 2 |" in text


@pytest.mark.parametrize(
    ("value", "scratch", "tune", "percent"),
    [(85.1, 83.0, 85.7, 77.8), (71.8, 64.3, 79.9, 48.1), (82.0, 82.5, 83.6, -45.5), (43.6, 39.1, 46.3, 62.5)],
    ids=["ViT-L", "iNaturalist 2018", "ViT-B, below scratch", "boxes of COCO"],
)
def test_the_gap_of_printed_figures(of_study: None, value: float, scratch: float, tune: float, percent: float) -> None:
    """As printed by Li et al. 2024 (arXiv 2411.09702)."""
    from attention_tables import recovered

    assert round(100 * recovered(value, [scratch] * 2, [tune] * 2), 1) == percent


@pytest.mark.parametrize(
    ("scratch", "tune"),
    [([0.20, 0.40], [0.49, 0.51]), ([0.29, 0.31], [0.40, 0.60]), ([0.5, 0.5], [0.4, 0.4]), ([0.2], [0.6])],
    ids=["scratch varies", "tune varies", "tune is worse", "one seed"],
)
def test_a_gap_of_less_than_two_spreads_is_not_measurable(
    of_study: None, tmp_path: Path, scratch: list[float], tune: list[float]
) -> None:
    from attention_tables import tables

    text = tables(written(tmp_path, scratch, tune, [0.35]))
    assert "| copy | pre-trained | 35.0 | not measurable | 1 |" in text


def test_sweeps_are_of_quarters_of_the_layers_and_distillation_of_three_of_them(of_study: None) -> None:
    from attention_models import ways

    found = ways(depth=12, heads=6)
    assert found["distill"].options["layers"] == "first:9"
    assert [name for name, way in found.items() if way.part == "layers"] == [
        *(f"copy-{end}-{k}" for end in ("first", "last") for k in (3, 6, 9)),
        *(f"distill-first-{k}" for k in (3, 6, 12)),
    ]
    assert [way.what for way in found.values() if way.part == "heads"] == ["1", "2", "4"]
