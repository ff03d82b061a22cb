"""Label errors: equal to cleanlab where the definitions coincide, and no image is judged by its own label."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cleanlab.count import compute_confident_joint, num_label_issues
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitrail.data.open import open_data
from vitrail.measure import label_errors
from vitrail.measure.label_errors import inseparable, out_of_fold, outliers, suspects
from vitrail.measure.probe import prepared

Probabilities = NDArray[np.float64]


def noisy(seed: int, images: int = 600, classes: int = 5) -> tuple[Probabilities, NDArray[np.int64]]:
    """Probabilities of uneven classes, a tenth of whose labels is another class; the last class has no image."""
    draw = np.random.default_rng(seed)
    truth = draw.choice(classes - 1, images, p=np.array([0.4, 0.3, 0.2, 0.1]))
    logits = draw.normal(size=(images, classes)) * 1.5
    logits[np.arange(images), truth] += 2.5
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.where(draw.random(images) < 0.1, (truth + draw.integers(1, classes - 1, images)) % (classes - 1), truth)
    return probabilities, labels


def clusters(seed: int, images: int = 240, classes: int = 4, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    return 4 * torch.eye(classes, width)[labels] + 0.5 * torch.randn(images, width, generator=generator), labels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("score", "method"), [("self_confidence", "self_confidence"), ("margin", "normalized_margin")])
def test_scores_equal_those_of_cleanlab(seed: int, score, method: str) -> None:
    probabilities, labels = noisy(seed)
    result = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels), score)
    np.testing.assert_allclose(
        result.scores, get_label_quality_scores(labels, probabilities, method=method), atol=1e-12
    )
    predicted = find_label_issues(
        labels, probabilities, filter_by="predicted_neq_given", return_indices_ranked_by=method
    )
    assert result.images.tolist() == predicted[: round(result.expected)].tolist()
    assert len(result.images) > 20


@pytest.mark.parametrize("seed", range(3))
def test_joint_and_numbers_of_errors_equal_those_of_cleanlab(seed: int) -> None:
    probabilities, labels = noisy(seed)
    result = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels))
    expected = compute_confident_joint(labels, probabilities, calibrate=False)
    joint = result.joint.to_dense().numpy()
    np.fill_diagonal(joint, joint.diagonal().clip(min=1))  # as cleanlab has it
    np.testing.assert_array_equal(joint, expected)
    calibrated = (1 - expected.diagonal() / expected.sum(1)) @ np.bincount(labels, minlength=5)
    assert result.expected == pytest.approx(calibrated)
    rounded = num_label_issues(labels, probabilities, estimation_method="off_diagonal_calibrated")
    assert abs(result.expected - rounded) <= 5  # cleanlab rounds every cell


@pytest.mark.parametrize("seed", range(3))
def test_the_default_score_equals_a_loop_over_images_and_classes(seed: int) -> None:
    probabilities, labels = noisy(seed)
    images, classes = probabilities.shape
    transition = np.where(np.eye(classes, dtype=bool), 0.95, 0.05 / (classes - 1))  # [true, given]
    for _ in range(label_errors.ROUNDS):
        counts = np.zeros((classes, classes))
        for i in range(images):
            posterior = probabilities[i] * transition[:, labels[i]]
            counts[:, labels[i]] += posterior / posterior.sum()
        transition = counts / np.maximum(counts.sum(1, keepdims=True), 1e-300)
    mistakes = transition * (1 - np.eye(classes))
    mistakes = mistakes * classes / mistakes.sum()
    least_probable = np.mean([probabilities[i, labels[i]] == probabilities[i].min() for i in range(images)])
    uniform = least_probable * (classes - 1)
    share = uniform**2 / (uniform**2 + 0.02**2)
    scores = []
    for i in range(images):
        own, others = probabilities[i, labels[i]], [c for c in range(classes) if c != labels[i]]
        weights = [share + (1 - share) * (classes - 1) * mistakes[c, labels[i]] for c in others]
        against = sum(w * probabilities[i, c] for w, c in zip(weights, others, strict=True))
        scores.append((own + 1e-6) / (own + against + 1e-6))
    assert 0.01 < share < 0.99  # both kinds of noise count
    np.testing.assert_allclose(suspects(torch.from_numpy(probabilities), torch.from_numpy(labels)).scores, scores)


def test_noise_between_two_classes_is_found_before_what_is_only_improbable() -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 10, 4000)
    logits = draw.normal(size=(4000, 10))
    logits[np.arange(4000), truth] += 4.0
    logits[np.arange(4000), truth ^ 1] += 2.0  # classes 0 and 1, 2 and 3 ... resemble each other
    probabilities = torch.from_numpy(logits).softmax(1)
    wrong = (draw.random(4000) < 0.1) & (truth < 2)
    labels = torch.from_numpy(np.where(wrong, truth ^ 1, truth))
    found = {
        score: float(wrong[suspects(probabilities, labels, score).scores.argsort()[: wrong.sum()]].mean())
        for score in ("noise", "ratio", "self_confidence", "margin")
    }
    assert found["noise"] > max(found[other] for other in ("ratio", "self_confidence", "margin")) + 0.1


def test_of_many_classes_only_the_most_probable_can_be_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities, labels = noisy(0)
    whole = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels)).scores
    monkeypatch.setattr(label_errors, "KEPT", 2)
    few = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels)).scores
    assert 0 < float((whole - few).abs().max()) < 0.1


def test_proposed_is_the_most_probable_other_class() -> None:
    probabilities, labels = noisy(0)
    result = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels))
    images = result.images.numpy()
    np.testing.assert_array_equal(result.proposed, probabilities[images].argmax(1))
    assert (result.proposed.numpy() != labels[images]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["symmetric", "similar"])
def test_default_ranking_finds_no_fewer_errors_than_cleanlab(kind: str) -> None:
    """Planted errors of real images among as many suspects, by out-of-fold probabilities and cleanlab's default score.

    Of 5 % in 3,000 images, three seeds.
    """
    split = open_data("embedded:fashion", limit=3000)["train"]
    pixels = [np.asarray(split.read(row).resize((14, 14)).convert("L"), np.float32) for row in range(len(split))]
    embeddings, truth = torch.from_numpy(np.stack(pixels)).flatten(1), torch.from_numpy(split.labels)
    similar = torch.tensor([6, 3, 4, 0, 2, 7, 0, 9, 0, 7])  # shirts and T-shirts, coats and pullovers, shoes
    ours = theirs = 0.0
    for seed in range(3):
        draw = np.random.default_rng(seed)
        wrong = draw.random(len(split)) < 0.05
        away = torch.from_numpy(draw.integers(1, 10, len(split)))
        other = (truth + away) % 10 if kind == "symmetric" else similar[truth]
        labels = torch.where(torch.from_numpy(wrong), other, truth)
        probabilities = torch.zeros(len(split), 10)
        for rows, block in out_of_fold(embeddings, labels, seed=seed)():
            probabilities[rows] = block
        scores = suspects(probabilities, labels).scores.numpy()
        ours += wrong[np.argsort(scores)[: wrong.sum()]].mean()
        peer = get_label_quality_scores(labels.numpy(), probabilities.numpy())
        theirs += wrong[np.argsort(peer)[: wrong.sum()]].mean()
    assert ours >= theirs > 3 * 0.3


def test_several_labels_per_image_equal_cleanlab_on_each_of_them() -> None:
    draw = np.random.default_rng(0)
    truth = draw.random((400, 3)) < [0.5, 0.3, 0.2]
    labels = truth ^ (draw.random((400, 3)) < 0.05)
    probabilities = 1 / (1 + np.exp(-(4 * truth - 2 + draw.normal(size=(400, 3)))))
    result = suspects(torch.from_numpy(probabilities), torch.from_numpy(labels.astype(np.int64)))
    own = np.where(labels, probabilities, 1 - probabilities)
    np.testing.assert_allclose(result.scores, own.min(1))
    binary = np.stack([1 - probabilities, probabilities], 2).reshape(-1, 2)
    options = {"filter_by": "predicted_neq_given", "return_indices_ranked_by": "self_confidence"}
    predicted = find_label_issues(labels.flatten().astype(int), binary, **options)[: round(result.expected)]
    low = np.isin(np.arange(labels.size), predicted).reshape(labels.shape)
    assert low.sum() > 30
    assert set(result.images.tolist()) == set(np.flatnonzero(low.any(1)).tolist())
    np.testing.assert_array_equal(result.proposed, (labels ^ low)[result.images.numpy()])
    assert (result.scores[result.images].diff() >= 0).all()


def test_an_image_alone_in_its_class_is_no_suspect() -> None:
    probabilities = torch.tensor([[0.98, 0.01, 0.01]] * 3 + [[0.01, 0.98, 0.01]] * 3 + [[0.9, 0.09, 0.01]])
    result = suspects(probabilities, torch.tensor([0, 0, 0, 1, 1, 0, 2]))
    assert result.images.tolist() == [5]
    assert result.proposed.tolist() == [1]


def test_blocks_give_what_the_whole_matrix_gives() -> None:
    probabilities, labels = (torch.from_numpy(array) for array in noisy(1))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    whole = suspects(probabilities, labels)
    streamed = suspects(lambda: ((rows, probabilities[rows]) for rows in order.split(7)), labels)
    assert torch.equal(whole.images, streamed.images)
    assert torch.equal(whole.scores, streamed.scores)
    assert torch.equal(whole.joint.to_dense(), streamed.joint.to_dense())


def test_folds_are_stratified_and_depend_on_the_seed_only() -> None:
    embeddings, labels = clusters(0)
    first, again, other = (out_of_fold(embeddings, labels, 4, seed) for seed in (0, 0, 1))
    parts = [[rows for rows, _ in blocks()] for blocks in (first, again, other)]
    assert torch.cat(parts[0]).sort().values.tolist() == list(range(240))
    assert all(torch.bincount(labels[part]).tolist() == [15] * 4 for part in parts[0])
    assert all(torch.equal(a, b) for a, b in zip(parts[0], parts[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts[0], parts[2], strict=True))


@pytest.mark.parametrize("classes", [3, 30])
def test_out_of_fold_equals_scikit_learn(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    """In blocks of a few images."""
    monkeypatch.setattr(label_errors, "RIDGES", (0.01,))
    monkeypatch.setattr(label_errors, "SCORES_AT_ONCE", 100)
    embeddings, labels = clusters(1, 120, classes, 32)
    features = prepared(embeddings)[0].double().numpy()
    for rows, probabilities in _by_fold(out_of_fold(embeddings, labels, 3), labels, 3):
        rest = np.setdiff1d(np.arange(120), rows)
        peer = LogisticRegression(C=1 / (0.01 * len(rest)), tol=1e-8, max_iter=2000)
        peer.fit(features[rest], labels.numpy()[rest])
        np.testing.assert_allclose(probabilities, peer.predict_proba(features[rows]), atol=2e-3)


def _by_fold(blocks: label_errors.Blocks, labels: Tensor, folds: int) -> list[tuple[NDArray[np.int64], Tensor]]:
    dense = torch.cat([block for _, block in blocks()])
    rows = torch.cat([rows for rows, _ in blocks()])
    sizes = [len(labels) // folds] * folds
    return [(part.numpy(), values) for part, values in zip(rows.split(sizes), dense.split(sizes), strict=True)]


def test_no_image_is_evaluated_by_a_classifier_that_saw_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """One regression per fold learns from the others, and a wrong label does not change its own probabilities."""
    monkeypatch.setattr(label_errors, "RIDGES", (0.1,))
    embeddings, labels = clusters(2)
    fitted, fit = [], label_errors._fit
    features = torch.nn.functional.pad(prepared(embeddings)[0], (0, 1), value=1.0)

    def recorded(some: Tensor, *others) -> Tensor:
        fitted.append({tuple(row) for row in some.tolist()})
        return fit(some, *others)

    monkeypatch.setattr(label_errors, "_fit", recorded)
    parts = [rows for rows, _ in out_of_fold(embeddings, labels, 4)()]
    for part, learned in zip(parts, fitted[1:], strict=True):  # the first is of the choice of a ridge
        assert len(learned) == 180
        assert not learned & {tuple(row) for row in features[part].tolist()}


def test_wrong_labels_of_separable_embeddings_rank_first() -> None:
    embeddings, truth = clusters(3)
    labels = truth.clone()
    labels[::19] = (truth[::19] + 1) % 4
    result = suspects(out_of_fold(embeddings, labels), labels)
    assert sorted(result.scores.argsort()[:13].tolist()) == list(range(0, 240, 19))
    assert set(result.images.tolist()) == set(range(0, 240, 19))
    assert torch.equal(result.proposed, truth[result.images])
    assert result.agreement == pytest.approx(1 - 13 / 240)


def test_wrong_labels_are_found_where_several_may_hold() -> None:
    embeddings, classes = clusters(4)
    truth = torch.stack([classes >= 2, classes % 2 == 0], 1).long()
    labels = truth.clone()
    labels[5, 0], labels[50, 1] = 1 - labels[5, 0], 1 - labels[50, 1]
    result = suspects(out_of_fold(embeddings, labels), labels)
    assert sorted(result.images.tolist()) == [5, 50]
    assert torch.equal(result.proposed, truth[result.images])


def test_more_folds_than_images_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 images cannot be divided into 5 folds; 2 to 3 are possible"):
        out_of_fold(torch.randn(3, 4), torch.tensor([0, 1, 0]))


def test_inseparable_classes_are_mixed_up_both_ways() -> None:
    joint = torch.tensor([[80, 20, 0, 0], [15, 85, 0, 0], [30, 0, 70, 0], [0, 0, 2, 3]]).to_sparse().coalesce()
    assert inseparable(joint) == [(0, 1, pytest.approx(0.15))]  # class 2 is taken for 0, but not 0 for 2
    assert inseparable(joint, share=0.16) == []


def test_outliers_are_those_far_from_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(300, 8, generator=generator) * 0.1
    embeddings[:, 0] += 1
    embeddings[7, 1], embeddings[9, 2] = 3, -9
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    distances = torch.cdist(unit.double(), unit.double()).sort(1).values[:, 5].numpy()
    low, high = np.quantile(distances, [0.25, 0.75])
    far = outliers(embeddings, k=5)
    assert far[:2].tolist() == [9, 7]
    assert far.tolist() == [i for i in np.argsort(-distances).tolist() if distances[i] > high + 3 * (high - low)]
