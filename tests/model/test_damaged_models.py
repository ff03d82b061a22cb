"""Model folders that were damaged or edited: a sentence each, and nothing is predicted with them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from vitrail.files import checksum
from vitrail.model.build import create_model
from vitrail.model.store import DESCRIPTION, WEIGHTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = create_model("vit_micro_28", classes=["a", "b", "c"], depth=1, width=16, heads=1)
    return model.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def describe(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit model.json; the checksum of the weights is made to fit."""
    description = json.loads((folder / DESCRIPTION).read_text())
    description |= {"bytes": (folder / WEIGHTS).stat().st_size, "checksum": checksum(folder / WEIGHTS)}
    change(description)
    (folder / DESCRIPTION).write_text(json.dumps(description))


def test_a_model_that_nobody_touched_is_loaded(copied: Path) -> None:
    assert vitrail.load(copied).classes == ("a", "b", "c")


def test_a_description_of_an_earlier_version_has_no_checksum_and_is_loaded(copied: Path) -> None:
    describe(copied, lambda d: d.pop("checksum"))
    vitrail.load(copied)


@pytest.mark.parametrize("byte", [-1, -1000, 2000])
def test_one_flipped_bit_is_noticed(byte: int, copied: Path) -> None:
    data = bytearray((copied / WEIGHTS).read_bytes())
    data[byte] ^= 0x40
    (copied / WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or does not belong to the description"):
        vitrail.load(copied)


def test_weights_that_are_no_numbers_are_rejected(copied: Path) -> None:
    data = bytearray((copied / WEIGHTS).read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start:] = b"\xff" * (len(data) - start)
    (copied / WEIGHTS).write_bytes(data)
    describe(copied, lambda d: None)
    with pytest.raises(ValueError, match="weights that are NaN or infinite"):
        vitrail.load(copied)


def test_predictions_that_are_no_numbers_are_a_sentence(copied: Path) -> None:
    tensors = {name: torch.full_like(tensor, 3e38) for name, tensor in load_file(copied / WEIGHTS).items()}
    save_file(tensors, copied / WEIGHTS)
    describe(copied, lambda d: None)
    model = vitrail.load(copied)
    with pytest.raises(ValueError, match="the model predicts NaN: its weights have diverged or are damaged"):
        model.predict(torch.zeros(3, 28, 28, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("head.fc.bias"), "it lacks head.fc.bias"),
        (lambda t: t.update({"head.fc.bixs": t.pop("head.fc.bias")}), "it lacks head.fc.bias"),
        (lambda t: t.update(more=torch.zeros(2)), "it has more, which the model has not"),
        (lambda t: t.update({"head.fc.bias": torch.zeros(4)}), r"head.fc.bias of shape \(4,\), not \(3,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Any]], object], sentence: str, copied: Path
) -> None:
    tensors = load_file(copied / WEIGHTS)
    change(tensors)
    save_file(tensors, copied / WEIGHTS)
    describe(copied, lambda d: None)
    with pytest.raises(ValueError, match=sentence):
        vitrail.load(copied)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(classes=5), r"is damaged \(classes"),
        (lambda d: d.update(classes=["a", "a", "b"]), "two classes have one name"),
        (lambda d: d.update(classes=[None] * 3), r"classes\[0\]: expected text, got None"),
        (lambda d: d.update(classes=[[1], [2], [3]]), r"is damaged \("),
        (lambda d: d.update(classes=["a"]), "head.fc"),
        (lambda d: d.update(multilabel="x"), r"is damaged \(multilabel: expected true or false"),
        (lambda d: d.update(files=[1, None]), r"is damaged \(files|lacks"),
        (lambda d: d.update(files=3), r"is damaged \(files"),
        (lambda d: d.update(stated=None), r"is damaged \(stated"),
        (lambda d: d.update(spec=[]), r"is damaged \(spec"),
        (lambda d: d.pop("spec"), r"is damaged \(.*missing spec"),
        (lambda d: d["spec"]["trunk"].update(width=10**9), "describes no model that can be built|out of range"),
        (lambda d: d["spec"]["trunk"].update(depth=10**9), "describes no model that can be built|out of range"),
        (lambda d: d["spec"]["trunk"].update(parallel=10**9), "describes no model that can be built|out of range"),
        (lambda d: d["spec"]["head"].update(copies=True), "copies: expected a whole number, got True"),
        (lambda d: d["spec"]["trunk"].update(colour="red"), "describes no model that can be built|no such setting"),
        (lambda d: d["preprocess"].update(size=10**6), "size: 1000000 is out of range"),
        (lambda d: d.update(format=99), r"by a later version of vitrail \(format 99, this one reads up to 2\); update"),
        (
            lambda d: d.update(format_version=7),
            r"later version of vitrail \(format 7, this one reads up to 1\); update",
        ),
    ],
)
def test_descriptions_that_cannot_be_are_named(
    change: Callable[[dict[str, Any]], object], sentence: str, copied: Path
) -> None:
    describe(copied, change)
    with pytest.raises((ValueError, OSError), match=sentence):
        vitrail.load(copied)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", "{", "\xff"])
def test_descriptions_that_are_no_json_are_a_sentence(text: str, copied: Path) -> None:
    (copied / DESCRIPTION).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"model.json is damaged"):
        vitrail.load(copied)
