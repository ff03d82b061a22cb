"""Figures against scikit-learn, torchmetrics, scipy and closed forms."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
import torchmetrics.functional.classification as tm
from scipy.stats import binomtest

from vitrail.measure.classification import (
    STANDARD,
    MultiLabelFigures,
    SingleLabelFigures,
    average_precision,
    classification,
    read_figures,
    wilson_interval,
)
from vitrail.report.html import DataSummary, Report, render

# classes, images, labels drawn from: plain, missing classes, one class only, two classes, one image
CASES = {
    "plain": (7, 300, range(7)),
    "missing classes": (12, 60, (0, 3, 4, 11)),
    "one class only": (5, 40, (2,)),
    "two classes": (2, 101, range(2)),
    "one image": (6, 1, range(6)),
    "fewer classes than five": (3, 50, range(3)),
}


def drawn(case: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, SingleLabelFigures]:
    classes, count, labels = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    target = torch.tensor(list(labels))[torch.randint(len(labels), (count,), generator=generator)]
    logits = 2 * torch.randn(count, classes, generator=generator) + 1.5 * F.one_hot(target, classes)
    figures = classification(logits, target, [f"c{i}" for i in range(classes)])
    assert isinstance(figures, SingleLabelFigures)
    return logits, target, figures


@pytest.mark.parametrize("case", CASES)
def test_per_class_figures_equal_scikit_learn(case: str) -> None:
    logits, target, figures = drawn(case)
    guess, classes = logits.argmax(1), logits.shape[1]
    p, r, f, support = sk.precision_recall_fscore_support(target, guess, labels=range(classes), zero_division=0)
    occurs = np.isin(np.arange(classes), torch.cat([target, guess]))
    np.testing.assert_allclose(figures.precision[occurs], p[occurs])
    np.testing.assert_allclose(figures.recall, np.where(support > 0, r, np.nan))
    np.testing.assert_allclose(figures.f1[occurs], f[occurs])
    assert np.isnan(figures.f1[~occurs]).all()
    np.testing.assert_array_equal(figures.support, support)
    np.testing.assert_array_equal(figures.confusion, sk.confusion_matrix(target, guess, labels=range(classes)))


@pytest.mark.parametrize("case", CASES)
def test_summary_figures_equal_scikit_learn_and_torch(case: str) -> None:
    logits, target, figures = drawn(case)
    guess, classes = logits.argmax(1), logits.shape[1]
    scalars = figures.scalars()
    assert scalars.keys() == STANDARD["top1"]
    assert scalars["top1"] == pytest.approx(sk.accuracy_score(target, guess))
    assert scalars["loss"] == pytest.approx(F.cross_entropy(logits.double(), target).item())
    averaged = {"labels": target.unique().tolist(), "average": "macro", "zero_division": 0}
    expected = sk.precision_recall_fscore_support(target, guess, **averaged)[:3]
    assert [scalars[f"macro_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "y_pred contains classes not in y_true"
        assert scalars["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(target, guess))
    top5 = sum(int(t in row.topk(min(5, classes)).indices) for row, t in zip(logits, target, strict=True)) / len(target)
    assert scalars["top5"] == pytest.approx(top5)


@pytest.mark.parametrize("case", CASES)
def test_calibration_error_equals_torchmetrics(case: str) -> None:
    logits, target, figures = drawn(case)
    probabilities = logits.double().softmax(1)
    expected = tm.multiclass_calibration_error(probabilities, target, logits.shape[1], n_bins=15, norm="l1")
    assert figures.ece == pytest.approx(expected.item(), abs=1e-6)
    assert figures.bin_count.sum() == len(target)


@pytest.mark.parametrize("case", CASES)
def test_probabilities_and_logits_give_the_same_figures(case: str) -> None:
    logits, target, figures = drawn(case)
    again = classification(logits.double().softmax(1), target, figures.classes, probabilities=True)
    assert again.scalars() == pytest.approx(figures.scalars(), rel=1e-9)


def test_calibration_bins_of_known_confidences() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.6], dtype=torch.float64)
    figures = classification(
        torch.stack([confidence, 1 - confidence], 1), torch.tensor([0, 0, 1, 0]), ["a", "b"], probabilities=True
    )
    assert isinstance(figures, SingleLabelFigures)
    assert figures.bin_count[13] == 3  # (13/15, 14/15]
    assert figures.bin_count[8] == 1  # (8/15, 9/15]: the upper edge belongs to its bin
    assert figures.bin_accuracy[13] == pytest.approx(2 / 3)
    assert figures.ece == pytest.approx((3 * (0.9 - 2 / 3) + 1 * 0.4) / 4)


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 40), (40, 40), (7, 23), (893, 1000)])
def test_interval_equals_scipys_wilson_interval(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("label", "top1", "top5"), [(0, 1, 1), (1, 0, 1), (4, 0, 1), (5, 0, 0), (7, 0, 0)])
def test_of_equal_scores_the_lower_class_comes_first(label: int, top1: float, top5: float) -> None:
    figures = classification(torch.zeros(1, 8), torch.tensor([label]))
    assert isinstance(figures, SingleLabelFigures)
    assert (figures.top1, figures.top5) == (top1, top5)
    assert figures.confusion[label, 0] == 1


def test_confused_pairs_are_the_largest_errors_in_order() -> None:
    guess = torch.tensor([1, 1, 1, 2, 2, 0, 1, 2])
    target = torch.tensor([0, 0, 0, 1, 1, 0, 1, 2])
    figures = classification(F.one_hot(guess, 3).float(), target, ["a", "b", "c"])
    assert isinstance(figures, SingleLabelFigures)
    assert figures.confused_pairs() == [(0, 1, 3), (1, 2, 2)]


def test_figures_survive_many_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9001, 4, generator=generator)  # more than two pieces
    target = torch.randint(4, (9001,), generator=generator)
    figures = classification(logits, target)
    assert figures.loss == pytest.approx(F.cross_entropy(logits.double(), target).item())
    assert figures.scalars()["top1"] == pytest.approx((logits.argmax(1) == target).double().mean().item())


def labelled(classes: int = 6, count: int = 80, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, MultiLabelFigures]:
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(count, classes, generator=generator) < 0.3).long()
    logits = torch.randn(count, classes, generator=generator) + 1.5 * target - 0.5
    logits[:, 0] = logits[:, 0].round()  # many ties
    figures = classification(logits, target, [f"c{i}" for i in range(classes)])
    assert isinstance(figures, MultiLabelFigures)
    return logits, target, figures


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("classes", "count"), [(6, 80), (1, 30), (2, 9)])
def test_multi_label_figures_equal_scikit_learn(classes: int, count: int, seed: int) -> None:
    logits, target, figures = labelled(classes, count, seed)
    guess = (logits.sigmoid() > 0.5).long()
    expected = [sk.average_precision_score(target[:, c], logits[:, c]) for c in range(classes)]
    np.testing.assert_allclose(figures.average_precision, expected)
    assert figures.loss == pytest.approx(F.binary_cross_entropy_with_logits(logits.double(), target.double()).item())
    scalars = figures.scalars()
    assert scalars["map"] == pytest.approx(np.mean(expected))
    averaged = {"labels": list(range(classes)), "zero_division": 0} if classes > 1 else {"zero_division": 0}
    flat = (target.flatten(), guess.flatten())
    assert scalars["micro_f1"] == pytest.approx(sk.f1_score(*flat))
    if classes > 1:
        assert scalars["macro_f1"] == pytest.approx(sk.f1_score(target, guess, average="macro", **averaged))
        assert scalars["subset_accuracy"] == pytest.approx(sk.accuracy_score(target, guess))


def test_classes_without_positives_are_listed_and_left_out_of_map() -> None:
    logits, target, _ = labelled()
    target[:, 2] = 0
    figures = classification(logits, target, [f"c{i}" for i in range(6)])
    assert isinstance(figures, MultiLabelFigures)
    assert figures.without_positives == ("c2",)
    others = [c for c in range(6) if c != 2]
    expected = np.mean([sk.average_precision_score(target[:, c], logits[:, c]) for c in others])
    assert figures.scalars()["map"] == pytest.approx(expected)


def test_macro_f1_of_several_labels_is_over_the_classes_that_have_positives() -> None:
    logits, target, _ = labelled()
    target[:, 2] = 0
    guess, present = (logits.sigmoid() > 0.5).long(), [0, 1, 3, 4, 5]
    assert guess[:, 2].any()  # predicted, yet absent
    figures = classification(logits, target)
    expected = sk.f1_score(target, guess, labels=present, average="macro", zero_division=0)
    assert figures.scalars()["macro_f1"] == pytest.approx(expected)
    assert np.isnan(figures.recall[2])


def test_absent_classes_are_counted_in_a_sentence() -> None:
    note = "8 of 12 classes have no images here; macro averages are over the 4 present"
    assert drawn("missing classes")[2].absent_note() == note
    assert drawn("plain")[2].absent_note() == ""


def test_recall_without_images_is_null_in_json() -> None:
    _, target, figures = drawn("missing classes")
    stored = json.loads(json.dumps(figures.to_json(), allow_nan=False))
    assert [value is None for value in stored["recall"]] == [c not in target.tolist() for c in range(12)]


def test_macro_averages_of_metrics_that_were_stored_with_zeros_leave_absent_classes_out() -> None:
    figures = drawn("missing classes")[2]
    stored = figures.to_json()
    stored["recall"] = [value or 0.0 for value in stored["recall"]]
    assert read_figures(stored).scalars() == pytest.approx(figures.scalars())


def test_average_precision_of_constant_scores_is_the_share_of_positives() -> None:
    assert average_precision(np.zeros(8), np.arange(8) < 3) == pytest.approx(3 / 8)


def test_a_tie_of_positive_and_negative_counts_as_one_step() -> None:
    assert average_precision(np.array([1.0, 1.0, 0.0]), np.array([True, False, True])) == pytest.approx(
        0.5 * 1 / 2 + 0.5 * 2 / 3
    )


@pytest.mark.parametrize("multilabel", [False, True])
def test_figures_come_back_from_strict_json(multilabel: bool) -> None:
    figures = labelled()[2] if multilabel else drawn("missing classes")[2]
    text = json.dumps(figures.to_json(), allow_nan=False)
    again = read_figures(json.loads(text))
    assert type(again) is type(figures)
    assert again.scalars() == figures.scalars()
    np.testing.assert_array_equal(again.f1, figures.f1)
    assert json.dumps(again.to_json()) == text


def test_an_impossible_true_class_is_an_infinite_loss_and_null_in_json() -> None:
    figures = classification(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    assert figures.loss == math.inf
    assert figures.to_json()["loss"] is None


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_scores_are_refused_with_their_row(broken: float) -> None:
    logits = torch.zeros(5, 3)
    logits[3, 1] = broken
    with pytest.raises(ValueError, match=r"1 of 5 rows .*row 3"):
        classification(logits, torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize(
    ("scores", "target", "classes", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), None, "not empty"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), None, "label 3 is outside the 3 classes"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), None, "label -1"),
        (torch.zeros(2, 3), torch.tensor([0]), None, "2 rows of scores, but 1 labels"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), ["a", "b"], "3 columns, but there are 2 classes"),
        (torch.zeros(2, 3), torch.tensor([0.5, 1.0]), None, "class numbers"),
        (torch.zeros(2, 3), torch.full((2, 3), 0.5), None, "0 or 1"),
        (torch.zeros(2, 3), torch.zeros(2, 2), None, "0 or 1"),
    ],
)
def test_wrong_input_is_refused_in_words(scores, target, classes, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        classification(scores, target, classes)


def test_logits_passed_as_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        classification(torch.tensor([[3.0, -1.0]]), torch.tensor([0]), probabilities=True)


def test_21000_classes_never_make_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, JSON and report hold what grows with images and with classes, nothing that grows with their square."""
    classes, count = 21_000, 40
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(count, classes, generator=generator)
    target = torch.randint(classes, (count,), generator=generator)
    scores[:10, target[:10]] += 100.0

    def matrix(self: SingleLabelFigures) -> None:
        raise AssertionError("a matrix of 21,000 x 21,000")

    monkeypatch.setattr(SingleLabelFigures, "confusion", property(matrix))
    names = [f"n{i:08d}" for i in range(classes)]
    figures = classification(scores, target, names)
    assert isinstance(figures, SingleLabelFigures)
    assert len(figures.cells) <= count
    assert figures.right.sum() == round(figures.top1 * count)
    guess = scores.argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert figures.scalars()["matthews"] == pytest.approx(sk.matthews_corrcoef(target, guess))
        assert figures.scalars()["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(target, guess))
    stored = json.loads(json.dumps(figures.to_json()))
    assert "confusion" not in stored
    assert np.array_equal(read_figures(stored).cells, figures.cells)
    counts = {"train": [2] * classes, "test": np.bincount(target, minlength=classes).tolist()}
    data = DataSummary("many.npz", names, counts, {"train": 2 * classes, "test": count})
    page = render(Report("many", figures, data=data))
    assert len(page) < 3_000_000
    assert "200 of 21,000 classes" in page
