"""Several classifiers together: against loops over images and numpy."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.measure.ensembles import (
    agreement,
    diversity,
    evaluate_members,
    fused_accuracy,
    head_accuracy,
    margins,
    subset_accuracy,
)
from vitrail.measure.evaluator import Loaders
from vitrail.model.build import create_model
from vitrail.model.heads.config import Mean


def some(images: int = 60, heads: int = 4, classes: int = 5, signal: float = 1.5) -> tuple[Tensor, Tensor]:
    target = torch.randint(classes, (images,))
    stack = torch.randn(images, heads, classes) + signal * torch.nn.functional.one_hot(target, classes)[:, None]
    return stack, target


def margins_by_loops(stack: Tensor, target: Tensor, votes: str) -> np.ndarray:
    scores, labels = stack.double().numpy(), target.numpy()
    found = np.zeros(scores.shape[:2])
    for i, row in enumerate(scores):
        shares = np.zeros_like(row)
        for k, logits in enumerate(row):
            if votes == "hard":
                shares[k, max(range(len(logits)), key=lambda c: (logits[c], -c))] = 1
            else:
                shares[k] = [math.exp(v) / sum(math.exp(w) for w in logits) for v in logits]
        mean = shares.mean(0)
        rival = max((c for c in range(len(mean)) if c != labels[i]), key=lambda c: (mean[c], -c))
        found[i] = shares[:, labels[i]] - shares[:, rival]
    return found


@pytest.mark.parametrize("votes", ["hard", "soft"])
def test_margins_equal_loops_over_images(votes: str) -> None:
    stack, target = some()
    np.testing.assert_allclose(margins(stack, target, votes).numpy(), margins_by_loops(stack, target, votes))


@pytest.mark.parametrize("votes", ["hard", "soft"])
def test_strength_and_correlation_equal_their_definitions(votes: str) -> None:
    stack, target = some()
    each = margins_by_loops(stack, target, votes)
    found = diversity(stack, target, votes)
    matrix = np.corrcoef(each.T)
    deviation = each.std(0)
    pairs = [(a, b) for a in range(4) for b in range(4)]
    weighted = sum(matrix[a, b] * deviation[a] * deviation[b] for a, b in pairs) / 16
    assert found.strength == pytest.approx(each.mean())
    assert found.correlation == pytest.approx(weighted / deviation.mean() ** 2)
    assert found.between == pytest.approx(np.mean([matrix[a, b] for a, b in pairs if a != b]))
    assert found.ratio == pytest.approx(found.correlation / found.strength**2)


@pytest.mark.parametrize("votes", ["hard", "soft"])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_lies_above_the_error_of_the_ensemble(votes: str, seed: int) -> None:
    torch.manual_seed(seed)
    stack, target = some(images=300, heads=5, signal=1.5 + 0.5 * seed)
    stack = stack + torch.randn(300, 1, 5)  # what all heads have in common, so that some errors are left
    found = diversity(stack, target, votes)
    shares = stack.softmax(-1) if votes == "soft" else torch.nn.functional.one_hot(stack.argmax(-1), 5).double()
    error = float((shares.mean(1).argmax(-1) != target).double().mean())
    assert found.strength > 0
    assert 0 < error <= found.bound


def test_copies_are_fully_correlated_and_independent_heads_are_not() -> None:
    stack, target = some(images=4000)
    copies = stack[:, :1].expand(-1, 4, -1)
    assert diversity(copies, target).correlation == pytest.approx(1)
    assert diversity(copies, target).between == pytest.approx(1)
    assert diversity(stack, target).between < 0.5


def test_undefined_figures_are_nan() -> None:
    perfect = torch.eye(3)[:, None].expand(-1, 2, -1)
    found = diversity(perfect, torch.arange(3))
    assert found.strength == 1
    assert math.isnan(found.correlation)
    assert math.isnan(found.between)
    wrong = diversity(perfect, torch.tensor([1, 2, 0]))
    assert math.isnan(wrong.ratio)
    stack, target = some(heads=1)
    assert diversity(stack, target).correlation == pytest.approx(1)
    assert math.isnan(diversity(stack, target).between)


def test_accuracies_of_heads_and_subsets_equal_loops() -> None:
    stack, target = some(images=30)
    for k in range(4):
        right = sum(int(row[k].argmax() == label) for row, label in zip(stack, target, strict=True))
        assert float(head_accuracy(stack, target)[k]) == pytest.approx(right / 30)
    found = subset_accuracy(stack, target)
    assert list(found) == [s for size in range(1, 5) for s in combinations(range(4), size)]
    for subset, value in found.items():
        right = sum(int(sum(row[k] for k in subset).argmax() == y) for row, y in zip(stack, target, strict=True))
        assert value == pytest.approx(right / 30)
    assert found[0, 1, 2, 3] == fused_accuracy(stack, target)
    assert fused_accuracy(stack, target, [3, 1]) == found[1, 3]
    assert set(subset_accuracy(stack, target, [2])) == set(combinations(range(4), 2))


def test_agreement_counts_equal_answers() -> None:
    stack, _ = some(images=30)
    said = stack.argmax(-1)
    found = agreement(stack)
    for a in range(4):
        for b in range(4):
            assert float(found[a, b]) == pytest.approx(sum(int(x == y) for x, y in said[:, [a, b]].tolist()) / 30)
    assert torch.equal(found, found.T)


def test_wrong_shapes_and_numbers_are_refused() -> None:
    stack, target = some()
    with pytest.raises(ValueError, match=r"shape \[60, 4\]"):
        agreement(stack[..., 0])
    with pytest.raises(ValueError, match="class numbers"):
        head_accuracy(stack, target[:5])
    with pytest.raises(ValueError, match="between 0 and 4"):
        head_accuracy(stack, target + 5)
    with pytest.raises(ValueError, match="from 0 to 3"):
        fused_accuracy(stack, target, [4])
    with pytest.raises(ValueError, match="8,191 subsets"):
        subset_accuracy(stack.repeat(1, 4, 1)[:, :13], target)
    with pytest.raises(ValueError, match="hard or soft"):
        margins(stack, target, "loud")  # type: ignore[arg-type]


def test_the_evaluator_gives_members_strength_and_correlation_of_a_head() -> None:
    torch.manual_seed(0)
    shape = {"depth": 1, "width": 32, "heads": 2, "image_size": 16, "patch": 8}
    model = create_model("deit_tiny", classes=4, head=Mean(copies=3), **shape)
    images, label = torch.randn(30, 3, 16, 16), torch.randint(4, (30,))
    batches = [Batch((images[i : i + 8],), label[i : i + 8], label[i : i + 8], torch.arange(8)) for i in (0, 8, 16, 22)]
    data = Loaders([str(c) for c in range(4)], {"test": batches}, "test", [])
    found = evaluate_members(model, data)["numbers"]
    rows = torch.cat([torch.arange(i, i + 8) for i in (0, 8, 16, 22)])
    with torch.no_grad():
        stack = model.eval().stack(images)[rows]
    right = stack.argmax(-1) == label[rows, None]
    assert found["members_top1"] == pytest.approx(right.double().mean().item())
    assert found["members_together"] == pytest.approx((stack.sum(1).argmax(1) == label[rows]).double().mean().item())
    assert found["strength"] == pytest.approx(diversity(stack, label[rows], votes="soft").strength, rel=1e-5)
    single = create_model("deit_tiny", classes=4, head=Mean(), **shape)
    assert "correlation" not in evaluate_members(single, data)["numbers"]
