"""Fewer training images and wrong labels: by closed forms, train alone, and each image by itself."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vitrail.config import RunConfig, from_mapping
from vitrail.data.open import open_data
from vitrail.schema import ConfigError

FASHION = "embedded:fashion"  # 900 training images of each of 10 classes after val is carved off
SHAPES = "synthetic:shapes?n=1000&size=8&classes=6"


def counts(data) -> list[int]:
    return np.bincount(data["train"].labels, minlength=len(data.classes)).tolist()


def test_shots_are_images_a_class():
    assert counts(open_data(FASHION, shots=7)) == [7] * 10


@pytest.mark.parametrize(("fraction", "each"), [(0.01, 9), (0.1, 90), (1.0, 900)])
def test_a_fraction_is_taken_of_every_class(fraction, each):
    assert counts(open_data(FASHION, fraction=fraction)) == [each] * 10


def test_the_smallest_fraction_leaves_one_image_a_class():
    assert counts(open_data(FASHION, fraction=1e-6)) == [1] * 10


@pytest.mark.parametrize("factor", [1, 10, 100, 900])
def test_a_long_tail_is_the_exponential_profile_in_the_order_of_classes(factor):
    wanted = [int(900 * factor ** (-c / 9) + 1e-9) for c in range(10)]
    assert counts(open_data(FASHION, long_tail=factor)) == wanted


def test_a_long_tail_of_uneven_classes_has_its_profile_in_full(tmp_path):
    labels = np.repeat([0, 1, 2], [100, 30, 400])
    np.savez(tmp_path / "a.npz", x_train=np.zeros((530, 2, 2), np.uint8), y_train=labels)
    # Class 1 allows 30 * 4^(1/2) = 60 images in the first class, fewer than that has itself.
    assert counts(open_data(tmp_path / "a.npz", val_fraction=0, long_tail=4)) == [60, 30, 15]


def test_fewer_shots_are_a_subset_of_more_shots():
    few, more = (set(open_data(FASHION, shots=n)["train"].index.tolist()) for n in (5, 50))
    assert few < more


@pytest.mark.parametrize("settings", [{"shots": 5}, {"fraction": 0.1}, {"long_tail": 10}, {"label_noise": 0.5}])
def test_only_train_changes_and_people_are_told(settings):
    plain, changed = open_data(SHAPES), open_data(SHAPES, **settings)
    for name in ("val", "test"):
        np.testing.assert_array_equal(changed[name].index, plain[name].index)
        np.testing.assert_array_equal(changed[name].labels, plain[name].labels)
    assert len(changed.notes) == len(plain.notes) + 1
    assert changed.notes[-1].startswith("train: ")


@pytest.mark.parametrize("settings", [{"shots": 5}, {"long_tail": 10}, {"label_noise": 0.5}])
def test_the_split_seed_decides_what_is_drawn(settings):
    def drawn(seed):
        train = open_data(SHAPES, split_seed=seed, **settings)["train"]
        return train.index.tolist(), train.labels.tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_label_noise_replaces_its_share_by_every_other_class_as_often():
    true, noisy = (open_data(FASHION, label_noise=p)["train"].labels for p in (0.0, 0.4))
    wrong = true != noisy
    assert abs(wrong.sum() - 0.4 * 9000) < 4 * (9000 * 0.4 * 0.6) ** 0.5
    away = np.bincount((noisy - true)[wrong] % 10, minlength=10)
    assert away[0] == 0
    assert stats.chisquare(away[1:]).pvalue > 1e-4
    assert stats.chisquare(np.bincount(true[wrong], minlength=10)).pvalue > 1e-4


def test_noise_at_an_image_does_not_depend_on_which_others_are_there():
    whole, few = (open_data(FASHION, label_noise=0.3, shots=n)["train"] for n in (None, 20))
    label = dict(zip(whole.index.tolist(), whole.labels.tolist(), strict=True))
    assert [label[i] for i in few.index.tolist()] == few.labels.tolist()


@pytest.mark.parametrize(("level", "column"), [("", 0), ("coarse", 1)])
def test_noise_reaches_the_level_that_is_learned_and_no_other(level, column):
    true, noisy = (open_data(SHAPES, level=level, label_noise=p)["train"] for p in (0.0, 0.5))
    np.testing.assert_array_equal(noisy.levels[:, column], noisy.labels)
    assert (noisy.labels != true.labels).any()
    np.testing.assert_array_equal(noisy.levels[:, 1 - column], true.levels[:, 1 - column])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": 901}, "'T-shirt/top' has 900 training images of the 901 asked for; use at most 900"),
        ({"long_tail": 901}, "use 1 to 900"),
        ({"shots": 5, "fraction": 0.5}, "exclude one another"),
    ],
)
def test_what_the_data_cannot_give_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        open_data(FASHION, **settings)


@pytest.mark.parametrize("settings", [{"shots": 2}, {"long_tail": 2}, {"label_noise": 0.1}])
def test_images_with_several_labels_are_refused(tmp_path, settings):
    labels = np.eye(3, dtype=int)[np.arange(60) % 3]
    np.savez(tmp_path / "a.npz", x_train=np.zeros((60, 2, 2), np.uint8), y_train=labels)
    with pytest.raises(ValueError, match="several labels"):
        open_data(tmp_path / "a.npz", **settings)


@pytest.mark.parametrize(
    "values",
    [
        {"shots": 0},
        {"fraction": 0},
        {"fraction": 1.5},
        {"long_tail": 0.5},
        {"label_noise": 1.1},
        {"shots": 1, "long_tail": 2},
    ],
)
def test_impossible_settings_are_refused_before_data_is_read(values):
    with pytest.raises(ConfigError, match=f"data.{next(iter(values))}"):
        from_mapping({"data": values}, RunConfig())
