"""From noise to an image: the probability-flow equation of diffusion, in steps.

With lambda = log(signal / noise), the exact solution from time s to time t is

    z_t = (noise_t / noise_s) z_s + noise_t * integral over lambda from s to t of e^lambda x(z, lambda)

in which x is the image that the network sees in z. DDIM takes x as constant over a step (Song and others 2021): first
order. DPM-Solver++(2M) takes it as the line through this x and the one before it (Lu and others 2022): second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitrail.model.noise import NoiseSchedule

Solver = Literal["ddim", "dpm"]


def solve(
    clean: Callable[[Tensor, float], Tensor],
    z: Tensor,
    times: Sequence[float],
    schedule: NoiseSchedule,
    solver: Solver = "dpm",
) -> Tensor:
    """Follow z [batch, ...] from times[0] down to times[-1]; `clean(z, time)` says which image it sees.

    One call of `clean` a step. At time 0 no noise is left, whatever the schedule says; a step that ends there is of
    first order, since lambda is infinite.
    """
    signal, noise = (level.tolist() for level in schedule.levels(torch.tensor(times, dtype=torch.float64)))
    if times[-1] == 0:
        signal[-1], noise[-1] = 1.0, 0.0
    before: Tensor | None = None
    reach = 0.0  # of the step before, in lambda
    for i in range(len(times) - 1):
        seen = clean(z, times[i])
        shrink = noise[i + 1] / noise[i]
        fall = shrink * signal[i] / signal[i + 1]  # e^-h, with h the step in lambda
        guess = seen
        step = -math.log(fall) if fall > 0 else math.inf
        if solver == "dpm" and before is not None and fall > 0:
            guess = seen + (seen - before) * (step / (2 * reach))
        z = shrink * z + signal[i + 1] * (1 - fall) * guess
        before, reach = seen, step
    return z


def times_from(r: float, steps: int, made: int) -> list[float]:
    """Times of `made` steps from r down to 0, the last ones of `steps` even steps from 1.

    The first begins at r itself, so that the noise an image carries is always that of its time.
    """
    return [r, *(i / steps for i in range(made - 1, -1, -1))]
