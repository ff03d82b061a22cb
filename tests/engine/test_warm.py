"""Steps that are warm compile nothing more: what is captured as a graph must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import quick_of

from vitrail.data.batch import Batch
from vitrail.engine import step as step_module
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, StaticBatch, TrainStep
from vitrail.learn.config import (
    ByolConfig,
    CmsfConfig,
    DinoConfig,
    GrafitConfig,
    IsdConfig,
    MocoConfig,
    MsfConfig,
    ProtonwConfig,
    SupconConfig,
    SupervisedConfig,
)
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model

COUNT, CLASSES, IMAGES = 6, 3, 60
CONFIGS: dict[str, Any] = {
    "dino": DinoConfig(prototypes=12, local_views=0, freeze_last=0.15),
    "cmsf semi": CmsfConfig(bank=20, predictor_hidden=16, k=3, constraint="semi", labelled=0.5),
    "moco both ways": MocoConfig(bank=20, symmetric=True),
    "grafit": GrafitConfig(views=2, predictor_hidden=16),
    "supervised": SupervisedConfig(smoothing=0.1),
    "byol": ByolConfig(predictor_hidden=16),
    "moco": MocoConfig(bank=20),
    "isd": IsdConfig(bank=20, predictor_hidden=16),
    "msf": MsfConfig(bank=20, predictor_hidden=16, k=3),
    "cmsf self": CmsfConfig(bank=20, predictor_hidden=16, k=3, pool=5),
    "cmsf supervised": CmsfConfig(bank=20, predictor_hidden=16, k=3, constraint="supervised"),
    "cmsf all of a label": CmsfConfig(bank=20, predictor_hidden=16, k=None, constraint="supervised"),
    "supcon": SupconConfig(),
    "protonw": ProtonwConfig(bank=20, predictor_hidden=16),
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch_of(step: int) -> Batch:
    index = (torch.arange(COUNT) + step * COUNT) % IMAGES
    generator = torch.Generator().manual_seed(step)
    views = tuple(
        torch.randint(256, (COUNT, 3, 28, 28), dtype=torch.uint8, generator=generator).clone() for _ in range(2)
    )
    label = index % CLASSES  # one tensor is both label and target, as loaders give it
    return Batch(views, label, label, index, step=step)


def compiled(name: str) -> Objective:
    torch.manual_seed(0)
    head = "class_token" if name == "supervised" else {"kind": "projected", "width": 8, "hidden": 16, "norm": True}
    model = create_model("vit_micro_28", classes=CLASSES, depth=1, width=16, heads=2, head=head)
    objective = build_objective(CONFIGS[name], model, TrainingFacts(np.arange(IMAGES) % 3, np.arange(IMAGES), 10))
    objective.train()
    objective.compile(backend="eager", dynamic=False)
    return objective


def made(objective: Objective, step: int, batch: Batch) -> None:
    objective.before_step(step)
    objective(batch)["loss"].backward()
    objective.zero_grad(set_to_none=True)
    objective.after_step(step)


# One of each: local views, guessed labels, two passes, several losses, classes, positives of a bank.
QUICK = ("dino", "cmsf semi", "moco both ways", "grafit", "supervised", "protonw")


@pytest.mark.parametrize("name", quick_of(CONFIGS, QUICK))
def test_a_step_after_those_that_warm_up_compiles_nothing(name: str) -> None:
    objective, still = compiled(name), StaticBatch(batch_of(0))
    for step in range(WARM_UP_STEPS):
        still.take(batch_of(step))
        made(objective, step, still.piece)
    with torch.compiler.set_stance("fail_on_recompile"):
        still.take(batch_of(WARM_UP_STEPS))
        made(objective, WARM_UP_STEPS, still.piece)


@pytest.mark.parametrize("name", ["supcon", "cmsf self"])
def test_another_batch_of_the_same_shapes_may_compile(name: str) -> None:
    # Why one batch serves both: code that was compiled for one tensor as label and target is compiled anew for two.
    objective = compiled(name)
    for step in range(WARM_UP_STEPS):
        made(objective, step, batch_of(step))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        made(objective, WARM_UP_STEPS, batch_of(WARM_UP_STEPS).changed(torch.clone))


def test_a_batch_that_keeps_its_place_holds_what_it_took_and_fits_its_own_shapes_alone() -> None:
    first, second = batch_of(0), batch_of(1)
    still = StaticBatch(first)
    places = [tensor.data_ptr() for tensor in still.piece.tensors()]
    assert still.fits(second)
    still.take(second)
    for found, expected, before in zip(still.piece.tensors(), second.tensors(), first.tensors(), strict=True):
        assert torch.equal(found, expected)
        assert not torch.equal(found, before) or torch.equal(before, expected)
    assert [tensor.data_ptr() for tensor in still.piece.tensors()] == places
    assert not set(places) & {tensor.data_ptr() for batch in (first, second) for tensor in batch.tensors()}
    assert not still.fits(second.changed(lambda tensor: tensor[:4]))
    assert not still.fits(second.changed(lambda tensor: tensor.float()))


def replayed(graph: step_module._Graph) -> SimpleNamespace:
    """What stands for a captured step on a machine without CUDA: the work, done again on the same batch."""
    return SimpleNamespace(replay=partial(graph.work, graph.piece))


def steps(graph: bool, sizes: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    torch.manual_seed(0)
    objective = Supervised(
        create_model("vit_micro_28", classes=CLASSES, depth=1, width=16, heads=2), SupervisedConfig()
    )
    optim = OptimConfig(lr=1e-2, warmup=0, schedule="constant")
    step = TrainStep(objective, optim, make_schedule(optim, 6, 600), device=torch.device("cpu"), graph=graph, ema=0.9)
    losses, captured = [], []
    for number, size in enumerate(sizes):
        step.feed(batch_of(number).changed(lambda tensor, size=size: tensor[:size].clone()))  # type: ignore[misc]
        losses.append(step.meter.read(step.group)["loss"])
        captured.append(step.captured)
    return losses, {name: tensor.clone() for name, tensor in step.model.state_dict().items()}, captured


@pytest.mark.parametrize(
    ("sizes", "first"),
    [((6,) * 6, 3), ((4, 6, 6, 6, 6, 6), 4), ((6, 6, 4, 6, 6, 6, 6), 6), ((6, 6, 6, 6, 4, 6), 3)],
)
def test_replayed_steps_are_the_plain_ones_whatever_pieces_come_first(
    sizes: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, weights, _ = steps(False, sizes)
    monkeypatch.setattr(step_module, "_why_no_graph", lambda *_: "")
    monkeypatch.setattr(step_module, "on", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(step_module._Graph, "_captured", replayed)
    found, found_weights, captured = steps(True, sizes)
    assert captured == [number >= first for number in range(len(sizes))]
    assert found == losses
    assert all(torch.equal(found_weights[name], tensor) for name, tensor in weights.items())


class Phased(Supervised):
    """Other work from its sixth step on, as where a cached teacher is no longer asked."""

    done = 0

    @property
    def phase(self) -> int:
        return int(self.done >= 5)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        found = super().forward(batch)
        return {**found, "loss": found["loss"] * (2 if self.phase else 1)}

    def after_step(self, step: int) -> None:
        self.done = step + 1


def test_steps_that_become_other_work_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(graph: bool) -> tuple[list[float], list[bool]]:
        torch.manual_seed(0)
        model = create_model("vit_micro_28", classes=CLASSES, depth=1, width=16, heads=2)
        optim = OptimConfig(lr=1e-2, warmup=0, schedule="constant")
        objective = Phased(model, SupervisedConfig())
        step = TrainStep(objective, optim, make_schedule(optim, 6, 600), device=torch.device("cpu"), graph=graph)
        losses, captured = [], []
        for number in range(11):
            step.feed(batch_of(number))
            losses.append(step.meter.read(step.group)["loss"])
            captured.append(step.captured)
        return losses, captured

    plain, _ = trained(False)
    monkeypatch.setattr(step_module, "_why_no_graph", lambda *_: "")
    monkeypatch.setattr(step_module, "on", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(step_module._Graph, "_captured", replayed)
    found, captured = trained(True)
    assert found == plain
    assert captured == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 3
