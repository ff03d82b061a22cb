"""k-means against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from vitrail.kernels.kmeans import kmeans


def blobs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(5, 3)) * 10
    truth = rng.integers(5, size=300)
    return (centres[truth] + rng.normal(size=(300, 3))).astype(np.float32), truth


@pytest.mark.parametrize("part", [1 << 24, 64])
def test_separate_clusters_are_found(part: int) -> None:
    rows, truth = blobs(0)
    found = kmeans(torch.from_numpy(rows), 5, part=part)
    assert adjusted_rand_score(truth, found.label.numpy()) > 0.99


def test_from_the_same_centres_it_ends_where_scikit_learn_ends() -> None:
    rows, _ = blobs(1)
    found = kmeans(torch.from_numpy(rows), 5)
    oracle = KMeans(5, init=found.centres.numpy(), n_init=1, max_iter=1).fit(rows)  # a fixed point stays
    np.testing.assert_allclose(oracle.cluster_centers_, found.centres.numpy(), rtol=1e-4, atol=1e-4)
    assert found.inertia == pytest.approx(oracle.inertia_, rel=1e-4)
    assert found.inertia == pytest.approx(KMeans(5, n_init=10, random_state=0).fit(rows).inertia_, rel=0.02)


def test_no_cluster_is_empty_and_equal_rows_are_no_trouble() -> None:
    rows, _ = blobs(2)
    assert len(torch.unique(kmeans(torch.from_numpy(rows), 40, iterations=3).label)) == 40
    assert kmeans(torch.ones(10, 2), 3).inertia == 0
    with pytest.raises(ValueError, match="11 clusters of 10 rows"):
        kmeans(torch.ones(10, 2), 11)
