"""A diffusion model that was trained here, as a `Diffuser`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from vitrail.data.device_pixels import normal_noise
from vitrail.generate.diffuser import PURE_NOISE, as_given, as_signed, check_request, steps_run
from vitrail.generate.solvers import Solver, solve, times_from
from vitrail.model.classifier import Classifier
from vitrail.model.config import NoiseScheduleName
from vitrail.model.denoiser import Denoiser
from vitrail.model.noise import equal_noise
from vitrail.model.replay import Replay


class OwnDiffuser:
    """Runs a denoiser (`vitrail train small-diffusion`) with guidance, on pixels.

    `guidance` g moves every guess from that without a class through that with the class: none + g (class - none); 1
    leaves out the former, and half of the cost. Both are rows of one call. `clip` keeps guessed images in -1..1.

    `r_schedule` is the schedule on which r is stated (none: that of the model). With `scaled_linear`, Stable
    Diffusion's, r means as much noise as in papers, whatever schedule the model was trained with.

    Noise is a function of an image's seed alone, to the bit. What the network makes of it differs in the last digits
    between batches of different sizes, where libraries choose other kernels; `exact` always computes `batch` rows, so
    that an image is the same whatever it was asked for with. On CUDA the network is then one graph, which is several
    times faster where images are small; its weights must stay where they are.
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
            from vitrail.model.store import load_model

            model = load_model(model)
        if not isinstance(model.trunk, Denoiser):
            raise ValueError("this model makes no images; train one that does with: vitrail train small-diffusion")
        if steps < 1 or batch < 1:
            raise ValueError(f"steps and batch must be at least 1, not {steps} and {batch}")
        self.model = model.to(device).eval() if device is not None else model.eval()
        self.name = str(model.spec.get("name") or "denoiser")
        self.classes = model.classes
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

    @property
    def size(self) -> int:
        """Side of the images that it makes."""
        return self.model.preprocess.size

    def time(self, r: float) -> float:
        """The model's own time for an r as it is stated; noise alone stays noise alone."""
        own = self.network.schedule.name
        return r if r > PURE_NOISE else equal_noise(r, self.r_schedule or own, own)

    def evaluations(self, r: float) -> int:
        return steps_run(self.time(r), self.steps) * (1 if self.guidance == 1 else 2)

    def __call__(self, images: Tensor, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        r = self.time(r)
        target, seeds = check_request(self.classes, target, seeds, images)
        if tuple(images.shape[2:]) != (self.size, self.size):
            raise ValueError(
                f"the model makes images of {self.size}x{self.size} pixels, these have "
                f"{images.shape[2]}x{images.shape[3]}; resize them first"
            )
        if steps_run(r, self.steps) == 0 or not len(images):
            return images.clone()
        made = [
            self._run(images[rows], target[rows], r, seeds[rows]).to(images.device) for rows in self._rows(len(images))
        ]
        return as_given(torch.cat(made), images.dtype)

    def txt2img(self, target: Tensor, seeds: Tensor) -> Tensor:
        target, seeds = check_request(self.classes, target, seeds)
        made = [self._run(None, target[rows], 1.0, seeds[rows]) for rows in self._rows(len(target))]
        whole = torch.cat(made) if made else torch.empty(0, 3, self.size, self.size)
        return as_given(whole, torch.uint8).cpu()

    def start(self, images: Tensor | None, r: float, seeds: Tensor) -> Tensor:
        """Where the way back begins, [batch, 3, height, width]: images at time r, or noise alone above 0.999."""
        noise = normal_noise(seeds.to(self.device), 3, self.size, self.size)
        if images is None or r > PURE_NOISE:
            return noise
        signed = as_signed(images.to(self.device))
        return self.network.schedule.noised(signed, noise, torch.full((len(signed),), r, device=self.device))

    def _rows(self, count: int) -> list[slice]:
        return [slice(first, first + self.batch) for first in range(0, count, self.batch)]

    @torch.inference_mode()
    def _run(self, images: Tensor | None, target: Tensor, r: float, seeds: Tensor) -> Tensor:
        """Images in -1..1."""
        count = len(seeds)
        if self.exact and count < self.batch:
            fill = [i % count for i in range(self.batch)]
            images, target, seeds = (None if images is None else images[fill]), target[fill], seeds[fill]
        label = target.to(self.device)
        z = self.start(images, r, seeds)
        if self.device.type == "cuda":
            z = z.contiguous(memory_format=torch.channels_last)
        begins = 1.0 if r > PURE_NOISE else r
        times = times_from(begins, self.steps, steps_run(r, self.steps))
        with self._precision():
            made = solve(
                lambda seen, time: self._clean(seen, time, label), z, times, self.network.schedule, self.solver
            )
        return made[:count].clamp(-1, 1)

    def _guessed(self, rows: Tensor, at: Tensor, label: Tensor) -> Tensor:
        if not (self.exact and rows.is_cuda):
            return self.network(rows, at, label)
        if rows.shape not in self._graphs:
            self._graphs[rows.shape] = Replay(self.network, rows, at, label)
        made: Tensor = self._graphs[rows.shape](rows, at, label).clone()
        return made

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def _clean(self, z: Tensor, time: float, label: Tensor) -> Tensor:
        """The image that the guided network sees in z."""
        network, rows = self.network, z
        if self.guidance != 1:
            rows, label = torch.cat([z, z]), torch.cat([label, torch.full_like(label, network.no_class)])
        at = torch.full((len(rows),), time, device=z.device)
        guessed = self._guessed(rows, at, label)
        if self.guidance != 1:
            given, free = guessed.chunk(2)
            guessed = free + self.guidance * (given - free)
        seen = network.schedule.clean(z, guessed, at[: len(z)])
        return seen.clamp(-1, 1) if self.clip else seen
