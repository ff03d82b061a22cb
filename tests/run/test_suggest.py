"""Rounds of labelling: from images without labels and a model to a table, and from the table to the next round."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.cli import run
from vitrail.data.dataset import UNLABELLED
from vitrail.measure.suggestion import suggest_rows
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.run.evaluate import load
from vitrail.run.suggest import suggest

IMAGES = 24


def model_of(classes: tuple[str, ...], **options: Any) -> Classifier:
    torch.manual_seed(0)
    shape = {"image_size": 32, "patch": 8, "width": 32, "depth": 2, "heads": 2}
    return create_model("deit_tiny", classes=classes, **shape, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images without labels, one of them unreadable."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(IMAGES):
        pixels = rng.integers(0, 80, (32, 32, 3)) + 80 * np.eye(3, dtype=int)[i % 3]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02d}.png")
    (folder / "broken.png").write_bytes(b"not an image")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "three"
    model_of(("blue", "green", "red")).save(path)
    return path


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def suggested(folder: Path, photos: Path, count: int, **options: Any) -> dict[str, Any]:
    return suggest(str(folder), str(photos), count, **options)[0]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_suggestions_are_those_of_the_models_embeddings_and_probabilities(photos: Path, folder: Path) -> None:
    model = load(folder).eval()
    paths = sorted(photos.glob("[0-9]*.png"))
    pixels = torch.stack([torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1) for path in paths])
    with torch.no_grad():
        out = model.outputs(pixels)
        embeddings, probabilities = out.representation, model(pixels).softmax(1)
    for by in ("margin", "typical", "coverage"):
        chosen = suggest_rows(by, embeddings, probabilities, torch.zeros(0, dtype=torch.int64), 5, 3)
        wanted = [paths[i].name for i in chosen[0].tolist()]
        assert [row["path"] for row in suggested(folder, photos, 5, by=by)["suggestions"]] == wanted


def test_rounds_go_on_from_the_table_and_never_suggest_what_has_a_label(
    photos: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, words = tmp_path / "next.csv", ["check", photos, "--model", folder, "--suggest", 6, "--by", "typical"]
    code, out, _ = ask(capsys, *words, "--csv", table, "--json")
    first = rows_of(table)
    assert code == 0
    assert [row["path"] for row in first] == [row["path"] for row in json.loads(out)["suggestions"]]
    assert {(row["label"], row["round"]) for row in first} == {("", "1")}
    for row in first[:4]:  # two of the six are left without a label
        row["label"] = "red"
    with table.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(first[0]))
        writer.writeheader()
        writer.writerows(first)
    assert ask(capsys, *words, "--csv", table, "--labelled", table)[0] == 0
    second = rows_of(table)
    assert second[:4] == first[:4]
    assert {(row["label"], row["round"]) for row in second[4:]} == {("", "2")}
    assert len({row["path"] for row in second}) == 10
    again = suggested(folder, photos, 6, by="typical", labelled=table)  # the same four labels, one round later
    assert [row["path"] for row in again["suggestions"]] == [row["path"] for row in second[4:]]
    assert again["suggestions"][0]["round"] == 3


def test_everything_can_be_labelled_but_what_cannot_be_read(photos: Path, folder: Path) -> None:
    paths = [row["path"] for row in suggested(folder, photos, IMAGES)["suggestions"]]
    assert sorted(paths) == [f"{i:02d}.png" for i in range(IMAGES)]
    with pytest.raises(ValueError, match=f"ask for 1 to {IMAGES}"):
        suggested(folder, photos, IMAGES + 1)


def test_both_counts_the_labels_that_the_model_learned_from(photos: Path, tmp_path: Path) -> None:
    model = model_of(("a", "b"))
    for count, note in ((9, "typical"), (10, "margin")):
        model.stated["class_counts"] = [count, 10]
        model.save(tmp_path / note)
        assert suggested(tmp_path / note, photos, 3)["note"].startswith(note)


def test_a_model_that_learned_without_labels_has_no_margin(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of((UNLABELLED,)).save(tmp_path / "m")
    words = ["check", photos, "--model", tmp_path / "m", "--suggest", 3]
    code, _, err = ask(capsys, *words, "--by", "margin")
    assert (code, err.count("\n")) == (2, 1)
    assert "use typical or coverage" in err
    for by in ("typical", "coverage", "both"):
        assert ask(capsys, *words, "--by", by)[0] == 0


def test_a_sheet_shows_the_suggestions(
    photos: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ask(capsys, "check", photos, "--model", folder, "--suggest", 3, "--out", tmp_path / "sheet.png")
    assert code == 0
    assert Image.open(tmp_path / "sheet.png").height > 200
    assert sum(".png" in line and "sheet" not in line for line in out.splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("path,label\n00.png,red\n", "no column 'round'"),
        ("path,label,round,score\nelsewhere.png,red,1,0.1\n", "elsewhere.png is none of the images"),
    ],
)
def test_a_table_that_does_not_fit_is_one_sentence(
    content: str, named: str, photos: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(content)
    words = ["check", photos, "--model", folder, "--suggest", 3, "--labelled", tmp_path / "t.csv"]
    code, _, err = ask(capsys, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert named in err


def test_suggestions_need_a_model(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "check", photos, "--suggest", 3)
    assert (code, err.count("\n")) == (2, 1)
    assert "--model RUN" in err


def test_a_table_of_labels_is_for_suggestions_alone(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "check", photos, "--labelled", "next.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert "--suggest 100" in err
