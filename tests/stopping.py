"""A run that is asked to stop in the middle, as by a job scheduler."""

from __future__ import annotations

import os
import signal

import pytest

from vitrail.data.batch import Batch
from vitrail.engine.step import TrainStep


def stop_after(step: int, patch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """From now on, training gets a signal once so many steps are made."""
    feed = TrainStep.feed

    def interrupted(self: TrainStep, piece: Batch) -> bool:
        done = feed(self, piece)
        if done and self.step == step:
            os.kill(os.getpid(), number)
        return done

    patch.setattr(TrainStep, "feed", interrupted)
