"""A run is the same under any number of processes: samples exactly, weights to rounding."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from safetensors import safe_open
from static_server import serving

from benchmarks.equality import TINY, difference, samples, train_cell
from vitrail.config import dump
from vitrail.data.batch import Batch
from vitrail.data.loading.sampler import share_of_batch
from vitrail.data.open import open_data
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import ProcessGroup
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.objective import Objective
from vitrail.recipes import recipe, with_values

STEPS = {"optim.steps": 6, "data.workers": 0}
CLOSE = 2e-5  # of weights of about 0.1 after six steps at a learning rate of 1e-3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that is not interrupted."""
    return train_cell(run_ranks, tmp_path_factory.mktemp("alone") / "cell", [(1, None)], **STEPS)


def same(cell: Path, alone: Path) -> None:
    assert len(samples(alone)) == STEPS["optim.steps"] * TINY["data.batch"]
    assert samples(cell) == samples(alone)
    assert difference(cell, alone) < CLOSE


def test_three_processes_that_do_not_divide_the_batch_equal_one(alone: Path, tmp_path: Path) -> None:
    same(train_cell(run_ranks, tmp_path / "cell", [(3, None)], **STEPS), alone)


def test_a_run_goes_on_under_another_number_of_processes(alone: Path, tmp_path: Path) -> None:
    same(train_cell(run_ranks, tmp_path / "cell", [(2, 2), (3, None)], **STEPS), alone)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    "parts",
    [
        [(1, None)],
        [(2, None)],
        [(3, None)],
        [(4, None)],
        [(1, 2), (4, None)],
        [(4, 1), (2, 2), (3, 4), (1, None)],
    ],
    ids=str,
)
def test_samples_and_weights_are_those_of_one_process(
    parts: Sequence[tuple[int, int | None]], workers: int, alone: Path, tmp_path: Path
) -> None:
    same(train_cell(run_ranks, tmp_path / "cell", parts, **{**STEPS, "data.workers": workers}), alone)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["device", "jpeg"])
def test_loaders_of_the_device_give_the_same_samples_under_any_number_of_processes(loader: str, tmp_path: Path) -> None:
    settings = {**STEPS, "data.loader": loader}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **settings)
    same(train_cell(run_ranks, tmp_path / "three", [(2, 2), (3, None)], **settings), one)


@pytest.mark.slow
def test_accumulation_into_uneven_pieces_changes_nothing(alone: Path, tmp_path: Path) -> None:
    same(train_cell(run_ranks, tmp_path / "cell", [(2, None)], **STEPS, **{"engine.accumulate": 2}), alone)


@pytest.mark.slow
def test_a_memory_bank_goes_on_under_another_number_of_processes(tmp_path: Path) -> None:
    """Batch normalisation of the projector is by process, so weights differ: rows of earlier steps must not."""
    settings = {"data.batch": 12, "data.augment.mixup": 0.0, "data.augment.cutmix": 0.0, "engine.keep": 9}
    settings |= {**STEPS, "recipe": "small-moco", "objective.bank": 48, "evaluators": ()}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **settings)
    several = train_cell(run_ranks, tmp_path / "several", [(2, 2), (3, 4), (1, None)], **settings)
    assert samples(several) == samples(one)
    banks, pushed = [], []  # rows, and how many were written in all, when two and when three processes stopped
    for file in sorted((several / "run" / "checkpoint").glob("step-*"))[:2]:
        with safe_open(file, framework="pt") as opened:
            (name,) = (key for key in opened.keys() if key.endswith("bank.rows"))  # noqa: SIM118 (not a mapping)
            banks.append(opened.get_tensor(name))
        pushed.append(12 * int(re.findall(r"\d+", file.name)[0]))
    kept = slice(max(0, pushed[1] - 48), pushed[0])
    assert kept.start < kept.stop
    assert torch.equal(banks[1][kept], banks[0][kept])
    assert not torch.equal(banks[1], banks[0])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tar files of synthetic images."""
    folder, train = tmp_path_factory.mktemp("shards"), open_data("synthetic:shapes?n=60&size=32")["train"]
    for shard in range(3):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for row in range(shard, 45, 3):
                stream = io.BytesIO()
                train.read(row).save(stream, "PNG")
                for suffix, content in (("png", stream.getvalue()), ("cls", b"%d" % train.labels[row])):
                    member = tarfile.TarInfo(f"{row:03d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("read", ["whole", "ranged"])
@pytest.mark.parametrize("parts", [[(1, None)], [(2, 2), (3, None)]], ids=str)
def test_a_streamed_run_is_that_of_local_tars(
    parts: Sequence[tuple[int, int | None]], read: str, shards: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp", reason="streams need the extra cloud")
    local = train_cell(run_ranks, tmp_path / "local", [(1, None)], **STEPS, **{"data.uri": str(shards)})
    with serving({f"/{file.name}": file.read_bytes() for file in shards.iterdir()}) as server:
        uri = f"{server.url}/train-{{000..002}}.tar?read={read}"
        streamed = train_cell(run_ranks, tmp_path / "streamed", parts, **STEPS, **{"data.uri": uri})
    same(streamed, local)
    assert len(parts) > 1 or difference(streamed, local) == 0


@pytest.mark.parametrize("pairs", [False, True])
def test_shares_cover_the_batch_in_order_and_differ_by_one_unit(pairs: bool) -> None:
    unit = 1 + pairs
    for batch in range(1, 40):
        for world, accumulate in ((1, 1), (2, 1), (3, 2), (4, 3)):
            pieces = world * accumulate
            if batch // unit < pieces:
                with pytest.raises(ValueError, match=f"at least {unit * pieces}"):
                    share_of_batch(batch, world, accumulate, 0, 0, pairs=pairs)
                continue
            shares = [
                share_of_batch(batch, world, accumulate, rank, piece, pairs=pairs)
                for rank in range(world)
                for piece in range(accumulate)
            ]
            places = [list(range(first, first + count)) for first, count in shares]
            assert list(chain.from_iterable(places)) == list(range(batch))
            counts = [count - (batch % unit if i == pieces - 1 else 0) for i, (_, count) in enumerate(shares)]
            assert max(counts) - min(counts) in (0, unit)
            assert not pairs or all(first % 2 == 0 for first, _ in shares)


class Mean(Objective):
    """The mean over images of weight x image."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(1, 1, bias=False)  # type: ignore[assignment]
        torch.nn.init.ones_(self.model.weight)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": self.model(batch.images.flatten(1)).mean()}


