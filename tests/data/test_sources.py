"""Folders, tables, arrays and named sets become divided data sets, or one clear sentence."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile import colour, make_hostile
from PIL import Image
from processes import server

from vitrail.config import from_mapping
from vitrail.data.check.scan import cache_file, drop_bad, reject_if_too_many, scan
from vitrail.data.counter import bits
from vitrail.data.dataset import DataSet, Level, Location, Source, Split, apportion, hold_out, limit_train
from vitrail.data.open import open_data, open_source
from vitrail.data.sources.folder import image_files
from vitrail.data.sources.npz import mapped
from vitrail.recipes import recipe
from vitrail.registry import PARTS, register
from vitrail.run.train import train


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 5, 3), value % 256, np.uint8)).save(path)
    return path


def tree(root: Path, sizes: dict[str, int], names=lambda i: f"{i}.png") -> Path:
    for name, count in sizes.items():
        for i in range(count):
            write(root / name / names(i), i)
    return root


def made(labels, classes: int | None = None) -> DataSet:
    labels = np.asarray(labels, np.int64)
    n = len(labels)
    split = Split("all", len, np.arange(n), [str(i) for i in range(n)], labels)
    count = classes or (labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1)
    return DataSet("made", tuple(map(str, range(count))), {"all": split})


# folders


def test_an_undivided_tree_is_carved_and_labelled_by_folder(tmp_path):
    data = open_data(tree(tmp_path, {"cat": 20, "dog": 30}))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 40, "val": 5, "test": 5}
    assert data.classes == ("cat", "dog")
    for split in data.splits.values():
        assert all(
            data.classes[label] == key.split("/")[0] for key, label in zip(split.keys, split.labels, strict=True)
        )
    indices = np.concatenate([split.index for split in data.splits.values()])
    assert sorted(indices) == list(range(50))


def test_the_image_behind_a_row_is_the_one_its_key_names(tmp_path):
    data = open_data(tree(tmp_path, {"a": 12, "b": 12}))
    for split in data.splits.values():
        for row, key in enumerate(split.keys):
            assert split.read(row).getpixel((0, 0))[0] == int(Path(key).stem)


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_given_splits_are_kept(tmp_path, val):
    tree(tmp_path / "train", {"a": 3, "b": 4})
    tree(tmp_path / val, {"a": 2, "b": 1})
    data = open_data(tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 7, "val": 3}
    assert any("final metrics are on val" in note for note in data.notes)


def test_test_without_val_has_val_carved_from_train(tmp_path):
    tree(tmp_path / "train", {"a": 10, "b": 10})
    tree(tmp_path / "test", {"a": 5, "b": 5})
    data = open_data(tmp_path, val_fraction=0.2)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 16, "val": 4, "test": 10}


def test_a_class_called_train_is_a_class(tmp_path):
    data = open_data(tree(tmp_path, {"bus": 12, "car": 12, "train": 12}))
    assert data.classes == ("bus", "car", "train")


def test_class_names_keep_odd_characters_in_natural_order(tmp_path):
    names = ["class 10", "class 2", "Ünïcödé 猫", 'it\'s, "quoted" [x]', "100%", "a=b&c?d"]
    data = open_data(tree(tmp_path, dict.fromkeys(names, 3)))
    assert set(data.classes) == set(names)
    assert data.classes.index("class 2") < data.classes.index("class 10")


def test_nested_files_belong_to_the_class_and_strays_are_noted(tmp_path):
    tree(tmp_path, {"a": 10, "b": 10})
    write(tmp_path / "a/deep/deeper/0.PNG")
    write(tmp_path / "a/.hidden.png")
    write(tmp_path / ".cache/0.png")
    write(tmp_path / "loose.png")
    (tmp_path / "b/notes.txt").write_text("x")
    (tmp_path / "b/Thumbs.db").write_text("x")
    (tmp_path / "empty").mkdir()
    data = open_data(tmp_path)
    assert data.classes == ("a", "b")
    keys = [key for split in data.splits.values() for key in split.keys]
    assert len(keys) == 21
    assert "a/deep/deeper/0.PNG" in keys
    notes = " / ".join(data.notes)
    for words in ("1 hidden", "2 files that are not images", "1 images outside class folders", "without images: empty"):
        assert words in notes


def test_image_files_lists_every_image_below_a_folder_in_natural_order(tmp_path):
    wanted = [write(tmp_path / name) for name in ("2.png", "10.png", "deep/er/1.JPG")]
    write(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("x")
    assert image_files(tmp_path) == wanted


def test_a_link_that_leads_back_up_ends(tmp_path):
    tree(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "a/loop").symlink_to(tmp_path / "a", target_is_directory=True)
    assert sum(map(len, open_data(tmp_path).splits.values())) == 20


def keys_of(data: DataSet) -> list[str]:
    return sorted(key for split in data.splits.values() for key in split.keys)


def test_a_link_to_a_folder_above_it_brings_no_images_of_other_classes(tmp_path):
    tree(tmp_path, {"cats": 10, "dogs": 10})
    before = keys_of(open_data(tmp_path))
    (tmp_path / "dogs/loop").symlink_to("..", target_is_directory=True)
    data = open_data(tmp_path)
    assert keys_of(data) == before
    assert "dogs/loop is a link to a folder above it and was not followed" in data.notes


def test_a_class_folder_that_is_a_link_to_its_own_root_is_no_class(tmp_path):
    tree(tmp_path, {"cats": 10, "dogs": 10})
    (tmp_path / "all").symlink_to(".", target_is_directory=True)
    data = open_data(tmp_path)
    assert data.classes == ("cats", "dogs")
    assert "all is a link to a folder above it and was not followed" in data.notes


def test_a_link_that_leads_back_by_way_of_another_folder_is_not_followed(tmp_path):
    tree(tmp_path / "data", {"cats": 10, "dogs": 10})
    write(tmp_path / "elsewhere/1.png")
    (tmp_path / "data/dogs/more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data", target_is_directory=True)
    keys = keys_of(open_data(tmp_path / "data"))
    assert [key for key in keys if "back" in key or "more" in key] == ["dogs/more/1.png"]


def test_a_folder_that_is_linked_beside_itself_is_read_once_by_its_own_name(tmp_path):
    tree(tmp_path, {"cats": 10, "dogs/young": 10})
    (tmp_path / "dogs/a_link").symlink_to("young", target_is_directory=True)
    data = open_data(tmp_path)
    assert len([key for key in keys_of(data) if key.startswith("dogs/young/")]) == 10
    assert not [key for key in keys_of(data) if "a_link" in key]
    assert "dogs/a_link is a link to a folder that is read already and was not followed" in data.notes


def test_links_to_folders_elsewhere_are_followed(tmp_path):
    tree(tmp_path / "data", {"cats": 10})
    tree(tmp_path / "pool", {"dogs": 10, "more": 3})
    (tmp_path / "data/dogs").symlink_to(tmp_path / "pool/dogs", target_is_directory=True)
    (tmp_path / "data/cats/more").symlink_to(tmp_path / "pool/more", target_is_directory=True)
    data = open_data(tmp_path / "data")
    assert len([key for key in keys_of(data) if key.startswith("dogs/")]) == 10
    assert len([key for key in keys_of(data) if key.startswith("cats/")]) == 13
    assert not [note for note in data.notes if "link" in note]


def test_a_folder_of_images_may_itself_be_a_link(tmp_path):
    write(tmp_path / "photos/1.png")
    (tmp_path / "photos/up").symlink_to(tmp_path, target_is_directory=True)
    assert image_files(tmp_path / "photos/up") == [tmp_path / "photos/up/photos/1.png"]


def test_unusable_folders_say_what_to_do(tmp_path):
    cases = {
        "empty": lambda p: p.mkdir(),
        "single": lambda p: tree(p, {"only": 5}),
        "no_train": lambda p: tree(p / "val", {"a": 2, "b": 2}),
        "unseen": lambda p: (tree(p / "train", {"a": 2, "b": 2}), tree(p / "val", {"a": 1, "c": 1})),
        "lonely": lambda p: tree(p, {"a": 1, "b": 1}),
    }
    words = {
        "empty": "CLASS/",
        "single": "only one class",
        "no_train": "no train folder",
        "unseen": r"not in train \(c\)",
        "lonely": "class has one to spare",
    }
    for name, make in cases.items():
        make(tmp_path / name)
        with pytest.raises(ValueError, match=words[name]):
            open_data(tmp_path / name)


def test_a_file_or_a_wrong_name_says_what_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    tree(tmp_path / "photos", {"a": 5, "b": 5})
    write(tmp_path / "photo.jpg")
    for uri, kind, words in [
        ("photo.jpg", ValueError, "single file"),
        ("photso", FileNotFoundError, "did you mean 'photos'"),
        ("embeded:fashion", ValueError, "did you mean 'embedded'"),
        ("embedded:fasion", ValueError, "did you mean 'fashion'"),
        ("synthetic:shape", ValueError, "synthetic:shapes"),
        ("synthetic:shapes?sead=1", ValueError, "did you mean 'seed'"),
        ("synthetic:shapes?n=many", ValueError, "whole number"),
        ("photos?shuffle=1", ValueError, "no option 'shuffle'"),
        ("torchvision:CIFAR11", ValueError, "did you mean 'CIFAR10"),
    ]:
        with pytest.raises(kind, match=words) as error:
            open_data(uri)
        assert "\n" not in str(error.value)


def test_vitrail_data_is_a_second_place_to_look(tmp_path, monkeypatch):
    tree(tmp_path / "store/photos", {"a": 5, "b": 5})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "store"))
    assert open_data("photos").classes == ("a", "b")


# carving


@pytest.mark.parametrize("sizes", [[50, 7, 3, 40], [10] * 10, [1, 2, 200], [5, 5, 5]])
@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_every_class_is_carved_within_one_of_its_exact_share(sizes, fraction):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    data = hold_out(made(labels), fraction, fraction, 3)
    for name in ("val", "test"):
        counts = np.bincount(data[name].labels, minlength=len(sizes))
        assert np.abs(counts - np.array(sizes) * fraction).max() <= 1
    assert np.bincount(data["train"].labels, minlength=len(sizes)).min() >= 1
    assert len(data["val"]) == max(1, round(fraction * sum(sizes)))


def test_carving_depends_on_seed_and_not_on_the_order_of_rows():
    labels = np.random.default_rng(0).integers(0, 4, 200)
    shuffled = np.random.default_rng(1).permutation(200)
    data = made(labels)
    other = DataSet("made", data.classes, {"all": data["all"].take(shuffled)})
    first, second = hold_out(data, 0.1, 0.2, 5), hold_out(other, 0.1, 0.2, 5)
    for name in ("train", "val", "test"):
        assert set(first[name].index) == set(second[name].index)
    assert set(hold_out(data, 0.1, 0.2, 6)["val"].index) != set(first["val"].index)


def test_carving_is_the_same_whatever_order_files_were_made_in(tmp_path):
    for folder, order in (("one", range(40)), ("two", reversed(range(40)))):
        for i in order:
            write(tmp_path / folder / "ab"[i % 2] / f"{i}.png")
    one, two = open_data(tmp_path / "one"), open_data(tmp_path / "two")
    for name in one.splits:
        assert list(one[name].keys) == list(two[name].keys)
        assert list(one[name].index) == list(two[name].index)


def test_carving_takes_no_slice_of_ordered_data():
    data = hold_out(made(np.repeat([0, 1], 500)), 0.2, 0, 0)
    first_half = np.count_nonzero(data["val"].index % 500 < 250)
    assert abs(first_half - 100) < 5 * np.sqrt(200 / 4)  # five standard deviations of a fair draw


def test_fractions_that_leave_nothing_are_refused():
    for fractions in ((0.5, 0.5), (1.0, 0.0)):
        with pytest.raises(ValueError, match="nothing to train on"):
            hold_out(made([0, 1] * 10), *fractions, 0)


def test_multilabel_carving_keeps_rare_labels_in_proportion():
    rng = np.random.default_rng(0)
    labels = (rng.random((2000, 4)) < [0.6, 0.3, 0.1, 0.03]).astype(int)
    data = hold_out(made(labels), 0.25, 0, 0)
    share = data["val"].labels.sum(0) / labels.sum(0)
    assert np.abs(share[3] * labels[:, 3].sum() - 0.25 * labels[:, 3].sum()) <= 1  # the rarest label is a stratum
    assert np.abs(share - 0.25).max() < 0.05


def test_apportion_adds_up_and_stays_near():
    rng = np.random.default_rng(0)
    for _ in range(50):
        exact = rng.random(8) * 5
        counts = apportion(exact, np.zeros(8, int), np.full(8, 9), round(exact.sum()))
        assert counts.sum() == round(exact.sum())
        assert np.abs(counts - exact).max() < 1


def test_limit_is_stratified_and_touches_train_only():
    data = hold_out(made(np.repeat([0, 1, 2], [600, 300, 3])), 0.1, 0.1, 0)
    few = limit_train(data, 30, 0)
    train = np.bincount(data["train"].labels)
    counts = np.bincount(few["train"].labels)
    assert counts.sum() == 30
    assert counts[2] == 1
    assert np.abs(counts[:2] - 30 * train[:2] / train.sum()).max() <= 1
    assert len(few["val"]) == len(data["val"])
    assert set(few["train"].index) < set(data["train"].index)


def test_counter_bits_are_splitmix64():
    def scramble(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    state = 12345
    for counter in (0, 7, 9):
        state = scramble((state + golden + counter) % 2**64)
    assert int(bits(12345, 7, np.array([8, 9]))[1]) == state


# tables


def table(path: Path, rows: list[list[str]], separator: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=separator).writerows(rows)
    return path


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_csv_gives_labels_splits_and_coarse_labels(tmp_path, separator):
    rows = [["path", "label", "split", "coarse"]]
    for i in range(12):
        write(tmp_path / f"images/{i}.png", i)
        rows.append(
            [f"images/{i}.png", ["2", "10"][i % 2], ["train", "valid", "test"][i % 3], "odd" if i % 2 else "even"]
        )
    data = open_data(table(tmp_path / "labels.csv", rows, separator))
    assert data.classes == ("2", "10")
    assert data.levels == (Level("fine", ("2", "10")), Level("coarse", ("even", "odd")))
    assert [len(data[s]) for s in ("train", "val", "test")] == [4, 4, 4]
    val = data["val"]
    assert [int(Path(key).stem) for key in val.keys] == [1, 4, 7, 10]
    assert list(val.labels) == [1, 0, 1, 0]
    assert val.levels.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert val.read(2).getpixel((0, 0))[0] == 7


def test_a_bar_in_any_label_makes_the_set_multilabel(tmp_path):
    rows = [["file", "tags"], *([f"{i}.png", ["red", "red|blue", "|", "blue | green"][i % 4]] for i in range(40))]
    for i in range(40):
        write(tmp_path / f"{i}.png")
    uri = f"{table(tmp_path / 't.csv', rows)}?path=file&label=tags"
    data = open_data(uri)
    assert data.multilabel
    assert data.classes == ("blue", "green", "red")
    wanted = [[0, 0, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]]
    for split in data.splits.values():
        assert split.labels.tolist() == [wanted[int(Path(key).stem) % 4] for key in split.keys]


def test_all_faults_of_a_table_are_counted_and_ten_listed(tmp_path):
    write(tmp_path / "0.png")
    rows = [["path", "label", "split"], ["0.png", "", "train"], ["0.png", "a", "holdout"]]
    rows += [[f"gone{i}.png", "a", "train"] for i in range(10)]
    with pytest.raises(ValueError) as error:
        open_data(table(tmp_path / "t.csv", rows))
    text = str(error.value)
    assert "12 faults" in text
    assert "line 2: empty label" in text
    assert "line 3: split 'holdout'" in text
    assert "line 4: no file gone0.png" in text
    assert "and 2 more" in text
    assert text.count("\n") == 11


def test_wrong_tables_say_so(tmp_path):
    write(tmp_path / "0.png")
    for rows, words in [
        ([["image", "labels"], ["0.png", "a"]], r"no column 'path' \(it has image, labels\)"),
        ([["path", "lable"], ["0.png", "a"]], "did you mean 'lable'"),
        ([["path", "label"]], "no rows"),
        ([["path", "label"], ["0.png", "a", "b"]], "line 2"),
        ([["path", "label", "split"], ["0.png", "a", "val"]], "no rows whose split is train"),
    ]:
        with pytest.raises(ValueError, match=words):
            open_data(table(tmp_path / "t.csv", rows))


def files_and_rows(folder: Path, count: int = 20, label=lambda i: "ab"[i % 2]) -> list[list[str]]:
    for i in range(count):
        write(folder / f"{i}.png", i)
    return [["path", "label"], *([f"{i}.png", label(i)] for i in range(count))]


def test_a_table_with_semicolons_is_read_and_said(tmp_path):
    data = open_data(table(tmp_path / "t.csv", files_and_rows(tmp_path), ";"))
    assert data.classes == ("a", "b")
    assert "t.csv is read with semicolons between its columns" in data.notes


@pytest.mark.parametrize(("suffix", "separator", "said"), [(".csv", ",", 0), (".tsv", "\t", 0), (".csv", "\t", 1)])
def test_the_usual_separator_of_a_suffix_needs_no_note(tmp_path, suffix, separator, said):
    data = open_data(table(tmp_path / f"t{suffix}", files_and_rows(tmp_path), separator))
    assert sum("between its columns" in note for note in data.notes) == said


def test_separators_inside_quotes_do_not_count(tmp_path):
    _, *rows = files_and_rows(tmp_path)
    path = tmp_path / "t.csv"
    path.write_text(
        "\n".join(['path;label;"x, y, z, with ""quotes"", and more"', *(";".join([*r, "1,5"]) for r in rows)])
    )
    assert open_data(path).classes == ("a", "b")


@pytest.mark.parametrize(
    ("encoding", "note"),
    [("utf-8", ""), ("utf-8-sig", ""), ("utf-16", "read as UTF-16"), ("cp1252", "read as Windows-1252")],
)
def test_the_encoding_of_a_table_is_recognised_and_said_where_it_is_not_utf_8(tmp_path, encoding, note):
    rows = files_and_rows(tmp_path, label=lambda i: ["café", "“Käse”"][i % 2])
    path = tmp_path / "t.csv"
    path.write_bytes("\r\n".join(map(",".join, rows)).encode(encoding))
    data = open_data(path)
    assert set(data.classes) == {"café", "“Käse”"}
    assert [note in said for said in data.notes if "read as" in said] == [True] * bool(note)


def test_bytes_that_windows_1252_lacks_are_read_as_latin_1(tmp_path):
    rows = files_and_rows(tmp_path, label=lambda i: ["caf\xe9", "x\x81"][i % 2])
    (tmp_path / "t.csv").write_bytes("\n".join(map(",".join, rows)).encode("latin-1"))
    assert any("read as Latin-1" in note for note in open_data(tmp_path / "t.csv").notes)


def test_damaged_utf_8_is_not_taken_for_another_encoding(tmp_path):
    rows = files_and_rows(tmp_path, label=lambda i: ["café", "Käse"][i % 2])
    (tmp_path / "t.csv").write_bytes("\n".join(map(",".join, rows)).encode()[:-3])
    with pytest.raises(ValueError, match="UTF-8"):
        open_data(tmp_path / "t.csv")


def test_a_picture_that_is_called_csv_is_no_table(tmp_path):
    write(tmp_path / "0.png").rename(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="cannot be read as UTF-8 text"):
        open_data(tmp_path / "t.csv")


@pytest.mark.parametrize("ext", [".png", "png"])
def test_ids_become_paths_by_folder_and_extension(tmp_path, ext):
    _, *rows = files_and_rows(tmp_path / "images")
    path = table(tmp_path / "t.csv", [["image_id", "breed"], *([name[:-4], label] for name, label in rows)])
    data = open_data(f"{path}?path=image_id&label=breed&folder=images&ext={ext}")
    assert keys_of(data) == sorted(f"images/{i}.png" for i in range(20))
    assert all(s.read(0).getpixel((0, 0))[0] == int(Path(s.keys[0]).stem) for s in data.splits.values())


def proposed(uri: str | Path) -> str:
    """The URI that the message about a table ends with."""
    with pytest.raises(ValueError) as error:
        open_data(uri)
    found = re.search(r'(?:; try|files are found with:) "(.*)"$', str(error.value))
    return found[1] if found else ""


@pytest.mark.parametrize(("folder", "strip"), [("train/images", 4), ("train images", 0), (".", 4)])
def test_the_message_about_missing_files_names_settings_that_work(tmp_path, folder, strip):
    _, *rows = files_and_rows(tmp_path / folder)
    write(tmp_path / "other/x.png")
    path = table(tmp_path / "t.csv", [["id", "breed"], *([n[: len(n) - strip], label] for n, label in rows)])
    assert len(keys_of(open_data(proposed(f"{path}?path=id&label=breed")))) == 20


def test_the_message_about_a_missing_column_names_settings_that_work(tmp_path):
    _, *rows = files_and_rows(tmp_path / "images")
    path = table(tmp_path / "t.csv", [["Filename", "Class"], *([name[:-4], label] for name, label in rows)], ";")
    assert len(keys_of(open_data(proposed(path)))) == 20


def test_nothing_is_proposed_where_no_setting_finds_a_file(tmp_path):
    files_and_rows(tmp_path / "images")
    path = table(tmp_path / "t.csv", [["path", "label"], *([f"gone{i}", "a"] for i in range(20))])
    assert proposed(path) == ""


def test_the_message_counts_the_files_that_the_settings_find(tmp_path):
    rows = files_and_rows(tmp_path / "images")
    with pytest.raises(ValueError, match=r"\n20 of 21 files are found with: "):
        open_data(table(tmp_path / "t.csv", [*rows, ["gone.png", "a"]]))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = table(tmp_path / "t.csv", files_and_rows(tmp_path))
    with pytest.raises(ValueError, match="there is no folder 'imgs'"):
        open_data(f"{path}?folder=imgs")


def test_parquet_reads_as_csv_does(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for i in range(20):
        write(tmp_path / f"{i}.png")
    columns = {"path": [f"{i}.png" for i in range(20)], "label": [i % 2 for i in range(20)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    table(tmp_path / "t.csv", [["path", "label"], *([f"{i}.png", str(i % 2)] for i in range(20))])
    one, two = open_data(tmp_path / "t.parquet"), open_data(tmp_path / "t.csv")
    assert one.classes == two.classes
    assert list(one["train"].keys) == list(two["train"].keys)
    assert np.array_equal(one["train"].labels, two["train"].labels)
    parquet.write_table(pyarrow.table({**columns, "label": [["a", "b"]] * 19 + [[]]}), tmp_path / "l.parquet")
    assert open_data(tmp_path / "l.parquet").multilabel


# arrays


def arrays(**changed):
    rng = np.random.default_rng(0)
    made = {
        "classes": np.array(["x", "y", "z"]),
        "x_train": rng.integers(0, 256, (30, 6, 5, 3), np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": rng.integers(0, 256, (9, 6, 5, 3), np.uint8),
        "y_test": np.arange(9) % 3,
        "coarse_classes": np.array(["p", "q"]),
        "coarse_train": np.arange(30) % 3 // 2,
        "coarse_test": np.arange(9) % 3 // 2,
    } | changed
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 5, 1), (6, 5)])
def test_npz_images_are_those_of_the_arrays(tmp_path, save, shape):
    rng = np.random.default_rng(1)
    stored = arrays(
        x_train=rng.integers(0, 256, (30, *shape), np.uint8), x_test=rng.integers(0, 256, (9, *shape), np.uint8)
    )
    save(tmp_path / "set.npz", **stored)
    data = open_data(tmp_path / "set.npz")
    assert data.classes == ("x", "y", "z")
    assert data.levels == (Level("fine", ("x", "y", "z")), Level("coarse", ("p", "q")))
    assert [len(data[s]) for s in ("train", "val", "test")] == [27, 3, 9]
    whole = np.concatenate([stored["x_train"], stored["x_test"]]).reshape(39, 6, 5, -1)
    for split in data.splits.values():
        for row, index in enumerate(split.index):
            assert np.array_equal(split.read(row), np.broadcast_to(whole[index], (6, 5, 3)))
            assert split.labels[row] == index % 3
            assert split.levels[row].tolist() == [index % 3, index % 3 // 2]
    assert list(data["test"].index) == list(range(30, 39))


def test_uncompressed_npz_is_mapped_not_read(tmp_path):
    np.savez(tmp_path / "set.npz", **arrays())
    assert isinstance(mapped(tmp_path / "set.npz", "x_train"), np.memmap)


def test_npz_with_val_and_without_names(tmp_path):
    np.savez(tmp_path / "set.npz", **arrays(classes=None, x_val=arrays()["x_test"], y_val=arrays()["y_test"]))
    data = open_data(tmp_path / "set.npz")
    assert data.classes == ("0", "1", "2")
    assert list(data["val"].index) == list(range(30, 39))
    assert list(data["test"].index) == list(range(39, 48))


def test_npz_that_does_not_fit_together_names_every_misfit(tmp_path):
    for changed, words in [
        ({"y_train": np.arange(29) % 3}, "30 images but y_train has 29"),
        ({"y_train": np.arange(30) % 4}, r"labels 0\.\.3 for 3 classes"),
        ({"y_test": np.arange(9) % 3 - 1}, r"labels -1\.\.1"),
        ({"x_train": np.zeros((30, 6, 5, 3), np.float32)}, "must be uint8 or uint16, not float32"),
        ({"x_train": np.zeros((30, 3, 6, 5), np.uint8)}, r"5 channels of 8 bits; read them with --data\.channels 5"),
        ({"coarse_test": np.arange(8)}, "coarse_test has 8"),
        ({"x_train": None}, "needs the arrays x_train"),
        ({"y_test": None}, "must come together"),
        ({"classes": np.array(["x", "y", None], object)}, "plain arrays"),
    ]:
        np.savez(tmp_path / "set.npz", **arrays(**changed))
        with pytest.raises(ValueError, match=words):
            open_data(tmp_path / "set.npz")
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(ValueError, match="plain arrays"):
        open_data(tmp_path / "text.npz")


def test_a_real_npz_opens():
    folder = os.environ.get("VITRAIL_DATA")
    if not folder or not (Path(folder) / "cifar100.npz").is_file():
        pytest.skip("VITRAIL_DATA names no folder with cifar100.npz")
    data = open_data("cifar100.npz")
    assert [len(level.classes) for level in data.levels] == [100, 20]
    assert data["test"].read(0).size == (32, 32)


# named sets


def test_embedded_fashion_is_balanced_shuffled_and_pinned():
    data = open_data("embedded:fashion", val_fraction=0)
    assert np.bincount(data["train"].labels).tolist() == [1000] * 10
    assert np.bincount(data["test"].labels).tolist() == [200] * 10
    assert np.count_nonzero(np.diff(data["train"].labels)) > 8500  # nine in ten neighbours differ
    image = np.asarray(data["train"].read(0))
    assert image.shape == (28, 28, 3)
    package = Path(open_data.__code__.co_filename).parent / "embedded"
    assert (package / "fashion.npz").stat().st_size <= 3_000_000
    assert "Zalando SE" in (package / "LICENSE").read_text(encoding="utf-8")


def test_embedded_images_carry_their_labels():
    from sklearn.neighbors import KNeighborsClassifier

    data = open_data("embedded:fashion", limit=2000)
    train, test = data["train"], data["test"].take(range(300))
    x, y = (np.stack([np.asarray(s.read(i))[..., 0].ravel() for i in range(len(s))]) for s in (train, test))
    assert KNeighborsClassifier(5).fit(x, train.labels).score(y, test.labels) > 0.7


def idx_file(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_torchvision_sets_are_read_from_disk_and_never_fetched(tmp_path):
    with pytest.raises(FileNotFoundError, match="download=true"):
        open_data(f"torchvision:MNIST?root={tmp_path}")
    assert list(tmp_path.iterdir()) == []
    images = np.random.default_rng(0).integers(0, 256, (50, 28, 28), np.uint8)
    for stem, part in (("train", slice(0, 40)), ("t10k", slice(40, 50))):
        idx_file(tmp_path / "MNIST/raw" / f"{stem}-images-idx3-ubyte", images[part])
        idx_file(tmp_path / "MNIST/raw" / f"{stem}-labels-idx1-ubyte", np.arange(50)[part] % 10)
    data = open_data(f"torchvision:MNIST?root={tmp_path}&download=false")
    assert len(data.classes) == 10
    again = pickle.loads(pickle.dumps(data["test"]))
    for split in (*data.splits.values(), again):
        for row, index in enumerate(split.index):
            assert np.array_equal(np.asarray(split.read(row))[..., 2], images[index])
            assert split.labels[row] == index % 10
    with pytest.raises(ValueError, match="did you mean 'root'"):
        open_data(f"torchvision:MNIST?rot={tmp_path}")


def test_torchvision_sets_made_of_files_are_read_as_files(tmp_path):
    for name in ("AnnualCrop", "Forest"):
        tree(tmp_path / "eurosat/2750", {name: 12})
    data = open_data(f"torchvision:EuroSAT?root={tmp_path}")
    assert data.classes == ("AnnualCrop", "Forest")
    assert sum(map(len, data.splits.values())) == 24
    assert scan(data) == []
    Path(data["train"].keys[0]).write_bytes(b"")
    assert scan(data) == [(data["train"].keys[0], "empty file")]


def test_fake_data_of_torchvision_takes_its_options():
    data = open_data("torchvision:FakeData?size=40&num_classes=4&image_size=3,8,9")
    assert sum(map(len, data.splits.values())) == 40
    assert data["train"].read(0).size == (9, 8)


# processes


def read_first(split: Split) -> tuple[bytes, int]:
    return split.read(0).tobytes(), len(split)


@pytest.mark.parametrize("kind", ["folder", "npz", "embedded:fashion", "synthetic:shapes?n=100"])
def test_splits_travel_to_other_processes(tmp_path, kind):
    uri: str | Path = kind
    if kind == "folder":
        uri = tree(tmp_path, {"a": 20, "b": 20})
    elif kind == "npz":
        uri = tmp_path / "set.npz"
        np.savez(uri, **arrays(x_train=np.zeros((30, 200, 200, 3), np.uint8)))
    split = open_data(uri)["train"]
    split.read(0)  # what a process has opened must not travel
    assert len(pickle.dumps(split)) < 100 * len(split) + 2000
    assert server().submit(read_first, split).result() == read_first(split)


# scanning


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def hostile_tree(root: Path) -> dict[str, object]:
    expected = make_hostile(root / "a")
    tree(root, {"b": 20})
    del expected["folder.jpg"], expected["missing.jpg"]  # not listed as files
    return {f"a/{name}": value for name, value in expected.items()}


def test_a_scan_finds_the_bad_and_only_the_bad(tmp_path):
    expected = hostile_tree(tmp_path)
    data = open_data(tmp_path)
    seen = []
    found = dict(scan(data, workers=2, progress=lambda done, total: seen.append((done, total))))
    wanted = {key: reason for key, reason in expected.items() if isinstance(reason, str)}
    assert set(found) == set(wanted)
    assert all(found[key].startswith(reason) for key, reason in wanted.items())
    assert seen[-1] == (len(expected) + 20, len(expected) + 20)
    clean = drop_bad(data, list(found.items()))
    assert scan(clean) == []
    for name, split in clean.splits.items():
        kept = [int(i) for i, key in zip(data[name].index, data[name].keys, strict=True) if key not in wanted]
        assert split.index.tolist() == kept


def test_a_second_scan_reads_only_what_changed(tmp_path):
    data = open_data(tree(tmp_path, {"a": 10, "b": 10}))
    assert scan(data) == []
    seen = []
    (tmp_path / "a/3.png").write_bytes(b"")
    assert scan(data, progress=lambda done, total: seen.append(total)) == [("a/3.png", "empty file")]
    assert seen == [1]
    assert scan(data, progress=lambda done, total: seen.append(total)) == [("a/3.png", "empty file")]
    assert seen == [1]


def test_a_cache_that_is_torn_foreign_or_unwritable_is_no_error(tmp_path, monkeypatch):
    data = open_data(tree(tmp_path / "data", {"a": 10, "b": 10}))
    cache = cache_file(str(tmp_path / "data"))
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\x1f\x8btorn")
    assert scan(data) == []
    with gzip.open(cache, "wt") as stream:
        json.dump([1, 2], stream)
    assert scan(data) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert scan(data) == []


def test_too_many_bad_images_are_refused_with_counts_and_names():
    bad = [(f"{i}.jpg", "truncated") for i in range(30)]
    reject_if_too_many(bad, 3000, 0.01, "photos")
    with pytest.raises(ValueError) as error:
        reject_if_too_many(bad, 2999, 0.01, "photos")
    text = str(error.value)
    assert "30 of 2999" in text
    assert "--data.bad_limit" in text
    assert "19.jpg" in text
    assert "20.jpg" not in text
    assert "and 10 more" in text


def test_sources_without_files_need_no_scan():
    assert scan(open_data("synthetic:shapes?n=40")) == []


def test_large_photographs_can_be_read_smaller(tmp_path):
    from dataclasses import replace

    for name in ("a", "b"):
        for i in range(10):
            path = write(tmp_path / name / f"{i}.jpg")
            Image.fromarray(colour()).resize((480, 320)).save(path)
    split = open_data(tmp_path)["train"]
    smaller = replace(split, reader=replace(split.reader, at_least=80))
    assert (split.read(0).size, smaller.read(0).size) == ((480, 320), (120, 80))


def test_a_source_from_elsewhere_opens_its_scheme_and_its_files_and_is_trained_on(tmp_path):
    reader = open_data("synthetic:shapes?n=40&size=32")["train"].reader

    def open_toy(location: Location) -> DataSet:
        count = location.whole_numbers({"n": 24})["n"]
        split = Split("all", reader, np.arange(count), [f"toy {i}" for i in range(count)], np.arange(count) % 2)
        return DataSet(location.uri, ("a", "b"), {"all": split})

    def opens(location: Location) -> bool:
        return location.scheme == "toy" or location.suffix == ".toy"

    register("source", "toy")(Source({"toy:any": "pictures for a test"}, open_toy, opens, ("n",)))
    try:
        (tmp_path / "pictures.toy").touch()
        assert len(open_source(str(tmp_path / "pictures.toy?n=30"))["all"]) == 30
        assert open_source("toy:any").classes == ("a", "b")
        with pytest.raises(ValueError, match=r"toy:any\?m=1: no option 'm' \(it has n\)"):
            open_source("toy:any?m=1")
        with pytest.raises(ValueError, match="did you mean 'toy'"):
            open_source("toyy:any")
        model = {"image_size": 32, "trunk": {"depth": 1, "width": 16, "heads": 2, "patch": 8}}
        settings = {"uri": "toy:any", "batch": 4, "workers": 0}
        out = {"out": str(tmp_path / "run"), "engine": {"device": "cpu"}}
        train(from_mapping({"model": model, "data": settings, "optim": {"steps": 2}, **out}, recipe("vit")), quiet=True)
        assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
    finally:
        PARTS["source"].pop("toy")


def test_a_scheme_is_found_without_importing_other_sources():
    code = (
        "import sys; from vitrail.data.open import open_source; open_source('synthetic:shapes?n=20&size=8'); "
        "print(*(m for m in sys.modules if m.startswith('vitrail.data.sources.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "sources.shapes" in loaded
    assert not any(f"sources.{name}" in loaded for name in ("npz", "parquet", "webdataset", "builtin"))
