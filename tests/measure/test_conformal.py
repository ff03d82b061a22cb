"""Prediction sets against loops, exact quantiles, scipy's beta-binomial and the coverage of many random splits."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom
from torch import Tensor

from vitrail.data.counter import seed_of, uniform
from vitrail.measure import calibration as conformal
from vitrail.measure.calibration import ConformalRule, coverage_interval, fit_conformal, set_metrics

VARIANTS = [("lac", None), ("aps", None), ("aps", 3), ("raps", None), ("raps", 3)]


def drawn(images: int, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of a model that is somewhat overconfident, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    return (2 * logits).softmax(1), torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def score(row: list[float], label: int, method: str, share: float, k_reg: int, lam: float) -> float:
    """Score of one class of one image, by its definition."""
    if method == "lac":
        return 1 - row[label]
    order = sorted(range(len(row)), key=lambda c: (-row[c], c))
    rank = order.index(label)
    total = sum(row[c] for c in order[:rank]) + share * row[label]
    return total + (lam * max(0, rank + 1 - k_reg) if method == "raps" else 0.0)


@pytest.mark.parametrize(("method", "seed"), VARIANTS)
def test_quantile_and_sets_equal_loops(method: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformal, "SCORES_AT_ONCE", 100)  # several pieces
    (p, y), (new, _) = drawn(99), drawn(80, seed=1)
    rule = fit_conformal(p, y, 0.8, method, seed, k_reg=2, lam=0.05)
    shares = [0.0] * 99 if seed is None else uniform(seed_of("fit", seed), np.arange(99)).tolist()
    scores = sorted(score(p[i].tolist(), int(y[i]), method, shares[i], 2, 0.05) for i in range(99))
    assert rule.quantile == pytest.approx(scores[79], abs=1e-12)  # the 80th of 99
    index = np.arange(80) + 1000
    shares = [0.0] * 80 if seed is None else uniform(seed_of("sets", seed), index).tolist()
    sets = rule.sets(new, index)
    for i, row in enumerate(new.tolist()):
        expected = [score(row, c, method, shares[i], 2, 0.05) <= rule.quantile for c in range(6)]
        if not any(expected):
            expected[max(range(6), key=lambda c, row=row: row[c])] = True
        assert sets[i].tolist() == expected


@pytest.mark.parametrize(
    ("images", "coverage", "rank"),
    [(9, 0.9, 9), (10, 0.9, 10), (19, 0.95, 19), (99, 0.55, 55), (99, 0.95, 95), (100, 0.9, 91), (3, 0.5, 2)],
)
def test_the_quantile_is_the_exact_order_statistic(images: int, coverage: float, rank: int) -> None:
    top = torch.linspace(0.9, 0.5, images, dtype=torch.float64)  # scores of label 0 rise from 0.1 to 0.5
    rule = fit_conformal(torch.stack([top, 1 - top], 1), torch.zeros(images, dtype=torch.long), coverage, "lac")
    assert rule.quantile == float((1 - top)[rank - 1])
    assert rule.note == ""
    assert rule.images == images


@pytest.mark.parametrize(("images", "coverage"), [(8, 0.9), (18, 0.95), (1, 0.6)])
def test_too_few_images_exclude_nothing_and_say_so(images: int, coverage: float) -> None:
    p, y = drawn(images)
    rule = fit_conformal(p, y, coverage, "raps")
    assert rule.quantile == math.inf
    assert f"and there are {images}: every set has all classes" in rule.note
    needed = int(rule.note.split("at least ")[1].split()[0])
    assert fit_conformal(*drawn(needed), coverage, "raps").note == ""
    assert fit_conformal(*drawn(needed - 1), coverage, "raps").note
    assert rule.sets(p).all()
    assert coverage_interval(images, coverage, 50) == (1.0, 1.0)


def test_an_empty_set_gets_the_most_probable_class() -> None:
    rule = ConformalRule("lac", 0.5, quantile=0.2, images=100)
    assert rule.sets([[0.9, 0.1, 0.0], [0.3, 0.4, 0.3], [0.4, 0.4, 0.2]]).int().tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [1, 0, 0],  # of equals the first
    ]


def test_of_equal_probabilities_the_lower_class_comes_first() -> None:
    rule = ConformalRule("aps", 0.5, quantile=0.1001, images=100)
    assert rule.sets(torch.full((3, 200), 1 / 200)).int().tolist() == [[1] * 21 + [0] * 179] * 3


@pytest.mark.parametrize("method", ["aps", "raps"])
def test_sets_of_a_confident_model_hold_what_was_asked_or_its_accuracy(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 16 * torch.randn(20_000, 10, generator=generator, dtype=torch.float64)
    label = torch.multinomial((0.5 * logits).softmax(1), 1, generator=generator)[:, 0]
    p = logits.softmax(1).float()  # many are exactly 1
    accuracy = float((p.argmax(1) == label).double().mean())
    assert 0.8 < accuracy < 0.93
    for coverage in (0.7, 0.95):
        sets = fit_conformal(p[:10_000], label[:10_000], coverage, method).sets(p[10_000:])
        share = float(sets.gather(1, label[10_000:, None]).double().mean())
        assert share == pytest.approx(max(coverage, accuracy), abs=0.01)
        assert sets[torch.arange(10_000), p[10_000:].argmax(1)].all()  # none is empty


def test_a_zero_penalty_is_aps_and_a_large_one_limits_the_size() -> None:
    (p, y), (new, _) = drawn(400), drawn(200, seed=1)
    plain = fit_conformal(p, y, 0.9, "aps").sets(new)
    assert fit_conformal(p, y, 0.9, "raps", lam=0.0).sets(new).equal(plain)
    assert fit_conformal(p, y, 0.9, "raps", k_reg=6).sets(new).equal(plain)
    assert int(fit_conformal(p, y, 0.7, "raps", k_reg=2, lam=10.0).sets(new).sum(1).max()) <= 2 < plain.sum(1).max()


def test_randomised_sets_depend_on_the_index_of_an_image_only() -> None:
    (p, y), (new, _) = drawn(200), drawn(150, seed=1)
    rule, index = fit_conformal(p, y, 0.7, "aps", seed=0), torch.arange(150) * 7 + 3
    whole = rule.sets(new, index)
    pieces = torch.cat([rule.sets(new[i : i + 11], index[i : i + 11]) for i in range(0, 150, 11)])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2))
    assert pieces.equal(whole)
    assert rule.sets(new[order], index[order]).equal(whole[order])
    assert not rule.sets(new, index + 1).equal(whole)
    assert not fit_conformal(p, y, 0.7, "aps", seed=1).sets(new, index).equal(whole)
    with pytest.raises(ValueError, match="give it, or fit without a seed"):
        rule.sets(new)
    same = fit_conformal(p[order], y[order], 0.7, "aps", seed=0, index=order)
    assert same.quantile == fit_conformal(p[:150], y[:150], 0.7, "aps", seed=0).quantile


@pytest.mark.parametrize("floats", [torch.float32, torch.float16])
def test_every_image_of_calibration_up_to_the_quantile_is_covered(floats: torch.dtype) -> None:
    p, y = drawn(99)
    for method in ("lac", "aps", "raps"):
        rule = fit_conformal(p.to(floats), y, 0.9, method)
        held = torch.cat([rule.sets(row[None].to(floats))[0, label][None] for row, label in zip(p, y, strict=True)])
        assert int(held.sum()) >= 90


@pytest.mark.parametrize(("method", "seed"), VARIANTS)
def test_coverage_of_random_splits_lies_in_its_interval(method: str, seed: int | None) -> None:
    n, m, coverage, splits = 100, 150, 0.8, 300
    p, y = drawn(2000)
    low, high = coverage_interval(n, coverage, m, level=0.99)
    generator, shares = torch.Generator().manual_seed(5), []
    for split in range(splits):
        order = torch.randperm(2000, generator=generator)[: n + m]
        given = None if seed is None else seed + split
        rule = fit_conformal(p[order[:n]], y[order[:n]], coverage, method, given, index=order[:n])
        # Without the top class in place of empty sets, which only adds coverage.
        held = torch.cat(
            [s.gather(1, y[order[n:]][:, None]) for *_, s in rule._scores(p[order[n:]], order[n:], "sets")]
        )
        shares.append(float((held <= rule.quantile).double().mean()))
    inside = np.mean([low <= share <= high for share in shares])
    assert inside >= 0.97
    assert np.mean(shares) == pytest.approx(81 / 101, abs=4 * np.std(shares) / math.sqrt(splits))


@pytest.mark.parametrize(
    ("n", "coverage", "m"), [(1000, 0.9, 1000), (50, 0.9, 7), (9, 0.9, 100), (500, 0.95, 3), (20_000, 0.99, 50_000)]
)
@pytest.mark.parametrize("level", [0.5, 0.99])
def test_the_interval_is_that_of_scipys_beta_binomial(n: int, coverage: float, m: int, level: float) -> None:
    k = round(math.ceil((n + 1) * coverage - 1e-6))
    expected = betabinom.ppf([(1 - level) / 2, (1 + level) / 2], m, k, n + 1 - k) / m
    assert coverage_interval(n, coverage, m, level) == pytest.approx(tuple(expected), abs=1e-12)


def test_metrics_of_sets_equal_loops() -> None:
    p, y = drawn(300, classes=12)
    y[y == 11] = 0  # a class without images
    sets = fit_conformal(p[:100], y[:100], 0.8, "aps").sets(p)
    metrics = set_metrics(sets, y)
    sizes, held = [sum(row) for row in sets.tolist()], [bool(sets[i, y[i]]) for i in range(300)]
    assert metrics["coverage"] == pytest.approx(sum(held) / 300)
    assert metrics["mean_size"] == pytest.approx(sum(sizes) / 300)
    assert metrics["median_size"] == pytest.approx(float(np.median(sizes)))
    for c in range(12):
        of_class = [i for i in range(300) if y[i] == c]
        expected = [sum(each[i] for i in of_class) / len(of_class) if of_class else None for each in (held, sizes)]
        assert [metrics["by_class"]["coverage"][c], metrics["by_class"]["size"][c]] == pytest.approx(expected)
    assert metrics["by_class"]["coverage"][11] is None
    assert sum(row["images"] for row in metrics["by_size"]) == 300
    for row in metrics["by_size"]:
        some = [held[i] for i in range(300) if row["smallest"] <= sizes[i] <= row["largest"]]
        assert (len(some), sum(some) / len(some)) == pytest.approx((row["images"], row["coverage"]))
    assert metrics["worst_size_coverage"] == min(row["coverage"] for row in metrics["by_size"])
    assert json.loads(json.dumps(metrics)) == metrics


@pytest.mark.parametrize("classes", [1, 3, 250])
def test_sets_of_every_size_have_a_stratum(classes: int) -> None:
    sets = torch.ones(classes + 1, classes).tril(-1).bool()  # sizes 0, 1, ..., classes
    strata = set_metrics(sets, torch.zeros(classes + 1, dtype=torch.long))["by_size"]
    assert sum(row["images"] for row in strata) == classes + 1
    assert strata[-1]["largest"] == classes


def test_a_rule_comes_back_from_json() -> None:
    for rule in (
        ConformalRule("lac", 0.9, 0.4, 50),
        ConformalRule("raps", 0.95, math.inf, 3, 2, 0.1, seed=7),
        fit_conformal(*drawn(50), 0.8, "aps", seed=2**40),
    ):
        assert ConformalRule.from_json(json.loads(json.dumps(rule.to_json(), allow_nan=False))) == rule


@pytest.mark.parametrize(
    "damage",
    [
        {"method": "magic"},
        {"coverage": 1.0},
        {"coverage": math.nan},
        {"quantile": "high"},
        {"quantile": math.nan},
        {"images": 0},
        {"images": math.inf},
        {"k_reg": -1},
        {"lam": math.inf},
        {"seed": "x"},
    ],
)
def test_a_damaged_rule_is_one_sentence(damage: dict[str, Any]) -> None:
    stored = {**ConformalRule("raps", 0.9, 0.4, 50).to_json(), **damage}
    with pytest.raises(ValueError, match=r"this is no stored rule of prediction sets .*fit it again"):
        ConformalRule.from_json(stored)


def test_bad_input_is_one_sentence() -> None:
    p, y = drawn(30)
    rule = fit_conformal(p, y)
    cases: list[tuple[Any, str]] = [
        (lambda: fit_conformal(p[:0], y[:0]), "at least one of each"),
        (lambda: fit_conformal(p, y + 6), "outside the 6 classes"),
        (lambda: fit_conformal(p.log(), y), "between 0 and 1"),
        (lambda: fit_conformal(p / 2, y), "do not sum to 1"),
        (lambda: fit_conformal(p, torch.zeros(30, 6)), "one label per image"),
        (lambda: fit_conformal(p, y, 90), "use one between 0 and 1"),
        (lambda: fit_conformal(p, y, method="apps"), "there are lac, aps, raps"),
        (lambda: fit_conformal(p, y, seed=0, index=[1, 2]), r"index has shape \[2\]"),
        (lambda: rule.sets(p[0]), r"not \[images, classes\]"),
        (lambda: rule.sets(p * math.nan), "NaN"),
        (lambda: coverage_interval(10, 0.9, 0), "images on both sides"),
        (lambda: set_metrics(rule.sets(p), y[:3]), "do not belong together"),
        (lambda: set_metrics(rule.sets(p), y + 6), "not all among 6 classes"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()
    assert rule.sets(p[:0]).shape == (0, 6)
