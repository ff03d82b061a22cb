"""Second-order heads (SoT, Xie et al. 2021, arXiv 2104.10935) and Gramian heads (Ryu et al. 2023, arXiv 2310.16483)."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import (
    AugmentConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SupervisedConfig,
)
from vitrail.recipes.deit import AUGMENT, small_deit

STATED = {
    "sot": {
        "source": "SoT, table S-3 (Tiny, Small); the authors' code for crop, jitter, EMA, cool-down",
        "data.batch": 1024,
        "optim.name": "adamw",
        "optim.epochs": 310,
        "optim.cooldown": 10,
        "optim.lr": 1e-3,
        "optim.floor": 1e-5,
        "optim.warmup": 5,
        "optim.weight_decay": 0.03,
        "objective.smoothing": 0.1,
        "data.augment.mixup": 0.8,
        "data.augment.cutmix": 1.0,
        "data.augment.erasing": 0.25,
        "data.augment.rand_magnitude": 9,
        "data.augment.rand_std": 0.5,
        "data.augment.jitter": 0.4,
        "model.drop_path": 0.1,
        "engine.ema": 0.99996,
        "optim.clip": 0,
    },
    "gramian": {
        "source": "Gramian heads, the authors' code",
        "optim.epochs": 300,
        "optim.name": "lamb",
        "optim.weight_decay": 0.05,
        "optim.lr": 5e-3,
        "optim.warmup": 3,
        "optim.warmup_lr": 1e-6,
        "optim.floor": 1e-6,
        "data.batch": 1024,
        "objective.loss": "bce",
        "objective.smoothing": 0.1,
        "data.repeats": 3,
        "data.augment.rand_magnitude": 9,
        "data.augment.mixup": 0.2,
        "data.augment.cutmix": 1.0,
        "data.augment.erasing": 0,
        "model.drop_path": 0.2,
    },
}
BY_MODEL = {
    "sot": {"sot_base": {"data.batch": 512, "optim.lr": 5e-4, "optim.weight_decay": 0.065}},
    "gramian": {
        "ga_convnext_small": {"model.drop_path": 0.4},
        "ga_convnext_base": {"model.drop_path": 0.5},
    },
}


def sot() -> RunConfig:
    """SoT: class token and second-order pooling of patch tokens, on ImageNet-1k.

    Source:    SoT, table S-3 and the authors' code
    Command:   vitrail train sot --data imagenet/ --model.name sot_small
    Expect:    the paper: Tiny 80.3, Small 82.7, Base 83.5 %; not run here
    """
    return RunConfig(
        recipe="sot",
        data=DataConfig(uri="", batch=1024, augment=replace(AUGMENT, jitter=0.4)),
        model=ModelConfig(name="sot_tiny", drop_path=0.1),
        optim=OptimConfig(lr=1e-3, epochs=310, cooldown=10, warmup=5, floor=1e-5, weight_decay=0.03),
        objective=SupervisedConfig(smoothing=0.1),
        engine=EngineConfig(ema=0.99996),
    )


def gramian() -> RunConfig:
    """Gramian attention heads on ImageNet-1k.

    Source:    the authors' code, whose README says that it was improved after the paper
    Command:   vitrail train gramian --data imagenet/ --model.name ga_convnext_tiny
    Expect:    not run here
    """
    augment = AugmentConfig(rand_ops=2, rand_magnitude=9, rand_std=0.5, rand_style="timm", mixup=0.2, cutmix=1.0)
    return RunConfig(
        recipe="gramian",
        data=DataConfig(uri="", batch=1024, repeats=3, augment=augment),
        model=ModelConfig(name="ga_convnext_tiny", drop_path=0.2),
        optim=OptimConfig(name="lamb", lr=5e-3, epochs=300, warmup=3, floor=1e-6, weight_decay=0.05),
        objective=SupervisedConfig(loss="bce", smoothing=0.1),
        engine=EngineConfig(accumulate=4),
    )


def small_sot() -> RunConfig:
    """SoT for 32-pixel images.

    Command:   vitrail train small-sot --data cifar100.npz
    Expect:    in 12 epochs 46.6 % of CIFAR-100 (std 0.3, three seeds, studies/second-order.yaml); 100 not measured yet
    """
    return replace(small_deit(), recipe="small-sot", model=ModelConfig(name="sot_7_32", drop_path=0.1))


def small_gramian() -> RunConfig:
    """Gramian heads on a small ViT.

    Command:   vitrail train small-gramian --data cifar100.npz
    Expect:    with six blocks and 15 epochs 49.1 % of CIFAR-100 (std 0.2, three seeds, studies/heads-vit.yaml; 46.3 %
               with a class token); 100 epochs not measured yet
    """
    return replace(small_deit(), recipe="small-gramian", model=ModelConfig(name="ga_vit_tiny_32", drop_path=0.1))
