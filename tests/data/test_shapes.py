"""Synthetic shapes: fixed by seed and index, told apart by form and pattern only."""

from __future__ import annotations

import numpy as np
import pytest

from vitrail.data.open import open_data
from vitrail.data.sources.shapes import _HOLE, CLASSES, GROUPS, SHAPES, boxes_of, label_of, polygon, render


def test_a_picture_depends_on_seed_and_index_and_not_on_n():
    few, many = open_data("synthetic:shapes?n=100"), open_data("synthetic:shapes?n=300")
    for name, split in few.splits.items():
        head = many[name].take(range(len(split)))
        assert np.array_equal(split.index, head.index)
        assert np.array_equal(split.labels, head.labels)
        assert np.array_equal(split.boxes, head.boxes)
        assert all(split.read(i).tobytes() == head.read(i).tobytes() for i in range(len(split)))
    other = open_data("synthetic:shapes?n=100&seed=1")["train"]
    assert few["train"].read(0).tobytes() != other.read(0).tobytes()


def test_splits_are_disjoint_and_hold_every_image_once():
    data = open_data("synthetic:shapes?n=1000")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 800, "val": 100, "test": 100}
    assert sorted(np.concatenate([split.index for split in data.splits.values()])) == list(range(1000))
    pictures = {split.read(i).tobytes() for split in data.splits.values() for i in range(20)}
    assert len(pictures) == 60


@pytest.mark.parametrize("classes", [2, 7, 12, 18])
def test_classes_are_balanced_to_one_in_every_split(classes):
    for split in open_data(f"synthetic:shapes?n=730&classes={classes}").splits.values():
        counts = np.bincount(split.labels, minlength=classes)
        assert counts.max() - counts.min() <= 1


def test_coarse_labels_are_the_groups_of_the_shapes():
    data = open_data("synthetic:shapes?n=400&classes=18")
    assert data.classes == CLASSES
    for split in data.splits.values():
        assert np.array_equal(split.levels[:, 0], split.labels)
        for fine, coarse in split.levels.tolist():
            assert data.classes[fine].split()[1] in GROUPS[data.levels[1].classes[coarse]]


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_have_the_area_of_the_unit_disc(shape):
    x, y = polygon(shape).T
    shoelace = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    solid = 1 - _HOLE**2 if shape == "ring" else 1
    assert shoelace * solid == pytest.approx(np.pi)


def test_the_size_is_that_asked_for_and_boxes_scale_with_it():
    index = np.arange(50)
    small, large = boxes_of(0, index, 64, 12), boxes_of(0, index, 256, 12)
    assert np.abs(small * 4 - large).max() <= 4
    assert open_data("synthetic:shapes?n=40&size=33")["train"].read(0).size == (33, 33)


def test_boxes_enclose_the_shape_tightly(monkeypatch):
    """Drawn twice with the object's colours swapped for two others, only the object's pixels change."""
    from vitrail.data.sources import shapes

    size, index = 96, np.arange(60)
    boxes = boxes_of(0, index, size, 18)
    colours = shapes._object_colours
    for i in index:
        plain = render(0, int(i), size, 18).astype(int)
        with monkeypatch.context() as patch:
            patch.setattr(shapes, "_object_colours", lambda *a: tuple((c + np.float32(0.5)) % 1 for c in colours(*a)))
            changed = np.abs(render(0, int(i), size, 18).astype(int) - plain).max(-1) > 20
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert (seen[:2] >= boxes[i, :2] - 1).all()
        assert (seen[2:] <= boxes[i, 2:] + 1).all()
        assert np.abs(seen - boxes[i]).max() <= 3  # a sharp corner covers less than a pixel


def test_mean_colour_tells_nothing():
    from sklearn.linear_model import LogisticRegression

    data = open_data("synthetic:shapes?n=4000&size=32&classes=6")
    x, y = (
        np.stack([np.asarray(data[name].read(i)).mean((0, 1)) / 255 for i in range(len(data[name]))])
        for name in ("train", "test")
    )
    score = LogisticRegression(max_iter=500).fit(x, data["train"].labels).score(y, data["test"].labels)
    chance = 1 / 6
    assert abs(score - chance) < 4 * np.sqrt(chance * (1 - chance) / len(y))  # four standard deviations of guessing


def test_form_can_be_learned_where_colour_cannot():
    """Contrast to the corner of the box, on a coarse grid: the outline is there to be seen."""
    from sklearn.ensemble import RandomForestClassifier

    labels = label_of(0, np.arange(600), 6)
    pictures = np.stack([render(0, i, 48, 6) for i in range(600)]).astype(float)
    boxes = boxes_of(0, np.arange(600), 48, 6)
    features = []
    for picture, (left, top, right, bottom) in zip(pictures, boxes, strict=True):
        crop = picture[top:bottom, left:right]
        rows = np.linspace(0, len(crop) - 1, 8).astype(int)
        columns = np.linspace(0, crop.shape[1] - 1, 8).astype(int)
        tiny = crop[np.ix_(rows, columns)]
        features.append(np.abs(tiny - tiny[0, 0]).max(-1).ravel())
    score = (
        RandomForestClassifier(100, random_state=0)
        .fit(features[:450], labels[:450])
        .score(features[450:], labels[450:])
    )
    assert score > 2 / 6


@pytest.mark.parametrize("options", ["n=5", "size=2", "classes=1", "classes=19", "seed=-1", "n=1.5"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=options.split("=")[0]):
        open_data(f"synthetic:shapes?{options}")
