"""Learning rate and weight decay as functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitrail.engine.config import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """A run's length and its curves, all in optimiser steps."""

    config: OptimConfig
    steps: int  # length of the run
    warmup: int
    cooldown: int
    drop_every: int  # steps between the drops of the step schedule
    peak: float  # learning rate after warm-up, scaled by batch

    def lr(self, step: int) -> float:
        """Learning rate of a step (0 is the first)."""
        if step < self.warmup:
            start = min(self.config.warmup_lr, self.peak)
            return start + (self.peak - start) * (step + 1) / (self.warmup + 1)
        floor = min(self.config.floor, self.peak)
        if self.config.schedule == "constant":
            return self.peak
        if self.config.schedule == "step":
            return self.peak * self.config.step_factor ** ((step - self.warmup) // self.drop_every)
        length = max(1, self.steps - self.warmup - self.cooldown)
        done = min(1.0, (step - self.warmup) / length)
        if self.config.schedule == "linear":
            return floor + (self.peak - floor) * (1 - done)
        return floor + (self.peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    def weight_decay(self, step: int) -> float:
        """Weight decay of a step: constant, or on a cosine to its end value."""
        start, end = self.config.weight_decay, self.config.weight_decay_end
        if end is None:
            return start
        done = min(1.0, step / max(1, self.steps - 1))
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def make_schedule(config: OptimConfig, batch: int, images: int) -> Schedule:
    """The schedule of a run on `images` training images; epochs become steps here, once."""
    steps = config.steps or max(1, math.ceil(config.epochs * images / batch - 1e-9))

    def in_steps(epochs: float) -> int:
        return round(epochs * images / batch)

    return Schedule(
        config=config,
        steps=steps,
        warmup=min(in_steps(config.warmup), steps // 2),
        cooldown=min(in_steps(config.cooldown), steps // 2),
        drop_every=max(1, in_steps(config.step_every)),
        peak=config.lr * (batch / config.lr_batch if config.lr_batch else 1.0),
    )
