"""Calibration against scipy, scikit-learn, brute force and closed forms."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitrail.measure import calibration, classification
from vitrail.measure.calibration import (
    FEWEST,
    HIGHEST,
    LOWEST,
    Calibration,
    calibration_metrics,
    choose_calibration,
    fit_robust_temperature,
    fit_temperature,
    fit_vector_scaling,
)


def drawn(images: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and labels that are drawn from their softmax: the logits are calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def drawn_labels(images: int, labels: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same where every label holds with the sigmoid of its logit."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, labels, generator=generator, dtype=torch.float64) - 0.5
    return logits, torch.bernoulli(logits.sigmoid(), generator=generator).long()


def log_loss(logits: Tensor, target: Tensor) -> float:
    if target.ndim == 2:
        return float(F.binary_cross_entropy_with_logits(logits, target.double()))
    return float(F.cross_entropy(logits, target))


CASES = [drawn(300, 7), drawn(40, 2, 1), drawn_labels(200, 5), drawn_labels(30, 1, 1)]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("factor", [0.05, 1.0, 30.0])
def test_the_temperature_is_the_minimum_that_scipy_finds(case: int, factor: float) -> None:
    logits, target = CASES[case][0] * factor, CASES[case][1]
    best = minimize_scalar(
        lambda u: log_loss(logits / math.exp(u), target), bounds=(-4.6, 4.6), method="bounded", options={"xatol": 1e-9}
    )
    assert fit_temperature(logits, target) == pytest.approx(math.exp(best.x), rel=1e-5)


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_multiplied_logits_have_the_factor_as_temperature(factor: float) -> None:
    for logits, target in (drawn(40_000, 5), drawn_labels(8_000, 5)):
        assert fit_temperature(logits * factor, target) == pytest.approx(factor, rel=0.03)


def test_the_temperature_does_not_depend_on_pieces_or_the_order_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    (logits, target), order = drawn(300, 7), torch.randperm(300, generator=torch.Generator().manual_seed(1))
    whole = fit_temperature(logits, target)
    monkeypatch.setattr(calibration, "SCORES_AT_ONCE", 50)
    assert fit_temperature(logits, target) == pytest.approx(whole, rel=1e-10)
    assert fit_temperature(logits[order], target[order]) == pytest.approx(whole, rel=1e-10)


def test_separable_hopeless_and_constant_logits_have_a_temperature_within_the_limits() -> None:
    target = torch.arange(40) % 4
    right = 3.0 * F.one_hot(target, 4) + torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    assert fit_temperature(right, target) == LOWEST
    assert fit_temperature(-right, target) == HIGHEST
    assert fit_temperature(torch.full((40, 4), 7.3), target) == 1.0
    assert fit_temperature(torch.zeros(40, 1), torch.zeros(40, dtype=torch.long)) == 1.0
    labels = F.one_hot(target, 4)
    assert fit_temperature(6.0 * labels - 3, labels) == LOWEST
    assert fit_temperature(3 - 6.0 * labels, labels) == HIGHEST
    assert fit_temperature(1e4 * right, target) > 0


def test_impossible_classes_do_not_count_and_stay_impossible() -> None:
    logits, target = drawn(300, 5)
    masked = F.pad(logits, (0, 1), value=-math.inf)
    assert fit_temperature(masked, target) == pytest.approx(fit_temperature(logits, target), rel=1e-9)
    narrow, wide = fit_vector_scaling(logits, target), fit_vector_scaling(masked, target)
    assert wide.scale[:5] == pytest.approx(narrow.scale, rel=1e-5)
    assert wide.bias[5] == 0
    for each in (wide, Calibration("temperature", 2.0), Calibration()):
        assert (each(masked) == -math.inf).nonzero()[:, 1].unique().tolist() == [5]
    wrong = target.clone()
    wrong[::10] = 5  # a label that cannot be
    keep = wrong != 5
    assert fit_temperature(masked, wrong) == pytest.approx(fit_temperature(logits[keep], target[keep]), rel=1e-9)
    with pytest.raises(ValueError, match=r"every label is minus infinity.*check the labels"):
        fit_temperature(masked, torch.full((300,), 5))


@pytest.mark.parametrize("several", [False, True])
def test_vector_scaling_is_the_minimum_that_scipy_finds(several: bool) -> None:
    logits, target = drawn_labels(150, 3) if several else drawn(150, 3)
    skewed = 1.7 * logits + torch.tensor([0.8, 0.0, -0.5])
    fitted = fit_vector_scaling(skewed, target, ridge=2.0)
    z, y, temperature = skewed.numpy(), target.numpy(), fit_temperature(skewed, target)

    def objective(x: Any) -> float:
        scores = z * x[:3] + x[3:]
        if several:
            loss = np.logaddexp(0, scores).sum() - (y * scores).sum()
        else:
            loss = -log_softmax(scores, 1)[np.arange(150), y].sum()
        return float(loss + np.sum((x[:3] * temperature - 1) ** 2) + np.sum(x[3:] ** 2))

    best = minimize(objective, np.r_[np.ones(3), np.zeros(3)], method="BFGS", options={"gtol": 1e-8})
    np.testing.assert_allclose([*fitted.scale, *fitted.bias], best.x, atol=1e-5)
    assert fitted.temperature == pytest.approx(temperature)


def test_vector_scaling_of_labels_without_ridge_is_a_logistic_regression_of_each() -> None:
    logits, target = drawn_labels(400, 3)
    fitted = fit_vector_scaling(logits, target, ridge=0.0)
    for c in range(3):
        oracle = LogisticRegression(C=np.inf, tol=1e-10).fit(logits[:, c : c + 1].numpy(), target[:, c].numpy())
        assert (fitted.scale[c], fitted.bias[c]) == pytest.approx((oracle.coef_[0, 0], oracle.intercept_[0]), abs=1e-4)


def test_vector_scaling_is_finite_where_images_are_separable() -> None:
    target = torch.arange(40) % 4
    fitted = fit_vector_scaling(5.0 * F.one_hot(target, 4), target)
    assert fitted(5.0 * F.one_hot(target, 4)).argmax(1).equal(target)


def test_a_temperature_changes_no_prediction() -> None:
    logits = drawn(200, 9)[0].float()
    for temperature in (LOWEST, 0.3, 7.7, HIGHEST):
        assert Calibration("temperature", temperature)(logits).argmax(1).equal(logits.argmax(1))
    assert Calibration()(logits) is logits
    assert Calibration("temperature", 2.0)(logits.bfloat16()).dtype == torch.float32


def test_vector_scaling_is_chosen_where_classes_differ_and_images_suffice() -> None:
    logits, target = drawn(1200, 4)
    skewed = logits + torch.tensor([1.5, 0.0, 0.0, -1.5])
    assert choose_calibration(skewed, target).kind == "vector"
    assert choose_calibration(2 * logits, target).kind == "temperature"
    few = torch.cat([(target == 0).nonzero()[: FEWEST - 1, 0], (target != 0).nonzero()[:, 0]])
    assert choose_calibration(skewed[few], target[few]).kind == "temperature"
    labels_logits, labels = drawn_labels(600, 2)
    assert choose_calibration(labels_logits + torch.tensor([2.0, -1.0]), labels).kind == "vector"
    assert choose_calibration(3 * labels_logits, labels).kind == "temperature"
    assert choose_calibration(labels_logits + 2.0, torch.ones_like(labels)).kind == "temperature"  # no negatives


def test_a_loss_that_is_lower_by_less_than_its_standard_error_is_not_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = drawn(400, 3)
    skewed, outcomes = logits + torch.tensor([0.5, 0.0, 0.0]), set()
    plain = F.cross_entropy(skewed, target, reduction="none")
    for bias in (-1.5, -0.9, -0.7, -0.5, -0.1, 0.1):
        vector = Calibration("vector", 1.0, (1.0, 1.0, 1.0), (bias, 0.0, 0.0))
        monkeypatch.setattr(calibration, "fit_vector_scaling", lambda *_, vector=vector: vector)  # of every fold
        change = F.cross_entropy(vector(skewed), target, reduction="none") - plain
        mean, error = float(change.mean()), float(change.std()) / math.sqrt(400)
        outcomes.add((mean < 0, mean < -error))
        assert (choose_calibration(skewed, target) == vector) == (mean < -error)
    assert outcomes == {(False, False), (True, False), (True, True)}


def test_a_choice_is_the_same_again_and_lowers_the_loss_of_other_images() -> None:
    logits, target = drawn(2400, 4)
    skewed = 2 * logits + torch.tensor([1.5, 0.0, 0.0, -1.5])
    chosen = choose_calibration(skewed[::2], target[::2], seed=3)
    assert chosen == choose_calibration(skewed[::2], target[::2], seed=3)
    temperature = Calibration("temperature", fit_temperature(skewed[::2], target[::2]))
    losses = [log_loss(each(skewed[1::2]), target[1::2]) for each in (chosen, temperature, Calibration())]
    assert losses == sorted(losses)
    assert losses[2] > losses[0] + 0.1


def test_a_calibration_comes_back_from_json() -> None:
    for each in (Calibration(), Calibration("temperature", 1.7), Calibration("vector", 1.7, (0.5, 0.6), (0.1, -0.2))):
        assert Calibration.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "isotonic"},
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"temperature": "warm"},
        {"scale": [1.0]},
        {"scale": None},
        {"kind": "vector"},
        {"kind": "vector", "scale": [1.0], "bias": [math.inf]},
        {"kind": ["vector"]},
    ],
)
def test_a_damaged_calibration_is_one_sentence(damage: dict[str, Any]) -> None:
    stored = {**Calibration("temperature", 1.5).to_json(), **damage}
    with pytest.raises(ValueError, match=r"this is no stored calibration .*fit it again"):
        Calibration.from_json(stored)


def test_logits_of_other_classes_are_rejected() -> None:
    with pytest.raises(ValueError, match="logits of 3 classes, but the calibration is of 2 classes"):
        Calibration("vector", 1.0, (1.0, 1.0), (0.0, 0.0))(torch.zeros(1, 3))


def equal_width_error(confidence: Any, right: Any, bins: int = 15) -> float:
    """In loops: bins (low, high], zero in the first."""
    error = 0.0
    for b in range(bins):
        inside = [i for i, c in enumerate(confidence) if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)]
        if inside:
            gap = sum(confidence[i] for i in inside) / len(inside) - sum(right[i] for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(gap)
    return error


def equal_mass_error(confidence: Any, right: Any, bins: int = 15) -> float:
    """In loops, for confidences that all differ: b-th of 15 equal shares of the sorted images."""
    order, error = sorted(range(len(confidence)), key=lambda i: confidence[i]), 0.0
    for b in range(bins):
        inside = [i for place, i in enumerate(order) if place * bins // len(order) == b]
        error += abs(sum(confidence[i] - right[i] for i in inside)) / len(order)
    return error


@pytest.mark.parametrize("probabilities", [False, True])
def test_metrics_of_one_label_equal_loops_and_scikit_learn(
    probabilities: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SCORES_AT_ONCE", 100)  # several pieces
    logits, target = drawn(211, 4)
    p = (1.8 * logits).softmax(1)
    metrics = calibration_metrics(p if probabilities else 1.8 * logits, target, probabilities=probabilities)
    hot = F.one_hot(target, 4)
    confidence, right = p.amax(1).tolist(), (p.argmax(1) == target).double().tolist()
    expected = {
        "loss": sk.log_loss(target, p),
        "brier": sum(float(((p[i] - hot[i]) ** 2).sum()) for i in range(211)) / 211,
        "ece": equal_width_error(confidence, right),
        "adaptive_ece": equal_mass_error(confidence, right),
        "classwise_ece": sum(equal_width_error(p[:, c].tolist(), hot[:, c].tolist()) for c in range(4)) / 4,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)
    figures = classification.classification(1.8 * logits, target)
    assert (metrics["ece"], metrics["loss"]) == pytest.approx((figures.scalars()["ece"], figures.loss), abs=1e-12)


@pytest.mark.parametrize("probabilities", [False, True])
def test_metrics_of_several_labels_equal_loops_and_scikit_learn(probabilities: bool) -> None:
    logits, target = drawn_labels(150, 3)
    p = logits.sigmoid()
    metrics = calibration_metrics(p if probabilities else logits, target, probabilities=probabilities)
    widths, masses = (
        [error(p[:, c].tolist(), target[:, c].tolist()) for c in range(3)]
        for error in (equal_width_error, equal_mass_error)
    )
    expected = {
        "loss": sk.log_loss(target.flatten(), p.flatten()),
        "brier": sk.brier_score_loss(target.flatten(), p.flatten()),
        "ece": sum(widths) / 3,
        "adaptive_ece": sum(masses) / 3,
        "classwise_ece": sum(widths) / 3,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_two_classes_have_twice_the_binary_brier_score() -> None:
    logits, target = drawn(90, 2)
    binary = sk.brier_score_loss(target, logits.softmax(1)[:, 1])
    assert calibration_metrics(logits, target)["brier"] == pytest.approx(2 * binary)


def test_equal_confidences_share_a_bin_whatever_the_order_of_images() -> None:
    p = torch.tensor([[0.75, 0.25]]).repeat(40, 1)
    target = (torch.arange(40) % 4 == 0).long()  # 3 of 4 are right: calibrated
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for rows in (torch.arange(40), order, target.argsort()):
        assert calibration_metrics(p, target[rows], probabilities=True)["adaptive_ece"] == pytest.approx(0)


def test_certain_predictions_have_metrics() -> None:
    target = torch.tensor([0, 1, 1])
    perfect = calibration_metrics(F.one_hot(target, 2).double(), target, probabilities=True)
    assert set(perfect.values()) == {0.0}
    labels = F.one_hot(target, 2)
    assert set(calibration_metrics(labels.double(), labels, probabilities=True).values()) == {0.0}
    assert calibration_metrics(labels.double(), 1 - labels, probabilities=True)["loss"] == math.inf
    masked = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    assert calibration_metrics(masked, torch.tensor([[1, 0], [1, 0]]))["loss"] == pytest.approx(0.75 * math.log(2))


def test_bad_input_is_one_sentence() -> None:
    logits, target = drawn(10, 3)
    for function in (fit_temperature, fit_vector_scaling, choose_calibration, calibration_metrics):
        with pytest.raises(ValueError, match="at least one of each"):
            function(logits[:0], target[:0])
        with pytest.raises(ValueError, match="label 3 is outside the 3 classes"):
            function(logits, target.clamp(max=0) + 3)
        with pytest.raises(ValueError, match="NaN or infinite"):
            function(logits * math.nan, target)
        with pytest.raises(ValueError, match="10 rows of scores, but 9 labels"):
            function(logits, target[:9])
        with pytest.raises(ValueError, match="10 rows of scores, but 1 labels"):
            function(logits, torch.tensor(0))
        with pytest.raises(ValueError, match="class numbers"):
            function(logits, target.double())
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibration_metrics(logits, target, probabilities=True)


def test_a_few_huge_logits_do_not_make_all_probabilities_equal():
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(5, (400,), generator=generator)
    logits = 2 * F.one_hot(target, 5).double() + torch.randn(400, 5, generator=generator, dtype=torch.float64)
    usual = fit_temperature(logits, target)
    assert fit_robust_temperature(logits, target) == usual
    logits[0] = 1e6 * (1 - F.one_hot(target[0], 5))  # one image, certain and wrong
    assert fit_temperature(logits, target) == 100
    robust = fit_robust_temperature(logits, target)
    scores = [calibration_metrics(logits / t, target)["brier"] for t in (robust, robust * 1.03, robust / 1.03, 1, 100)]
    assert scores[0] == min(scores)
    assert 0.5 * usual < robust < 2 * usual
    assert choose_calibration(logits, target) == Calibration("temperature", robust)
