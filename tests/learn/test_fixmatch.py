"""FixMatch: the loss of the paper's equations, no gradient through pseudo-labels, whole runs, how batches are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.config import validate
from vitrail.data.batch import Batch
from vitrail.data.loading.sampler import BatchSampler
from vitrail.engine import checkpoint
from vitrail.engine.run_folder import RunFolder
from vitrail.learn.cmsf import draw_labelled
from vitrail.learn.config import FixmatchConfig
from vitrail.learn.fixmatch import FixMatch
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.model.build import create_model
from vitrail.recipes import recipe, with_values

CLASSES, IMAGES, COUNT = 3, 30, 12
INDEX = 2 * np.arange(IMAGES)
FACTS = TrainingFacts(np.arange(IMAGES) % CLASSES, INDEX, 7)


def made(**options: Any) -> FixMatch:
    torch.manual_seed(0)
    model = create_model("vit_micro_28", classes=CLASSES, depth=1, width=16, heads=2)
    torch.nn.init.normal_(model.head.fc.weight, std=2.0)  # an untrained head is never confident
    objective = build_objective(FixmatchConfig(labelled=0.3, **options), model, FACTS)
    assert isinstance(objective, FixMatch)
    return objective.train()


def batch_of(step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(step)
    views = tuple(torch.randn(COUNT, 3, 28, 28, generator=generator) for _ in range(2))
    rows = (5 * torch.arange(COUNT) + step) % IMAGES
    return Batch(views, rows % CLASSES, rows % CLASSES, 2 * rows, step=step)


def by_hand(weak: Sequence[Sequence[float]], strong: Sequence[Sequence[float]], batch: Batch, config: Any) -> float:
    """Eq. 3 and 4 of the paper, image by image."""

    def log_probability(logits: Sequence[float], label: int) -> float:
        return logits[label] - math.log(sum(math.exp(value) for value in logits))

    labelled = {int(INDEX[row]) for row in draw_labelled(FACTS.labels, config.labelled)}
    with_label, without = [], []
    for i in range(COUNT):
        if int(batch.index[i]) in labelled:
            with_label.append(-log_probability(weak[i], int(batch.label[i])))
            continue
        guess = max(range(CLASSES), key=lambda c: weak[i][c])
        sure = math.exp(log_probability(weak[i], guess)) >= config.threshold
        without.append(-log_probability(strong[i], guess) if sure else 0.0)
    assert len(with_label) > 1
    assert 0 < sum(value != 0 for value in without) < len(without)
    return sum(with_label) / len(with_label) + config.weight * sum(without) / len(without)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_loss_is_that_of_the_papers_equations(weight: float) -> None:
    objective, batch = made(threshold=0.7, weight=weight), batch_of()
    weak, strong = (objective.model(view).double().tolist() for view in batch.views)
    expected = by_hand(weak, strong, batch, objective.options)
    assert float(objective(batch)["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def test_no_gradient_goes_through_pseudo_labels() -> None:
    """Those of weak views without a label are zero, those of strong views with a label, too."""
    objective, batch = made(threshold=0.7), batch_of()
    views = tuple(view.clone().requires_grad_() for view in batch.views)
    gradients = torch.autograd.grad(objective(Batch(views, batch.label, batch.label, batch.index))["loss"], views)
    known = objective.known[batch.index]

    def moved(gradient: Tensor) -> Tensor:
        return gradient.flatten(1).abs().sum(1) > 0

    assert torch.equal(moved(gradients[0]), known)
    assert not (moved(gradients[1]) & known).any()
    assert moved(gradients[1]).any()


def test_labels_that_may_not_be_used_change_nothing() -> None:
    objective, batch = made(threshold=0.7), batch_of()
    known = objective.known[batch.index]
    other = torch.where(known, batch.label, (batch.label + 1) % CLASSES)
    assert objective(batch)["loss"] == objective(Batch(batch.views, other, other, batch.index))["loss"]
    assert objective(batch)["loss"] != objective(Batch(batch.views, (other + 1) % CLASSES, other, batch.index))["loss"]


def test_one_image_in_eight_is_drawn_from_those_with_a_label() -> None:
    objective = made()
    assert objective.groups is not None
    labelled = objective.groups == 0
    assert np.array_equal(np.flatnonzero(labelled), draw_labelled(FACTS.labels, 0.3))
    sampler = BatchSampler(IMAGES, 1000, 0, "balanced", objective.groups)
    drawn = np.concatenate([sampler.table(step)[:, 0] for step in range(8)])
    assert labelled[drawn].mean() == pytest.approx(1 / 8, abs=3 * (7 / 64 / len(drawn)) ** 0.5)
    assert set(drawn.tolist()) == set(range(IMAGES))


def test_with_all_labels_there_is_nothing_to_match() -> None:
    with pytest.raises(ValueError, match=r"objective\.labelled: with 1 no image is without a label"):
        build_objective(FixmatchConfig(labelled=1.0), create_model("vit_micro_28", classes=CLASSES), FACTS)


@pytest.mark.parametrize("setting", [{"data.sampling": "balanced"}, {"data.augment.mixup": 0.2}])
def test_what_does_not_go_with_it_is_one_sentence(setting: dict[str, Any]) -> None:
    (problem,) = validate(with_values(recipe("small-fixmatch"), setting))
    assert problem.startswith("objective: fixmatch needs data.sampling shuffle")


def test_a_run_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = with_values(
        recipe("small-fixmatch"),
        {
            "data.uri": "synthetic:shapes?n=120&size=28",
            "data.batch": 16,
            "data.workers": 0,
            "data.check": "off",
            "model.name": "vit_micro_28",
            "model.trunk": {"depth": 1, "width": 32, "heads": 2},
            "objective.labelled": 0.1,
            "objective.threshold": 0.2,
            "optim.steps": 7,
            "engine.device": "cpu",
            "engine.log_every": 1,
            "engine.checkpoint_every": 0.01,
            "engine.keep": 9,
        },
    )
    runs = [
        vitrail.train(with_values(config, {"out": str(tmp_path / name)}), quiet=True) for name in ("whole", "other")
    ]
    for path in (runs[1].path / "checkpoint").iterdir():  # as a kill after step 4 would leave it
        if int(path.stem.removeprefix("step-")) > 4:
            path.unlink()
    vitrail.resume(runs[1].path, quiet=True)
    states = [checkpoint.newest(run.path / "checkpoint")[0] for run in runs]
    assert states[0].step == states[1].step == 7
    assert all(torch.equal(t, states[1].tensors[name]) for name, t in states[0].tensors.items())
    lines = [[line for line in RunFolder(run.path).read_metrics() if line["split"] == "train"] for run in runs]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert any(line["confident"] > 0 for line in lines[0])
