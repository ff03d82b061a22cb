"""DINO against loops and closed forms, and the figures that tell a collapse."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.learn.config import DinoConfig
from vitrail.learn.dino import Dino, Prototypes, view_loss
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.selfsupervised import collapse_note, spread_and_rank
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

COUNT, STEPS, PROTOTYPES = 5, 20, 7


def small(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    head = {"kind": "projected", "width": 8, "hidden": 16}
    return create_model("vit_micro_28", classes=3, depth=1, width=16, heads=2, head=head)


def dino(**options: object) -> Dino:
    config = DinoConfig(**{"prototypes": PROTOTYPES, "local_views": 2, "local_size": 14, "freeze_last": 0.0} | options)
    model = small()
    torch.manual_seed(1)
    objective = build_objective(config, model, TrainingFacts(np.arange(10) % 3, np.arange(10), STEPS))
    assert isinstance(objective, Dino)
    return objective.train()


def batch_of(objective: Dino, step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(step)
    sides = [view.size or 28 for view in objective.views.all()]
    views = tuple(torch.randn(COUNT, 3, side, side, generator=generator) for side in sides)
    rows = torch.arange(COUNT)
    objective.before_step(step)
    return Batch(views, rows % 3, rows % 3, rows, step=step)


def scores_of(model: Classifier, last: Prototypes, images: Tensor) -> Tensor:
    """Cosines, written out."""
    embedding = model.head.projector(model.head.pooled(model.tokens(images)))
    weight = last.weight
    return (embedding / embedding.norm(dim=1, keepdim=True)) @ (weight / weight.norm(dim=1, keepdim=True)).T


def test_the_loss_is_a_loop_over_pairs_of_views_images_and_prototypes() -> None:
    objective = dino()
    objective.centre.normal_(std=0.1)
    other = small(3)
    objective.target.module.load_state_dict(other.state_dict())  # or the teacher would be the student
    batch = batch_of(objective, step=3)
    twin = copy.deepcopy(objective)
    temperature = 0.04 + (0.07 - 0.04) * 3 / (0.3 * STEPS)
    terms = []
    for t in range(2):
        teacher = scores_of(twin.target.classifier, twin.target_last.module, batch.views[t])
        for v in range(4):
            if v == t:
                continue
            student = scores_of(twin.model, twin.last, batch.views[v])
            for image in range(COUNT):
                p = ((teacher[image] - twin.centre) / temperature).exp()
                q = (student[image] / 0.1).exp()
                terms.append(-sum(p[k] / p.sum() * torch.log(q[k] / q.sum()) for k in range(PROTOTYPES)))
    assert len(terms) == 6 * COUNT
    torch.testing.assert_close(objective(batch)["loss"], torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)


def test_of_equal_views_the_loss_is_the_teachers_entropy_and_asks_for_nothing() -> None:
    objective = dino(local_views=0, temperature=0.1, teacher_temperature=0.1, teacher_temperature_start=0.1)
    image = batch_of(objective).views[0]
    batch = batch_of(objective)
    batch = Batch((image, image), batch.label, batch.target, batch.index)
    p = (scores_of(objective.model, objective.last, image) / 0.1).softmax(1)
    loss = objective(batch)["loss"]
    torch.testing.assert_close(loss, -(p * p.log()).sum(1).mean(), rtol=1e-5, atol=1e-6)
    loss.backward()
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad and "head.fc" not in name:
            # zero but for rounding of probabilities, over a temperature of 0.1; others are above 1e-3
            assert parameter.grad.abs().max() < 1e-5, name


def test_view_loss_is_torchs_cross_entropy_with_probabilities() -> None:
    student, teacher = torch.randn(4, 3, 6, requires_grad=True), torch.randn(2, 3, 6).softmax(-1)
    pairs = [(t, v) for t in range(2) for v in range(4) if t != v]
    expected = torch.stack([F.cross_entropy(student[v], teacher[t]) for t, v in pairs]).mean()
    found = view_loss(student, teacher)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, student), torch.autograd.grad(expected, student))


def test_the_centre_is_a_running_mean_of_what_the_teacher_says_and_is_used_before_it_moves() -> None:
    objective = dino()
    centre = torch.zeros(PROTOTYPES)
    for step in range(3):
        batch = batch_of(objective, step)
        teacher = [scores_of(objective.target.classifier, objective.target_last.module, v) for v in batch.views[:2]]
        torch.testing.assert_close(objective.centre, centre)
        objective(batch)
        centre = 0.9 * centre + 0.1 * torch.cat(teacher).mean(0)
    torch.testing.assert_close(objective.centre, centre.detach())
    assert "centre" in objective.state_dict()


def test_the_teachers_temperature_rises_on_a_line_and_stays() -> None:
    objective = dino()
    found = [objective.teacher_temperature(step) for step in (0, 3, 6, 19)]
    assert found == pytest.approx([0.04, 0.055, 0.07, 0.07])


def test_prototypes_wait_in_the_first_steps_and_the_rest_does_not() -> None:
    objective = dino(freeze_last=0.1)  # 2 of 20 steps
    for step, waits in ((0, True), (1, True), (2, False), (3, False)):
        objective.zero_grad()
        objective(batch_of(objective, step))["loss"].backward()
        assert bool((objective.last.weight.grad == 0).all()) == waits
        assert objective.model.trunk.patch_embed.proj.weight.grad.abs().sum() > 0


def test_the_teacher_follows_network_and_prototypes() -> None:
    objective = dino(momentum=0.5, momentum_end=None)
    before = objective.target_last.module.weight.clone(), objective.target.classifier.head.fc.weight.clone()
    with torch.no_grad():
        objective.last.weight += 1
        objective.model.head.fc.weight += 2
    objective.after_step(0)
    torch.testing.assert_close(objective.target_last.module.weight, before[0] + 0.5)
    torch.testing.assert_close(objective.target.classifier.head.fc.weight, before[1] + 1)


def test_views_are_two_large_ones_and_the_small_ones() -> None:
    seen = [(view.weak, view.size, view.scale) for view in dino(local_views=3).views.all()]
    assert seen == [(False, None, None)] * 2 + [(False, 14, (0.05, 0.4))] * 3


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    facts = TrainingFacts(np.arange(6) % 3, np.arange(6), 4, AugmentConfig(mixup=0.8))
    with pytest.raises(ValueError, match="set mixup and cutmix to 0"):
        build_objective(DinoConfig(), small(), facts)
    head = {"kind": "projected", "width": 8, "hidden": 16}
    fixed = create_model("resmlp_t12_32", classes=3, depth=1, width=16, patch=8, head=head)
    with pytest.raises(ValueError, match=r"objective\.local_size: .* of 16 pixels"):
        build_objective(DinoConfig(local_size=16), fixed, TrainingFacts(np.arange(6) % 3, np.arange(6), 4))


# Collapse


def test_spread_and_rank_by_eigenvalues() -> None:
    torch.manual_seed(0)
    for shape in ((40, 6), (5, 12)):
        rows = torch.randn(shape) * torch.rand(shape[1])
        unit = (rows / rows.norm(dim=1, keepdim=True)).double()
        eigen = torch.linalg.eigvalsh(torch.cov(unit.T, correction=0))
        spread, rank = spread_and_rank(rows)
        deviation = unit.std(0, correction=0).square().mean().sqrt() * math.sqrt(shape[1])
        assert float(spread) == pytest.approx(float(deviation), rel=1e-5)
        assert float(rank) == pytest.approx(float(eigen.sum() ** 2 / eigen.square().sum()), rel=1e-5)


def test_spread_and_rank_of_known_shapes() -> None:
    same = torch.ones(9, 4)
    assert float(spread_and_rank(same)[0]) < 1e-6
    corners = torch.cat([torch.eye(4), -torch.eye(4)])
    assert [float(x) for x in spread_and_rank(corners)] == pytest.approx([1.0, 4.0])
    line = torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 4)
    assert [float(x) for x in spread_and_rank(line)] == pytest.approx([1.0, 1.0])


def test_a_collapse_is_told_after_the_first_tenth_and_only_then() -> None:
    flat, line, good = {"spread": 0.05, "rank": 9.0}, {"spread": 0.9, "rank": 1.2}, {"spread": 0.9, "rank": 9.0}
    assert collapse_note(flat, 0.05, 10) == ""
    assert "spread is 0.050, below 0.1" in collapse_note(flat, 0.5, 10)
    assert "rank is 1.20, below 1.5" in collapse_note(line, 0.5, 10)
    assert collapse_note(line, 0.5, 2) == ""
    assert collapse_note(good, 1.0, 10) == ""
    assert collapse_note({"loss": 1.0}, 1.0, 10) == ""


def test_a_run_that_collapses_says_so_once_in_its_log_and_notes(tmp_path: Path) -> None:
    """A teacher that follows at once, one view for both and a large rate: all images get one embedding."""
    import vitrail
    from vitrail.config import from_mapping

    run = vitrail.train(
        from_mapping(
            {
                "out": str(tmp_path / "run"),
                "data": {
                    "uri": "synthetic:shapes?n=60&size=32",
                    "batch": 12,
                    "workers": 0,
                    "check": "off",
                    "augment": {"crop": "evaluation", "flip": 0.0},
                },
                "model": {
                    "name": "vit_tiny_32",
                    "trunk": {"depth": 1, "width": 16, "heads": 2, "patch": 8},
                    "head": {"kind": "projected", "width": 8, "hidden": 16},
                },
                "objective": {"kind": "byol", "predictor_hidden": 16, "momentum": 0.0},
                "optim": {"name": "sgd", "lr": 0.5, "steps": 40, "warmup": 0},
                "engine": {"device": "cpu", "log_every": 4},
            }
        ),
        quiet=True,
    )
    told = [note for note in run.notes if note.startswith("embeddings have collapsed:")]
    assert len(told) == 1
    assert told[0] in (run.path / "log.txt").read_text()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["split"] == "train"]
    assert all({"spread", "rank"} <= line.keys() for line in logged)
    assert sum(line["spread"] < 0.1 for line in logged) > 1, "or once would mean nothing"


@pytest.mark.slow
def test_the_small_recipe_does_not_collapse(tmp_path: Path) -> None:
    from vitrail.recipes import recipe, with_values
    from vitrail.run.train import train

    changes = {
        "out": str(tmp_path / "run"),
        "data.uri": "embedded:fashion",
        "data.limit": 800,
        "data.batch": 64,
        "data.check": "off",
        "model.trunk": {"depth": 2, "width": 48, "heads": 3},
        "model.head.hidden": 256,
        "objective.prototypes": 512,
        "objective.local_views": 2,
        "optim.epochs": 5.0,
        "optim.warmup": 0.5,
        "engine.log_every": 25,
        "engine.evaluate_every": 0.0,
        "evaluators": ("classification",),
    }
    run = train(with_values(recipe("small-dino"), changes), quiet=True)
    assert not [note for note in run.notes if "collapsed" in note]
    last = [line for line in map(json.loads, (run.path / "metrics.jsonl").open()) if "rank" in line][-1]
    assert last["rank"] > 1.5  # below, all images differ along a line; 1.1 with the temperature and projector of DINO
