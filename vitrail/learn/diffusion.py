"""Class-conditional denoising diffusion.

images [batch, 3, height, width] in -1..1. Each gets its own time and new noise in every step; some labels are dropped,
so that the model also learns the unconditional distribution (classifier-free guidance, Ho and Salimans, 2022, arXiv
2207.12598).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.learn.config import DiffusionConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.model.classifier import Classifier
from vitrail.model.trunks.denoiser import Denoiser, NoiseSchedule


class Diffusion(Objective):
    """The mean squared error of a denoiser's prediction. Raises `ValueError` for a model that is none."""

    def __init__(self, model: Classifier, config: DiffusionConfig, augment: AugmentConfig | None = None) -> None:
        super().__init__()
        if not isinstance(model.trunk, Denoiser):
            raise ValueError("objective diffusion trains a denoiser; use --model.name denoiser_32 (or denoiser_64)")
        if augment is not None and (augment.mixup or augment.cutmix):
            raise ValueError(
                "objective diffusion would learn to make mixed images; use --data.augment.mixup 0 "
                "--data.augment.cutmix 0"
            )
        self.model, self.config = model, config
        choose_process(model, config)

    @classmethod
    def build(cls, model: Classifier, config: DiffusionConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.augment)

    @property
    def denoiser(self) -> Denoiser:
        assert isinstance(self.model.trunk, Denoiser)
        return self.model.trunk

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        images = self.model._images(batch.images)
        device, count = images.device, len(images)
        time = torch.rand(count, device=device)
        dropped = torch.rand(count, device=device) < self.config.drop_label
        label = torch.where(dropped, self.denoiser.no_class, batch.label)
        wrong, _ = self.denoiser.errors(images, label, time, torch.randn_like(images, dtype=torch.float32))
        if self.config.min_snr is None:
            return {"loss": wrong.mean()}
        weighed = wrong * min_snr_weight(self.denoiser.schedule, time, self.config.min_snr)
        return {"loss": weighed.mean(), "unweighed": wrong.mean().detach()}


def min_snr_weight(schedule: NoiseSchedule, time: Tensor, cap: float) -> Tensor:
    """Weights [batch] under which the image's error counts min(signal² / noise², cap) (Hang et al., 2023,
    arXiv 2303.09556).

    The error of the noise is that of the image times snr, the error of the velocity times snr + 1.
    """
    snr = schedule.signal_to_noise(time)
    return snr.clamp_max(cap) / (snr if schedule.prediction == "eps" else snr + 1)


def choose_process(model: Classifier, config: DiffusionConfig) -> None:
    """Store the schedule and the prediction target in the model: whoever loads it must know them."""
    assert isinstance(model.trunk, Denoiser)
    model.trunk.schedule = NoiseSchedule(config.schedule, config.prediction)
    chosen = {"schedule": config.schedule, "prediction": config.prediction}
    model.spec = {**model.spec, "trunk": {**model.spec["trunk"], **chosen}}
