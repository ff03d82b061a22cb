"""Paired tests and seed statistics equal enumeration and closed forms."""

from __future__ import annotations

import math
import re
from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.compare.comparison import (
    Comparison,
    Failure,
    Member,
    Price,
    compare_members,
    disagreement_matrix,
)
from vitrail.compare.page import render_comparison
from vitrail.compare.statistics import holm, paired_interval, pareto, sign_flip_p, sign_flip_p_whole
from vitrail.measure.evaluator import Predictions, StoredPredictions, read_predictions, write_predictions
from vitrail.measure.probe import Correlation, Spread, early_and_final


def enumerated(values: list[float]) -> float:
    """Two-sided p by trying every combination of signs."""
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in product((-1, 1), repeat=len(values))
    ]
    return float(np.mean([s >= abs(sum(values)) - 1e-12 for s in sums]))


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_both_sign_flip_tests_equal_enumeration(values: list[int]) -> None:
    assert sign_flip_p(values) == enumerated(values)
    # The transform sums at most 100 terms of rounding error 1e-16.
    assert sign_flip_p_whole(values) == pytest.approx(enumerated(values), abs=1e-13)


def test_flips_of_single_images_are_the_exact_binomial_test() -> None:
    """90 images only one model knows, 60 only the other: McNemar's exact p is a binomial tail."""
    values = np.array([1] * 90 + [-1] * 60 + [0] * 5000)
    tail = sum(math.comb(150, k) for k in range(90, 151)) / 2**150
    assert sign_flip_p_whole(values) == pytest.approx(2 * tail, rel=1e-9)


def test_many_pairs_are_drawn_and_come_near_the_exact_value() -> None:
    values = np.random.default_rng(0).integers(-3, 6, 40)
    exact = sign_flip_p_whole(values)
    # Standard error of a share of 100,000 draws; five of them.
    assert sign_flip_p(values.astype(float)) == pytest.approx(exact, abs=5 * (exact * (1 - exact) / 100_000) ** 0.5)


def test_few_seeds_can_never_be_significant() -> None:
    assert sign_flip_p([1.0, 2.0, 1.5]) == 2 / 2**3
    assert sign_flip_p([1.0, 2.0, 1.5, 1.2, 1.1]) == 2 / 2**5


@pytest.mark.parametrize("test", [sign_flip_p, sign_flip_p_whole])
def test_no_pairs_are_refused(test) -> None:
    with pytest.raises(ValueError, match="one value per pair"):
        test([])


def test_fractions_are_no_whole_numbers() -> None:
    with pytest.raises(ValueError, match="whole numbers are needed"):
        sign_flip_p_whole(np.array([0.5, 1.0]))


def test_the_interval_over_images_is_that_of_enumerated_resampling() -> None:
    """Four images, one seed: all 4^4 resamples are known, with their quantiles."""
    values = np.array([[1, 0, -1, 1]])
    means = np.sort([np.mean([values[0][i] for i in drawn]) for drawn in product(range(4), repeat=4)])
    low, high = paired_interval(values, draws=40_000)
    # A quantile of a discrete distribution: exact wherever the true share at it is not within the noise of the level.
    assert low == means[int(0.025 * 256)]
    assert high == means[int(0.975 * 256)]


def test_the_interval_over_seeds_is_that_of_enumerated_resampling() -> None:
    """Every image alike: only seeds matter, and 3^3 draws of them are known; their distance from 2 is widened."""
    values = np.repeat(np.array([[0.0], [1.0], [5.0]]), 10, axis=1)
    means = np.sort([2 + (np.mean(drawn) - 2) * 1.5**0.5 for drawn in product((0.0, 1.0, 5.0), repeat=3)])
    low, high = paired_interval(values, draws=40_000, level=0.8)
    assert low == pytest.approx(means[int(0.1 * 27)])
    assert high == pytest.approx(means[int(0.9 * 27)])


