"""Runs whose model is sharded over processes equal those of one process."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from small import quick_of

from benchmarks.equality import difference, one_rank, samples, train_cell, weights
from vitrail.config import validate
from vitrail.engine import checkpoint
from vitrail.engine.device import ProcessGroup, leave
from vitrail.engine.shard import (
    PartialParameter,
    StoredRows,
    can_be_partial,
    chunk_of,
    gather_into,
    hold_one_block,
    keeping_rows,
    shard_objective,
    without_weights,
)
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.weights import load_model
from vitrail.recipes import recipe, with_values

ALONE = {"optim.steps": 10, "data.workers": 0}
FULL = {**ALONE, "engine.shard": "full"}
CLOSE = 1e-5


@pytest.mark.parametrize(
    ("name", "world"),
    quick_of([(name, world) for name in ("adamw", "lamb", "muon") for world in (2, 3, 4)], []),
)
def test_ten_sharded_steps_equal_those_of_one_process(name: str, world: int, tmp_path: Path) -> None:
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **ALONE, **{"optim.name": name})
    several = train_cell(run_ranks, tmp_path / "several", [(world, None)], **FULL, **{"optim.name": name})
    stored = several / "run" / "checkpoint" / "step-000000010"
    assert len(list(stored.glob("rank-*.safetensors"))) == world
    assert samples(several) == samples(one)
    assert difference(several, one) < CLOSE
    kept, gathered = (load_model(folder / "run").state_dict() for folder in (one, several))
    assert all(torch.allclose(kept[key], gathered[key], atol=CLOSE) for key in kept)


@pytest.mark.slow
def test_a_sharded_run_goes_on_under_another_number_of_processes(tmp_path: Path) -> None:
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **ALONE)
    moved = train_cell(run_ranks, tmp_path / "moved", [(4, 2), (2, 4), (1, 6), (3, None)], **FULL)
    assert samples(moved) == samples(one)
    assert difference(moved, one) < CLOSE


@pytest.mark.slow
def test_the_best_weights_of_a_sharded_run_are_kept_also_when_it_is_resumed(tmp_path: Path) -> None:
    looks = {"engine.select": "best", "engine.evaluate_every": 1 / 3, "optim.lr": 0.03, "optim.name": "lamb"}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **ALONE, **looks)
    moved = train_cell(run_ranks, tmp_path / "moved", [(2, 6), (3, None)], **FULL, **looks)
    best = [checkpoint.newest(folder / "run/checkpoint")[0] for folder in (one, moved)]
    assert best[0] is not None
    assert best[1] is not None
    assert best[0].facts["best"]["step"] == best[1].facts["best"]["step"] < 10
    kept, last = best[1].part("best"), best[1].part("ema")
    stored = load_model(moved / "run").state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in kept.items())
    assert not all(torch.equal(stored[name], tensor) for name, tensor in last.items())
    assert max(float((kept[name] - t).abs().max()) for name, t in best[0].part("best").items()) < CLOSE
    assert not (moved / "run/checkpoint/gathered").exists()


@pytest.mark.slow
def test_momentum_teachers_are_sharded_alike(tmp_path: Path) -> None:
    mixing = {"data.augment.mixup": 0.0, "data.augment.cutmix": 0.0, "data.batch": 12}
    byol: dict[str, object] = {**mixing, "recipe": "small-byol", "optim.name": "adamw", "optim.weight_decay": 0.05}
    byol["optim.steps"] = 3  # batch norms of six images each amplify rounding
    plain = train_cell(run_ranks, tmp_path / "plain", [(2, None)], **{**ALONE, **byol})
    full = train_cell(run_ranks, tmp_path / "full", [(2, None)], **{**FULL, **byol})
    assert difference(full, plain) < CLOSE


@pytest.mark.slow
def test_bf16_stays_close_to_autocast_of_one_process(tmp_path: Path) -> None:
    settings = {"engine.precision": "bf16"}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **ALONE, **settings)
    two = train_cell(run_ranks, tmp_path / "two", [(2, None)], **FULL, **settings)
    assert all(tensor.dtype == torch.float32 for tensor in weights(two).values())
    assert difference(two, one) < 0.02  # ten steps of at most 1e-3 each, in either direction


@pytest.mark.parametrize(
    "settings",
    [{"optim.name": "sgd"}, {"objective.kind": "moco"}, {"engine.compile": True}, {"engine.precision": "fp8"}],
    ids=str,
)
def test_what_cannot_be_sharded_is_rejected_before_work_starts(settings: dict[str, object]) -> None:
    config = with_values(recipe("vit"), {"engine.shard": "full", **settings})
    value = next(iter(settings.values()))
    assert any(
        p.startswith("engine.shard: full does not go with") and str(value).lower() in p for p in validate(config)
    )


def written(folder: Path, parts: list[dict[str, torch.Tensor]], shapes: dict[str, list[int]]) -> Path:
    """A checkpoint of so many processes, by the letter of the format."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for rank, rows in enumerate(parts):
        save_file(rows, folder / f"rank-{rank:05d}.safetensors")
    sums = [checkpoint.checksum(rows) for rows in parts]
    header = {"format": 1, "format_version": 1, "step": 4, "facts": {}, "checksums": sums, "shapes": shapes}
    (folder / "layout.json").write_text(json.dumps(header))
    return folder


