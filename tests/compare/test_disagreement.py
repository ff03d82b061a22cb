"""The disagreement matrix against counting by hand."""

from __future__ import annotations

import json

import pytest
import torch

from vitrail.compare.statistics import disagreement

GENERATOR = torch.Generator().manual_seed(3)
LABELS = torch.randint(0, 5, (200,), generator=GENERATOR)
LOGITS = {name: torch.randn(200, 5, generator=GENERATOR) for name in ("teacher", "student", "both")}


def test_every_rate_is_the_share_of_different_decisions() -> None:
    found = disagreement(LOGITS, LABELS)
    assert found.names == ("labels", "teacher", "student", "both")
    said = {"labels": LABELS.tolist()}
    for name, logits in LOGITS.items():
        said[name] = [max(range(5), key=row.__getitem__) for row in logits.tolist()]
    for i, one in enumerate(found.names):
        for j, other in enumerate(found.names):
            different = sum(a != b for a, b in zip(said[one], said[other], strict=True))
            assert float(found.rates[i, j]) == different / 200
            assert found.between(one, other) == different / 200


def test_it_is_symmetric_with_a_zero_diagonal() -> None:
    rates = disagreement(LOGITS, LABELS).rates
    assert torch.equal(rates, rates.T)
    assert rates.diagonal().tolist() == [0.0] * 4
    assert (rates[~torch.eye(4, dtype=torch.bool)] > 0).all()


def test_the_first_row_is_one_minus_accuracy() -> None:
    from sklearn.metrics import accuracy_score

    rates = disagreement(LOGITS, LABELS).rates
    for i, logits in enumerate(LOGITS.values(), 1):
        assert float(rates[0, i]) == pytest.approx(1 - accuracy_score(LABELS, logits.argmax(1)), abs=1e-12)


def test_decisions_serve_as_well_as_logits() -> None:
    decided = {name: logits.argmax(1) for name, logits in LOGITS.items()}
    assert torch.equal(disagreement(decided, LABELS).rates, disagreement(LOGITS, LABELS).rates)


def test_of_equal_logits_the_lower_class_is_the_decision() -> None:
    tied = torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    assert disagreement({"tied": tied}, torch.tensor([1, 0])).between("labels", "tied") == 0


def test_it_goes_into_json() -> None:
    found = disagreement({"a": torch.tensor([0, 1])}, torch.tensor([0, 0]))
    assert json.loads(json.dumps(found.to_json())) == {"names": ["labels", "a"], "rates": [[0, 0.5], [0.5, 0]]}


@pytest.mark.parametrize(
    ("predictions", "labels", "words"),
    [
        ({"a": torch.zeros(3, 2)}, torch.zeros(4, dtype=torch.long), r"'a' has shape \[3, 2\].*same 4 images"),
        ({"a": torch.zeros(3)}, torch.zeros(3, dtype=torch.long), "class numbers"),
        ({"a": torch.full((1, 2), float("nan"))}, torch.zeros(1, dtype=torch.long), "no numbers"),
        ({"labels": torch.zeros(3, 2)}, torch.zeros(3, dtype=torch.long), "first row"),
        ({"a": torch.zeros(3, 2)}, torch.zeros(3, 2), "one label"),
        ({}, torch.zeros(0, dtype=torch.long), "class numbers"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    predictions: dict[str, torch.Tensor], labels: torch.Tensor, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        disagreement(predictions, labels)
