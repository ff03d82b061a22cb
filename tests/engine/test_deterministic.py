"""`--engine.deterministic true`: the same command gives the same bits, on a CPU and on an accelerator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stopping import stop_after

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping
from vitrail.engine import checkpoint
from vitrail.engine.loop import Stopped
from vitrail.engine.run_folder import TIMING
from vitrail.engine.step import TrainStep
from vitrail.recipes import recipe
from vitrail.schema import parse_flags

STEPS, STOPPED = 20, 9
COMMON = (
    "--data synthetic:shapes?n=48&size=16 --data.batch 8 --data.workers 0 --data.check off --model.image_size 16 "
    f"--optim.steps {STEPS} --optim.warmup 0 --engine.log_every 5 --engine.ema 0.9 "
    "--engine.evaluate_every 0 --engine.checkpoint_every 0 --engine.deterministic true"
)
VIT = (
    "--model.name vit_tiny_32 --model.trunk.depth 2 --model.trunk.width 48 --model.trunk.heads 3 --model.trunk.patch 4"
)
CASES = {
    "attention": ("vit", f"{VIT} --model.drop_path 0.1"),
    "convolutions": ("small-rsb", "--model.name cifar_resnet20 --model.trunk.depth 8"),
    "bank": ("msf", f"{VIT} --objective.bank 64"),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator"),
        ],
    ),
]


def configured(case: str, device: str, out: Path) -> RunConfig:
    name, flags = CASES[case]
    words = f"{COMMON} {flags} --engine.device {device} --out {out}"
    return from_mapping(parse_flags(words.split())[1], recipe(name))


def state(run: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, object]]]:
    """Weights, moving average, optimiser, banks and random states at the end; metrics without their timings."""
    last, _ = checkpoint.newest(run / "checkpoint")
    assert last.step == STEPS
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return last.tensors, [{k: v for k, v in row.items() if k not in TIMING} for row in rows]


def assert_equal_bits(one: Path, other: Path) -> None:
    (tensors, metrics), (others, other_metrics) = state(one), state(other)
    assert tensors.keys() == others.keys()
    assert [name for name, value in tensors.items() if not torch.equal(value, others[name])] == []
    assert metrics == other_metrics


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_repeats_and_resumes_bit_for_bit(case: str, device: str, tmp_path: Path) -> None:
    first = vitrail.train(configured(case, device, tmp_path / "first"), quiet=True).path
    assert_equal_bits(first, vitrail.train(configured(case, device, tmp_path / "second"), quiet=True).path)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(STOPPED, patch)
        with pytest.raises(Stopped, match=f"stopped after step {STOPPED};"):
            vitrail.train(configured(case, device, tmp_path / "stopped"), quiet=True)
    assert_equal_bits(first, vitrail.resume(tmp_path / "stopped", quiet=True).path)


def test_an_operation_that_cannot_repeat_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def feed(*_: object) -> bool:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # on any device: which of the two stays?
        return True

    monkeypatch.setattr(TrainStep, "feed", feed)
    words = f"{COMMON} {CASES['attention'][1]} --engine.device cpu --out {tmp_path / 'run'}"
    assert command(["train", "vit", *words.split()]) == 2
    assert "engine.deterministic: put_ does not have a deterministic implementation" in capsys.readouterr().err
