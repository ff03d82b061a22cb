"""Diffusion models for GeNIe: their interface, the solvers of the probability-flow equation, and models trained here.

With lambda = log(signal / noise), the exact solution from time s to time t is

    z_t = (noise_t / noise_s) z_s + noise_t * integral over lambda from s to t of e^lambda x(z, lambda)

in which x is the clean image that the network predicts from z. DDIM takes x as constant over a step (Song et al. 2021):
first order. DPM-Solver++(2M) takes it as the line through this x and the one before it (Lu et al. 2022): second order.

GeNIe (Abbasi Koohpayegani et al., 2023, arXiv 2312.02548) needs X_r = STDiff(X_S, T, r): noise the image part of the
way, then denoise it under another class. `r` is a time in training: of the steps of a whole sampling, only those with a
time of at most r are taken. How much noise that is depends on the schedule; `vitrail.model.trunks.denoiser.equal_noise`
converts between schedules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.model.classifier import Classifier
from vitrail.model.config import NoiseScheduleName
from vitrail.model.optimize import Replay
from vitrail.model.trunks.denoiser import Denoiser, NoiseSchedule, equal_noise

PURE_NOISE = 0.999  # an r above it means that nothing of the image is left

Solver = Literal["ddim", "dpm"]


def solve(
    clean: Callable[[Tensor, float], Tensor],
    z: Tensor,
    times: Sequence[float],
    schedule: NoiseSchedule,
    solver: Solver = "dpm",
) -> Tensor:
    """Integrate z [batch, ...] from times[0] down to times[-1]; `clean(z, time)` predicts the clean image.

    One call of `clean` per step. At time 0 no noise is left, whatever the schedule says; a step that ends there is of
    first order, since lambda is infinite.
    """
    signal, noise = (level.tolist() for level in schedule.levels(torch.tensor(times, dtype=torch.float64)))
    if times[-1] == 0:
        signal[-1], noise[-1] = 1.0, 0.0
    before: Tensor | None = None
    last_step = 0.0  # in lambda
    for i in range(len(times) - 1):
        image = clean(z, times[i])
        shrink = noise[i + 1] / noise[i]
        decay = shrink * signal[i] / signal[i + 1]  # e^-h, with h the step in lambda
        step = -math.log(decay) if decay > 0 else math.inf
        estimate = image
        if solver == "dpm" and before is not None and decay > 0:
            estimate = image + (image - before) * (step / (2 * last_step))
        z = shrink * z + signal[i + 1] * (1 - decay) * estimate
        before, last_step = image, step
    return z


def times_from(r: float, steps: int, taken: int) -> list[float]:
    """Times of `taken` steps from r down to 0, the last ones of `steps` even steps from 1.

    The first begins at r itself, so that the noise an image carries is always that of its time.
    """
    return [r, *(i / steps for i in range(taken - 1, -1, -1))]


class Diffuser(ABC):
    """Generates images of a class, from another image or from noise alone. Each depends on its own seed alone.

    target [batch] are indices of `classes`; seeds [batch] whole numbers.
    """

    name: str
    classes: tuple[str, ...]
    steps: int
    guidance: float  # 1: none
    batch: int
    size: int  # side of the images that it generates

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        """Images [batch, 3, height, width], bytes or floats in 0..1, changed towards `target`; of the same dtype."""
        target, seeds = check_request(self.classes, target, seeds, images)
        parts = [self._run(images[b], target[b], r, seeds[b]).to(images.device) for b in self._batches(len(images))]
        return as_given(torch.cat(parts), images.dtype) if parts else images.clone()

    def txt2img(self, target: Tensor, seeds: Tensor) -> Tensor:
        """Images of the target classes from noise alone: bytes [batch, 3, height, width]."""
        target, seeds = check_request(self.classes, target, seeds)
        parts = [self._run(None, target[b], 1.0, seeds[b]) for b in self._batches(len(target))]
        images = torch.cat(parts) if parts else torch.empty(0, 3, self.size, self.size)
        return as_given(images, torch.uint8).cpu()

    def evaluations(self, r: float) -> int:
        """Network evaluations per image: two per step where it is guided."""
        return self.steps_taken(r) * (1 if self.guidance == 1 else 2)

    @abstractmethod
    def steps_taken(self, r: float) -> int:
        """Steps from noise level r on."""

    @abstractmethod
    def _run(self, images: Tensor | None, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        """Images in -1..1 of one batch; from noise alone without `images`."""

    def _batches(self, count: int) -> list[slice]:
        return [slice(first, first + self.batch) for first in range(0, count, self.batch)]


def steps_run(r: float, steps: int) -> int:
    """How many of `steps` are taken from noise level `r` on: floor(r * steps).

    >>> [steps_run(r, 50) for r in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    [15, 25, 30, 35, 40, 45, 50]
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r is a share of the noise, so {r:g} must lie between 0 and 1")
    return steps if r > PURE_NOISE else math.floor(r * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996


def check_request(
    classes: Sequence[str], target: Tensor, seeds: Tensor, images: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Targets and seeds as int64; raises `ValueError` where they do not fit the images or the classes."""
    target, seeds = (torch.as_tensor(t).to(torch.int64) for t in (target, seeds))
    count = len(target) if images is None else len(images)
    if target.shape != (count,) or seeds.shape != (count,):
        raise ValueError(
            f"{count} images need as many targets and seeds, not {list(target.shape)} and {list(seeds.shape)}"
        )
    if count and not 0 <= int(target.min()) <= int(target.max()) < len(classes):
        raise ValueError(f"targets must be places in the {len(classes)} classes, from 0 to {len(classes) - 1}")
    if images is not None:
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be [batch, 3, height, width], not {list(images.shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images must be bytes (uint8) or floats in 0..1, not {images.dtype}")
    return target, seeds


def as_signed(images: Tensor) -> Tensor:
    """Bytes, or floats in 0..1, to float32 in -1..1."""
    return images.to(torch.float32) / 127.5 - 1 if images.dtype == torch.uint8 else images.to(torch.float32) * 2 - 1


def as_given(signed: Tensor, like: torch.dtype) -> Tensor:
    """Floats in -1..1 to bytes, or to floats in 0..1."""
    if like == torch.uint8:
        return ((signed + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return ((signed + 1) / 2).clamp(0, 1).to(like)


class OwnDiffuser(Diffuser):
    """Runs a denoiser (`vitrail train small-diffusion`) with guidance, on pixels.

    `guidance` g extrapolates from the prediction without a class through that with it: none + g (class - none); 1
    leaves out the former, and half of the cost. Both are rows of one call. `clip` keeps predicted images in -1..1.

    `r_schedule` is the schedule on which r is stated (none: that of the model). With `scaled_linear`, Stable
    Diffusion's, r means as much noise as in papers, whatever schedule the model was trained with.

    Noise is a function of an image's seed alone, to the bit. Outputs of the network differ in the last digits between
    batches of different sizes, where libraries choose other kernels; `exact` always computes `batch` rows, so that an
    image is the same whatever else is in its batch. On CUDA the network is then one graph, which is several times
    faster where images are small; its weights must stay where they are.
    """

    def __init__(
        self,
        model: Classifier | str | Path,
        *,
        steps: int = 50,
        solver: Solver = "dpm",
        guidance: float = 2.0,
        batch: int = 256,
        clip: bool = True,
        exact: bool = False,
        r_schedule: NoiseScheduleName | None = None,
        device: str | torch.device | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, Classifier):
            from vitrail.model.weights import load_model

            model = load_model(model)
        if not isinstance(model.trunk, Denoiser):
            raise ValueError("this model makes no images; train one that does with: vitrail train small-diffusion")
        if steps < 1 or batch < 1:
            raise ValueError(f"steps and batch must be at least 1, not {steps} and {batch}")
        self.model = model.to(device).eval() if device is not None else model.eval()
        self.name = str(model.spec.get("name") or "denoiser")
        self.classes = model.classes
        self.size = model.preprocess.size
        self.steps, self.solver, self.guidance = steps, solver, guidance
        self.batch, self.clip, self.exact, self.autocast = batch, clip, exact, autocast
        self.r_schedule = r_schedule
        self._graphs: dict[torch.Size, Replay] = {}

    @property
    def network(self) -> Denoiser:
        assert isinstance(self.model.trunk, Denoiser)
        return self.model.trunk

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def time(self, r: float) -> float:
        """The model's own time for an r as it is stated; noise alone stays noise alone."""
        schedule = self.network.schedule.name
        return r if r > PURE_NOISE else equal_noise(r, self.r_schedule or schedule, schedule)

    def steps_taken(self, r: float) -> int:
        return steps_run(self.time(r), self.steps)

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        r = self.time(r)
        check_request(self.classes, target, seeds, images)
        if tuple(images.shape[2:]) != (self.size, self.size):
            raise ValueError(
                f"the model makes images of {self.size}x{self.size} pixels, these have "
                f"{images.shape[2]}x{images.shape[3]}; resize them first"
            )
        if steps_run(r, self.steps) == 0 or not len(images):
            return images.clone()
        return super().__call__(images, target, r, seeds)

    def start(self, images: Tensor | None, r: float, seeds: Tensor) -> Tensor:
        """Start of denoising, [batch, 3, height, width]: images at time r, or noise alone above 0.999."""
        noise = normal_noise(seeds.to(self.device), 3, self.size, self.size)
        if images is None or r > PURE_NOISE:
            return noise
        signed = as_signed(images.to(self.device))
        return self.network.schedule.noised(signed, noise, torch.full((len(signed),), r, device=self.device))

    @torch.inference_mode()
    def _run(self, images: Tensor | None, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        count = len(seeds)
        if self.exact and count < self.batch:
            fill = [i % count for i in range(self.batch)]
            images, target, seeds = (None if images is None else images[fill]), target[fill], seeds[fill]
        label = target.to(self.device)
        z = self.start(images, r, seeds)
        if self.device.type == "cuda":
            z = z.contiguous(memory_format=torch.channels_last)
        times = times_from(1.0 if r > PURE_NOISE else r, self.steps, steps_run(r, self.steps))
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            images = solve(lambda z, time: self._clean(z, time, label), z, times, self.network.schedule, self.solver)
        return images[:count].clamp(-1, 1)

    def _clean(self, z: Tensor, time: float, label: Tensor) -> Tensor:
        """The clean image that the guided network predicts from z."""
        network, rows = self.network, z
        if self.guidance != 1:
            rows, label = torch.cat([z, z]), torch.cat([label, torch.full_like(label, network.no_class)])
        at = torch.full((len(rows),), time, device=z.device)
        output = self._network_output(rows, at, label)
        if self.guidance != 1:
            conditional, unconditional = output.chunk(2)
            output = unconditional + self.guidance * (conditional - unconditional)
        image = network.schedule.clean(z, output, at[: len(z)])
        return image.clamp(-1, 1) if self.clip else image

    def _network_output(self, rows: Tensor, at: Tensor, label: Tensor) -> Tensor:
        if not (self.exact and rows.is_cuda):
            return self.network(rows, at, label)
        if rows.shape not in self._graphs:
            self._graphs[rows.shape] = Replay(self.network, rows, at, label)
        output: Tensor = self._graphs[rows.shape](rows, at, label).clone()
        return output
