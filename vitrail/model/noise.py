"""How much of an image is left at a time between 0 (all of it) and 1 (next to none).

At time t an image x and noise n are seen as  z = signal(t) x + noise(t) n,  with signal² + noise² = 1. A network may
guess the noise itself (`eps`) or the velocity  v = signal n - noise x  (Salimans and Ho 2022); either gives x back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitrail.model.config import NoisePrediction, NoiseScheduleName

SCALED_LINEAR = (0.00085, 0.012, 1000)  # first and last variance, steps: Stable Diffusion's
LAST_ANGLE = math.pi / 2 * 0.999  # at time 1 a signal of 0.0016 is left: `eps` divides by it


class NoiseSchedule:
    """Signal and noise at any time.

    `cosine`: an angle that grows evenly. `scaled_linear`: Stable Diffusion's thousand steps; time t is step 1000 t, in
    between the logarithm is interpolated, so that every step has exactly its published signal level.
    """

    def __init__(self, name: NoiseScheduleName = "cosine", prediction: NoisePrediction = "v") -> None:
        self.name, self.prediction = name, prediction

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Signal and noise at times of any shape, float32 unless times are float64."""
        kind = torch.float64 if time.dtype == torch.float64 else torch.float32
        if self.name == "cosine":
            angle = time.to(torch.float64) * LAST_ANGLE
            return angle.cos().to(kind), angle.sin().to(kind)
        first, last, steps = SCALED_LINEAR
        # Made where it is used, by a few small kernels: a table on the host would have to be copied.
        betas = torch.linspace(first**0.5, last**0.5, steps, dtype=torch.float64, device=time.device).square()
        kept = torch.log1p(-betas).cumsum(0)
        place = (time.to(torch.float64) * steps).clamp(0, steps - 1)
        below = place.floor().clamp(max=steps - 2)
        low = below.to(torch.int64)
        log = kept[low] + (kept[low + 1] - kept[low]) * (place - below)
        return (log / 2).exp().to(kind), (-torch.expm1(log)).sqrt().to(kind)

    def noised(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Images [batch, ...] at times [batch]."""
        signal, share = self._per_image(time, images)
        return signal * images + share * noise

    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the network is to guess."""
        if self.prediction == "eps":
            return noise
        signal, share = self._per_image(time, images)
        return signal * noise - share * images

    def clean(self, seen: Tensor, guessed: Tensor, time: Tensor) -> Tensor:
        """The image that follows from a noised one and the network's guess."""
        signal, share = self._per_image(time, seen)
        if self.prediction == "eps":
            return (seen - share * guessed) / signal
        return signal * seen - share * guessed

    def noise(self, seen: Tensor, guessed: Tensor, time: Tensor) -> Tensor:
        """The noise that follows from a noised image and the network's guess."""
        if self.prediction == "eps":
            return guessed
        signal, share = self._per_image(time, seen)
        return share * seen + signal * guessed

    def signal_to_noise(self, time: Tensor) -> Tensor:
        """signal² / noise² at times of any shape."""
        signal, share = self.levels(time)
        return (signal / share.clamp_min(1e-6)).square()

    def time_at(self, signal_to_noise: float) -> float:
        """When signal² / noise² is this; 0 or 1 where it is never so large, or so small."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            more = float(self.signal_to_noise(torch.tensor(middle, dtype=torch.float64))) > signal_to_noise
            low, high = (middle, high) if more else (low, middle)
        return high

    def _per_image(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        signal, share = self.levels(time)
        shape = (-1,) + (1,) * (like.ndim - 1)
        return signal.to(like.dtype).view(shape), share.to(like.dtype).view(shape)


def equal_noise(r: float, stated: NoiseScheduleName, used: NoiseScheduleName) -> float:
    """The time of the schedule `used` with the signal-to-noise ratio that `stated` has at time r.

    Papers state r on Stable Diffusion's schedule, which leaves less of an image at equal times than the cosine: GeNIe's
    r of 0.8 (Koohpayegani et al. 2023, arXiv 2312.02548) is 0.88 on the cosine. Raises `ValueError` for an r outside
    of 0 to 1.

    >>> [round(equal_noise(r, "scaled_linear", "cosine"), 2) for r in (0.5, 0.6, 0.7, 0.8, 0.9)]
    [0.65, 0.74, 0.82, 0.88, 0.93]
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r is a share of the noise, so {r:g} must lie between 0 and 1")
    if stated == used:
        return r
    ratio = NoiseSchedule(stated).signal_to_noise(torch.tensor(r, dtype=torch.float64))
    return NoiseSchedule(used).time_at(float(ratio))
