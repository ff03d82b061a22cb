"""What to label next: every rule equals a search by brute force or scikit-learn, and none suggests an image twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from vitrail.measure import suggestion
from vitrail.measure.suggestion import coverage, margin, pure_radius, suggest_rows, typical, typicality

NONE = torch.zeros(0, dtype=torch.int64)
RULES = ("margin", "typical", "coverage", "both")


def unit_rows(rows: int, width: int = 8, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def blobs(sizes: list[int], noise: float = 0.05, width: int = 16) -> tuple[Tensor, Tensor]:
    label = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = torch.eye(len(sizes), width)[label] + noise * unit_rows(len(label), width)
    return torch.nn.functional.normalize(rows, dim=1), label


def distances(unit: Tensor) -> NDArray[np.float64]:
    return torch.cdist(unit.double(), unit.double(), compute_mode="donot_use_mm_for_euclid_dist").numpy()


def test_margin_is_the_difference_of_the_two_highest_probabilities() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25], [0.34, 0.33, 0.33], [0.9, 0.05, 0.05]])
    rows, score, _ = margin(probabilities, torch.tensor([2]), 2)
    assert rows.tolist() == [1, 0]
    assert score.tolist() == pytest.approx([0.05, 0.2])


@pytest.mark.parametrize("k", [1, 5, 20])
def test_typicality_is_that_of_scikit_learns_neighbours(k: int) -> None:
    unit = unit_rows(1500)  # more than are searched at once
    far = NearestNeighbors(n_neighbors=k + 1, algorithm="brute").fit(unit.double().numpy())
    mean = far.kneighbors(unit.double().numpy())[0][:, 1:].mean(1)
    np.testing.assert_allclose(typicality(unit, k).numpy(), 1 / (mean + 1e-5), rtol=1e-6)


def test_typical_takes_the_most_typical_image_of_the_largest_clusters_without_a_label() -> None:
    sizes = [12, 40, 25, 30]
    unit, label = blobs(sizes)
    starts = np.cumsum([0, *sizes])
    labelled = torch.tensor([int(starts[1]) + 3])  # the largest cluster has one already
    chosen = typical(unit, labelled, 3)
    wanted = []
    for c in (3, 2, 0):
        rows = np.flatnonzero(label.numpy() == c)
        apart = np.sort(distances(unit)[np.ix_(rows, rows)], 1)[:, 1 : min(20, len(rows) // 2) + 1]
        wanted.append(int(rows[apart.mean(1).argmin()]))
    assert chosen[0].tolist() == wanted


def test_clusters_take_turns_where_they_are_fewer_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestion, "CLUSTERS", 2)
    unit, label = blobs([30, 20])
    assert label[typical(unit, NONE, 5)[0]].tolist() == [0, 1, 0, 1, 0]


def test_clusters_of_five_images_are_left_out_while_others_are_there() -> None:
    unit, label = blobs([30, 5, 20])
    assert 1 not in label[typical(unit, NONE, 3)[0]].tolist()
    assert sorted(typical(unit, NONE, 55)[0].tolist()) == list(range(55))


def brute_force_cover(near: NDArray[np.bool_], labelled: list[int], budget: int) -> tuple[list[int], list[int]]:
    """Counts anew in every round."""
    covered = near[labelled].any(0)
    chosen: list[int] = []
    added: list[int] = []
    for _ in range(budget):
        gains = (near & ~covered).sum(1)
        gains[[*labelled, *chosen]] = -1
        if gains.max() == 0:
            covered = np.zeros(len(near), bool)
            gains = near.sum(1)
            gains[[*labelled, *chosen]] = -1
        chosen.append(int(gains.argmax()))
        added.append(int(gains.max()))
        covered = covered | near[chosen[-1]]
    return chosen, added


@pytest.mark.parametrize("labelled", [[], [3, 17, 40]])
@pytest.mark.parametrize("radius", [0.4, 0.8])
def test_coverage_is_the_greedy_choice_of_brute_force(radius: float, labelled: list[int]) -> None:
    unit = unit_rows(120, 4)
    chosen = coverage(unit, torch.tensor(labelled, dtype=torch.int64), 60, 3, radius=radius)
    rows, added = brute_force_cover(distances(unit) < radius, labelled, 60)
    assert (chosen[0].tolist(), chosen[1].tolist()) == (rows, added)
    assert added[0] >= added[1] > 1


def test_the_radius_is_the_largest_at_which_95_percent_of_the_balls_have_one_pseudo_label() -> None:
    unit, _ = blobs([60, 50, 40], noise=0.9)
    radius = pure_radius(unit, 3)
    found = suggestion._clusters(unit, 3, 0).numpy()
    apart, other = distances(unit), found[:, None] != found[None]

    def purity(of: float) -> float:
        return float(1 - ((apart < of) & other).any(1).mean())

    assert purity(radius - 1e-5) >= 0.95
    assert purity(radius + 1e-5) < 0.95


def test_coverage_of_too_many_pairs_is_of_a_random_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, label = blobs([300, 300, 300])
    assert "drawn at random" not in coverage(unit, NONE, 3, 3)[2]
    monkeypatch.setattr(suggestion, "MOST_EDGES", 10_000)
    chosen = coverage(unit, torch.tensor([5]), 2, 3)
    assert "drawn at random" in chosen[2]
    assert sorted(label[chosen[0]].tolist()) == [1, 2]


def test_nothing_depends_on_how_many_similarities_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_rows(200, 4)
    whole, radius = coverage(unit, NONE, 20, 3, radius=0.5), pure_radius(unit, 3)
    monkeypatch.setattr(suggestion, "SEARCHED", 1000)
    monkeypatch.setattr(suggestion, "QUERIES", 7)
    parts = coverage(unit, NONE, 20, 3, radius=0.5)
    assert parts[0].tolist() == whole[0].tolist()
    assert pure_radius(unit, 3) == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize("by", RULES)
def test_no_image_is_suggested_twice_nor_one_with_a_label(by: str) -> None:
    unit = unit_rows(60)
    probabilities = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).softmax(1)
    labelled = torch.arange(0, 60, 7)
    free = 60 - len(labelled)
    chosen = suggest_rows(by, unit, probabilities, labelled, free, 3)
    assert sorted([*chosen[0].tolist(), *labelled.tolist()]) == list(range(60))
    assert len(chosen[1]) == free
    again = suggest_rows(by, unit, probabilities, labelled, free, 3)
    assert torch.equal(again[0], chosen[0])


def test_both_is_typical_with_few_labels_and_margin_with_ten_per_class() -> None:
    unit = unit_rows(60)
    probabilities = torch.randn(60, 2, generator=torch.Generator().manual_seed(1)).softmax(1)
    for count, rule in ((19, "typical"), (20, "margin")):
        expected = suggest_rows(rule, unit, probabilities, torch.arange(count), 5, 2)
        assert torch.equal(suggest_rows("both", unit, probabilities, torch.arange(count), 5, 2)[0], expected[0])


def test_a_model_without_classes_has_no_margin_and_both_is_typical() -> None:
    unit = unit_rows(30)
    with pytest.raises(ValueError, match="use typical or coverage"):
        suggest_rows("margin", unit, None, NONE, 5, 2)
    assert torch.equal(suggest_rows("both", unit, None, NONE, 5, 2)[0], typical(unit, NONE, 5)[0])


@pytest.mark.parametrize("by", ["typical", "coverage"])
def test_equal_images_can_be_suggested(by: str) -> None:
    same = torch.ones(12, 4)
    assert len(set(suggest_rows(by, same, None, torch.tensor([0]), 11, 2)[0].tolist())) == 11


@pytest.mark.parametrize("budget", [0, 31])
def test_as_many_images_as_have_no_label_can_be_asked_for(budget: int) -> None:
    with pytest.raises(ValueError, match="ask for 1 to 30"):
        suggest_rows("typical", unit_rows(32), None, torch.tensor([1, 2]), budget, 2)