def fed(pieces: Sequence[tuple[Sequence[float], float, int]]) -> tuple[float, float]:
    """Gradient (a step of SGD with learning rate 1) and logged loss of micro-batches of (values, share, missing)."""
    optim = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant", warmup=0, steps=1)
    objective = Mean()
    step = TrainStep(objective, optim, make_schedule(optim, 1, 1), device=torch.device("cpu"), accumulate=len(pieces))
    for values, share, missing in pieces:
        images, label = torch.tensor(values)[:, None, None, None], torch.zeros(len(values), dtype=torch.int64)
        step.feed(Batch((images,), label, label, label, share=share, missing=missing))
    gradient = 1 - float(objective.model.weight.detach())
    return gradient, step.meter.read(ProcessGroup())["loss"]


def test_micro_batches_weigh_as_much_as_they_have_images() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    gradient, loss = fed([(values[:3], 3 * 2 / 5, 0), (values[3:], 2 * 2 / 5, 0)])
    assert gradient == pytest.approx(np.mean(values), rel=1e-6)
    assert loss == pytest.approx(np.mean(values), rel=1e-6)


def test_the_mean_is_over_the_images_that_could_be_read() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0]  # and a sixth that could not be read
    gradient, loss = fed([(values[:3], 3 * 2 / 6, 0), (values[3:], 2 * 2 / 6, 1)])
    assert gradient == pytest.approx(np.mean(values), rel=1e-6)
    assert loss == pytest.approx(np.mean(values), rel=1e-6)


def test_equal_pieces_are_averaged_as_ever() -> None:
    values = torch.tensor([0.1, 0.7, 0.3, 0.9, 0.2, 0.5])
    gradient, _ = fed([(part.tolist(), 1.0, 0) for part in values.split(2)])
    weight = torch.ones((), requires_grad=True)
    for part in values.split(2):
        ((part * weight).mean() / 3).backward()
    assert weight.grad is not None
    assert 1 - gradient == float(1 - weight.grad)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_unreadable_images_leave_the_mean_over_the_others_of_all_processes(world: int, tmp_path: Path) -> None:
    settings = {**STEPS, "lost": [1, 5, 6, 17, 30]}
    one = train_cell(run_ranks, tmp_path / "one", [(1, None)], **settings)
    several = train_cell(run_ranks, tmp_path / "several", [(world, None)], **settings)
    steps = [step for step, _, _ in samples(one)]
    assert min(map(steps.count, set(steps))) < TINY["data.batch"]
    assert samples(several) == samples(one)
    assert difference(several, one) < CLOSE


KILLED = """
import os, signal, sys
from vitrail.engine.step import TrainStep
feed = TrainStep.feed
def killed(self, piece):
    done = feed(self, piece)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == sys.argv[1] and self.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
TrainStep.feed = killed
from vitrail.cli import run
sys.exit(run(sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_killed_run_and_it_ends_with_the_same_weights(
    rank: int, alone: Path, tmp_path: Path
) -> None:
    step = int(np.random.default_rng().integers(1, STEPS["optim.steps"]))
    config, script = tmp_path / "config.yaml", tmp_path / "killed.py"
    settings: dict[str, Any] = {**TINY, **STEPS, "engine.checkpoint_every": 0.2}
    config.write_text(dump(with_values(recipe("vit"), settings)))
    script.write_text(KILLED)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=1"]
    words += [str(script), str(rank), str(step), "train", "--config", str(config), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors[-3000:]
    assert "exitcode: -9" in errors
    assert difference(tmp_path, alone) < CLOSE, f"killed after step {step}"
