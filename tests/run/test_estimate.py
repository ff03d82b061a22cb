"""The memory of a run, estimated before it begins, compared with what torch allocates when it trains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vitrail.cli import run
from vitrail.config import RunConfig
from vitrail.data.batch import Batch
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.objective import Objective
from vitrail.recipes import configured
from vitrail.run.estimate import MemoryEstimate, estimate_memory, untrained

CPU = torch.device("cpu")


def tiny(optimizer: str = "adamw", ema: float = 0.0, batch: int = 32, recipe: str = "demo") -> RunConfig:
    engine = {"device": "cpu", "ema": ema}
    data = {"batch": batch, "uri": "synthetic:shapes?n=64&size=28"}
    return configured(recipe, {"data": data, "optim": {"name": optimizer}, "engine": engine})


def estimated(config: RunConfig, **options: int) -> MemoryEstimate:
    return estimate_memory(untrained(config)[0], config, device=CPU, autocast=None, **options)


def peak(objective: Objective, config: RunConfig) -> int:
    """Bytes at the peak of two steps by torch's profiler, weights and buffers included."""
    stored = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in objective.state_dict().values()}
    now = most = sum(stored.values())
    count, size = config.data.batch, objective.model.preprocess.size
    schedule = make_schedule(config.optim, count, 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = TrainStep(objective, config.optim, schedule, device=CPU, ema=config.engine.ema)
        views = tuple(torch.randint(256, (count, 3, size, size), dtype=torch.uint8) for _ in objective.views.all())
        label = torch.zeros(count, dtype=torch.int64)
        for _ in range(2):
            step.feed(Batch(views, label, label, torch.arange(count)))
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(("optimizer", "ema"), [("adamw", 0.0), ("sgd", 0.9), ("lamb", 0.0), ("muon", 0.9)])
def test_the_estimate_is_close_to_the_measured_peak(optimizer: str, ema: float) -> None:
    config = tiny(optimizer, ema)
    objective, _ = untrained(config)
    assert estimated(config).peak == pytest.approx(peak(objective, config), rel=0.15)


def test_the_estimate_is_close_with_activation_checkpointing() -> None:
    plain = tiny()
    config = replace(plain, engine=replace(plain.engine, activation_checkpointing="blocks"))
    objective, _ = untrained(config)
    estimate = estimated(config).peak
    assert estimate == pytest.approx(peak(objective, config), rel=0.15)
    assert estimate < 0.7 * (estimated(plain).peak or 0)


def test_optimizer_state_is_counted_as_the_optimizer_has_it() -> None:
    config = tiny("muon")
    objective, _ = untrained(config)
    step = TrainStep(objective, config.optim, make_schedule(config.optim, 8, 100), device=CPU)
    views = (torch.zeros(8, 3, 28, 28, dtype=torch.uint8),)
    label = torch.zeros(8, dtype=torch.int64)
    step.feed(Batch(views, label, label, label))
    states = [t for state in step.optimizer.state.values() for t in state.values() if t.ndim]
    assert estimated(config).optimizer == sum(t.numel() * t.element_size() for t in states)


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    small, large = estimated(tiny(batch=8)), estimated(tiny(batch=16))
    assert small.activations is not None
    assert large.activations == pytest.approx(2 * small.activations, rel=0.1)
    assert (small.parameters, small.gradients, small.optimizer) == (large.parameters, large.gradients, large.optimizer)


def test_a_process_of_two_has_half_the_batch_and_a_copy_of_the_gradients_to_exchange() -> None:
    alone, shared = estimated(tiny(batch=16)), estimated(tiny(batch=16), world=2)
    assert (alone.batch, shared.batch) == (16, 8)
    assert shared.copies - alone.copies == alone.gradients


def test_an_estimate_changes_neither_weights_nor_random_numbers() -> None:
    config = tiny()
    objective, _ = untrained(config)
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    state = torch.get_rng_state()
    estimate_memory(objective, config, device=CPU, autocast=None)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())


def test_activations_in_bf16_take_less() -> None:
    config = tiny()
    objective, _ = untrained(config)
    lower = estimate_memory(objective, config, device=CPU, autocast=torch.bfloat16)
    assert lower.activations is not None
    assert lower.activations < 0.85 * (estimated(config).activations or 0)


def test_a_plan_is_one_json_object_with_steps_and_peak(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "synthetic:shapes?n=80&size=28", "--data.batch", "16", "--optim.steps", "7", "--json"]
    assert run(["show", "demo", "--plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 7
    assert plan["memory"]["peak"] > plan["memory"]["parameters"] + plan["memory"]["optimizer"]


def test_a_plan_of_texts_is_rejected_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "text", "--plan"]) == 2
    assert "differ in length" in capsys.readouterr().err
