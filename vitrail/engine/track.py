"""The rows of `metrics.jsonl`, logged to TensorBoard as well."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"  # in the run folder
PLACES = ("step", "epoch")


class TensorBoard:
    """Event files in RUN/tensorboard, a curve for every number of every split.

    `step` is where the run goes on: what was written after it is taken back. Raises `ValueError`, with what to do,
    where TensorBoard is not installed.
    """

    def __init__(self, run: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ValueError(NOT_THERE) from None
        self.writer = SummaryWriter(str(run / FOLDER), purge_step=step + 1 if step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        split = str(line["split"])
        for name, value in line.items():
            if name not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
                self.writer.add_scalar(f"{split}/{name}", value, int(line["step"]))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


NOT_THERE = "engine.track: tensorboard is not installed; pip install vitrail[track], or leave engine.track out"


def refuse_untracked(track: str) -> None:
    """Raises `ValueError` before work starts, where the tracker is not installed."""
    from importlib.util import find_spec

    if track == "tensorboard" and find_spec("tensorboard") is None:
        raise ValueError(NOT_THERE)
