"""Training in 8-bit floats: the setting, steps compared with bf16, checkpoints, and devices without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from vitrail.config import RunConfig
from vitrail.data.batch import Batch
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import choose_precision
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.kernels import fp8
from vitrail.kernels.fp8_training import Fp8TrainingLinear
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.recipes import with_values

CPU = torch.device("cpu")


def steps(eight_bits: bool, count: int = 30, accumulate: int = 1) -> tuple[list[float], TrainStep]:
    torch.manual_seed(0)
    model = create_model("vit_micro_28", classes=4, width=32, heads=2, depth=2, drop_path=0.0)
    optim = OptimConfig(lr=2e-3, warmup=0, schedule="constant")
    step = TrainStep(
        Supervised(model, SupervisedConfig()),
        optim,
        make_schedule(optim, 16, 640),
        device=CPU,
        autocast=torch.bfloat16,
        fp8=eight_bits,
        ema=0.9,
        accumulate=accumulate,
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(count):
        labels = torch.randint(4, (16,), generator=generator)
        images = torch.randint(64, (16, 3, 28, 28), dtype=torch.uint8, generator=generator)
        images += (labels * 60).to(torch.uint8)[:, None, None, None]
        parts = zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True)
        assert [step.feed(Batch((i,), y, y, torch.arange(len(y)))) for i, y in parts][-1]
        losses.append(step.meter.read(step.group)["loss"])
    return losses, step


def test_losses_follow_those_of_bf16() -> None:
    (losses, ours), (expected, theirs) = steps(True), steps(False)
    assert losses != expected
    assert losses == pytest.approx(expected, abs=0.05)
    assert losses[-1] < 0.5 * losses[0]  # it learns
    assert sum(type(m) is Fp8TrainingLinear for m in ours.objective.modules()) == 8
    assert not any(type(m) is Fp8TrainingLinear for m in theirs.objective.modules())


def test_weights_and_optimiser_have_the_names_shapes_and_dtypes_of_bf16() -> None:
    (_, ours), (_, theirs) = steps(True, 2), steps(False, 2)

    def shape(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: (t.shape, t.dtype) for name, t in tensors.items()}

    assert shape(ours.objective.state_dict()) == shape(theirs.objective.state_dict())
    assert [g["names"] for g in ours.optimizer.param_groups] == [g["names"] for g in theirs.optimizer.param_groups]
    states = [{str(i): t for i, s in enumerate(o.optimizer.state.values()) for t in s.values()} for o in (ours, theirs)]
    assert shape(states[0]) == shape(states[1])


def test_micro_batches_add_up_to_the_batch() -> None:
    whole, pieces = steps(True, 4)[0], steps(True, 4, accumulate=2)[0]
    assert pieces == pytest.approx(whole, abs=0.02)  # pieces have scales of their own


def config_of(out: Path, **more: Any) -> RunConfig:
    values = {
        "data.uri": "synthetic:shapes?n=60&size=28",
        "data.batch": 12,
        "data.workers": 0,
        "data.check": "off",
        "model.name": "vit_micro_28",
        "model.trunk": {"depth": 1, "width": 32, "heads": 2},
        "optim.steps": 5,
        "engine.device": "cpu",
        "engine.precision": "fp8",
        "engine.ema": 0.9,
        "engine.log_every": 1,
        "engine.checkpoint_every": 0.01,
        "engine.keep": 9,
        "out": str(out),
    }
    return with_values(RunConfig(), {**values, **more})


def test_a_device_without_it_is_one_sentence_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^engine\.precision: fp8 needs a CUDA accelerator .*, not cpu; use auto$"):
        vitrail.train(config_of(tmp_path / "run", **{"data.uri": str(tmp_path / "none.npz")}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_resumes_bit_for_bit_and_its_model_is_an_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "supports_fp8", lambda _: True)
    assert choose_precision("fp8", CPU) is torch.bfloat16
    taken: list[int] = []
    build = TrainStep.__init__

    def counted(self: TrainStep, *given: Any, **options: Any) -> None:
        build(self, *given, **options)
        taken.append(sum(type(m) is Fp8TrainingLinear for m in self.objective.modules()))

    monkeypatch.setattr(TrainStep, "__init__", counted)
    runs = [vitrail.train(config_of(tmp_path / name), quiet=True) for name in ("whole", "other")]
    for path in (runs[1].path / "checkpoint").iterdir():  # as a kill after step 3 would leave it
        if int(path.stem.removeprefix("step-")) > 3:
            path.unlink()
    vitrail.resume(runs[1].path, quiet=True)
    assert taken == [4, 4, 4]
    states = [checkpoint.newest(run.path / "checkpoint")[0] for run in runs]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].step == states[1].step == 5
    assert all(torch.equal(t, states[1].tensors[name]) for name, t in states[0].tensors.items())
    other = vitrail.train(config_of(tmp_path / "bf16", **{"engine.precision": "bf16"}), quiet=True)
    plain = checkpoint.newest(other.path / "checkpoint")[0]
    assert plain is not None
    assert plain.tensors.keys() == states[0].tensors.keys()
    kept = vitrail.load(runs[0].path)
    assert {type(m) for m in kept.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.slow
def test_the_benchmark_compares_loss_curves_with_those_of_bf16(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "fp8_training.py"
    sizes = ["--steps", "4", "--every", "2", "--seeds", "1", "--batch", "8", "--width", "64"]
    options = ["--json", str(tmp_path / "rows.jsonl"), "--part", "curves", "--device", "cpu", *sizes]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not [row for row in rows if "error" in row]
    runs = {row["recipe"]: row["losses"] for row in rows if "losses" in row}
    assert {recipe: [step for step, _ in losses] for recipe, losses in runs.items()} == {
        "bf16": [2, 4],
        "fp8": [2, 4],
    }
    (ours,) = (row for row in rows if row.get("recipe") == "fp8" and "final_loss" in row)
    assert ours["final_loss"] == runs["fp8"][-1][1]
    assert ours["final_minus_bf16"] == [runs["fp8"][-1][1] - runs["bf16"][-1][1]]