def test_the_interval_is_as_wide_as_seeds_vary() -> None:
    """The variance of the drawn means is that of the mean of two seeds: s^2 / 2, with s^2 of the sample."""
    values = np.repeat(np.array([[1.0], [4.0]]), 3, axis=1)
    low, high = paired_interval(
        values, level=0.5
    )  # a quarter of the draws has both times the first, a quarter the second
    assert high - low == pytest.approx(2 * (2 * np.var([1, 4], ddof=1) / 2) ** 0.5)


def test_the_interval_of_many_images_is_the_normal_one() -> None:
    values = np.random.default_rng(0).choice([-1, 0, 1], (1, 20_000), p=[0.1, 0.7, 0.2])
    low, high = paired_interval(values)
    error = values.std() / 20_000**0.5
    # Quantiles of 10,000 draws have a standard error of 0.027 of the distribution's own; four of them.
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.11 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.11 * error)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_spread_is_that_of_the_sample() -> None:
    found = Spread.of([0.80, 0.82, 0.87])
    assert (found.mean, found.low, found.high) == (pytest.approx(0.83), 0.80, 0.87)
    assert found.std == pytest.approx(np.std([0.80, 0.82, 0.87], ddof=1))
    assert found.range == pytest.approx(0.07)
    assert math.isnan(Spread.of([0.5]).std)


def test_correlations_equal_numpy_and_rank_differences() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=12), rng.normal(size=12)
    found = Correlation.of(first.tolist(), second.tolist())
    assert found.pearson == pytest.approx(np.corrcoef(first, second)[0, 1])
    apart = np.argsort(np.argsort(first)) - np.argsort(np.argsort(second))
    assert found.spearman == pytest.approx(1 - 6 * (apart**2).sum() / (12 * (12**2 - 1)))  # without ties


def test_equal_values_share_their_rank() -> None:
    assert Correlation.of([1, 2, 2, 3], [10, 20, 20, 30]).spearman == pytest.approx(1)
    assert Correlation.of([1, 1, 2], [1, 2, 3]).spearman == pytest.approx(np.corrcoef([1.5, 1.5, 3], [1, 2, 3])[0, 1])


@pytest.mark.parametrize("values", [([1, 2], [3, 4]), ([1, 1, 1], [1, 2, 3])])
def test_too_few_or_constant_values_have_no_correlation(values) -> None:
    assert math.isnan(Correlation.of(*values).pearson)


def test_early_looks_are_paired_by_epoch_and_seed() -> None:
    curves = [{1.0: 0.3, 2.0: 0.5, 3.0: 0.9}, {1.0: 0.2, 2.0: 0.6}, {1.0: 0.1, 2.0: 0.7}]
    found = early_and_final(curves, [0.5, 0.6, 0.7])
    assert list(found) == [1.0, 2.0]  # not every seed has a third
    assert found[1.0].spearman == pytest.approx(-1)
    assert found[2.0].spearman == pytest.approx(1)


def test_the_front_is_what_nothing_beats() -> None:
    rng = np.random.default_rng(2)
    cost, value = rng.integers(0, 6, 30).tolist(), rng.integers(0, 6, 30).tolist()
    front = pareto(cost, value)
    kept = sorted({(c, v) for c, v, on in zip(cost, value, front, strict=True) if on})
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(kept))  # dearer is better
    for c, v, on in zip(cost, value, front, strict=True):
        assert on or any(a <= c and b >= v for a, b in kept)


# Stored predictions


def test_decisions_survive_the_rounding_of_logits(tmp_path) -> None:
    logits = torch.tensor([[1.0, 1.00001, 0.0], [1e6, -1e6, 2.0], [0.3, 0.2, 0.1]])
    write_predictions(tmp_path, Predictions(torch.tensor([7, 3, 5]), torch.tensor([1, 0, 2]), logits))
    found = read_predictions(tmp_path)
    assert found.index.tolist() == [3, 5, 7]
    assert found.guess.tolist() == [0, 0, 1]  # float16 cannot tell 1 from 1.00001
    assert found.right.tolist() == [1, 0, 1]
    assert found.logits.isfinite().all()


