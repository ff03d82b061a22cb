"""Trackers that show the lines of `metrics.jsonl`, offline in the run folder: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

FOLDER = "tensorboard"  # in the run folder
PLACES = ("step", "epoch")
EXTRAS = {"tensorboard": "track", "mlflow": "mlflow", "wandb": "wandb"}  # tracker, and package: extra


class Tracker(Protocol):
    """Shows lines of `metrics.jsonl`; `step` of the constructor is where the run continues."""

    def write(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, by split and name.

    >>> scalars({"step": 2, "split": "val", "top1": 0.5, "final": True})
    {'val/top1': 0.5}
    """
    numbers = {k: v for k, v in line.items() if k not in PLACES and isinstance(v, int | float)}
    return {f"{line['split']}/{name}": v for name, v in numbers.items() if not isinstance(v, bool)}


class TensorBoard:
    """Event files in RUN/tensorboard, a curve for every number; points after `step` are removed."""

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run / FOLDER), purge_step=step + 1 if step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, int(line["step"]))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class MlflowTracker:
    """The store that MLFLOW_TRACKING_URI names, else files in RUN/mlflow; a resumed run is a second one there.

    To see the files: `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlflow`.
    """

    def __init__(self, run: Path, step: int) -> None:
        import mlflow

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which later versions of MLflow 3 want
        files = (run / "mlflow").absolute().as_uri()
        client = mlflow.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or files)
        known = client.get_experiment_by_name("vitrail")
        experiment = client.create_experiment("vitrail") if known is None else known.experiment_id
        name = f"{run.name} from step {step}" if step else run.name
        self.client, self.run_id = client, client.create_run(experiment, run_name=name).info.run_id

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in scalars(line).items():
            self.client.log_metric(self.run_id, name, value, step=int(line["step"]))

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class WandbTracker:
    """An offline run in RUN/wandb (`wandb sync RUN/wandb/offline-*`); a resumed run is a second one there."""

    def __init__(self, run: Path, step: int) -> None:
        import wandb

        name = f"{run.name} from step {step}" if step else run.name
        self.run = wandb.init(project="vitrail", name=name, dir=str(run), mode="offline")

    def write(self, line: Mapping[str, Any]) -> None:
        self.run.log({**scalars(line), "trainer/step": int(line["step"])})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "mlflow": MlflowTracker, "wandb": WandbTracker}


def reject_untracked(track: str) -> None:
    """Raises `ValueError` before work starts, where the tracker is not installed."""
    if track in EXTRAS and find_spec(track) is None:
        raise ValueError(
            f"engine.track: {track} is not installed; pip install vitrail[{EXTRAS[track]}], or leave --engine.track out"
        )
