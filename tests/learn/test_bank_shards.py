"""A bank in two processes is the bank of one: searches, softmaxes, checkpoints and whole training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_ranks
from torch import Tensor

from vitrail.data.batch import Batch, ViewSpec
from vitrail.engine.device import ProcessGroup
from vitrail.engine.step import Statistics
from vitrail.kernels.similarity import relation_loss
from vitrail.learn.bank import Bank, attend_all, make_bank
from vitrail.learn.config import (
    AttentionTransferConfig,
    CmsfConfig,
    CompresConfig,
    DinoConfig,
    GrafitConfig,
    IsdConfig,
    MocoConfig,
    MsfConfig,
    ProtonwConfig,
)
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.model.build import create_model

WORLD, ROWS, COUNT, STEPS = 2, 13, 6, 4  # 13 rows do not divide: 7 and 6

CONFIGS: dict[str, Any] = {
    "moco": MocoConfig(bank=ROWS),
    "isd": IsdConfig(bank=ROWS, predictor_hidden=16),
    "msf": MsfConfig(bank=ROWS, predictor_hidden=16, k=3),
    "msf bf16": MsfConfig(bank=ROWS, predictor_hidden=16, k=3, bank_precision="bf16"),
    "cmsf self": CmsfConfig(bank=ROWS, predictor_hidden=16, k=3, pool=5),
    "cmsf supervised": CmsfConfig(bank=ROWS, predictor_hidden=16, k=9, constraint="supervised"),
    "cmsf top-all": CmsfConfig(bank=ROWS, predictor_hidden=16, k=None, constraint="supervised"),
    "compres 2q": CompresConfig(bank=ROWS, queues=2, teacher="TEACHER"),
    "protonw": ProtonwConfig(bank=ROWS, predictor_hidden=16),
    "dino": DinoConfig(prototypes=12, local_views=1, local_size=14),
    "grafit": GrafitConfig(views=2, predictor_hidden=16),
    "attention of a mean image": AttentionTransferConfig(teacher="TEACHER", aggregate="examples", heads="first:1"),
}


def small(seed: int = 0, width: int = 16, head: Any = None) -> Any:
    torch.manual_seed(seed)
    head = head or {"kind": "projected", "width": 8, "hidden": 16}
    return create_model("vit_micro_28", classes=3, depth=1, width=width, heads=2, head=head)


def batch_of(step: int, spec: ViewSpec, share: slice) -> Batch:
    generator = torch.Generator().manual_seed(step)
    sides = [view.size or 28 for view in spec.all()]
    views = tuple(torch.randn(COUNT, 3, side, side, generator=generator)[share] for side in sides)
    rows = ((torch.arange(COUNT) + step * COUNT) % 18)[share]
    return Batch(views, rows % 3, rows % 3, rows, step=step)


def trained(name: str, teacher: str, group: ProcessGroup) -> dict[str, Any]:
    """Some steps of SGD; each process has its part of every batch."""
    from dataclasses import replace

    config = CONFIGS[name]
    if hasattr(config, "teacher"):
        config = replace(config, teacher=teacher)
    model = small(head={"kind": "mean"} if isinstance(config, AttentionTransferConfig) else None)
    torch.manual_seed(2)
    objective = build_objective(config, model, TrainingFacts(np.arange(18) % 3, np.arange(18), STEPS))
    # A BatchNorm that knows its own process's images only would not be one process's; a mean image is of training.
    objective.train(isinstance(config, AttentionTransferConfig))
    wrapped = group.wrap(objective, torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    each = COUNT // group.world
    losses = []
    for step in range(STEPS):
        if name == "dino":
            objective.training = True  # the centre moves in training only; the model has no BatchNorm and no drop path
        found = wrapped(batch_of(step, objective.views, slice(group.rank * each, (group.rank + 1) * each)))
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        objective.after_step(step)
        values = torch.stack([found[key].detach() for key in ("loss", "purity") if key in found])
        if group.world > 1:
            dist.all_reduce(values)
            values /= group.world
        losses.append(values)
    here = len(objective.bank.here()) if isinstance(getattr(objective, "bank", None), Bank) else 0
    return {"losses": torch.stack(losses), "state": objective.state_dict(), "here": here}


def unit(generator: torch.Generator, *shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


def searched(rank: int, world: int) -> dict[str, Any]:
    """What is computed over a bank of many pushes, for this process's part of 6 queries."""
    generator = torch.Generator().manual_seed(0)
    bank = make_bank(ROWS, 5, second=4)
    each = COUNT // world
    share = slice(rank * each, (rank + 1) * each)
    for step in range(5):
        values, second = unit(generator, COUNT, 5), unit(generator, COUNT, 4)
        labels = torch.arange(COUNT) % (step + 2)
        own = bank.push(values[share], labels[share], second[share])
    queries, other = unit(generator, COUNT, 5)[share], unit(generator, COUNT, 4)[share]
    wanted = torch.tensor([0, 1, 2, -1, 4, 5])[share]
    slots = torch.arange(COUNT * 2).view(COUNT, 2)[share]
    twin = make_bank(ROWS, 5, second=4)
    twin.load_state_dict(bank.state_dict())
    asking = queries.clone().requires_grad_()
    loss = relation_loss(asking, other, bank.here(), bank.here(second=True), 0.2, 0.1, by=attend_all)
    loss.backward()
    return {
        "own": own,
        "near": bank.nearest(queries, 9, own),  # more than a shard holds
        "near beside": bank.nearest(other, 3, own, second=True),
        "near of a label": bank.nearest(queries, 4, own, wanted),
        "rows": bank.rows_at(slots),
        "attended": attend_all(queries, bank.here(), 0.1),
        "relations": loss.detach(),
        "gradient": asking.grad,
        "state": bank.state_dict(),
        "loaded": twin.state_dict(),
        "here": len(bank.here()),
    }