def test_labels_of_many_are_decided_one_by_one(tmp_path) -> None:
    logits = torch.tensor([[1e-9, -1.0], [2.0, 3.0]])
    write_predictions(tmp_path, Predictions(torch.tensor([0, 1]), torch.tensor([[1, 0], [1, 0]]), logits))
    found = read_predictions(tmp_path)
    assert found.guess.tolist() == [[1, 0], [1, 1]]
    assert found.right.tolist() == [1, 0]


def test_a_run_without_predictions_has_none(tmp_path) -> None:
    assert read_predictions(tmp_path) is None


# Runs side by side

CLASSES = ("a", "b", "c")


def member(variant: str, seed: int, guess: list[int], target: list[int], val: tuple[float, ...] = ()) -> Member:
    said, true = torch.tensor(guess), torch.tensor(target)
    stored = StoredPredictions(torch.arange(len(true)), true, said, torch.nn.functional.one_hot(said, 3).half())
    history = [{"step": i, "epoch": float(i), "split": "val", "top1": v} for i, v in enumerate(val, 1)]
    top1 = float((said == true).double().mean())
    return Member(variant, seed, f"{variant}-{seed}", {"top1": top1}, "test", "d", CLASSES, history, stored)


TARGET = [0, 0, 1, 1, 2, 2]


def test_a_row_has_mean_spread_and_paired_difference() -> None:
    members = [
        member("base", 0, [0, 1, 1, 1, 2, 0], TARGET),  # 4 of 6
        member("base", 1, [0, 1, 1, 2, 2, 0], TARGET),  # 3
        member("new", 0, [0, 0, 1, 1, 2, 0], TARGET),  # 5
        member("new", 1, [0, 0, 1, 1, 2, 2], TARGET),  # 6
        member("new", 2, [1, 1, 0, 0, 0, 0], TARGET),  # 0, and without a partner
    ]
    found = compare_members("s", members, "base")
    new = found.row("new")
    assert new.spread.mean == pytest.approx((5 + 6 + 0) / 18)
    assert new.against.seeds == 2
    assert new.against.difference == pytest.approx((1 / 6 + 3 / 6) / 2)
    assert new.against.p_seeds == 0.5
    by_image = [0, 2, 0, 1, 0, 1]  # what seeds 0 and 1 gained on each image, together
    assert new.against.p_images == pytest.approx(enumerated(by_image))
    assert found.row("base").against is None


def test_gains_of_classes_are_differences_of_recall() -> None:
    found = compare_members(
        "s", [member("base", 0, [0, 1, 1, 1, 2, 0], TARGET), member("new", 0, [0, 0, 1, 0, 2, 0], TARGET)], "base"
    )
    np.testing.assert_allclose(found.class_gains("new"), [0.5, -0.5, 0.0])


def test_disagreement_is_counted_between_variants_at_equal_seeds_and_between_seeds_inside() -> None:
    a = [member("a", 0, [0, 0, 0, 0, 0, 0], TARGET), member("a", 1, [0, 0, 0, 1, 1, 1], TARGET)]
    b = [member("b", 0, [0, 0, 0, 0, 0, 1], TARGET), member("b", 1, [1, 1, 0, 1, 1, 1], TARGET)]
    found = disagreement_matrix([a, b])
    np.testing.assert_allclose(found, [[3 / 6, (1 / 6 + 2 / 6) / 2], [(1 / 6 + 2 / 6) / 2, 4 / 6]])


def test_seeds_of_other_images_are_not_paired_by_image() -> None:
    import dataclasses

    other = dataclasses.replace(member("new", 0, [0] * 6, TARGET), data="elsewhere")
    found = compare_members("s", [member("base", 0, [0] * 6, TARGET), other], "base")
    assert found.row("new").against.interval is None
    assert any("different data" in note for note in found.notes)


