"""Losses against torch, timm and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised, balanced_weights, smooth
from vitrail.model.build import create_model
from vitrail.model.heads.head import Head

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
MIXED = torch.softmax(torch.randn(6, 5, generator=torch.Generator().manual_seed(2)), -1)


def objective(multilabel: bool = False, labels: np.ndarray | None = None, **options: object) -> Supervised:
    model = create_model("vit_micro_28", classes=5, multilabel=multilabel)
    return Supervised(model, SupervisedConfig(**options), labels)


def test_plain_cross_entropy_is_torchs() -> None:
    assert torch.equal(objective().criterion(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS))


def test_smoothing_over_all_is_torchs() -> None:
    ours = objective(smoothing=0.1)
    torch.testing.assert_close(ours.criterion(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))
    torch.testing.assert_close(ours.criterion(LOGITS, MIXED), F.cross_entropy(LOGITS, MIXED, label_smoothing=0.1))


def test_smoothing_over_the_others_keeps_one_minus_epsilon() -> None:
    dense = smooth(F.one_hot(LABELS, 5).float(), 0.1, "others")
    assert torch.allclose(dense.gather(1, LABELS[:, None]), torch.tensor(0.9))
    assert torch.allclose(dense.sum(1), torch.ones(6))
    assert torch.allclose(smooth(MIXED, 0.1, "others").sum(1), torch.ones(6))
    expected = -(dense * LOGITS.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(objective(smoothing=0.1, smoothing_style="others").criterion(LOGITS, LABELS), expected)


def test_soft_targets_are_timms() -> None:
    torch.testing.assert_close(objective().criterion(LOGITS, MIXED), SoftTargetCrossEntropy()(LOGITS, MIXED))


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(threshold: float | None, summed: bool, smoothing: float) -> None:
    ours = objective(loss="bce", bce_threshold=threshold, bce_sum=summed, smoothing=smoothing)
    theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold, sum_classes=summed)
    torch.testing.assert_close(ours.criterion(LOGITS, LABELS), theirs(LOGITS, LABELS))
    if smoothing == 0:  # timm smooths hard labels only
        torch.testing.assert_close(ours.criterion(LOGITS, MIXED), theirs(LOGITS, MIXED))


def test_balanced_weights_are_scikit_learns_and_average_to_one() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 3, 4, 4])
    weights = balanced_weights(labels, 5)
    expected = compute_class_weight("balanced", classes=np.arange(5), y=labels)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    assert weights[torch.from_numpy(labels)].mean() == pytest.approx(1)
    assert balanced_weights(np.array([0, 0, 2]), 4)[[1, 3]].tolist() == [0, 0]


def test_class_weights_multiply_each_classs_loss() -> None:
    labels = np.array([0, 0, 0, 1, 2, 3, 4])
    ours = objective(class_weights="balanced", labels=labels)
    each = F.cross_entropy(LOGITS, LABELS, reduction="none")
    expected = (each * balanced_weights(labels, 5)[LABELS]).mean()
    torch.testing.assert_close(ours.criterion(LOGITS, LABELS), expected)


def test_multilabel_uses_one_sigmoid_a_class() -> None:
    target = (MIXED > 0.2).float()
    ours = objective(multilabel=True)
    torch.testing.assert_close(ours.criterion(LOGITS, target), F.binary_cross_entropy_with_logits(LOGITS, target))
    smoothed = objective(multilabel=True, smoothing=0.2)
    expected = F.binary_cross_entropy_with_logits(LOGITS, target * 0.8 + 0.1)
    torch.testing.assert_close(smoothed.criterion(LOGITS, target), expected)


class TwoClassifiers(Head):
    prefix, classifiers = 1, 2

    def forward(self, tokens):
        return torch.stack([LOGITS, LOGITS.flip(0)], 1)

    def losses(self, stack, target):
        return {"extra": stack.sum() * 0 + 0.25}


@pytest.mark.parametrize(("rule", "share"), [("sum", 1.0), ("mean", 0.5)])
def test_every_classifier_of_a_head_gets_its_loss_and_the_heads_own_is_added(rule: str, share: float) -> None:
    ours = objective(classifier_loss=rule)
    ours.model.head = TwoClassifiers()
    batch = Batch((torch.zeros(6, 3, 28, 28),), LABELS, LABELS, torch.arange(6))
    found = ours(batch)
    first, second = F.cross_entropy(LOGITS, LABELS), F.cross_entropy(LOGITS.flip(0), LABELS)
    torch.testing.assert_close(found["loss"], share * (first + second) + 0.25)
    torch.testing.assert_close(found["loss_1"], second)
    assert found["extra"] == 0.25


def test_every_weight_that_is_trained_gets_a_gradient_also_under_a_projected_head() -> None:
    model = create_model("vit_micro_28", classes=3, depth=1, width=32, heads=2, head="projected")
    assert len(list(model.head.projector.parameters())) > 0
    made = Supervised(model, SupervisedConfig())
    labels = torch.tensor([0, 2])
    images = torch.randn(2, 3, 28, 28)
    made(Batch((images,), labels, labels, labels))["loss"].backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert not any(p.requires_grad for p in model.head.projector.parameters())
