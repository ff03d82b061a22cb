"""A run that is asked to stop in the middle, as by a job scheduler."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def not_ignored(number: int) -> Iterator[None]:
    """A signal has its effect here and in processes begun here, also where nohup or a background shell ignores it."""
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    try:
        yield
    finally:
        signal.signal(number, before)
