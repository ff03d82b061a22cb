"""Which weights a run keeps, and early stopping: exact, resumable, alike in all processes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks, start
from safetensors.torch import load_file
from torch import Tensor

import vitrail
from vitrail.cli import run as command
from vitrail.compare import budgets
from vitrail.compare.study import Study, run_hash, smoke
from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.data.batch import Batch
from vitrail.engine import checkpoint
from vitrail.engine.loop import Best, Loop
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import TIMING
from vitrail.engine.step import TrainStep
from vitrail.recipes import recipe
from vitrail.run import finish
from vitrail.schema import ConfigError, parse_flags

TINY = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 32 --model.trunk.heads 2 "
    "--data.workers 0 --data.loader host --data.augment.rand_ops 0 --data.batch 16 --data.check off "
    "--optim.epochs 5 --optim.warmup 0 --engine.log_every 2 --engine.device cpu --engine.ema 0"
)
RISES_AND_FALLS = {3: 0.5, 6: 0.7, 9: 0.7, 12: 0.6, 15: 0.4}  # top-1 by step, of which an epoch has three
LATE = {**RISES_AND_FALLS, 15: 0.9}
EARLIER = Path(__file__).parents[1] / "fixtures" / "earlier-run"
Weights = dict[str, Tensor]


def configured(photos: Path, out: Path, flags: str = "") -> RunConfig:
    base = from_mapping(parse_flags(f"{TINY} --data {photos} --out {out}".split())[1], recipe("vit"))
    return from_mapping(parse_flags(flags.split())[1], base)


def script(values: Mapping[int, float], patch: Any, metric: str = "top1") -> dict[int, Weights]:
    """From now on val has this metric; returns the weights that were evaluated, by step."""
    evaluate, weights = Loop._evaluate, {}

    def scripted(self: Loop, bar: Progress) -> None:
        def metrics(model: torch.nn.Module) -> dict[str, float]:
            weights[self.step] = {name: t.clone() for name, t in model.state_dict().items()}
            return {metric: values[self.step], "loss": 1.0}

        self.evaluate = metrics
        evaluate(self, bar)

    patch.setattr(Loop, "_evaluate", scripted)
    return weights


def kept(run: Path) -> Weights:
    return load_file(run / "model" / "model.safetensors")


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


def lines(run: Path) -> list[dict[str, Any]]:
    logged = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in logged]


def newest(run: Path) -> checkpoint.State:
    state = checkpoint.newest(run / "checkpoint")[0]
    assert state is not None
    return state


# Selection


@pytest.mark.parametrize("flags", ["", "--engine.ema 0.8", "--calibrate false", "--model.trunk.adaptive.kind avit"])
def test_the_weights_of_the_best_evaluation_are_kept_and_of_equal_ones_the_earlier(
    flags: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(RISES_AND_FALLS, monkeypatch)
    run = vitrail.train(configured(photos, tmp_path / "run", f"--engine.select best {flags}"), quiet=True)
    assert not equal(evaluated[6], evaluated[9])
    assert not equal(evaluated[6], evaluated[15])
    assert equal(kept(run.path), evaluated[6])
    assert equal(run.model.state_dict(), evaluated[6])
    final = newest(run.path)
    assert final.step == 15  # and trained on from the last weights, not from the best
    stored = final.part("ema") if "ema" in flags else final.part("objective")
    assert equal({name.removeprefix("model."): t for name, t in stored.items()}, evaluated[15])
    assert run.model.stated["selected"] == {"metric": "top1", "value": 0.7, "step": 6, "waited": 3}
    sentence = "weights of epoch 2 (step 6) are kept: the best top1 on val, 0.7"
    assert sentence in (run.path / "report.html").read_text()
    assert sentence in (run.path / "log.txt").read_text()
    metrics = vitrail.evaluate(run.path, str(photos), device="cpu")[0]
    assert metrics.scalars() == pytest.approx(run.figures.scalars())


def test_calibration_is_fitted_on_the_weights_that_are_kept(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated, fitted = script(RISES_AND_FALLS, monkeypatch), []

    def fit(model: torch.nn.Module, *_: Any, **__: Any) -> None:
        fitted.append({name: t.clone() for name, t in model.state_dict().items()})
        raise ValueError("seen")

    monkeypatch.setattr(finish, "fit_on_val", fit)
    vitrail.train(configured(photos, tmp_path / "run", "--engine.select best"), quiet=True)
    assert [equal(weights, evaluated[6]) for weights in fitted] == [True]


def test_without_a_choice_the_last_weights_are_kept_and_checkpoints_are_as_before(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(RISES_AND_FALLS, monkeypatch)
    run = vitrail.train(configured(photos, tmp_path / "run"), quiet=True)
    assert equal(kept(run.path), evaluated[15])
    assert "best" not in newest(run.path).facts
    assert newest(run.path).part("best") == {}
    assert "selected" not in run.model.stated
    assert "are kept" not in (run.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("top1", [0.2, 0.4, 0.3], 1),
        ("map", [math.nan, 0.1, 0.1], 1),
        ("perplexity", [9.0, 4.0, 5.0], 1),
        ("denoising_loss", [0.5, 0.5, 0.4], 2),
    ],
)
def test_less_perplexity_and_loss_are_better_and_nan_never_is(metric: str, values: list[float], best: int) -> None:
    state = Best()
    for step, value in enumerate(values):
        state.update({metric: value, "loss": float(step)}, step)
    assert (state.metric, state.value, state.step, state.waited) == (metric, values[best], best, len(values) - 1 - best)


def test_metrics_that_are_never_a_number_leave_the_last_weights_and_say_so(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(dict.fromkeys(RISES_AND_FALLS, math.nan), monkeypatch, "map")
    run = vitrail.train(configured(photos, tmp_path / "run", "--engine.select best"), quiet=True)
    assert equal(kept(run.path), evaluated[15])
    assert "the last weights are kept: map on val was never a number to select by" in run.notes


def test_metrics_on_val_are_called_optimistic_where_val_selected_the_weights(photos: Path, tmp_path: Path) -> None:
    flags = "--data.judge val --engine.select best --optim.lr 0.01"
    run = vitrail.train(configured(photos, tmp_path / "run", flags), quiet=True)
    measured = [line["top1"] for line in lines(run.path) if line["split"] == "val" and "final" not in line]
    assert run.figures.scalars()["top1"] == max(measured)
    assert "metrics on val are optimistic" in " ".join(run.notes)
    assert "Metrics on val are optimistic" in (run.path / "report.html").read_text()


def test_an_objective_without_labels_selects_by_its_first_evaluator(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = from_mapping(parse_flags(TINY.split())[1], recipe("small-msf"))
    flags = f"--data {photos} --out {tmp_path / 'run'} --evaluators knn --engine.select best --objective.bank 32"
    config = from_mapping(parse_flags(flags.split())[1], base)
    evaluated: dict[int, Weights] = {}
    evaluate = Loop._evaluate

    def watched(self: Loop, bar: Progress) -> None:
        evaluated[self.step] = {name: t.clone() for name, t in self.kept.state_dict().items()}
        evaluate(self, bar)

    monkeypatch.setattr(Loop, "_evaluate", watched)
    run = vitrail.train(config, quiet=True)
    by_step = {line["step"]: line["knn"] for line in lines(run.path) if line["split"] == "val"}
    best = max(by_step, key=lambda step: (by_step[step], -step))
    assert run.model.stated["selected"]["metric"] == "knn"
    assert run.model.stated["selected"]["step"] == best
    assert equal(kept(run.path), evaluated[best])


def test_of_an_adapter_only_what_it_trains_is_stored_with_the_checkpoint(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(RISES_AND_FALLS, monkeypatch)
    flags = "--engine.select best --model.adapter.kind lora --model.adapter.rank 2 --optim.lr 0.01"
    run = vitrail.train(configured(photos, tmp_path / "run", flags), quiet=True)
    state = newest(run.path)
    stored = {name for name in state.part("objective") if name.startswith("model.")}
    assert {f"model.{name}" for name in state.part("best")} == stored
    assert len(stored) < len(evaluated[6])
    again = vitrail.load(run.path, merged=False).state_dict()
    changed = [n for n, t in evaluated[6].items() if not torch.equal(t, evaluated[15][n])]
    assert changed
    assert all(torch.equal(again[name], evaluated[6][name]) for name in changed)
    monkeypatch.setattr(TrainStep, "feed", None)  # nothing is left to train
    assert equal(vitrail.resume(run.path, quiet=True).model.state_dict(), evaluated[6])


# Early stopping


def test_patience_ends_the_run_as_its_last_step_would_and_leaves_the_schedule_alone(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(LATE, monkeypatch)
    whole = vitrail.train(configured(photos, tmp_path / "whole"), quiet=True)
    run = vitrail.train(configured(photos, tmp_path / "run", "--engine.patience 2 --engine.log_every 5"), quiet=True)
    assert equal(kept(run.path), evaluated[12])
    assert newest(run.path).step == 12
    logged, longer = lines(run.path), {line["step"]: line for line in lines(whole.path) if line["split"] == "train"}
    assert [line["step"] for line in logged if line["split"] == "train"] == [5, 10, 12]
    assert {line["lr"] for line in logged if line.get("step") in (10, 12) and "lr" in line} == {
        longer[10]["lr"],
        longer[12]["lr"],
    }
    assert (logged[-1]["step"], logged[-1]["final"], logged[-1]["split"]) == (12, True, "test")
    sentence = (
        "raining stopped early at epoch 4 (step 12 of 15): top1 on val has not improved for 2 evaluations in a row, "
        "the best was 0.7 at epoch 2 (step 6)"
    )
    assert f"t{sentence}" in run.notes
    assert f"t{sentence}" in (run.path / "log.txt").read_text()
    assert f"T{sentence}." in (run.path / "report.html").read_text()


def test_patience_that_ends_at_the_last_step_is_no_early_stop(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(RISES_AND_FALLS, monkeypatch)
    run = vitrail.train(configured(photos, tmp_path / "run", "--engine.patience 3"), quiet=True)
    assert newest(run.path).step == 15
    assert "stopped early" not in (run.path / "log.txt").read_text()


def test_a_run_that_stopped_early_is_not_trained_on_when_resumed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = script(LATE, monkeypatch)
    flags = "--engine.patience 2 --engine.select best"
    run = vitrail.train(configured(photos, tmp_path / "run", flags), quiet=True).path
    before, report = lines(run), (run / "report.html").read_text()
    monkeypatch.setattr(TrainStep, "feed", None)
    assert command(["train", "--resume", str(run)]) == 0
    assert "training had ended at step 12; it is not continued" in capsys.readouterr().err
    assert lines(run) == before
    assert equal(kept(run), evaluated[6])
    assert ("stopped early at epoch 4" in (run / "report.html").read_text()) == ("stopped early at epoch 4" in report)


# Resuming


def train_until_killed(config: RunConfig, kill_at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        script(LATE, patch)
        feed = TrainStep.feed

        def killed(self: TrainStep, piece: Batch) -> bool:
            done = feed(self, piece)
            if self.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        patch.setattr(TrainStep, "feed", killed)
        vitrail.train(config, quiet=True)


@pytest.mark.parametrize(
    ("kill_at", "flags"),
    [
        (8, ""),  # evaluated at 6, checkpoint of 4: the best evaluation is made again
        (11, "--engine.ema 0.8 --engine.keep 1"),  # checkpoint of 8, which has the weights of 6
        (12, "--engine.keep 1"),  # where patience ends, before it is evaluated
    ],
)
def test_kill_and_resume_gives_the_same_best_weights_and_the_same_last_step(
    kill_at: int, flags: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = f"--engine.select best --engine.patience 2 --engine.checkpoint_every 1.4 --model.drop_path 0.2 {flags}"
    process = start(train_until_killed, configured(photos, tmp_path / "killed", shared), kill_at)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    script(LATE, monkeypatch)
    whole = vitrail.train(configured(photos, tmp_path / "whole", shared), quiet=True).path
    resumed = vitrail.resume(tmp_path / "killed", quiet=True).path
    one, two = newest(whole), newest(resumed)
    assert one.step == two.step == 12
    assert one.facts == two.facts
    assert one.facts["best"] == {"metric": "top1", "value": 0.7, "step": 6, "waited": 2}
    assert equal(one.tensors, two.tensors)
    assert one.part("best")
    assert equal(kept(whole), kept(resumed))
    assert lines(whole) == lines(resumed)


def test_a_torn_checkpoint_is_passed_over_and_the_best_weights_are_those_of_the_one_before(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = script(RISES_AND_FALLS, monkeypatch)
    run = vitrail.train(configured(photos, tmp_path / "run", "--engine.select best"), quiet=True).path
    last = sorted((run / "checkpoint").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-200])
    assert newest(run).step == 12
    shutil.rmtree(run / "model")
    assert equal(kept(vitrail.resume(run, quiet=True).path), evaluated[6])


def test_a_full_disk_ends_the_run_and_the_best_weights_of_the_last_checkpoint_are_intact(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    evaluated, real, calls = script(RISES_AND_FALLS, monkeypatch), safetensors.torch.save_file, []

    def full(tensors: Weights, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match=r"step 12 could not be written .*No space left.*step 9 is intact.*--resume"):
            vitrail.train(configured(photos, tmp_path / "run", "--engine.select best --engine.keep 1"), quiet=True)
    assert equal(newest(tmp_path / "run").part("best"), evaluated[6])
    assert equal(kept(vitrail.resume(tmp_path / "run", quiet=True).path), evaluated[6])


def test_a_checkpoint_of_an_earlier_version_is_continued_and_selects_among_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(EARLIER, tmp_path / "run")
    assert "best" not in newest(run).facts
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("  evaluate_every: 0.66", "  select: best\n  patience: 9\n  evaluate_every: 0.2")
    )
    evaluated = script({step: -step for step in range(20)}, monkeypatch)
    (run / "model" / "model.safetensors").unlink()
    resumed = vitrail.resume(run, quiet=True)
    assert len(evaluated) > 1
    assert min(evaluated) > 4
    assert equal(kept(resumed.path), evaluated[min(evaluated)])


# Several processes


def one_rank(rank: int, folder: str, config: RunConfig) -> None:
    """One of two processes; the second sees a metric that rises all the time."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        evaluated = script(LATE if rank == 0 else {step: step / 100 for step in LATE}, patch)
        try:
            run = vitrail.train(config, quiet=True)
        finally:
            torch.distributed.destroy_process_group()
    facts = {"steps": sorted(evaluated), "same": equal(run.model.state_dict(), evaluated[6])}
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(facts))