def test_the_seed_study_knows_test_against_val_and_early_against_final() -> None:
    guesses = ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 0], [0, 0, 1, 1, 0, 0])  # 6, 5, 4 of 6
    vals = ((0.1, 0.9), (0.2, 0.8), (0.3, 0.7))
    members = [member("base", s, g, TARGET, v) for s, (g, v) in enumerate(zip(guesses, vals, strict=True))]
    found = compare_members("s", members, "base").to_json()["seeds"]["base"]
    assert found["sets"]["test"]["range"] == pytest.approx(2 / 6)
    assert found["between"][0]["sets"] == ["test", "val"]
    assert found["between"][0]["spearman"] == pytest.approx(1)
    assert [e["spearman"] for e in found["early"]] == pytest.approx([-1, 1])


def priced(first: Price, second: Price) -> Comparison:
    """Two variants with two seeds each: 4 and 5, and 5 and 4 of 6 images right."""
    four, five = [0, 1, 1, 1, 2, 0], [0, 0, 1, 1, 2, 0]
    members = [
        member("base", 0, four, TARGET),
        member("base", 1, five, TARGET),
        member("new", 0, five, TARGET),
        member("new", 1, four, TARGET),
    ]
    return compare_members("s", members, "base", prices={"base": first, "new": second})


def front_of(page: str) -> list[str]:
    return re.findall(r'<th scope="row" class="v\d"><i></i>(\w+)[^\n]*Pareto front</span>', page)


def test_two_variants_of_the_same_network_have_no_front() -> None:
    found = priced(Price(10, 20, 28, 93.6, speed_noise=0.25), Price(10, 20, 28, 87.4, speed_noise=0.25))
    page = render_comparison(found, {})
    assert [row.front for row in found.rows] == [False, False]
    assert front_of(page) == []
    assert "Time of inference" in page
    assert 'class="front"' not in page


def test_a_variant_twice_as_fast_and_as_accurate_is_the_front() -> None:
    found = priced(Price(10, 40, 28, 50.0, speed_noise=0.1), Price(10, 20, 28, 100.0, speed_noise=0.1))
    assert [row.front for row in found.rows] == [False, True]
    assert front_of(render_comparison(found, {})) == ["new"]


def test_measured_times_have_horizontal_whiskers_and_counted_costs_have_none() -> None:
    found = priced(Price(10, 40, 28, 50.0, speed_noise=0.1), Price(20, 20, 28, 100.0, speed_noise=0.1))
    page = render_comparison(found, {})
    charts = {
        name: page.split(f"<h3>{name}</h3>")[1].split("</svg>")[0] for name in ("Parameters", "Time of inference")
    }
    whiskers = {name: re.findall(r'class="whisker" d="[^"]*H[\d.]+"', chart) for name, chart in charts.items()}
    assert {name: len(found) for name, found in whiskers.items()} == {"Parameters": 0, "Time of inference": 2}


@pytest.mark.parametrize(
    ("costs", "noise", "front"),
    [
        ([1.0, 2.0, 4.0], [0.1, 0.1, 0.1], [True, False, True]),  # the second is no better than the first
        ([1.0, 2.0, 4.0], [5.0, 5.0, 5.0], [False, False, True]),  # only accuracies differ: the best one
    ],
)
def test_the_front_counts_differences_beyond_the_noise_alone(
    costs: list[float], noise: list[float], front: list[bool]
) -> None:
    assert pareto(costs, [0.5, 0.51, 0.9], noise, [0.02, 0.02, 0.02]) == front


def test_a_failure_is_a_row_and_json_has_no_nan() -> None:
    import json

    found = compare_members(
        "s",
        [member("base", 0, [0] * 6, TARGET)],
        "base",
        failures=[Failure("new", 0, "out of memory")],
        prices={"base": Price(10, 20, 28)},
    )
    told = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(told)["rows"][1]["failures"] == [{"seed": 0, "reason": "out of memory"}]
    assert json.loads(told)["rows"][0]["front"] is True


def test_the_order_of_runs_changes_nothing() -> None:
    members = [member(v, s, [s] * 6, TARGET) for v in ("a", "b") for s in (0, 1)]
    tables = [compare_members("s", order, "a", order=("a", "b")).to_json() for order in permutations(members)]
    assert all(t["rows"] == tables[0]["rows"] for t in tables)
