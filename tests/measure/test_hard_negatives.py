"""Images made from one class for another: labels, hardness, and how far they have gone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.svm import LinearSVC

from vitrail.measure.hard_negatives import (
    Hardness,
    axis_position,
    hardness,
    histogram_overlap,
    label_consistency,
    largest_jump,
)

GENERATOR = torch.Generator().manual_seed(0)
SOURCE, TARGET, MOVED = torch.randn(3, 7, 12, generator=GENERATOR, dtype=torch.float64)

# Labels


def test_labels_are_consistent_among_all_classes_or_an_episodes_alone() -> None:
    logits = torch.tensor([[5.0, 1, 0, 2], [0, 1, 5, 2], [0, 3, 5, 2], [0, 3, 5, 4]])
    target = torch.tensor([0, 3, 1, 3])
    assert label_consistency(logits, target).share == 1 / 4
    among = torch.tensor([[0, 3], [3, 1], [3, 1], [2, 3]])
    found = label_consistency(logits, target, among)
    assert (found.share, found.images) == (3 / 4, 4)
    assert found.interval[0] < 3 / 4 < found.interval[1]


def test_fewer_classes_never_make_labels_less_consistent() -> None:
    logits = torch.randn(200, 10, generator=GENERATOR)
    target = torch.arange(200) % 10
    among = torch.stack([(target + step) % 10 for step in range(4)], 1)
    assert label_consistency(logits, target, among).share >= label_consistency(logits, target).share
    assert label_consistency(logits, target, target[:, None]).share == 1


def test_a_class_that_cannot_be_chosen_and_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="not among"):
        label_consistency(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="no images"):
        label_consistency(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


# Hardness


def test_probabilities_are_the_softmax_of_scikit_learns_svm_on_real_images_alone() -> None:
    support = torch.randn(3, 4, 2, 10, generator=GENERATOR, dtype=torch.float64)
    made = torch.randn(3, 6, 10, generator=GENERATOR, dtype=torch.float64)
    source, target = torch.arange(6).repeat(3, 1) % 4, (torch.arange(6).repeat(3, 1) + 1) % 4
    found = hardness(support, made, source, target)
    for episode in range(3):
        known = F.normalize(support[episode].flatten(0, 1), dim=-1).numpy()
        machine = LinearSVC(C=1.0, dual=False, tol=1e-10, max_iter=100_000).fit(known, np.repeat(np.arange(4), 2))
        scores = torch.from_numpy(machine.decision_function(F.normalize(made[episode], dim=-1).numpy()))
        chance = scores.softmax(1).numpy()
        # Two solvers, each converged to about 1e-7.
        assert found.source[episode] == pytest.approx(chance[range(6), source[0]].mean(), abs=1e-5)
        assert found.target[episode] == pytest.approx(chance[range(6), target[0]].mean(), abs=1e-5)


def test_images_that_stay_at_their_source_are_the_sources() -> None:
    support = torch.eye(3, 8)[None, :, None].repeat(2, 1, 2, 1)
    source, target = torch.tensor([[0, 1, 2]] * 2), torch.tensor([[1, 2, 0]] * 2)
    stayed = hardness(support, support[:, :, 0], source, target)
    assert (stayed.source > stayed.target).all()
    gone = hardness(support, support[:, [1, 2, 0], 0], source, target)
    np.testing.assert_allclose(gone.target, stayed.source)
    between = hardness(support, support[:, :, 0] + support[:, [1, 2, 0], 0], source, target)
    np.testing.assert_allclose(between.source, between.target, atol=1e-6)


def test_overlap_is_one_for_the_same_and_nothing_for_what_lies_apart() -> None:
    values = np.random.default_rng(0).random(500)
    assert histogram_overlap(values, values[::-1]) == pytest.approx(1)
    assert histogram_overlap(values * 0.3, 0.6 + values * 0.3) == 0
    assert Hardness(values * 0.3, 0.6 + values * 0.3).to_json()["overlap"] == 0


def test_overlap_is_the_common_area() -> None:
    """Uniform on [0, 0.4] and on [0.2, 0.6]: half of each is common; bins are 0.05 wide, so no bin is cut."""
    even = (np.arange(4000) + 0.5) / 4000
    assert histogram_overlap(0.4 * even, 0.2 + 0.4 * even) == pytest.approx(0.5, abs=1e-3)


def test_probabilities_of_zero_and_one_belong_to_a_bin() -> None:
    assert histogram_overlap(np.array([0.0, 1.0]), np.array([0.0, 1.0])) == 1
    with pytest.raises(ValueError, match="no values"):
        histogram_overlap(np.array([]), np.array([0.5]))


# How far


def test_the_position_is_nothing_at_the_source_and_the_distance_at_the_target() -> None:
    """The axis of GeNIe-Ada (arXiv 2312.02548)."""
    assert (axis_position(SOURCE, SOURCE, TARGET) == 0).all()
    torch.testing.assert_close(axis_position(TARGET, SOURCE, TARGET), (TARGET - SOURCE).norm(dim=1))
    half = axis_position((SOURCE + TARGET) / 2, SOURCE, TARGET)
    torch.testing.assert_close(half, (TARGET - SOURCE).norm(dim=1) / 2)


def test_the_position_does_not_change_when_all_embeddings_move_or_turn() -> None:
    plain = axis_position(MOVED, SOURCE, TARGET)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=GENERATOR, dtype=torch.float64))[0]
    turned = axis_position(*(5 + each @ turn for each in (MOVED, SOURCE, TARGET)))
    torch.testing.assert_close(turned, plain)
    torch.testing.assert_close(axis_position(3 * MOVED, 3 * SOURCE, 3 * TARGET), 3 * plain)


def test_what_is_orthogonal_to_the_axis_does_not_count() -> None:
    axis = F.normalize(TARGET - SOURCE, dim=1)
    aside = MOVED - (MOVED * axis).sum(1, keepdim=True) * axis
    torch.testing.assert_close(axis_position(MOVED + aside, SOURCE, TARGET), axis_position(MOVED, SOURCE, TARGET))


def test_the_printed_box_divides_by_another_length() -> None:
    away, axis = MOVED - SOURCE, TARGET - SOURCE
    cosine = F.cosine_similarity(away, axis, dim=1)
    torch.testing.assert_close(axis_position(MOVED, SOURCE, TARGET, printed=True), cosine * axis.norm(dim=1))
    assert (axis_position(SOURCE, SOURCE, TARGET, printed=True) == 0).all()
    # A path that bends: by the box, the jump comes earlier.
    path = torch.tensor([[0.1, 1.0], [0.9, 1.0], [1.9, 0.1]])
    start, end = torch.zeros(2), torch.tensor([2.0, 0.0])
    assert largest_jump(axis_position(path, start, end)).item() == 2
    assert largest_jump(axis_position(path, start, end, printed=True)).item() == 1


def test_a_source_that_is_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="no axis"):
        axis_position(MOVED, SOURCE, SOURCE)


def test_a_planted_jump_is_found_whatever_the_scale_and_the_first_is_never_chosen() -> None:
    steps = torch.tensor([[0.0, 0.1, 0.2, 0.9, 1.0], [0.0, -0.8, -0.7, -0.6, -0.5], [9.0, 9.0, 9.0, 9.0, 9.0]])
    assert largest_jump(steps).tolist() == [3, 1, 1]
    assert largest_jump(40 * steps).tolist() == [3, 1, 1]
    assert int(largest_jump(torch.randn(500, 5, generator=GENERATOR)).min()) == 1
    with pytest.raises(ValueError, match="two candidates"):
        largest_jump(torch.zeros(3, 1))