def test_rows_of_all_processes_are_joined(tmp_path: Path) -> None:
    rows = torch.arange(10.0).view(5, 2)
    parts = [{"a": rows[:2], "b": torch.ones(3)}, {"a": rows[2:4]}, {"a": rows[4:]}]
    written(tmp_path / "step-000000004", parts, {"a": [5, 2]})
    state, damaged = checkpoint.newest(tmp_path)
    assert state is not None
    assert (state.step, damaged) == (4, [])
    stored = state.tensors["a"]
    assert isinstance(stored, StoredRows)
    assert stored.shape == (5, 2)
    assert torch.equal(stored.whole(), rows)
    for start in range(6):
        for stop in range(start, 6):
            assert torch.equal(stored[start:stop], rows[start:stop])
    assert torch.equal(state.tensors["b"], torch.ones(3))


def test_a_part_of_a_checkpoint_has_whole_tensors(tmp_path: Path) -> None:
    rows = torch.arange(6.0).view(3, 2)
    written(
        tmp_path / "step-000000004",
        [{"ema/a": rows[:2], "ema/b": rows.clone()}, {"ema/a": rows[2:]}],
        {"ema/a": [3, 2]},
    )
    state = checkpoint.newest(tmp_path)[0]
    assert state is not None
    assert torch.equal(state.part("ema")["a"], rows)
    assert torch.equal(state.part("ema")["b"], rows)


def test_every_row_is_of_the_process_that_torch_gives_it_to() -> None:
    for rows in range(12):
        for world in range(1, 6):
            chunks = [list(chunk) for chunk in torch.arange(rows).chunk(world)] if rows else []
            ours = [list(range(rows))[chunk_of(rows, world, rank)] for rank in range(world)]
            assert [own for own in ours if own] == [[int(i) for i in chunk] for chunk in chunks]


def test_blocks_are_held_one_at_a_time() -> None:
    whole, streamed = small_model(), small_model()
    held: list[int] = []

    def count(block: torch.nn.Module, args: object) -> None:
        held.append(sum("mapped" in parameter.__dict__ for parameter in streamed.parameters()))

    weights = streamed.state_dict()
    for _ in range(2):  # weights are gathered again and again
        hold_one_block(streamed, torch.device("cpu"))
    for block in streamed.trunk.blocks:
        block.mlp.register_forward_pre_hook(count)
    images = torch.rand(3, 3, 32, 32)
    assert torch.equal(whole.eval()(images), streamed.eval()(images))
    assert held == [len(list(block.parameters())) for block in streamed.trunk.blocks]
    assert all(tensor.data_ptr() == weights[name].data_ptr() for name, tensor in streamed.state_dict().items())


def test_a_block_that_fails_is_let_go_of() -> None:
    model = small_model()
    hold_one_block(model, torch.device("cpu"))
    with pytest.raises(AttributeError):
        model.trunk.blocks[0](torch.rand(1, 2, 3))
    assert not any("mapped" in parameter.__dict__ for parameter in model.parameters())


@pytest.mark.parametrize("fault", ["file", "rows", "checksum"])
def test_a_damaged_sharded_checkpoint_is_reported_and_not_used(fault: str, tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2, 2)}, {"a": torch.ones(2, 2)}]
    folder = written(tmp_path / "step-000000004", parts, {"a": [5 if fault == "rows" else 4, 2]})
    if fault == "file":
        (folder / "rank-00001.safetensors").unlink()
    if fault == "checksum":
        content = (folder / "rank-00000.safetensors").read_bytes()
        (folder / "rank-00000.safetensors").write_bytes(content[:-1] + b"\x01")
    state, damaged = checkpoint.newest(tmp_path)
    assert state is None
    assert "is damaged" in damaged[0]


