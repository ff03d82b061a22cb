"""Matchings are the best there are; clusters that are classes align with them whatever their numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from vitrail.measure.clustering import (
    best_matching,
    class_of_cluster,
    cluster_alignment,
    nearest_centre,
    purity,
    shared_images,
)
from vitrail.measure.retrieval import neighbour_purity, positive_ranks


def blobs(rows: int, classes: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    centres = torch.eye(classes, 8)
    label = torch.arange(rows) % classes
    noise_of = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return centres[label] + noise * noise_of, label


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (30, 30), (5, 12), (12, 5), (3, 1)])
@pytest.mark.parametrize("whole", [False, True])  # whole numbers have many equal matchings
def test_a_matching_is_as_good_as_scipys(shape: tuple[int, int], whole: bool) -> None:
    random = np.random.default_rng(shape[0])
    for _ in range(20):
        gain = random.normal(size=shape)
        gain = np.floor(2 * gain) if whole else gain
        found = best_matching(gain)
        rows, columns = linear_sum_assignment(gain, maximize=True)
        has = found >= 0
        assert has.sum() == min(shape)
        assert len(set(found[has])) == min(shape)
        assert gain[has, found[has]].sum() == pytest.approx(gain[rows, columns].sum(), abs=1e-9)


def test_a_matching_is_the_best_of_all_permutations() -> None:
    gain = np.random.default_rng(0).random((6, 6))
    best = max(itertools.permutations(range(6)), key=lambda p: sum(gain[i, j] for i, j in enumerate(p)))
    assert best_matching(gain).tolist() == list(best)


def test_a_matching_of_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        best_matching(np.array([[np.nan, 1.0], [0.0, 1.0]]))


def test_clusters_with_permuted_numbers_align_perfectly() -> None:
    label = torch.arange(60) % 6
    permuted = torch.tensor([4, 2, 0, 5, 1, 3])
    shared = shared_images(permuted[label], label, 6, 6)
    assert class_of_cluster(shared)[permuted.numpy()].tolist() == list(range(6))


def test_purity_by_hand() -> None:
    # Three clusters: {a a a b}, {b b c}, {c}: 3 + 2 + 1 of 8 have the most frequent class of their cluster.
    cluster, label = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    shared = shared_images(cluster, label, 3, 3)
    assert shared.tolist() == contingency_matrix(cluster.numpy(), label.numpy()).tolist()
    assert purity(shared) == 6 / 8


def test_the_score_of_a_match_is_relative_to_the_clusters_size() -> None:
    # By common images cluster 0 would take class 0 (6 > 4); by their share both prefer what the sum decides.
    shared = np.array([[6, 5], [4, 0]])
    # shares: [[6/11, 5/11], [1, 0]]: 5/11 + 1 beats 6/11 + 0.
    assert class_of_cluster(shared).tolist() == [1, 0]


def test_well_separated_classes_are_found_without_labels() -> None:
    found = cluster_alignment(blobs(120, 5, 0.05, 0), blobs(60, 5, 0.05, 1), 5)
    assert (found.accuracy, found.purity) == (1.0, 1.0)
    assert found.per_class.tolist() == [1.0] * 5


def test_accuracy_per_class_is_its_share_of_right_images() -> None:
    train, test = blobs(120, 5, 0.6, 0), blobs(90, 5, 0.6, 1)
    found = cluster_alignment(train, test, 5)
    size = torch.bincount(test[1]).numpy()
    assert 0.3 < found.accuracy < 1
    assert (found.per_class * size).sum() / size.sum() == pytest.approx(found.accuracy)


def test_nearest_centres_are_nearest_in_euclidean_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, centres = torch.randn(50, 6, generator=generator), 0.5 * torch.randn(7, 6, generator=generator)
    assert nearest_centre(rows, centres).equal(torch.cdist(rows.double(), centres.double()).argmin(1))


def test_one_class_a_class_without_images_and_fewer_images_than_clusters() -> None:
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    alone = torch.zeros(10, dtype=torch.int64)
    assert cluster_alignment((rows, alone), (rows, alone), 1).accuracy == 1.0
    found = cluster_alignment((rows, alone), (rows, alone), 3)
    assert np.isnan(found.per_class[1:]).all()
    few = cluster_alignment((rows[:2], torch.tensor([0, 1])), (rows[:2], torch.tensor([0, 1])), 5)
    assert (few.accuracy, few.clusters) == (1.0, 2)


def test_constant_embeddings_are_one_cluster_of_one_class() -> None:
    constant, label = torch.ones(12, 3), torch.arange(12) % 3
    found = cluster_alignment((constant, label), (constant, label), 3)
    assert found.accuracy == pytest.approx(1 / 3)


def neighbours_by_loop(queries: Tensor, memory: Tensor, query: int) -> list[int]:
    near = F.cosine_similarity(queries[query].double()[None], memory.double())
    return near.argsort(descending=True).tolist()


@pytest.mark.parametrize("part", [1 << 24, 50])
def test_neighbour_purity_is_that_of_a_loop(part: int) -> None:
    (queries, labels), (memory, memory_labels) = blobs(20, 4, 0.8, 0), blobs(31, 4, 0.8, 1)
    by_loop = [
        np.mean([memory_labels[row] == labels[i] for row in neighbours_by_loop(queries, memory, i)[:5]])
        for i in range(20)
    ]
    found = neighbour_purity(queries, labels, memory, memory_labels, 5, part=part)
    assert found == pytest.approx(np.mean(by_loop))
    assert 0.1 < found < 0.95


def test_ones_own_image_is_no_neighbour() -> None:
    memory, labels = torch.eye(4), torch.arange(4)
    assert neighbour_purity(memory, labels, memory, labels, 1) == 1.0
    assert neighbour_purity(memory, labels, memory, labels, 1, own=torch.arange(4)) == 0.0
    with pytest.raises(ValueError, match="no other image"):
        neighbour_purity(memory[:1], labels[:1], memory[:1], labels[:1], 1, own=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("part", [1 << 24, 50])
def test_the_rank_of_the_kth_image_of_ones_class_is_that_of_a_loop(part: int) -> None:
    (queries, labels), (memory, memory_labels) = blobs(20, 4, 0.8, 0), blobs(31, 4, 0.8, 1)
    by_loop = []
    for i in range(20):
        kin = [
            place
            for place, row in enumerate(neighbours_by_loop(queries, memory, i), 1)
            if memory_labels[row] == labels[i]
        ]
        by_loop.append(kin[2])
    assert positive_ranks(queries, labels, memory, memory_labels, 3, part=part).tolist() == by_loop


def test_queries_without_enough_of_their_class_have_no_rank() -> None:
    memory, labels = torch.eye(3), torch.tensor([0, 0, 1])
    assert positive_ranks(memory, labels, memory, labels, 2).tolist() == [2, 2]
    assert len(positive_ranks(memory, labels, memory, labels, 4)) == 0
