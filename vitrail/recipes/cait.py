"""CaiT: deeper transformers, and transfer as it prescribes it (Touvron et al. 2021, arXiv 2103.17239).

Smoothing is shared over all classes (`smoothing_style: all`), as in the authors' code; see `vitrail.recipes.deit`.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import DataConfig, DistillationConfig, ModelConfig, OptimConfig, RunConfig, SupervisedConfig
from vitrail.recipes.deit import AUGMENT, TEACHER, small_deit

STATED = {
    "cait-400": {
        "source": "CaiT (arXiv 2103.17239)",
        "optim.epochs": 400,
        "data.batch": 1024,
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "optim.warmup": 5,
        "optim.weight_decay": 0.05,
        "data.repeats": 3,
        "data.crop_ratio": 1.0,
    },
    "cait-384": {
        "source": "CaiT (arXiv 2103.17239); numbers from DeiT III (arXiv 2204.07118)",
        "model.image_size": 384,
        "optim.lr": 1e-5,
        "data.batch": 512,
        "optim.weight_decay": 0.1,
        "data.crop_ratio": 1.0,
    },
    "cait-distilled": {
        "source": "CaiT (arXiv 2103.17239): hard distillation without a token",
        "objective.mode": "hard",
    },
}


def cait_400() -> RunConfig:
    """CaiT on ImageNet-1k from scratch; drop path and LayerScale come with the model.

    Source:    CaiT; drop path and LayerScale by model as the paper prints them
    Command:   vitrail train cait-400 --data imagenet/ --model.name cait_s24
    Expect:    the paper: S36 83.4 %, M36 83.7 %; not run here
    """
    return RunConfig(
        recipe="cait-400",
        data=DataConfig(uri="", batch=1024, repeats=3, crop_ratio=1.0, augment=AUGMENT),
        model=ModelConfig(name="cait_s36"),
        optim=OptimConfig(lr=1e-3, epochs=400, warmup=5, weight_decay=0.05),
        objective=SupervisedConfig(smoothing=0.1),
    )


def cait_384() -> RunConfig:
    """CaiT fine-tuned at 384 pixels.

    Source:    CaiT; the settings it leaves out are those of DeiT III (arXiv 2204.07118)
    Command:   vitrail train cait-384 --data imagenet/ --model.weights RUN
    Expect:    the paper: S36 83.4 -> 84.8 %; not run here
    """
    base = cait_400()
    return replace(
        base,
        recipe="cait-384",
        data=replace(base.data, batch=512, repeats=1),
        model=ModelConfig(name="cait_s36", weights="timm", image_size=384),
        optim=OptimConfig(lr=1e-5, epochs=20, warmup=5, weight_decay=0.1, floor=1e-6),
    )


def cait_distilled() -> RunConfig:
    """CaiT with hard distillation and no distillation token.

    Source:    CaiT, ablation from DeiT-S to CaiT
    Command:   vitrail train cait-distilled --data imagenet/
    Expect:    the paper: S36 at 384 pixels 84.8 -> 85.2 %; not run here
    """
    labels = SupervisedConfig(smoothing=0.1)
    return replace(
        cait_400(),
        recipe="cait-distilled",
        objective=DistillationConfig(teacher=TEACHER, mode="hard", labels=labels),
    )


def small_cait() -> RunConfig:
    """CaiT for 32-pixel images.

    Command:   vitrail train small-cait --data cifar100.npz
    Expect:    not measured yet
    """
    return replace(small_deit(), recipe="small-cait", model=ModelConfig(name="cait_xxs12_32"))
