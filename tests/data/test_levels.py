"""Labels at several levels: every source gives them, one is chosen, all are kept."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image

from vitrail.data.dataset import Level
from vitrail.data.open import open_data, open_source
from vitrail.data.pack import pack

SPECIES = ("ant", "bee", "cat", "dog", "eel", "fly")
ORDER = {"ant": "wasps", "bee": "wasps", "cat": "hunters", "dog": "hunters", "eel": "eels", "fly": "flies"}
KINGDOM = {"wasps": "insects", "flies": "insects", "hunters": "beasts", "eels": "fish"}
TAXONOMY = (
    Level("fine", SPECIES),
    Level("order", ("eels", "flies", "hunters", "wasps")),
    Level("kingdom", ("beasts", "fish", "insects")),
)


def expected(species: np.ndarray) -> np.ndarray:
    """[images, 3] by walking the taxonomy with names."""
    rows = []
    for number in species.tolist():
        order = ORDER[SPECIES[number]]
        rows.append([number, TAXONOMY[1].classes.index(order), TAXONOMY[2].classes.index(KINGDOM[order])])
    return np.array(rows)


def arrays(path, **changed):
    made = {}
    for split, count in (("train", 60), ("test", 12)):
        species = np.arange(count) % 6
        levels = expected(species)
        made[f"x_{split}"] = np.zeros((count, 4, 4, 3), np.uint8)
        made[f"y_{split}"] = species
        made[f"level_order_{split}"], made[f"level_kingdom_{split}"] = levels[:, 1], levels[:, 2]
    names = {
        "classes": SPECIES,
        "level_order_classes": TAXONOMY[1].classes,
        "level_kingdom_classes": TAXONOMY[2].classes,
    }
    made |= {name: np.array(values) for name, values in names.items()} | changed
    np.savez(path / "set.npz", **{name: value for name, value in made.items() if value is not None})
    return str(path / "set.npz")


def table(path, header=("path", "label", "level:order", "level:kingdom")):
    rows = []
    for i in range(60):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path / f"{i}.png")
        name = SPECIES[i % 6]
        rows.append((f"{i}.png", name, ORDER[name], KINGDOM[ORDER[name]]))
    with (path / "set.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return str(path / "set.csv")


@pytest.mark.parametrize("make", [arrays, table])
def test_arrays_and_tables_give_every_level_finest_first(tmp_path, make):
    data = open_data(make(tmp_path))
    assert data.levels == TAXONOMY
    for split in data.splits.values():
        np.testing.assert_array_equal(split.levels, expected(split.labels))


def test_columns_keep_their_order_with_coarse_among_them(tmp_path):
    data = open_data(table(tmp_path, ("path", "label", "level:order", "coarse")))
    assert [level.name for level in data.levels] == ["fine", "order", "coarse"]


@pytest.mark.parametrize("make", [arrays, table])
def test_a_packed_set_keeps_all_levels(tmp_path, make):
    pack(open_source(make(tmp_path)), tmp_path / "packed", 0, 1)
    data = open_data(tmp_path / "packed")
    assert data.levels == TAXONOMY
    for split in data.splits.values():
        np.testing.assert_array_equal(split.levels, expected(split.labels))


@pytest.mark.parametrize("label", ["", "|"])
def test_a_pack_of_format_1_still_reads(tmp_path, label):
    """Format 1 as it was: `coarse_classes` in the listing and coarse.npy [images] in place of the levels."""
    for i in range(20):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [(f"{i}.png", f"{'ab'[i % 2]}{label}", ("warm", "cold")[i % 2]) for i in range(20)]
    with (tmp_path / "set.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "coarse"), *rows])
    source = open_source(str(tmp_path / "set.csv"))
    out = tmp_path / "packed"
    pack(source, out, 0, 1)
    levels = np.load(out / "all-levels.npy")
    (out / "all-levels.npy").unlink()
    np.save(out / "all-coarse.npy", levels[:, -1])
    listing = json.loads((out / "pack.json").read_text())
    del listing["levels"]
    listing |= {"format": 1, "coarse_classes": ["cold", "warm"]}
    for array in listing["splits"][0]["arrays"]:
        if array["file"] == "all-levels.npy":
            array |= {"file": "all-coarse.npy", "bytes": (out / "all-coarse.npy").stat().st_size}
    (out / "pack.json").write_text(json.dumps(listing))
    read = open_source(str(out))
    assert read.levels == source.levels
    np.testing.assert_array_equal(read["all"].levels, source["all"].levels)


def test_a_chosen_level_is_the_label_and_all_levels_stay(tmp_path):
    uri = arrays(tmp_path)
    fine, coarse = open_data(uri), open_data(uri, level="kingdom")
    assert coarse.classes == ("beasts", "fish", "insects")
    assert coarse.levels == TAXONOMY
    for name, split in coarse.splits.items():
        np.testing.assert_array_equal(split.labels, expected(fine[name].labels)[:, 2])
        np.testing.assert_array_equal(split.levels, fine[name].levels)
    assert any("level kingdom" in note for note in coarse.notes)


def test_splits_do_not_depend_on_the_level(tmp_path):
    uri = arrays(tmp_path)
    for level in ("", "fine", "order", "kingdom"):
        data = open_data(uri, level=level)
        for name, split in open_data(uri).splits.items():
            np.testing.assert_array_equal(data[name].index, split.index)


def test_a_coarser_level_of_images_with_several_labels_is_one_label(tmp_path):
    uri = arrays(
        tmp_path, y_train=np.eye(6, dtype=int)[np.arange(60) % 6], y_test=np.eye(6, dtype=int)[np.arange(12) % 6]
    )
    data = open_data(uri)
    assert data.multilabel
    assert data.levels == TAXONOMY[1:]  # there is no single class at the finest level
    chosen = open_data(uri, level="order")
    assert not chosen.multilabel
    np.testing.assert_array_equal(chosen["test"].labels, expected(np.arange(12) % 6)[:, 1])


@pytest.mark.parametrize(
    ("changed", "level", "message"),
    [
        ({}, "kingdm", "it has fine, order, kingdom.*did you mean 'kingdom'"),
        ({"level_order_test": None}, "order", "split test .* has no labels of level 'order'"),
        ({"level_order_classes": np.array(["one"]), "level_order_train": np.zeros(60, int)}, "order", "only one class"),
    ],
)
def test_a_level_that_cannot_be_learned_is_refused(tmp_path, changed, level, message):
    if "level_order_train" in changed:
        changed["level_order_test"] = np.zeros(12, int)
    uri = arrays(tmp_path, **changed)
    with pytest.raises(ValueError, match=message):
        open_data(uri, level=level)


def test_a_level_of_data_without_a_taxonomy_is_refused():
    with pytest.raises(ValueError, match="one level of labels only"):
        open_data("embedded:fashion", level="coarse")


@pytest.mark.parametrize("columns", [("level:fine", "coarse"), ("level:coarse", "coarse"), ("level:", "coarse")])
def test_a_column_that_names_no_new_level_is_refused(tmp_path, columns):
    with pytest.raises(ValueError, match="no new level"):
        open_data(table(tmp_path, ("path", "label", *columns)))


def test_labels_of_a_level_outside_its_classes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"level_kingdom_test has labels 7\.\.7 for 3 classes"):
        open_data(arrays(tmp_path, level_kingdom_test=np.full(12, 7)))
