"""Scores for images of no class against scikit-learn, scipy, loops and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from scipy.special import logsumexp, softmax
from sklearn.covariance import ledoit_wolf
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from vitrail.measure import trust as rejection
from vitrail.measure.trust import (
    fit_mahalanobis,
    fit_neighbours,
    logit_score,
    read_embedding_score,
    rejection_metrics,
    threshold_for,
)
from vitrail.model.store import read_tensors, write_tensors

KINDS = ("max_probability", "max_logit", "energy")


def embedded(images: int, width: int = 6, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings of clusters with correlated features."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(images) % classes
    centres = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(98))
    return centres[target] + torch.randn(images, width, generator=generator) @ mixing, target


def test_scores_of_logits_equal_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "SCORES_AT_ONCE", 30)  # several pieces
    logits = 3 * torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    rows = logits.double().numpy()
    expected = (softmax(rows, 1).max(1), rows.max(1), logsumexp(rows, 1))
    for kind, scores in zip(KINDS, expected, strict=True):
        np.testing.assert_allclose(logit_score(logits, kind), scores, rtol=1e-13)
        assert logit_score(logits[:0], kind).shape == (0,)


def test_the_energy_keeps_what_a_shift_of_all_logits_takes_from_the_probability() -> None:
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(logit_score(logits + 7, "energy"), logit_score(logits, "energy") + 7)
    assert torch.allclose(logit_score(logits + 7, "max_probability"), logit_score(logits, "max_probability"))


def test_several_labels_are_scored_by_the_most_certain() -> None:
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    formulas = (lambda z: 1 / (1 + math.exp(-z)), lambda z: z, lambda z: math.log(1 + math.exp(z)))
    for kind, formula in zip(KINDS, formulas, strict=True):
        expected = [max(formula(z) for z in row) for row in logits.tolist()]
        np.testing.assert_allclose(logit_score(logits, kind, multilabel=True), expected, rtol=1e-12)


def test_impossible_classes_change_no_score() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    masked = torch.nn.functional.pad(logits, (0, 2), value=-math.inf)
    for kind in KINDS:
        for several in (False, True):
            assert torch.allclose(
                logit_score(masked, kind, multilabel=several), logit_score(logits, kind, multilabel=several)
            )


@pytest.mark.parametrize("k", [1, 5, 90])
def test_neighbour_distances_equal_scikit_learn(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "QUERIES", 7)  # several pieces
    (train, _), (test, _) = embedded(90), embedded(40, seed=1)
    unit = [(x / x.norm(dim=1, keepdim=True)).double().numpy() for x in (train, test)]
    distances, _ = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(unit[0]).kneighbors(unit[1])
    scores = fit_neighbours(train, k)(5 * test)  # lengths do not matter
    np.testing.assert_allclose(scores, -distances[:, -1], atol=1e-6)
    assert fit_neighbours(train, k)(test[:0]).shape == (0,)


def test_a_training_image_is_as_near_as_it_can_be() -> None:
    train, _ = embedded(50)
    assert float(fit_neighbours(train, 1)(train).abs().max()) < 1e-6


@pytest.mark.parametrize(("images", "width"), [(90, 6), (12, 20)])  # also fewer images than features
def test_mahalanobis_distances_equal_a_loop_with_scikit_learns_shrinkage(
    images: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "SCORES_AT_ONCE", 50)  # several pieces
    (train, y), (test, _) = embedded(images, width), embedded(20, width, seed=1)
    x, means = train.double().numpy(), [train[y == c].double().mean(0).numpy() for c in range(3)]
    residual = np.stack([x[i] - means[int(y[i])] for i in range(images)])
    covariance, shrinkage = ledoit_wolf(residual, assume_centered=True)
    inverse = np.linalg.inv(covariance)
    expected = [max(-(row - m) @ inverse @ (row - m) for m in means) for row in test.double().numpy()]
    score = fit_mahalanobis(train, y)
    assert score.shrinkage == pytest.approx(shrinkage, rel=1e-9)
    np.testing.assert_allclose(score(test), expected, rtol=1e-7)
    assert score(test[:0]).shape == (0,)


def test_mahalanobis_distances_do_not_depend_on_the_scale_of_features_where_there_are_many_images() -> None:
    (train, y), (test, _) = embedded(3000, 3), embedded(20, 3, seed=1)
    scale = torch.tensor([1.0, 2.0, 0.5])
    plain, scaled = fit_mahalanobis(train, y)(test), fit_mahalanobis(train * scale, y)(test * scale)
    assert torch.allclose(plain, scaled, rtol=0.02)


def test_an_image_of_several_labels_counts_for_each_and_one_label_is_a_class() -> None:
    train, y = embedded(60)
    test, _ = embedded(20, seed=1)
    one_hot = torch.nn.functional.one_hot(y, 5)  # two labels without images
    assert torch.allclose(fit_mahalanobis(train, one_hot)(test), fit_mahalanobis(train, y)(test))
    both = one_hot.clone()
    both[:30, 3] = 1
    twice = torch.cat([train, train[:30]]), torch.cat([y, torch.full((30,), 3)])
    assert torch.allclose(fit_mahalanobis(train, both)(test), fit_mahalanobis(*twice)(test), rtol=1e-9)
    assert len(fit_mahalanobis(train, both).means) == 4


def test_a_singular_covariance_is_inverted() -> None:
    train = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])  # x x' is the covariance: nothing to shrink by
    score = fit_mahalanobis(train, torch.zeros(2, dtype=torch.long))
    assert score.shrinkage == rejection.LEAST_SHRINKAGE
    assert score(torch.tensor([[1.0, 0.0]])).tolist() == pytest.approx([-1.0], rel=1e-5)
    assert score(torch.eye(2)).isfinite().all()


@pytest.mark.parametrize("kind", ["neighbours", "mahalanobis"])
def test_unknown_images_score_lower(kind: str) -> None:
    (train, y), (known, _) = embedded(150), embedded(60, seed=1)
    unknown = 10 * torch.randn(60, 6, generator=torch.Generator().manual_seed(3)) + 15
    score = fit_neighbours(train, 5) if kind == "neighbours" else fit_mahalanobis(train, y)
    metrics = rejection_metrics(score(known), score(unknown))
    assert metrics["auroc"] > 0.9
    assert rejection_metrics(score(unknown), score(known))["auroc"] == pytest.approx(1 - metrics["auroc"])


@pytest.mark.parametrize("kind", ["neighbours", "mahalanobis"])
def test_a_fitted_score_comes_back_from_a_file(kind: str, tmp_path: Path) -> None:
    train, y = embedded(50)
    score = fit_neighbours(train, 5) if kind == "neighbours" else fit_mahalanobis(train, y)
    write_tensors(tmp_path / "score.safetensors", score.tensors())
    facts = json.loads(json.dumps({**score.to_json(), "threshold": 1.0}))
    again = read_embedding_score(facts, read_tensors(tmp_path / "score.safetensors"))
    assert again(train).equal(score(train))
    assert again.to_json() == score.to_json()


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("neighbours", {"kind": "cosine"}),
        ("neighbours", {"k": 51}),
        ("neighbours", {"k": 0}),
        ("neighbours", {"k": None}),
        ("neighbours", {"images": 49}),
        ("mahalanobis", {"classes": 2}),
        ("mahalanobis", {"shrinkage": "much"}),
        ("mahalanobis", {"kind": "neighbours"}),
        ("neighbours", {"memory": torch.zeros(50)}),
        ("neighbours", {"memory": torch.full((50, 6), math.nan)}),
        ("mahalanobis", {"whitening": torch.eye(5)}),
        ("mahalanobis", {"means": None}),
    ],
)
def test_a_damaged_score_is_one_sentence(kind: str, damage: dict[str, Any]) -> None:
    train, y = embedded(50)
    score = fit_neighbours(train, 5) if kind == "neighbours" else fit_mahalanobis(train, y)
    facts, tensors = score.to_json(), score.tensors()
    for name, value in damage.items():
        (tensors if name in tensors else facts)[name] = value
    with pytest.raises(ValueError, match=r"this is no stored score of embeddings .*fit it again"):
        read_embedding_score(facts, tensors)


SCORES = {
    "distinct": (np.random.default_rng(0).normal(1, 1, 83), np.random.default_rng(1).normal(0, 1, 57)),
    "many ties": (np.random.default_rng(0).integers(1, 6, 83) / 4, np.random.default_rng(1).integers(0, 5, 57) / 4),
    "all equal": (np.ones(20), np.ones(30)),
    "separated": (np.arange(5.0) + 10, np.arange(7.0)),
    "reversed": (np.arange(7.0), np.arange(5.0) + 10),
    "one of each": (np.array([0.3]), np.array([0.2])),
}


@pytest.mark.parametrize("case", SCORES)
def test_metrics_equal_scikit_learn(case: str) -> None:
    known, unknown = SCORES[case]
    metrics = rejection_metrics(known, unknown)
    truth, scores = np.r_[np.ones(len(known)), np.zeros(len(unknown))], np.r_[known, unknown]
    fpr, tpr, _ = sk.roc_curve(truth, scores, drop_intermediate=False)
    expected = {
        "auroc": sk.roc_auc_score(truth, scores),
        "fpr95": fpr[np.argmax(tpr >= 0.95)],
        "aupr": sk.average_precision_score(truth, scores),
        "aupr_unknown": sk.average_precision_score(1 - truth, -scores),
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95, 1.0])
def test_the_threshold_is_the_highest_that_keeps_enough(case: str, keep: float) -> None:
    known = SCORES[case][0]
    threshold = threshold_for(known, keep)
    assert (known >= threshold).mean() >= keep
    assert (known > threshold).mean() < keep


def test_a_share_that_is_no_binary_fraction_keeps_exactly_that_many() -> None:
    assert threshold_for(torch.arange(100.0), 0.55) == 45.0  # 100 * 0.55 is above 55 in floats


def test_bad_input_is_one_sentence() -> None:
    train, y = embedded(20)
    score = fit_neighbours(train, 3)
    cases: list[tuple[Any, str]] = [
        (lambda: logit_score(train, "margin"), "there are max_probability, max_logit, energy"),
        (lambda: logit_score(train[0], "energy"), r"not \[images, classes\]"),
        (lambda: logit_score(train * math.nan, "energy"), "NaN"),
        (lambda: fit_neighbours(train, 21), "k = 21 neighbours of 20 training images"),
        (lambda: fit_neighbours(train[:0], 1), "check model and split"),
        (lambda: score(train[:, :4]), r"\[images, 6\] are needed"),
        (lambda: score(train * math.inf), "NaN or infinite"),
        (lambda: fit_mahalanobis(train, y[:4]), "class numbers of 20 images"),
        (lambda: fit_mahalanobis(train, y.float()), "class numbers of 20 images"),
        (lambda: fit_mahalanobis(train, y - 1), "leave them out"),
        (lambda: fit_mahalanobis(train, torch.zeros(20, 3)), "there are none"),
        (lambda: fit_mahalanobis(train, torch.arange(20)), "needs several images"),
        (lambda: fit_mahalanobis(torch.full((20, 3), 0.1).double(), y), "needs several images"),
        (lambda: threshold_for(torch.arange(3.0), 0.0), "above 0 and up to 1"),
        (lambda: threshold_for([]), "one finite number per image"),
        (lambda: rejection_metrics([1.0, math.nan], [0.0]), "one finite number per image"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()