def started_in_rows(rank: int, world: int, folder: str, weights: str) -> None:
    """Shard a model whose blocks kept their rows; the first process stores what all of them gather."""
    from datetime import timedelta

    meet, limit = f"file://{folder}/meet", timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=limit)
    group = ProcessGroup(rank, world)
    with keeping_rows(group):
        objective = Supervised(small_model(weights), SupervisedConfig())
    block = objective.model.trunk.blocks[0]
    assert all(parameter.is_meta for parameter in block.parameters())
    empty = without_weights(objective.model)
    shard_objective(objective, torch.device("cpu"), None)
    gather_into(empty, objective.model, torch.device("cpu"), Path(folder) / "gathered")
    if rank == 0:
        torch.save(empty.state_dict(), f"{folder}/gathered.pt")
    torch.distributed.destroy_process_group()


def small_model(weights: str = "none") -> Classifier:
    torch.manual_seed(3)
    options = {"depth": 2, "width": 30, "heads": 2, "patch": 8}  # three processes have 30, 30 and 30 of 90 rows
    return create_model("vit_tiny_32", classes=5, weights=weights, **options)


@pytest.mark.parametrize("world", quick_of([1, 2, 3, 4], [2]))
@pytest.mark.parametrize("weights", ["none", "file"])
def test_a_model_that_starts_in_shards_has_the_weights_of_one_that_starts_whole(
    world: int, weights: str, tmp_path: Path
) -> None:
    source = "none"
    if weights == "file":
        torch.manual_seed(5)
        source = str(
            create_model("vit_tiny_32", classes=7, depth=2, width=30, heads=2, patch=8).save(tmp_path / "other")
        )
    run_ranks(started_in_rows, world, str(tmp_path), source, world=world)
    expected, gathered = small_model(source).state_dict(), torch.load(tmp_path / "gathered.pt", weights_only=True)
    assert expected.keys() == gathered.keys()
    assert all(torch.equal(expected[name], gathered[name]) for name in expected)


FAMILIES = ["vit_tiny", "deit3_small", "cait_xxs24", "resmlp_s12", "patchconvnet_s60", "xcit_t12_p8", "sot_tiny"]


@pytest.mark.parametrize("name", [*FAMILIES, "deit_tiny branches"])
def test_rows_of_all_processes_make_the_initial_weights_of_every_family(name: str) -> None:
    name, _, head = name.partition(" ")
    options = {"depth": 3, "width": 48, "heads": 4}

    def build() -> dict[str, torch.nn.Parameter]:
        torch.manual_seed(1)
        return dict(create_model(name, classes=3, head=head or None, **options).named_parameters())

    expected, rows = build(), []
    for rank in range(2):
        with keeping_rows(ProcessGroup(rank, 2)):
            rows.append(build())
    for key, whole in expected.items():
        parts = [part[key] for part in rows]
        partial = all(isinstance(part, PartialParameter) for part in parts)
        assert partial or not key.startswith("trunk.blocks.")
        assert torch.equal(torch.cat([part.rows for part in parts]) if partial else parts[0], whole)


def test_blocks_whose_start_depends_on_all_of_them_are_built_whole() -> None:
    assert can_be_partial(create_model("vit_tiny_32", depth=2, width=32, heads=2))
    assert not can_be_partial(create_model("vit_tiny_32", depth=2, width=32, heads=2, start="fixup"))
    assert not can_be_partial(create_model("cifar_resnet20"))


def under_torchrun(rank: int, *args: Any) -> None:
    """One process with the environment that torchrun gives it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
    try:
        one_rank(rank, *args)
    finally:
        leave()


@pytest.mark.slow
def test_one_process_under_torchrun_shards_its_model_too(tmp_path: Path) -> None:
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **ALONE)
    (tmp_path / "alone").mkdir()
    run_ranks(under_torchrun, 1, str(tmp_path / "alone"), FULL, None, world=1)
    stored = tmp_path / "alone" / "run" / "checkpoint" / "step-000000010"
    assert [file.name for file in sorted(stored.iterdir())] == ["layout.json", "rank-00000.safetensors"]
    assert difference(tmp_path / "alone", one) < CLOSE
