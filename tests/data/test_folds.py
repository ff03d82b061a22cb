"""Folds of cross-validation: a partition, stratified as scikit-learn's, by seed and image alone, test left as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.model_selection import StratifiedKFold

import vitrail
from vitrail.config import DataConfig, RunConfig, from_mapping
from vitrail.data.dataset import DataSet, hold_out
from vitrail.data.open import open_data, open_source
from vitrail.recipes import recipe
from vitrail.run.run_data import division, open_for, open_run

SHAPES = "synthetic:shapes?n=503&size=8&classes=6"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Uneven classes, with val and test of their own."""
    rng = np.random.default_rng(0)
    sizes = {"train": 301, "val": 53, "test": 40}
    arrays: dict[str, NDArray[np.uint8]] = {}
    for name, count in sizes.items():
        arrays[f"x_{name}"] = rng.integers(0, 255, (count, 4, 4), dtype=np.uint8)
        arrays[f"y_{name}"] = np.minimum(rng.geometric(0.4, count) - 1, 3).astype(np.uint8)
    np.savez(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def folds(uri: str | Path, count: int, **options: int) -> list[DataSet]:
    return [open_data(uri, fold=f"{i}/{count}", **options) for i in range(1, count + 1)]


@pytest.mark.parametrize("count", [2, 5])
def test_folds_partition_train_and_val_together(table: Path, count: int) -> None:
    whole = open_data(table)
    pooled = np.concatenate([whole["train"].index, whole["val"].index])
    divided = folds(table, count)
    assert np.array_equal(np.sort(np.concatenate([data["val"].index for data in divided])), np.sort(pooled))
    for data in divided:
        assert np.array_equal(np.sort(np.concatenate([data["train"].index, data["val"].index])), np.sort(pooled))
        assert np.array_equal(data["test"].index, whole["test"].index)
        for split in (data["train"], data["val"]):
            pixels = np.asarray(split.read(0))
            origin = whole["train"] if split.index[0] in whole["train"].index else whole["val"]
            row = int(np.flatnonzero(origin.index == split.index[0])[0])
            assert np.array_equal(pixels, np.asarray(origin.read(row)))
            assert (split.keys[0], split.labels[0]) == (origin.keys[row], origin.labels[row])


def test_every_fold_has_of_every_class_what_scikit_learns_has(table: Path) -> None:
    whole = open_data(table)
    labels = np.concatenate([whole["train"].labels, whole["val"].labels])
    theirs = [np.bincount(labels[held], minlength=4) for _, held in StratifiedKFold(5).split(labels, labels)]
    ours = [np.bincount(data["val"].labels, minlength=4) for data in folds(table, 5)]
    assert np.array_equal(np.sort(ours, 0), np.sort(theirs, 0))
    assert (np.ptp(ours, 0) <= 1).all()
    assert np.ptp(np.sum(ours, 1)) <= 1


def test_an_image_is_in_its_fold_whatever_the_order(table: Path) -> None:
    source = open_source(str(table))
    rng = np.random.default_rng(1)
    mixed = {name: split.take(rng.permutation(len(split))) for name, split in source.splits.items()}
    for fold in ("1/3", "3/3"):
        first = hold_out(source, 0.1, 0.1, 0, fold)["val"].index
        second = hold_out(replace(source, splits=mixed), 0.1, 0.1, 0, fold)["val"].index
        assert set(first.tolist()) == set(second.tolist())


def test_another_seed_gives_other_folds() -> None:
    first, second = (open_data(SHAPES, fold="1/5", split_seed=seed)["val"].index for seed in (0, 1))
    assert not np.array_equal(np.sort(first), np.sort(second))
    assert any(note.startswith("val: fold 1/5") for note in open_data(SHAPES, fold="1/5").notes)


def test_test_of_an_undivided_source_is_that_of_no_folds(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"c{i % 3}").mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"c{i % 3}" / f"{i}.png")
    held = open_data(tmp_path)["test"].index
    divided = folds(tmp_path, 4)
    assert all(np.array_equal(data["test"].index, held) for data in divided)
    assert sorted(np.concatenate([data["val"].index for data in divided]).tolist() + held.tolist()) == list(range(60))


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "5", "a/b", "1/5/2"])
def test_what_is_no_fold_is_one_sentence(fold: str) -> None:
    with pytest.raises(ValueError, match="is not I/K, as in 1/5"):
        open_data(SHAPES, fold=fold)


@pytest.mark.parametrize("uri", ["synthetic:meals", "PHOTOS"])
def test_where_nothing_can_be_stratified_there_are_no_folds(uri: str, tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="level and fold mean nothing there"):
        open_data(uri.replace("PHOTOS", str(tmp_path)), fold="1/5")


def test_train_and_val_that_were_packed_apart_are_not_pooled(table: Path, tmp_path: Path) -> None:
    from vitrail.data.pack import pack

    pack(open_source(str(table)), tmp_path / "packed", 4)
    with pytest.raises(ValueError, match="name the data that were packed"):
        open_data(tmp_path / "packed", fold="1/5")


def test_a_model_states_its_fold_and_is_evaluated_on_it(tmp_path: Path) -> None:
    settings = {
        "data": {"uri": "synthetic:shapes?n=60&size=28", "batch": 16, "workers": 0, "fold": "2/3", "judge": "val"},
        "model": {"trunk": {"depth": 1, "width": 32, "heads": 2}},
        "optim": {"steps": 2, "warmup": 0},
        "engine": {"ema": 0, "device": "cpu", "evaluate_every": 0, "checkpoint_every": 0},
        "out": str(tmp_path / "run"),
    }
    config: RunConfig = from_mapping(settings, recipe("demo"))
    run = vitrail.train(config, quiet=True)
    opened = open_for(vitrail.load(run.path), config.data.uri)
    assert np.array_equal(opened["val"].index, open_run(config.data)["val"].index)
    assert not np.array_equal(opened["val"].index, open_data(config.data.uri)["val"].index)


def test_folds_are_of_the_data_that_a_run_learned_from_and_of_no_others(table: Path, tmp_path: Path) -> None:
    model = vitrail.create_model("vit_micro_28", classes=4, depth=1, width=32, heads=2)
    model.stated |= {"data": SHAPES, "division": {"split_seed": 0, "fold": "2/3"}}
    assert np.array_equal(open_for(model, table)["val"].index, open_data(table)["val"].index)


def test_a_model_without_folds_states_nothing_of_them() -> None:
    assert set(division(DataConfig())) == {"val_fraction", "test_fraction", "split_seed"}
