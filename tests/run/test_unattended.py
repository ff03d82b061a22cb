"""Runs that nobody watches: signals, restarts, leftovers of kills, changed settings, divergence."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stopping import not_ignored, stop_after

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.data.batch import Batch
from vitrail.engine.checkpoint import steps_saved
from vitrail.engine.device import choose_device
from vitrail.engine.loop import Diverged, Stopped, TooLarge
from vitrail.engine.run_folder import unused
from vitrail.engine.step import TrainStep
from vitrail.files import remove_leftovers, write_text
from vitrail.recipes import recipe
from vitrail.run.train import check_unchanged
from vitrail.schema import ConfigError, parse_flags

TINY = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1 "
    "--data.workers 0 --data.loader host --data.augment.rand_ops 0 --data.batch 16 --data.check off "
    "--optim.steps 8 --optim.warmup 0 --engine.log_every 2 --engine.evaluate_every 0 --engine.device cpu"
)


def configured(photos: Path, out: Path, flags: str = "") -> RunConfig:
    base = from_mapping(parse_flags(f"{TINY} --data {photos} --out {out}".split())[1], recipe("vit"))
    return from_mapping(parse_flags(flags.split())[1], base)


def stopped(step: int, photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch, flags: str = "") -> Path:
    """A run that was asked to stop after so many steps."""
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(Stopped):
            vitrail.train(configured(photos, out, flags), quiet=True)
    return out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def equal(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_of_terminals_and_schedulers_save_as_sigterm_does(
    name: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(signal, name)
    with monkeypatch.context() as patch, not_ignored(number):
        stop_after(3, patch, number)
        with pytest.raises(Stopped, match="after step 3"):
            vitrail.train(configured(photos, tmp_path / "run"), quiet=True)
        assert signal.getsignal(number) == signal.SIG_DFL
    assert steps_saved(tmp_path / "run" / "checkpoint") == [3]


def test_a_hangup_that_nohup_ignores_stays_ignored(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_after(3, monkeypatch, signal.SIGHUP)
        vitrail.train(configured(photos, tmp_path / "run"), quiet=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "run" / "report.html").is_file()


def test_resume_auto_begins_and_continues_to_the_same_weights(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vitrail.train(configured(photos, tmp_path / "whole"), quiet=True)
    words = ["train", "vit", *TINY.split(), "--data", str(photos), "--out", str(tmp_path / "run"), "--resume", "auto"]
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert command(words) == 130
    assert steps_saved(tmp_path / "run" / "checkpoint")[-1] == 5
    assert command(words) == 0
    assert "resuming" in capsys.readouterr().err
    assert equal(tmp_path / "whole", tmp_path / "run")
    assert command([*words, "--optim.lr", "0.5", "--seed", "3"]) == 2
    said = capsys.readouterr().err
    assert "optim.lr was 0.0005, now it is 0.5" in said
    assert "seed was 0, now it is 3" in said
    assert "engine.device, data.workers may change" in said


def test_resume_auto_wants_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "vit", "--data", "synthetic:shapes?n=60&size=32", "--resume", "auto"]) == 2
    assert "--resume auto continues the run of --out FOLDER" in capsys.readouterr().err


def test_a_configuration_that_was_edited_is_noticed_and_the_machine_may_change(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(3, photos, tmp_path / "run", monkeypatch)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lr: 0.0005", "lr: 10.0005"))
    with pytest.raises(ConfigError, match=r"optim.lr was 0.0005, now it is 10.0005"):
        vitrail.resume(run, quiet=True)
    (run / "config.yaml").write_text(text)
    vitrail.resume(run, {"data": {"workers": 1}}, quiet=True)
    assert (run / "report.html").is_file()


def test_settings_that_the_run_chose_itself_are_no_change() -> None:
    check_unchanged({"data": {"loader": "device"}, "out": "a"}, {"data": {"loader": "auto"}, "out": "b"}, "x")
    with pytest.raises(ConfigError):
        check_unchanged({"data": {"loader": "device"}}, {"data": {"loader": "host"}}, "x")


def test_what_a_kill_left_is_removed_when_the_run_is_resumed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(6, photos, tmp_path / "run", monkeypatch, "--engine.checkpoint_every 0.4 --engine.keep 2")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    checkpoints = run / "checkpoint"
    newest = checkpoints / f"step-{steps_saved(checkpoints)[-1]:09d}.safetensors"
    for step in (0, 1):  # removed too late by a process that was killed
        (checkpoints / f"step-{step:09d}.safetensors").write_bytes(newest.read_bytes())
    left = [checkpoints / f".step.safetensors.{dead.pid}.tmp", run / f".report.html.{dead.pid}.tmp"]
    others = run / f".table.csv.{os.getppid()}.tmp"
    for path in (*left, others):
        path.write_text("half")
    vitrail.resume(run, quiet=True)
    assert not any(path.exists() for path in left)
    assert others.exists()  # its writer is alive
    assert len(steps_saved(checkpoints)) == 2


def test_the_next_writer_in_a_folder_removes_what_killed_ones_left(tmp_path: Path) -> None:
    dead = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os; from vitrail.files import *\n"
            "with replacing(Path('page.html')) as page:\n page.touch(); os.kill(os.getpid(), 9)",
        ],
        cwd=tmp_path,
    )
    assert dead.wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(rf"\.page\.html\.[0-9a-f]{{8}}-{dead.pid}\.tmp", left.name)
    alive = left.with_name(left.name.replace(str(dead.pid), str(os.getppid())))
    elsewhere = left.with_name(f".page.html.00000000-{dead.pid}.tmp")
    for path in (alive, elsewhere):
        path.touch()
    write_text(tmp_path / ("n" * 251 + ".txt"), "a name of 255 bytes")
    assert not left.exists()
    assert {alive, elsewhere} < set(tmp_path.iterdir())
    remove_leftovers(tmp_path.iterdir(), locked=True)
    assert [path for path in (alive, elsewhere) if path.exists()] == [alive]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't alloc"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_lack_of_memory_is_a_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raised(*_: object) -> int:
        raise error

    monkeypatch.setattr("vitrail.cli._call", raised)
    assert command(["list"]) == 2
    assert "memory was out" in capsys.readouterr().err
    error = RuntimeError("another matter")
    with pytest.raises(RuntimeError, match="another matter"):
        command(["list"])


def test_a_folder_that_was_killed_before_its_configuration_counts_as_empty(photos: Path, tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / ".lock").touch()
    (stub / ".config.yaml.1.tmp").touch()
    assert unused(stub)
    vitrail.train(configured(photos, stub, "--optim.steps 1"), quiet=True)
    assert (stub / "report.html").is_file()
    assert not unused(stub)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".hidden").touch()
    assert not unused(tmp_path / "other")
    remove_leftovers((tmp_path / "missing").rglob("*"))


@pytest.mark.parametrize("log_every", [1, 5, 20])
def test_divergence_is_noticed_however_often_metrics_are_logged(log_every: int, photos: Path, tmp_path: Path) -> None:
    first = vitrail.train(configured(photos, tmp_path / "first", "--optim.steps 1"), quiet=True)
    tensors = {
        name: torch.full_like(t, torch.nan) if t.is_floating_point() else t for name, t in weights(first.path).items()
    }
    save_file(tensors, tmp_path / "nan.safetensors")
    flags = f"--engine.log_every {log_every} --optim.steps 60 --model.weights {tmp_path / 'nan.safetensors'}"
    with pytest.raises(Diverged, match="training has diverged"):
        vitrail.train(configured(photos, tmp_path / "run", flags), quiet=True)
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(logged) * log_every <= 20


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cpu:0:1"])
def test_a_device_that_is_none_is_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=r"engine.device: "):
        choose_device(name)


def test_a_checkpoint_keeps_the_settings_that_must_not_change(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.engine import checkpoint

    run = stopped(3, photos, tmp_path / "run", monkeypatch)
    state, _ = checkpoint.newest(run / "checkpoint")
    assert state is not None
    kept, stored = from_mapping(state.facts["config"]), from_mapping(load_yaml(run))
    assert kept.optim == stored.optim
    assert (kept.out, kept.engine.device, kept.data.workers) == (None, "auto", None)  # these may change


def hold_at_most(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is too small for pieces of more images."""
    feed = TrainStep.feed

    def limited(self: TrainStep, piece: Batch) -> bool:
        if len(piece) > images:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return feed(self, piece)

    monkeypatch.setattr(TrainStep, "feed", limited)


