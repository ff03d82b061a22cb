"""Diffusion models from scratch: the generator of GeNIe (arXiv 2312.02548) where no weights can be downloaded."""

from __future__ import annotations

from vitrail.config import AugmentConfig, DataConfig, DiffusionConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig


def small_diffusion() -> RunConfig:
    """A class-conditional diffusion model of 32-pixel images, in minutes on one accelerator.

    Command:   vitrail train small-diffusion --data cifar10.npz
    Expect:    not measured yet; top-1 is that of the class under which noise is guessed best
    """
    return RunConfig(
        recipe="small-diffusion",
        # Flips alone: whatever else augmentation did to images, the model would learn to make.
        data=DataConfig(uri="", batch=512, augment=AugmentConfig(crop="evaluation", flip=0.5)),
        model=ModelConfig(name="denoiser_32"),
        optim=OptimConfig(lr=4e-4, epochs=120, warmup=2, weight_decay=0.0, floor=1e-5, clip=1.0),
        objective=DiffusionConfig(),
        engine=EngineConfig(ema=0.9995, evaluate_every=10, checkpoint_every=20, log_every=100),
        evaluators=("denoising",),
    )
