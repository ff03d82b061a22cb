"""How long each variant of a study may train, so that all spend the same: epochs, time, or multiply-accumulates.

The baseline keeps its length; the others get as many epochs as cost the same. The choice is stored, because a time
that is measured again would give another length, and with it other runs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.compare.jobs import IdleWorkers, failure_reason, given_device, visible_devices
from vitrail.compare.study import Study, run_hash
from vitrail.compare.worker import Worker
from vitrail.config import RunConfig, dump
from vitrail.engine.run_folder import RunFolder
from vitrail.files import parse_json, write_text
from vitrail.model.cost import cost
from vitrail.run.launch import STOPPED
from vitrail.run.run_data import open_run
from vitrail.run.train import build_model

PROBE_SECONDS = 20.0  # of training, after the first steps
PROBE_LINES = 4
PROBE_STEPS = 10  # steps per line
PROBE_PATIENCE = 600.0

Lengths = dict[str, dict[str, float]]  # variant -> {"epochs": 7.3} or {"steps": 100}


def lengths_of(
    study: Study, root: Path, report: Callable[[str], None] = lambda _: None
) -> tuple[Lengths, dict[str, str]]:
    """The length of each variant, and the reason in words; measured once and kept in `root/lengths.json`.

    Studies of one root share what was measured, and with it the runs that have such a length. Only the length changes:
    warm-up and cool-down keep the epochs that the configuration gives them.

    A variant that cannot be measured keeps the base's length: its run will fail by itself and say why. Raises
    `ValueError` where that is the baseline.
    """
    texts = {name: _length_text(config) for name, config in study.configs.items()}
    if study.budget in ("epochs", "none"):
        return {}, texts
    kept = _read(root / "lengths.json")
    costs: dict[str, float] = {}
    for name, config in study.configs.items():
        key = f"{study.budget} {run_hash(config, seed=False)}"
        if key not in kept:
            report(f"{name}: measuring for equal {study.budget}")
            try:
                kept[key] = _cost_per_image(study.budget, config)
            except (ValueError, OSError, RuntimeError) as error:
                if name == study.baseline:
                    raise ValueError(f"budget: the baseline {name} cannot be measured: {error}") from None
                continue
            kept = {**_read(root / "lengths.json"), **kept}  # another study may have written
            write_text(root / "lengths.json", json.dumps(kept, indent=1))
        costs[name] = kept[key]
    base = study.configs[study.baseline]
    images = base.optim.epochs * _count(base) if base.optim.steps is None else base.optim.steps * base.data.batch
    lengths: Lengths = {}
    for name, config in study.configs.items():
        if name != study.baseline and name in costs:
            lengths[name] = scaled(config, images * costs[study.baseline] / costs[name])
            share = next(iter(lengths[name].values())) / float(config.optim.steps or config.optim.epochs)
            changed = replace(config, optim=replace(config.optim, **lengths[name]))  # type: ignore[arg-type]
            texts[name] = f"{_length_text(changed)} ({share:.3g} x)"
    return lengths, texts


def scaled(config: RunConfig, images: float, count: int | None = None) -> dict[str, float]:
    """The setting that makes a run see about this many images, in the unit in which its length is given.

    Epochs are rounded to four digits, so that a length can be written down and read again exactly.
    """
    if config.optim.steps is not None:
        return {"steps": max(1, round(images / config.data.batch))}
    count = _count(config) if count is None else count
    return {"epochs": float(f"{images / count:.4g}")}


def _cost_per_image(budget: str, config: RunConfig) -> float:
    """Multiply-accumulates (forward and backward: three forward passes) or seconds of one training image.

    Teachers and other models that only help to train are not counted as multiply-accumulates.
    """
    if budget == "macs":
        model = build_model(replace(config.model, weights="none"), config, open_run(config.data))
        return 3.0 * cost(model, model.preprocess.size).macs
    return 1 / probe(config)


def probe(
    config: RunConfig, seconds: float = PROBE_SECONDS, steps: int = PROBE_STEPS, idle: IdleWorkers | None = None
) -> float:
    """Images/s of real training steps, so many at a time: a run that is stopped before it is ever evaluated.

    A worker of `idle` trains it, and is left there. Raises `RuntimeError` where it cannot be begun.
    """
    folder, workers = Path(tempfile.mkdtemp(prefix="vitrail-probe-")), idle or IdleWorkers()
    try:
        log_every = min(steps, config.engine.log_every)
        engine = replace(config.engine, evaluate_every=0.0, checkpoint_every=0.0, log_every=log_every)
        engine = replace(engine, select="last", patience=0)
        optim = replace(config.optim, steps=10**6)  # longer than it is ever watched
        write_text(folder / "probe.yaml", dump(replace(config, engine=engine, optim=optim, out=None)))
        device, log = next(iter(visible_devices()), None), folder / "log.txt"
        worker = workers.take(device) or Worker(log, given_device(device))
        try:
            worker.submit(["--config", str(folder / "probe.yaml"), "--out", str(folder / "run")], log)
            speeds, code = _watch(worker, RunFolder(folder / "run"), seconds)
        except BaseException:
            worker.stop()
            worker.end()
            raise
        if code == STOPPED and worker.alive:
            workers.workers.append((device, worker))
        else:  # its state is unknown
            worker.end()
        if not speeds:
            raise RuntimeError(failure_reason(log, code))
        return statistics.median(speeds)
    finally:
        if idle is None:
            workers.end()
        shutil.rmtree(folder, ignore_errors=True)


def _watch(worker: Worker, run: RunFolder, seconds: float) -> tuple[list[float], int]:
    """Images/s of the lines after the first two, in which kernels are chosen and graphs compiled; and the exit code."""
    began: float | None = None
    patience = time.monotonic() + PROBE_PATIENCE
    speeds: list[float] = []
    while (code := worker.exit_code()) is None and time.monotonic() < patience:
        speeds = [line["images_per_second"] for line in run.read_metrics() if "images_per_second" in line][2:]
        if speeds and began is None:
            began = time.monotonic()
        if began is not None and len(speeds) >= PROBE_LINES and time.monotonic() - began >= seconds:
            break
        time.sleep(0.1)
    if code is None:
        worker.stop()
    while code is None and (code := worker.exit_code()) is None:
        time.sleep(0.05)
    return speeds, code


def _count(config: RunConfig) -> int:
    return len(open_run(config.data)["train"])


def _length_text(config: RunConfig) -> str:
    return f"{config.optim.steps} steps" if config.optim.steps is not None else f"{config.optim.epochs:g} epochs"


def _read(path: Path) -> dict[str, float]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return dict(values) if isinstance(values, dict) else {}