def test_a_batch_that_does_not_fit_says_how_to_cut_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_at_most(8, monkeypatch)
    with pytest.raises(
        TooLarge, match=r"a batch of 16 images in 1 piece .* of cpu; set --engine.accumulate 2, or auto"
    ):
        vitrail.train(configured(photos, tmp_path / "run"), quiet=True)


def test_the_fewest_pieces_that_fit_are_found_and_kept(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vitrail.train(configured(photos, tmp_path / "named", "--engine.accumulate 4"), quiet=True)
    hold_at_most(4, monkeypatch)
    run = vitrail.train(configured(photos, tmp_path / "auto", "--engine.accumulate auto"), quiet=True)
    assert load_yaml(run.path)["engine"]["accumulate"] == 4
    assert equal(tmp_path / "named", run.path)
    lines = [len((r / "metrics.jsonl").read_text().splitlines()) for r in (tmp_path / "named", run.path)]
    assert lines[0] == lines[1]
    hold_at_most(0, monkeypatch)
    with pytest.raises(TooLarge, match="no piece of a batch fits into memory, not even 2 images"):
        vitrail.train(configured(photos, tmp_path / "none", "--engine.accumulate auto"), quiet=True)


def test_a_loss_worse_than_that_of_class_frequencies_is_said_first(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends, far from anything useful, with finite gradients to the last."""
    run = vitrail.train(configured(photos, tmp_path / "high", "--optim.lr 5 --optim.clip 1"))
    assert "is worse than that of predicting class frequencies alone, 1.1;" in capsys.readouterr().err
    page = (run.path / "report.html").read_text()
    assert page.index("is worse than that of predicting class frequencies") < page.index("are classified correctly")
    run = vitrail.train(configured(photos, tmp_path / "usual", "--optim.steps 40 --optim.lr 3e-3"), quiet=True)
    assert run.figures.loss < 1.08
    assert "is worse than" not in (run.path / "report.html").read_text()


def test_check_compares_the_checksums_of_runs_and_packs(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, packed = tmp_path / "run", tmp_path / "packed"
    vitrail.train(configured(photos, run), quiet=True)
    assert command(["pack", str(photos), str(packed)]) == 0
    assert command(["check", str(run)]) == 0
    assert command(["check", str(packed)]) == 0
    capsys.readouterr()
    damaged = {
        run / "checkpoint" / f"step-{steps_saved(run / 'checkpoint')[-1]:09d}.safetensors": run,
        run / "model" / "model.safetensors": run,
        next(packed.rglob("*.bin")): packed,
    }
    for file, folder in damaged.items():
        data = bytearray(file.read_bytes())
        data[-100] ^= 0x10
        file.write_bytes(data)
        assert command(["check", str(folder), "--json"]) == 2
        faults = json.loads(capsys.readouterr().out)["faults"]
        assert any(file.name in fault for fault in faults)


@pytest.mark.slow
def test_a_lost_process_is_a_sentence_and_the_same_command_goes_on(photos: Path, tmp_path: Path) -> None:
    """One of two processes is killed; the other ends by itself, and the command of both continues the run."""
    words = [sys.executable, "-m", "vitrail", "train", "vit", *TINY.split(), "--data", str(photos), "--resume", "auto"]
    words[words.index("--optim.steps") + 1] = "400"
    words += ["--out", str(tmp_path / "run"), "--engine.checkpoint_every", "1"]

    def both(port: int) -> list[subprocess.Popen[str]]:
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [{**os.environ, **group, "RANK": r, "LOCAL_RANK": r, "GLOO_SOCKET_IFNAME": "lo"} for r in "01"]
        return [subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) for env in ranks]

    first, second = both(free_port())
    wait_until(lambda: steps_saved(tmp_path / "run" / "checkpoint"))
    second.kill()
    _, said = first.communicate(timeout=120)
    assert first.returncode == 2
    assert "another process of this run ended" in said
    assert "Traceback" not in said
    done = both(free_port())
    ends = [process.communicate(timeout=300)[1] for process in done]
    assert [process.returncode for process in done] == [0, 0], ends
    assert "resuming" in ends[0]
    assert (tmp_path / "run" / "report.html").is_file()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
