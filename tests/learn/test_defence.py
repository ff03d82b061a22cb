"""Training against a growing set of patches (SlowFormer, arXiv 2310.02544)."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from vitrail.data.batch import Batch
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.attack import UniversalPatch, attack_losses
from vitrail.learn.attack_config import AttackConfig, DefenceConfig
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.defence import PatchTraining
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import AdaptiveConfig, Adavit, Ats, Avit
from vitrail.recipes import recipe, with_values

SIZE, CLASSES = 32, 5
POLICIES: dict[str, AdaptiveConfig] = {
    "ats": Ats(layers=(1,)),
    "avit": Avit(gate_scale=2.0, gate_center=1.0),
    "adavit": Adavit(),
}
QUICK = DefenceConfig(every=3, inner_steps=2, attack=AttackConfig(size=8))


def small(policy: str | None = "avit") -> Classifier:
    torch.manual_seed(0)
    adaptive = None if policy is None else POLICIES[policy]
    options = {"image_size": SIZE, "patch": 8, "width": 32, "depth": 2, "heads": 2, "adaptive": adaptive}
    model = create_model("deit_tiny", classes=CLASSES, **options)
    nn.init.normal_(model.trunk.pos_embed)
    return model


def batch(step: int, count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    label = torch.randint(0, CLASSES, (count,), generator=generator)
    return Batch((images,), label, label, torch.arange(count), step=step)


def work(objective: PatchTraining, steps: int = 12) -> TrainStep:
    optim = OptimConfig(lr=1e-3, steps=steps, warmup=0)
    return TrainStep(objective, optim, make_schedule(optim, 8, 80), device=torch.device("cpu"))


@pytest.mark.parametrize("policy", POLICIES)
def test_patches_are_made_when_they_are_due_and_pasted_from_then_on(policy: str) -> None:
    objective = PatchTraining(small(policy), QUICK, steps=12)
    step = work(objective)
    assert len(objective.patches) == 3  # after 3, 6 and 9 steps; one after the last would never be seen
    for i in range(12):
        exist = i // 3
        assert bool(objective.pasted) == (exist > 0)
        assert int(objective.chosen) < max(1, exist)
        made = [bool(p.any()) for p in objective.patches]
        assert made == [k < exist for k in range(3)]
        step.feed(batch(i))
    assert len({tuple(p.flatten().tolist()) for p in objective.patches}) == 3


def test_the_loss_is_the_usual_one_on_images_that_carry_the_chosen_patch() -> None:
    objective = PatchTraining(small(), QUICK, steps=12).eval()
    plain = Supervised(objective.model, SupervisedConfig())
    given = batch(0)
    assert torch.equal(objective(given)["loss"], plain(given)["loss"])  # nothing is pasted yet
    objective.patches.copy_(torch.randint(0, 256, objective.patches.shape))
    objective.chosen.fill_(1)
    objective.pasted.fill_(True)
    images = given.images.clone()
    images[:, :, :8, :8] = objective.patches[1].to(torch.uint8)
    found, expected = objective(given), plain(replace(given, views=(images,)))
    assert found.keys() == expected.keys()
    assert {"ponder", "prior"} <= found.keys()  # the model's own losses, too
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_steps_draw_evenly_from_the_set_and_by_seed_and_step_alone() -> None:
    config = replace(QUICK, every=100, clean=0.25)

    def drawn(seed: int) -> list[tuple[bool, int]]:
        chosen = replace(config, attack=replace(config.attack, seed=seed))
        objective = PatchTraining(small(), chosen, steps=100_000)
        made = []
        for step in range(2000):
            objective._draw(step, 4)
            made.append((bool(objective.pasted), int(objective.chosen)))
        return made

    first = drawn(0)
    assert first == drawn(0)
    assert first != drawn(1)
    counts = [sum(on and k == place for on, k in first) for place in range(4)]
    # 2000 draws of probability 3/16: mean 375, standard deviation 17.5; five of them.
    assert all(abs(count - 375) < 88 for count in counts)


def test_each_patch_is_made_against_the_model_of_its_moment() -> None:
    objective = PatchTraining(small(), QUICK, steps=12)
    step, kept = work(objective), {}
    for i in range(9):
        step.feed(batch(i))
        if (i + 1) % 3 == 0:
            kept[i // 3] = copy.deepcopy(objective)
    for k, then in kept.items():
        again = then.attack(batch(3 * k + 2), QUICK.attack.seed + k + 1)
        assert torch.equal(again, objective.patches[k])
    assert not torch.equal(kept[2].attack(batch(2), 1), objective.patches[0])


def test_the_inner_attack_brings_its_loss_down_and_leaves_the_model_alone() -> None:
    config = replace(QUICK, inner_steps=20)
    objective = PatchTraining(small(), config, steps=12)
    model, given = objective.model.train(), batch(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    levels = objective.attack(given, 7)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    patch, losses = UniversalPatch(8, image_size=SIZE, seed=7), []
    for used in (patch.levels, levels):
        patch.set_levels(used)
        losses.append(attack_losses(model, patch, config.attack, given)["loss"].detach())
    assert losses[1] < losses[0]


def test_only_the_model_is_trained() -> None:
    objective = PatchTraining(small(), QUICK, steps=12)
    assert all(name.startswith("model.") for name, p in objective.named_parameters() if p.requires_grad)


def test_a_run_goes_on_from_its_state_bit_for_bit() -> None:
    def train(objective: PatchTraining, first: int, last: int) -> list[float]:
        optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.05)
        seen = []
        for step in range(first, last):
            loss = objective(batch(step))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            objective.after_step(step)
            seen.append(float(loss.detach()))
        return seen

    whole = PatchTraining(small(), QUICK, steps=12)
    losses = train(whole, 0, 12)
    for stop in (3, 7):  # right after a patch was made, and between two
        half = PatchTraining(small(), QUICK, steps=12)
        train(half, 0, stop)
        resumed = PatchTraining(small(), QUICK, steps=12)
        resumed.load_state_dict(copy.deepcopy(half.state_dict()))
        assert train(resumed, stop, 12) == losses[stop:]
        for key, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[key], value), key


def test_a_compiled_step_is_the_plain_one_though_patches_change_between_steps() -> None:
    plain, compiled = (PatchTraining(small(), QUICK, steps=12) for _ in range(2))
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled.compile(backend=counted, dynamic=False)
    for step in range(5):
        losses = [float(o(batch(step))["loss"].detach()) for o in (plain, compiled)]
        assert losses[0] == losses[1]
        for objective in (plain, compiled):
            objective.after_step(step)
    assert bool(compiled.pasted)
    assert torch.equal(compiled.patches, plain.patches)
    assert len(graphs) == 1  # neither the step nor the set of patches is part of it


def test_perturbations_can_be_trained_against_as_well() -> None:
    config = replace(QUICK, attack=AttackConfig(change="perturbation", eps=16))
    objective = PatchTraining(small(), config, steps=12)
    step = work(objective)
    for i in range(4):
        step.feed(batch(i))
    assert objective.patches[0].min() < 0
    assert objective.patches.abs().max() <= 16


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="a patch every 3 steps, but the run has 3"):
        PatchTraining(small(), QUICK, steps=3)
    with pytest.raises(ValueError, match="spends the same on every image"):
        PatchTraining(small(None), QUICK, steps=12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
def test_a_captured_step_leaves_the_images_of_its_own_batch_to_the_attack() -> None:
    objective, device = PatchTraining(small(), QUICK, steps=12), torch.device("cuda")
    optim = OptimConfig(lr=1e-3, steps=12, warmup=0)
    step = TrainStep(objective, optim, make_schedule(optim, 8, 80), device=device, graph=True)
    for i in range(9):
        given = batch(i).changed(lambda t: t.to(device))
        step.feed(given)
        assert torch.equal(objective.last.images, given.images)
        assert bool(objective.pasted) == (i + 1 >= 3)
    assert step.captured
    assert objective.patches.flatten(1).any(1).all()


@pytest.mark.slow
def test_a_defended_run_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data.uri": "synthetic:shapes?n=60&size=32",
        "data.batch": 8,
        "data.workers": 0,
        "data.check": "off",
        "data.loader": "host",
        "model.image_size": SIZE,
        "model.trunk": {"depth": 2, "width": 32, "heads": 2, "patch": 8, "adaptive": POLICIES["avit"]},
        "optim.steps": 7,
        "objective.every": 2,
        "objective.inner_steps": 2,
        "engine.device": "cpu",
        "engine.checkpoint_every": 0.01,
        "engine.keep": 9,
    }
    config = with_values(recipe("small-defence"), changes)
    whole = vitrail.train(with_values(config, {"out": str(tmp_path / "whole")}), quiet=True)
    other = vitrail.train(with_values(config, {"out": str(tmp_path / "other")}), quiet=True)
    for path in (other.path / "checkpoint").iterdir():  # as a kill after step 5 would leave it
        if int(path.stem.removeprefix("step-")) > 5:
            path.unlink()
    vitrail.resume(other.path, quiet=True)
    states = [checkpoint.newest(run.path / "checkpoint")[0] for run in (whole, other)]
    assert states[0].step == states[1].step == 7
    assert all(torch.equal(t, states[1].tensors[name]) for name, t in states[0].tensors.items())
    assert states[0].tensors["objective/patches"].flatten(1).any(1).all()  # all three were made