@pytest.mark.slow
def test_all_processes_stop_together_and_keep_the_weights_that_the_first_selects(photos: Path, tmp_path: Path) -> None:
    config = configured(photos, tmp_path / "run", "--engine.select best --engine.patience 2")
    run_ranks(one_rank, str(tmp_path), config)
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert facts == {"steps": [3, 6, 9, 12], "same": True}
    assert newest(tmp_path / "run").step == 12
    assert equal(newest(tmp_path / "run").part("best"), kept(tmp_path / "run"))


# Settings


@pytest.mark.parametrize("flags", ["--engine.select best", "--engine.patience 2"])
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--engine.evaluate_every 0",
            r"needs evaluations on val during training; set --engine\.evaluate_every",
        ),
        ("--objective.kind attack", r"an attack trains a patch and no weights .*; leave it out"),
    ],
)
def test_what_val_cannot_decide_is_rejected_with_the_settings(
    flags: str, more: str, sentence: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        configured(photos, tmp_path / "run", f"{flags} {more}")
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("flags", ["--engine.select best", "--engine.patience 2"])
def test_data_without_val_or_labels_are_rejected_before_any_work(flags: str, photos: Path, tmp_path: Path) -> None:
    config = configured(photos, tmp_path / "run", f"{flags} --data.val_fraction 0")
    with pytest.raises(ValueError, match=r"has no val images to compute a metric .*set --data\.val_fraction above 0"):
        vitrail.train(config, quiet=True)
    config = configured(photos / "red", tmp_path / "run", flags)
    config = replace(config, objective=recipe("small-msf").objective, model=recipe("small-msf").model)
    with pytest.raises(ValueError, match="has no labels to compute a metric on val from; leave it out"):
        vitrail.train(config, quiet=True)
    assert not (tmp_path / "run").exists()


def test_both_settings_change_the_run_of_a_study(photos: Path, tmp_path: Path) -> None:
    hashes = [
        run_hash(configured(photos, tmp_path / "run", flags))
        for flags in ("", "--engine.select best", "--engine.patience 2", "--engine.select last --engine.patience 0")
    ]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]


def test_short_trials_of_a_study_accept_runs_that_select(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(photos, tmp_path / "run", "--engine.select best --engine.patience 2")
    tried = smoke(Study("s", config, {"best": {}, "last": {"engine": {"select": "last"}}})).configs
    assert [tried[name].engine.select for name in ("best", "last")] == ["best", "last"]
    written: list[RunConfig] = []

    def instead(self: budgets.Worker, words: list[str], _: Path) -> None:
        written.append(from_mapping(load_yaml(words[words.index("--config") + 1])))
        raise RuntimeError

    monkeypatch.setattr(budgets.Worker, "submit", instead)
    with pytest.raises(RuntimeError):
        budgets.probe(config)
    assert (written[0].engine.select, written[0].engine.patience) == ("last", 0)
