"""Whole runs: the folder they leave, exact resume, interruption, bad images, splits."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import make_hostile
from PIL import Image
from processes import run_ranks, start
from safetensors.torch import load_file
from stopping import not_ignored, stop_after

import vitrail
from vitrail.cli import run as cli
from vitrail.config import RunConfig, dump, from_mapping, load_yaml
from vitrail.data.batch import Batch
from vitrail.data.dataset import Split
from vitrail.data.loading.loader import EvalLoader
from vitrail.engine import checkpoint
from vitrail.engine.loop import Stopped
from vitrail.engine.run_folder import TIMING
from vitrail.engine.step import TrainStep
from vitrail.recipes import recipe
from vitrail.schema import parse_flags

SMALL = (
    "--model.name vit_micro_28 --model.trunk.depth 2 --model.trunk.width 32 --model.trunk.heads 2 "
    "--data.workers 0 --data.loader host --data.augment.rand_ops 0 --data.batch 16 "
    "--optim.epochs 3 --optim.warmup 0.5 --engine.log_every 2"
)


def configure(flags: str, base: str = "vit") -> RunConfig:
    return from_mapping(parse_flags(flags.split())[1], from_mapping(parse_flags(SMALL.split())[1], recipe(base)))


def lines(run: Path) -> list[dict[str, object]]:
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in found]


def assert_same_run(first: Path, second: Path) -> None:
    """Bit for bit: weights, moving average, optimiser, random state, metrics."""
    one, two = (checkpoint.newest(run / "checkpoint")[0] for run in (first, second))
    assert one.step == two.step
    assert one.tensors.keys() == two.tensors.keys()
    different = [name for name, t in one.tensors.items() if not torch.equal(t, two.tensors[name])]
    assert different == []
    models = [load_file(run / "model" / "model.safetensors") for run in (first, second)]
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())
    assert lines(first) == lines(second)


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, which no test may change."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return vitrail.train(configure(f"--data {photos} --out {out}"), quiet=True).path


def test_a_run_leaves_its_folder_and_learns(photos: Path, tmp_path: Path) -> None:
    run = vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'} --optim.epochs 30"), quiet=True)
    assert run.split == "test"
    assert run.figures.scalars()["top1"] > 0.8  # chance is a third
    names = {p.name for p in run.path.iterdir()} - {".lock"}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "checkpoint",
        "model",
        "predictions.safetensors",
        "report.html",
        "log.txt",
        "environment.json",
    }
    logged = lines(run.path)
    assert {line["split"] for line in logged} == {"train", "val", "test"}
    assert [line for line in logged if line["split"] == "test"] == [logged[-1]]
    assert logged[-1]["top1"] == run.figures.scalars()["top1"]
    again = vitrail.load(run.path)
    figures, _, split = vitrail.evaluate(again, str(photos), device="cpu")
    assert split == "test"
    assert figures.scalars() == pytest.approx(run.figures.scalars())


def test_a_run_repeats_from_its_own_config(finished: Path, tmp_path: Path) -> None:
    stored = {**load_yaml(finished / "config.yaml"), "out": str(tmp_path / "b")}
    assert_same_run(finished, vitrail.train(from_mapping(stored), quiet=True).path)


def train_until_killed(config: RunConfig, kill_at: int) -> None:
    feed = TrainStep.feed

    def killed(self: TrainStep, piece: Batch) -> bool:
        done = feed(self, piece)
        if self.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    TrainStep.feed = killed  # type: ignore[method-assign]
    vitrail.train(config, quiet=True)


@pytest.mark.parametrize(
    ("flags", "kill_at"),
    [
        ("--data.loader device --data.augment.crop pad", 7),
        ("--data.loader jpeg --data.augment.crop simple", 7),
        ("--data.workers 0 --engine.checkpoint_every 1", 7),  # 48 images: three steps an epoch, so in an epoch's middle
        ("--data.workers 2 --engine.checkpoint_every 0.7 --engine.accumulate 2 --optim.name lamb", 5),
    ],
)
def test_kill_and_resume_equals_never_stopping(photos: Path, tmp_path: Path, flags: str, kill_at: int) -> None:
    shared = f"--data {photos} --data.augment.erasing 0.3 --data.augment.jitter 0.2 --model.drop_path 0.2 {flags}"
    whole = vitrail.train(configure(f"{shared} --out {tmp_path / 'whole'}"), quiet=True)
    process = start(train_until_killed, configure(f"{shared} --out {tmp_path / 'killed'}"), kill_at)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    resumed = vitrail.resume(tmp_path / "killed", quiet=True)
    assert_same_run(whole.path, resumed.path)


def test_resume_of_a_finished_run_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    again = vitrail.resume(copy, quiet=True)
    assert again.path == copy
    assert lines(copy) == lines(finished)


def test_an_interrupted_run_saves_and_says_how_to_go_on(photos: Path, tmp_path: Path) -> None:
    flags = f"--data {photos} --data.augment.mixup 0.5"
    config = configure(f"{flags} --out {tmp_path / 'stopped'}")
    whole = vitrail.train(configure(f"{flags} --out {tmp_path / 'whole'}"), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Stopped, match=f"stopped after step 5; continue with: vitrail train --resume {tmp_path}"):
            vitrail.train(config, quiet=True)
    assert_same_run(whole.path, vitrail.resume(tmp_path / "stopped", quiet=True).path)


def interrupted(*_: object, **__: object) -> None:
    """As Ctrl-C does it; a real signal is ignored where a shell started the tests in the background."""
    raise KeyboardInterrupt


def interrupt_the_final_evaluation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("vitrail.run.finish.figures_of", interrupted)


def test_ctrl_c_in_the_final_evaluation_says_how_to_go_on(photos: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt_the_final_evaluation(patch)
        with pytest.raises(Stopped, match=f"continue with: vitrail train --resume {tmp_path / 'run'}"):
            vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'}"), quiet=True)
    assert_same_run(finished, vitrail.resume(tmp_path / "run", quiet=True).path)


def test_ctrl_c_in_the_final_evaluation_of_a_resumed_run_says_how_to_go_on(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_the_final_evaluation(patch)
        assert cli(["train", "--resume", str(copy), "--json"]) == 130
    step = checkpoint.newest(finished / "checkpoint")[0].step
    errors = capsys.readouterr().err
    assert f"stopped after step {step}; continue with: vitrail train --resume {copy}\n" in errors


def test_ctrl_c_before_a_run_is_begun_names_no_run(photos: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.train.create_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'}"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_torn_checkpoint_is_passed_over_on_resume(finished: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(finished, tmp_path / "run")
    newest = sorted((torn / "checkpoint").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-200])
    assert checkpoint.newest(torn / "checkpoint")[0].step < checkpoint.newest(finished / "checkpoint")[0].step
    assert_same_run(finished, vitrail.resume(torn, quiet=True).path)


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_intact(
    finished: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    real, calls = safetensors.torch.save_file, []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(tensors, path, metadata=metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    out = tmp_path / "run"
    with pytest.raises(OSError, match=r"step 6 could not be written .*No space left.*step 3 is intact.*--resume"):
        vitrail.train(configure(f"--data {photos} --out {out}"), quiet=True)
    assert checkpoint.newest(out / "checkpoint")[0].step == 3
    monkeypatch.undo()
    assert_same_run(finished, vitrail.resume(out, quiet=True).path)


def test_a_bad_batch_is_skipped_reported_and_training_goes_on(photos: Path, tmp_path: Path) -> None:
    from vitrail.learn.supervised import Supervised

    forward, seen = Supervised.forward, []

    def poisoned(self, batch):
        losses = forward(self, batch)
        if batch.step == 4:
            seen.extend(batch.index.tolist())
            losses["loss"] = losses["loss"] * float("nan")
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervised, "forward", poisoned)
        run = vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'}"), quiet=True)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert len(run.notes) == 2  # the other: too few val images to calibrate
    assert "the last at step 4" in run.notes[0]
    assert f"images {seen[0]}, {seen[1]}" in run.notes[0]
    assert "last good checkpoint: step 3" in run.notes[0]
    skipped = [line for line in lines(run.path) if "skipped_updates" in line]
    assert [(line["step"], line["skipped_updates"]) for line in skipped] == [(6, 1)]


def test_only_val_is_read_while_training_and_test_once_at_the_end(photos: Path, tmp_path: Path) -> None:
    read: list[str] = []
    start = EvalLoader.__iter__

    def watched(self):
        read.append(self.split.name)
        return start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvalLoader, "__iter__", watched)
        vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'}"), quiet=True)
    assert read == ["val", "val", "val", "test"]


TWELVE = (  # one of each kind that a folder of photographs may hold
    *("truncated.jpg", "empty.jpg", "text.jpg", "bomb.png", "cmyk_adobe.jpg", "cmyk.tif", "grey_16_bit.png"),
    *("palette.png", "palette_transparent.png", "alpha.png", "rotated.jpg", "one_bit.png"),
)


def test_hostile_images_do_not_stop_a_run_and_are_listed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    root = tmp_path / "data"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(144):
            Image.fromarray(noise.integers(0, 256, (30, 30, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    expected = {name: value for name, value in make_hostile(tmp_path / "all").items() if name in TWELVE}
    assert len(expected) == 12
    for name in expected:
        (tmp_path / "all" / name).rename(root / "a" / name)
    reasons = {name: value for name, value in expected.items() if isinstance(value, str)}
    assert len(reasons) == 4

    seen: dict[str, np.ndarray] = {}
    read = Split.read

    def watched(self: Split, row: int) -> Image.Image:
        image = read(self, row)
        seen[Path(self.keys[row]).name] = np.asarray(image)
        return image

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Split, "read", watched)
        run = vitrail.train(
            configure(f"--data {root} --out {tmp_path / 'run'} --optim.epochs 1 --data.bad_limit 0.05"), quiet=True
        )
    report = (run.path / "report.html").read_text()
    listed = report[report.index("Skipped images and why") :]
    listed = listed[: listed.index("</details>")]
    for name in expected:
        assert (name in listed) == (name in reasons), name
    assert all(reason in listed for reason in reasons.values())
    for name in expected.keys() - reasons.keys():  # decoded right, up to what JPEG itself loses
        difference = np.abs(seen[name].astype(int) - expected[name].astype(int))
        assert difference.max() <= (4 if name.endswith(".jpg") else 0), name

    with pytest.raises(ValueError, match=r"4 of 300 images .*more than data.bad_limit 0.01 allows") as refused:
        vitrail.train(configure(f"--data {root} --out {tmp_path / 'refused'}"), quiet=True)
    assert all(name in str(refused.value) for name in reasons)
    assert not (tmp_path / "refused").exists()


def test_a_run_folder_is_refused_before_any_image_is_read(tmp_path: Path, photos: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0")
    with pytest.raises(FileExistsError, match="--resume"):
        vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'}"), quiet=True)


def test_changed_data_are_refused_on_resume(tmp_path: Path, photos: Path) -> None:
    import shutil

    copied = tmp_path / "photos"
    shutil.copytree(photos, copied)
    run = vitrail.train(configure(f"--data {copied} --out {tmp_path / 'run'}"), quiet=True)
    for path in sorted((copied / "red").iterdir())[:5]:
        path.unlink()
    with pytest.raises(ValueError, match="only be resumed on the data it began with"):
        vitrail.resume(run.path, quiet=True)


def test_resume_takes_no_other_settings(tmp_path: Path, photos: Path) -> None:
    run = vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'} --optim.epochs 1"), quiet=True)
    with pytest.raises(ValueError, match=r"--optim.epochs: a resumed run keeps its configuration"):
        vitrail.resume(run.path, {"optim": {"epochs": 9}}, quiet=True)


def test_finetuning_the_head_of_a_run_leaves_the_trunk_alone(tmp_path: Path, photos: Path) -> None:
    first = vitrail.train(configure(f"--data {photos} --out {tmp_path / 'a'} --optim.epochs 1"), quiet=True)
    flags = f"--data {photos} --out {tmp_path / 'b'} --model.weights {first.path} --optim.tune head --engine.ema 0"
    second = vitrail.train(configure(flags), quiet=True)
    one, two = first.model.state_dict(), second.model.state_dict()
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    assert changed == {"head.fc.weight", "head.fc.bias"}


def test_without_val_nothing_is_watched_and_test_is_judged(tmp_path: Path, photos: Path) -> None:
    flags = f"--data {photos} --out {tmp_path / 'a'} --optim.epochs 1 --data.val_fraction 0"
    run = vitrail.train(configure(flags), quiet=True)
    assert run.split == "test"
    assert {line["split"] for line in lines(run.path)} == {"train", "test"}
    with pytest.raises(ValueError, match="neither val nor test"):
        vitrail.train(configure(f"{flags} --data.test_fraction 0".replace("/a ", "/b ")), quiet=True)


def test_while_settings_are_chosen_test_stays_unseen(tmp_path: Path, photos: Path) -> None:
    flags = f"--data {photos} --out {tmp_path / 'a'} --optim.steps 1 --data.judge val"
    run = vitrail.train(configure(flags), quiet=True)
    assert run.split == "val"
    assert "test" not in {line["split"] for line in lines(run.path)}
    with pytest.raises(ValueError, match=r"data\.judge is val"):
        vitrail.train(configure(f"{flags} --data.val_fraction 0".replace("/a ", "/b ")), quiet=True)


def test_few_images_from_scratch_are_warned_about(tmp_path: Path, photos: Path, capsys) -> None:
    config = configure(f"--data {photos} --out {tmp_path / 'a'} --optim.steps 1 --model.trunk.width 192")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, trunk={"width": 192, "depth": 3}))
    vitrail.train(config)
    assert "48 training images are few for 1." in capsys.readouterr().err


def test_a_head_that_takes_a_models_distillation_token_away_is_warned_about(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--optim.steps 1 --model.trunk.depth 1 --model.trunk.width 48 --model.trunk.heads 3"
    named = f"--data {photos} {small} --model.name deit_tiny_distilled_32"
    vitrail.train(configure(f"{named} --out {tmp_path / 'a'} --model.head.kind distilled"))
    assert "distillation" not in capsys.readouterr().err
    vitrail.train(configure(f"{named} --out {tmp_path / 'b'} --model.head.kind mean"))
    assert "model.head mean replaces what deit_tiny_distilled_32 is named for" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path, photos: Path) -> None:
    """The same losses and weights to rounding, with mixing, accumulation and an odd number of evaluated images."""
    flags = (
        f"--data {photos} --data.augment.mixup 0.8 --data.augment.cutmix 1 --engine.accumulate 2 --model.drop_path 0 "
        "--data.val_fraction 0.15"
    )
    one = vitrail.train(configure(f"{flags} --out {tmp_path / 'one'}"), quiet=True)
    text = tmp_path / "config.yaml"
    text.write_text(dump(configure(f"{flags} --out {tmp_path / 'two'}")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(free_port())]
    command += ["-m", "vitrail", "train", "--config", str(text), "--out", str(tmp_path / "two")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = lines(one.path), lines(tmp_path / "two")
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=2e-4, abs=2e-5) if isinstance(value, float) else value), key
    other = load_file(tmp_path / "two" / "model" / "model.safetensors")
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)


def stopped_rank(rank: int, folder: str, config: RunConfig) -> None:
    """One of two processes; the second is told to stop while it makes its third step."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    feed = TrainStep.feed

    def interrupted(self: TrainStep, piece: Batch) -> bool:
        if rank == 1 and self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return feed(self, piece)

    TrainStep.feed = interrupted  # type: ignore[method-assign]
    try:
        vitrail.train(config, quiet=True)
    except Stopped as stopped:
        (Path(folder) / f"stopped-{rank}").write_text(str(stopped.step))
    finally:
        torch.distributed.destroy_process_group()


def test_when_one_process_is_told_to_stop_all_stop_a_step_later_far_from_any_logging(
    tmp_path: Path, photos: Path
) -> None:
    out = tmp_path / "run"
    flags = f"--data {photos} --out {out} --optim.steps 300 --engine.log_every 300 --engine.checkpoint_every 0"
    config = configure(f"{flags} --engine.evaluate_every 0 --engine.device cpu")
    run_ranks(stopped_rank, str(tmp_path), config)
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)] == ["4", "4"]
    assert checkpoint.steps_saved(out / "checkpoint") == [4]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ctrl_c_from_a_terminal(tmp_path: Path, photos: Path) -> None:
    text = tmp_path / "config.yaml"
    text.write_text(dump(configure(f"--data {photos} --optim.epochs 2000 --engine.checkpoint_every 0")))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vitrail", "train", "--config", str(text), "--out", str(out)]
    with not_ignored(signal.SIGINT):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continue with: vitrail train --resume {out}" in errors
    assert "Traceback" not in errors
    assert checkpoint.newest(out / "checkpoint")[0].step > 0
