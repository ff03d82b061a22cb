"""How long each variant of a study may train, so that all spend the same: epochs, time, or multiply-accumulates.

The baseline keeps its length; the others get as many epochs as cost the same. What was chosen is written down, because
a time that is measured again would give another length, and with it other runs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.compare.jobs import failure_reason
from vitrail.compare.study import Study, run_hash
from vitrail.config import RunConfig, dump
from vitrail.engine.run_folder import RunFolder
from vitrail.files import write_text
from vitrail.model.cost import cost
from vitrail.run.run_data import open_run
from vitrail.run.train import build_model

PROBE_SECONDS = 20.0  # of training, after the first steps
PROBE_LINES = 4
PROBE_STEPS = 10  # steps a line
PROBE_PATIENCE = 600.0

Lengths = dict[str, dict[str, float]]  # variant -> {"epochs": 7.3} or {"steps": 100}


def lengths_of(
    study: Study, root: Path, *, tell: Callable[[str], None] | None = None
) -> tuple[Lengths, dict[str, str]]:
    """What each variant's length is set to, and in words why; measured once and kept in `root/lengths.json`.

    Studies of one root share what was measured, and with it the runs that have such a length. Only the length changes:
    warm-up and cool-down keep the epochs that the configuration gives them.

    A variant that cannot be measured keeps the base's length: its run will fail by itself and say why. Raises
    `ValueError` where that is the baseline.
    """
    if study.budget in ("epochs", "none"):
        return {}, {name: _told(config) for name, config in study.configs.items()}
    kept = _read(root / "lengths.json")
    units: dict[str, float] = {}
    for name, config in study.configs.items():
        key = f"{study.budget} {run_hash(config, seed=False)}"
        if key not in kept:
            if tell is not None:
                tell(f"{name}: measuring for equal {study.budget}")
            try:
                kept[key] = _cost_of_an_image(study.budget, config)
            except (ValueError, OSError, RuntimeError) as error:
                if name == study.baseline:
                    raise ValueError(f"budget: the baseline {name} cannot be measured: {error}") from None
                continue
            kept = {**_read(root / "lengths.json"), **kept}  # another study may have written
            write_text(root / "lengths.json", json.dumps(kept, indent=1))
        units[name] = kept[key]
    made: Lengths = {}
    said: dict[str, str] = {}
    base = study.configs[study.baseline]
    total = _images(base) * units[study.baseline]
    for name, config in study.configs.items():
        said[name] = _told(config)
        if name == study.baseline or name not in units:
            continue
        made[name] = scaled(config, total / units[name])
        share = made[name].get("epochs", made[name].get("steps", 0.0)) / _own_length(config)
        said[name] = f"{_told(replace(config, optim=replace(config.optim, **made[name])))} ({share:.3g} x)"  # type: ignore[arg-type]
    return made, said


def scaled(config: RunConfig, images: float, count: int | None = None) -> dict[str, float]:
    """The setting that makes a run see about this many images, in the unit in which its length is given.

    Epochs are rounded to four digits, so that a length can be written down and read again exactly.
    """
    if config.optim.steps is not None:
        return {"steps": max(1, round(images / config.data.batch))}
    count = _count(config) if count is None else count
    return {"epochs": float(f"{images / count:.4g}")}


def _cost_of_an_image(budget: str, config: RunConfig) -> float:
    """Multiply-accumulates (forward and backward: three forward passes) or seconds of one training image.

    Teachers and other models that only help to train are not counted as multiply-accumulates.
    """
    if budget == "macs":
        model = build_model(replace(config.model, weights="none"), config, open_run(config.data))
        return 3.0 * cost(model, model.preprocess.size).macs
    return 1 / probe(config)


def probe(config: RunConfig, seconds: float = PROBE_SECONDS) -> float:
    """Images a second of real training steps: a run that is stopped before it ever looks at val or test.

    Raises `RuntimeError` where it cannot be begun.
    """
    place = Path(tempfile.mkdtemp(prefix="vitrail-probe-"))
    try:
        engine = replace(
            config.engine,
            evaluate_every=0.0,
            checkpoint_every=0.0,
            log_every=min(PROBE_STEPS, config.engine.log_every),
        )
        optim = replace(config.optim, steps=10**6)  # longer than it is ever watched
        write_text(place / "probe.yaml", dump(replace(config, engine=engine, optim=optim, out=None)))
        words = ["train", "--config", str(place / "probe.yaml"), "--out", str(place / "run")]
        with (place / "log.txt").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "vitrail", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            rates = _watch(process, RunFolder(place / "run"), seconds)
        finally:
            process.terminate()
            process.wait()
        if not rates:
            raise RuntimeError(failure_reason(place / "log.txt", process.returncode))
        return statistics.median(rates)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], run: RunFolder, seconds: float) -> list[float]:
    """Rates of the lines after the first two, in which kernels are chosen and graphs compiled."""
    began: float | None = None
    patience = time.monotonic() + PROBE_PATIENCE
    rates: list[float] = []
    while process.poll() is None and time.monotonic() < patience:
        rates = [line["images_per_second"] for line in run.read_metrics() if "images_per_second" in line][2:]
        if rates and began is None:
            began = time.monotonic()
        if began is not None and len(rates) >= PROBE_LINES and time.monotonic() - began >= seconds:
            break
        time.sleep(0.1)
    return rates


def _images(config: RunConfig) -> float:
    """Training images that a run sees in all."""
    if config.optim.steps is not None:
        return float(config.optim.steps * config.data.batch)
    return config.optim.epochs * _count(config)


def _count(config: RunConfig) -> int:
    return len(open_run(config.data)["train"])


def _own_length(config: RunConfig) -> float:
    return float(config.optim.steps or config.optim.epochs)


def _told(config: RunConfig) -> str:
    return f"{config.optim.steps} steps" if config.optim.steps is not None else f"{config.optim.epochs:g} epochs"


def _read(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return {}
    return dict(found) if isinstance(found, dict) else {}