def moco_with_batch_norm() -> Any:
    model = small(head={"kind": "projected", "width": 8, "hidden": 16, "norm": True})
    facts = TrainingFacts(np.arange(18) % 3, np.arange(18), STEPS)
    return build_objective(MocoConfig(bank=ROWS), model, facts).train()


def shuffled_keys(rank: int, world: int) -> dict[str, Tensor]:
    """Keys of this process's images at step 1, and the order in which the images of all were divided."""
    objective, each = moco_with_batch_norm(), COUNT // world
    objective.before_step(1)
    images = batch_of(0, ViewSpec(1), slice(rank * each, (rank + 1) * each)).images
    return {"keys": objective.embed_target(images), "order": objective._order(each, torch.device("cpu"))}


def one_rank(rank: int, folder: str, teacher: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    try:
        found: dict[str, Any] = {"search": searched(rank, WORLD)}
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean += rank
        norm.running_var *= 1 + 2 * rank
        Statistics(torch.nn.Sequential(norm)).agree(ProcessGroup(rank, WORLD, rank))
        found["statistics"] = {"mean": norm.running_mean, "var": norm.running_var}
        found["shuffled"] = shuffled_keys(rank, WORLD)
        for name in CONFIGS:
            found[name] = trained(name, teacher, ProcessGroup(rank, WORLD, rank))
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small(7, width=24).save(tmp_path_factory.mktemp("teacher")))


@pytest.fixture(scope="module")
def two(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(one_rank, str(folder), teacher, world=WORLD)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return searched(0, 1)


def test_keys_are_normalised_with_images_of_other_processes(two: list[dict[str, Any]]) -> None:
    images, each = batch_of(0, ViewSpec(1), slice(None)).images, COUNT // WORLD
    order = two[0]["shuffled"]["order"]
    assert torch.equal(order, two[1]["shuffled"]["order"])
    assert sorted(order.tolist()) == list(range(COUNT))
    assert set(order[:each].tolist()) != set(range(each))  # or nothing was shuffled
    expected = torch.empty(COUNT, 8)
    for rank in range(WORLD):  # one BatchNorm a process, over the images that the order gave it
        chosen = order[rank * each : (rank + 1) * each]
        expected[chosen] = moco_with_batch_norm().target.embed(images[chosen])
    found = torch.cat([two[rank]["shuffled"]["keys"] for rank in range(WORLD)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_running_statistics_are_the_mean_of_all_processes(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["statistics"]["mean"].tolist() == [0.5, 0.5]
        assert found["statistics"]["var"].tolist() == [2.0, 2.0]


def test_each_process_holds_its_own_rows_and_no_others(two: list[dict[str, Any]]) -> None:
    assert [found["search"]["here"] for found in two] == [7, 6]
    assert [found["msf"]["here"] for found in two] == [7, 6]


@pytest.mark.parametrize("what", ["near", "near beside", "near of a label"])
def test_the_nearest_rows_of_all_shards_are_those_of_one_process(
    what: str, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    scores, slots = (torch.cat([found["search"][what][i] for found in two]) for i in range(2))
    torch.testing.assert_close(scores, one[what][0])  # another shape of product rounds otherwise
    real = scores > float("-inf")  # of a label there may be fewer than k
    assert real.any(1).all()
    assert torch.equal(slots[real], one[what][1][real])


def test_slots_and_rows_are_those_of_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for what in ("own", "rows"):
        assert torch.equal(torch.cat([found["search"][what] for found in two]), one[what])


def test_a_softmax_over_all_shards_is_that_of_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for i in range(3):
        torch.testing.assert_close(torch.cat([found["search"]["attended"][i] for found in two]), one["attended"][i])
    losses = torch.stack([found["search"]["relations"] for found in two])
    torch.testing.assert_close(losses.mean(), one["relations"])
    gradients = torch.cat([found["search"]["gradient"] for found in two])
    torch.testing.assert_close(gradients / WORLD, one["gradient"])  # each process's mean is over half of the queries


def test_a_checkpoint_is_that_of_one_process_and_is_read_back(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in two:
        for state in (found["search"]["state"], found["search"]["loaded"]):
            assert state.keys() == one["state"].keys()
            assert all(torch.equal(state[name], one["state"][name]) for name in state)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_in_two_processes_is_training_in_one(name: str, two: list[dict[str, Any]], teacher: str) -> None:
    alone = trained(name, teacher, ProcessGroup())
    # float32 sums in another order, four steps long; banks in bf16 round to 2^-8 of what they hold
    close = {"rtol": 1e-4, "atol": 1e-5} if "bf16" not in name else {"rtol": 1e-2, "atol": 1e-2}
    for found in two:
        torch.testing.assert_close(found[name]["losses"], alone["losses"], **close)
        for key, value in alone["state"].items():
            torch.testing.assert_close(found[name]["state"][key], value, msg=key, **close)
