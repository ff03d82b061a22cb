"""Runs whose model is sharded over processes equal those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from small import quick_of

from benchmarks.equality import difference, samples, train_cell, weights
from vitrail.config import validate
from vitrail.engine import run_folder as checkpoint
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
    assert torch.equal(state.tensors["a"], rows)
    assert torch.equal(state.tensors["b"], torch.ones(3))


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
