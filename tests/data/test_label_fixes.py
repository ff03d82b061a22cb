"""Fixes of labels: all faulty rows at once, tables that open as data, images untouched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitrail.data.check.check import write_suspects
from vitrail.data.check.contact_sheet import Suspect
from vitrail.data.dataset import DataSet
from vitrail.data.open import open_data
from vitrail.data.sources.table import apply_fixes
from vitrail.schema import ConfigError


def row_of(data: DataSet, key: str, fix: str) -> str:
    split = next(split for split in data.splits.values() if key in list(split.keys))
    return f"{key},{split.index[list(split.keys).index(key)]},{split.name},{fix}"


def fixes(tmp_path: Path, *rows: str, header: str = "path,index,split,fix") -> Path:
    file = tmp_path / "fixes.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def test_every_faulty_row_is_reported_and_nothing_is_written(photos: Path, tmp_path: Path) -> None:
    data = open_data(photos)
    good = row_of(data, "red/00.jpg", "blue")
    file = fixes(
        tmp_path,
        good,
        "nowhere.jpg,0,train,blue",
        good.replace("red/00.jpg", "red/01.jpg"),
        row_of(data, "red/02.jpg", "gren"),
        good.replace("blue", "green"),
        "x.jpg,,,",
    )
    with pytest.raises(ConfigError) as caught:
        apply_fixes(data, file, tmp_path / "out.csv")
    lines = caught.value.problems
    assert len(lines) == 4
    assert "line 3: " in lines[0]
    assert "no image 'nowhere.jpg' with index 0 in split 'train'" in lines[0]
    assert "no image 'red/01.jpg'" in lines[1]
    assert "no class 'gren', nor 'remove'; did you mean 'green'?" in lines[2]
    assert "'red/00.jpg' has another fix above" in lines[3]
    assert not (tmp_path / "out.csv").exists()


def test_the_table_opens_as_the_same_splits_and_images_stay(photos: Path, tmp_path: Path) -> None:
    data = open_data(photos)
    before = {file: file.read_bytes() for file in photos.rglob("*.jpg")}
    file = fixes(tmp_path, row_of(data, "red/00.jpg", "blue"), row_of(data, "blue/03.jpg", "remove"), "x.jpg,9,train,")
    counts = apply_fixes(data, file, tmp_path / "deeper" / "out.csv")
    assert counts == {"images": 59, "changed": 1, "removed": 1}
    again = open_data(tmp_path / "deeper" / "out.csv")
    label = {Path(k).parts[-2:]: again.classes[c] for s in again.splits.values() for k, c in zip(s.keys, s.labels)}  # noqa: B905
    wanted = {Path(k).parts[-2:]: data.classes[c] for s in data.splits.values() for k, c in zip(s.keys, s.labels)}  # noqa: B905
    del wanted["blue", "03.jpg"]
    assert label == {**wanted, ("red", "00.jpg"): "blue"}
    assert {n: len(s) for n, s in again.splits.items()} != {}
    for name, split in again.splits.items():
        kept = [key for key in data[name].keys if key != "blue/03.jpg"]
        assert [Path(key).parts[-2:] for key in split.keys] == [Path(key).parts[-2:] for key in kept]
    assert {file: file.read_bytes() for file in photos.rglob("*.jpg")} == before


def test_several_labels_are_joined(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    table.write_text(
        "path,label,split\n"
        + "".join(f"{photos}/red/{i:02d}.jpg,{'red|warm' if i % 2 else 'red'},train\n" for i in range(8))
    )
    data = open_data(table, val_fraction=0)
    keys = list(data["train"].keys)
    rows = [row_of(data, keys[i], fix) for i, fix in ((1, "red"), (0, "warm | red"), (2, "|"))]
    rows += [row_of(data, keys[i], "red") for i in (3, 5, 7)]
    apply_fixes(data, fixes(tmp_path, *rows), tmp_path / "out.csv")
    again = open_data(tmp_path / "out.csv", val_fraction=0)
    assert (again.multilabel, again.classes) == (True, ("red", "warm"))
    assert again["train"].labels.tolist() == [[1, 1], [1, 0], [0, 0], *[[1, 0]] * 5]


def test_a_class_called_remove_is_a_class(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    files = sorted((photos / "red").iterdir())
    table.write_text("path,label\n" + "".join(f"{f},{'keep' if i % 2 else 'remove'}\n" for i, f in enumerate(files)))
    data = open_data(table, val_fraction=0, test_fraction=0)
    file = fixes(tmp_path, row_of(data, str(files[1]), "remove"))
    assert apply_fixes(data, file, tmp_path / "out.csv") == {"images": 20, "changed": 1, "removed": 0}


def test_generated_images_stay_marked(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    files = sorted((photos / "red").iterdir())
    rows = [f"{f},{'ab'[i % 2]},{int(i > 15)}" for i, f in enumerate(files)]
    table.write_text("\n".join(["path,label,generated", *rows]))
    data = open_data(table, val_fraction=0, test_fraction=0)
    apply_fixes(data, fixes(tmp_path, row_of(data, str(files[0]), "b")), tmp_path / "out.csv")
    assert open_data(tmp_path / "out.csv", val_fraction=0)["train"].generated.sum() == 4


def test_data_without_files_and_foreign_tables_are_rejected(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fixes are for image files with one level of labels"):
        apply_fixes(open_data("synthetic:shapes?n=30"), fixes(tmp_path), tmp_path / "out.csv")
    with pytest.raises(ValueError, match="has no column 'fix'; edit a file that --csv wrote"):
        apply_fixes(open_data(photos), fixes(tmp_path, header="path,index,split"), tmp_path / "out.csv")


def test_suspects_are_rows_with_an_empty_fix(photos: Path, tmp_path: Path) -> None:
    data = open_data(photos)
    first = data["train"].keys[0]
    suspects = [Suspect("train", 0, "probably mislabelled", "red", 0.01234), Suspect("train", 1, "unlike all others")]
    write_suspects(data, suspects, tmp_path / "suspects.csv")
    header, one, two = (tmp_path / "suspects.csv").read_text().splitlines()
    assert header == "path,index,split,label,proposed,score,reason,fix"
    label = data.classes[data["train"].labels[0]]
    assert one == f"{first},{data['train'].index[0]},train,{label},red,0.0123,probably mislabelled,"
    assert two.endswith(",,,unlike all others,")
    assert apply_fixes(data, tmp_path / "suspects.csv", tmp_path / "out.csv")["changed"] == 0
    assert np.array_equal(open_data(tmp_path / "out.csv")["train"].labels, data["train"].labels)
