"""Binary cross entropy starts every classifier at the frequency of its classes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail.data.batch import Batch
from vitrail.data.config import PreprocessConfig
from vitrail.learn.config import DistillationConfig, SupervisedConfig
from vitrail.learn.distillation import Distillation
from vitrail.learn.supervised import Supervised
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import Lora
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.config import (
    AttentionPool,
    Branches,
    ClassAttention,
    ClassMlp,
    ClassToken,
    Distilled,
    Gramian,
    HeadConfig,
    Mean,
    Own,
    Projected,
    SecondOrder,
)
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.tokens import Tokens

CLASSES, BCE, CE = 5, SupervisedConfig(loss="bce"), SupervisedConfig()
SMALL = {"width": 32, "depth": 2, "heads": 2, "image_size": 32, "patch": 8}
SECOND = SecondOrder(rows=4, columns=4, heads=2)
GRAMIAN = Gramian(heads=2, gram_width=16, attention_width=16, attention_heads=2, embed_groups=2)
HEADS: list[HeadConfig] = [
    ClassToken(),
    ClassToken(copies=3),
    ClassToken(hidden=16),
    Mean(),
    Mean(copies=2),
    Mean(hidden=16, mlp=True),
    ClassAttention(),
    ClassMlp(),
    AttentionPool(layerscale=0.1),
    AttentionPool(queries="per_class", layerscale=0.1),
    AttentionPool(queries="per_class", per_class_logit="shared", layerscale=0.1),
    Distilled(),
    Projected(hidden=16, width=8),
    Branches(branches=2),
    *(replace(SECOND, fusion=fusion) for fusion in ("sum", "concat", "late", "aggregate_all", "class_only")),
    replace(SECOND, fusion="words_only", class_token="none"),
    GRAMIAN,
    replace(GRAMIAN, auxiliary=True),
]
IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def small(head: HeadConfig, classes: int = CLASSES, multilabel: bool = False) -> Classifier:
    torch.manual_seed(0)
    if isinstance(head, Own):
        return create_model("timm:test_resnet", classes=classes, image_size=32, multilabel=multilabel).eval()
    return create_model("vit_tiny", classes=classes, head=head, multilabel=multilabel, **SMALL).eval()


def logits(model: Classifier) -> Tensor:
    with torch.no_grad():
        return model.eval().stack(IMAGES)


@pytest.mark.filterwarnings("ignore:the second_order head with fusion")
@pytest.mark.parametrize("head", [*HEADS, Own()], ids=str)
def test_every_classifier_of_every_head_starts_at_the_prior(head: HeadConfig) -> None:
    """The objective adds -log(C - 1) to all logits of a new classifier, and their mean then says 1 / C."""
    model = small(head, classes=10)
    before = logits(model)
    if isinstance(head, Own):  # timm's start of a bias is no zero, and what it started at goes
        before = before - model.trunk.backbone.fc.bias.detach()
    Supervised(model, BCE)
    after = logits(model)
    torch.testing.assert_close(after - before, torch.full_like(after, -math.log(9)), rtol=1e-5, atol=1e-5)
    assert after.mean((0, 2)).sigmoid().tolist() == pytest.approx([0.1] * after.shape[1], rel=0.2)


@pytest.mark.parametrize("head", [ClassToken(), AttentionPool(), GRAMIAN, SECOND, Own()], ids=str)
def test_cross_entropy_starts_where_it_did(head: HeadConfig) -> None:
    model = small(head)
    before = logits(model)
    Supervised(model, CE)
    assert torch.equal(logits(model), before)


def test_frequencies_of_unequal_classes_and_of_several_labels() -> None:
    single = np.repeat(np.arange(CLASSES), [50, 25, 20, 5, 0])
    several = np.zeros((40, CLASSES), np.int64)
    for c, count in enumerate((40, 20, 10, 1, 0)):
        several[:count, c] = 1
    for labels, multilabel, expected in (
        (single, False, [0.5, 0.25, 0.2, 0.05, 0.5 / 100]),
        (several, True, [1 - 0.5 / 40, 0.5, 0.25, 1 / 40, 0.5 / 40]),
    ):
        model = small(Mean(copies=2), multilabel=multilabel)
        Supervised(model, CE if multilabel else BCE, labels)  # several labels always learn by sigmoids
        for row in model.head.fc.bias.sigmoid().unflatten(0, (2, -1)):
            assert row.tolist() == pytest.approx(expected)


def test_unlabelled_images_do_not_count_and_adjusted_logits_start_at_the_prior() -> None:
    labels = np.array([0] * 30 + [1] * 10 + [-1] * 60)
    model = small(Mean(), classes=2)
    Supervised(model, BCE, labels)
    assert model.head.fc.bias.sigmoid().tolist() == pytest.approx([0.75, 0.25])
    model = small(Mean(), classes=2)
    objective = Supervised(model, replace(BCE, logit_adjustment=1.0), labels[:40])
    assert objective.shift is not None
    assert (model.head.fc.bias + objective.shift).sigmoid().tolist() == pytest.approx([0.75, 0.25])


def test_a_classifier_that_was_trained_keeps_its_biases(tmp_path: Path) -> None:
    """A saved one, one that starts from its weights, and one that objectives are built for twice."""
    model = small(Mean())
    nn.init.normal_(model.head.fc.bias)
    expected = model.head.fc.bias.clone()
    model.save(tmp_path)
    same = create_model("vit_tiny", classes=CLASSES, head=Mean(), weights=str(tmp_path), **SMALL)
    for kept in (model, vitrail.load(tmp_path), same):
        Supervised(kept, BCE)
        assert torch.equal(kept.head.fc.bias, expected)
    other = create_model("vit_tiny", classes=3, head=Mean(), weights=str(tmp_path), **SMALL)  # its classifier is new
    Supervised(other, BCE)
    assert other.head.fc.bias.sigmoid().tolist() == pytest.approx([1 / 3] * 3)
    own = small(Own())
    own.save(tmp_path / "own")
    loaded = vitrail.load(tmp_path / "own")
    Supervised(loaded, BCE)
    assert torch.equal(loaded.trunk.backbone.fc.bias, own.trunk.backbone.fc.bias)


def test_frozen_biases_stay_and_an_adapters_own_classifier_starts_at_the_prior() -> None:
    model = small(Mean())
    model.head.requires_grad_(False)
    Supervised(model, BCE)
    assert not model.head.fc.bias.any()
    adapted = apply(small(Mean()), Lora())
    Supervised(adapted, BCE)
    assert adapted.head.fc.bias.sigmoid().tolist() == pytest.approx([1 / CLASSES] * CLASSES)


def test_a_distillation_token_that_learns_by_cross_entropy_starts_at_zero() -> None:
    model, teacher = small(Distilled()), small(Mean())
    labels = np.repeat(np.arange(CLASSES), [50, 25, 20, 4, 1])
    Distillation(model, DistillationConfig(labels=BCE), teacher, labels)
    assert model.head.fc.bias.sigmoid().tolist() == pytest.approx([0.5, 0.25, 0.2, 0.04, 0.01])
    assert not model.head.fc_dist.bias.any()


class Pixels(nn.Module):
    """A trunk without layers: pixels of 8 x 8 images are the features."""

    prefix = 0

    def embed(self, images: Tensor) -> Tokens:
        return Tokens(images.flatten(1)[:, None], 0, (1, 1))

    def encode(self, tokens: Tokens, *_: object) -> tuple[Tokens, dict[str, Tensor]]:
        return tokens, {}

    forward = embed


def test_a_linear_classifier_learns_as_fast_as_by_cross_entropy() -> None:
    """192 features of 100 Gaussian classes, 200 steps of AdamW: most of the gap is the start of the biases."""
    names = [str(c) for c in range(100)]
    generator = torch.Generator().manual_seed(0)
    means = 0.35 * torch.randn(100, 192, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 100, (count,), generator=generator)
        noise = torch.randn(count, 192, generator=generator)
        return (means[labels] + noise).unflatten(1, (3, 8, 8)), labels

    torch.manual_seed(0)
    preprocess = PreprocessConfig(size=8)
    start = Classifier(Pixels(), MeanHead(192, 100), spec={}, classes=names, preprocess=preprocess, multilabel=False)
    steps, held_out = [draw(40) for _ in range(200)], draw(4000)

    def accuracy(config: SupervisedConfig, from_zero: bool = False) -> float:
        model = copy.deepcopy(start)
        objective = Supervised(model, config)
        if from_zero:
            nn.init.zeros_(model.head.fc.bias)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for images, labels in steps:
            optimizer.zero_grad()
            objective(Batch((images,), labels, labels, torch.arange(len(labels))))["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            return float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())

    by_softmax, by_prior, by_half = accuracy(CE), accuracy(BCE), accuracy(BCE, from_zero=True)
    assert by_softmax > 0.93
    assert by_prior > by_softmax - 0.02
    assert by_half < by_softmax - 0.07
