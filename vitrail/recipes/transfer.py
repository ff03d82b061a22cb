"""Transfer from one data set to another.

Settings of CaiT (Touvron et al. 2021, arXiv 2103.17239), DeiT III (Touvron et al. 2022, arXiv 2204.07118) and Gramian
heads (Ryu et al. 2023, arXiv 2310.16483).
"""

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
from vitrail.recipes.deit import AUGMENT

STATED = {
    "transfer-cifar": {"source": "CaiT (arXiv 2103.17239)", "optim.lr": 1e-5, "optim.epochs": 1000},
    "transfer-flowers": {"source": "CaiT (arXiv 2103.17239)", "optim.lr": 1e-4, "optim.epochs": 1000},
    "transfer-cars": {"source": "CaiT (arXiv 2103.17239)", "optim.lr": 1e-4, "optim.epochs": 1000},
    "transfer-inat": {"source": "CaiT (arXiv 2103.17239)", "optim.lr": 1e-4, "optim.epochs": 360},
    "transfer-fgvc": {
        "source": "Gramian heads, appendix A.1: SGD, 20,000 iterations, final epoch; a grid of rates and decays",
        "optim.name": "sgd",
        "optim.steps": 20000,
        "data.augment.crop": "evaluation",
    },
    "transfer-attention": {"source": "DeiT III (arXiv 2204.07118)", "optim.tune": "attention"},
}


def _transfer(name: str, rate: float, epochs: float) -> RunConfig:
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=1024, repeats=3, crop_ratio=0.875, augment=AUGMENT),
        model=ModelConfig(name="cait_s36", weights="timm"),
        optim=OptimConfig(lr=rate, epochs=epochs, warmup=5, weight_decay=0.05, floor=1e-6),
        objective=SupervisedConfig(smoothing=0.1),
    )


def transfer_cifar() -> RunConfig:
    """From ImageNet to CIFAR, at 224 pixels: training's settings with a hundredth of the learning rate.

    Source:    CaiT; DeiT does not give its own settings
    Command:   vitrail train transfer-cifar --data cifar100.npz --model.name deit_base
    Expect:    the paper: CaiT S36 99.2 and 92.2 % (CIFAR-10, -100); not run here
    """
    return _transfer("transfer-cifar", 1e-5, 1000)


def transfer_flowers() -> RunConfig:
    """From ImageNet to Flowers-102: a tenth of the learning rate.

    Source:    CaiT
    Command:   vitrail train transfer-flowers --data torchvision:Flowers102?root=data
    Expect:    the paper: CaiT S36 98.8 %; not run here
    """
    return _transfer("transfer-flowers", 1e-4, 1000)


def transfer_cars() -> RunConfig:
    """From ImageNet to Stanford Cars.

    Source:    CaiT
    Command:   vitrail train transfer-cars --data torchvision:StanfordCars?root=data
    Expect:    the paper: CaiT S36 93.5 %; not run here
    """
    return _transfer("transfer-cars", 1e-4, 1000)


def transfer_inat() -> RunConfig:
    """From ImageNet to iNaturalist.

    Source:    CaiT
    Command:   vitrail train transfer-inat --data inaturalist/
    Expect:    the paper: CaiT S36 77.1 and 80.6 % (2018, 2019); not run here
    """
    return _transfer("transfer-inat", 1e-4, 360)


def transfer_fgvc() -> RunConfig:
    """Fine-grained data from ImageNet weights: one cell of the grid over which mean and spread are reported.

    Source:    Gramian heads, appendix A.1; batch, momentum and the grid (7 learning rates 1e-4 to 1e-1, 7 ratios of
               weight decay to learning rate 1e-6 to 1e-3, and 0) are those of Kornblith et al. 2019, from memory;
               images at 256, centre crop of 224
    Command:   vitrail train transfer-fgvc --data cub/ --model.name timm:resnet50 --optim.lr 0.01
    Expect:    the paper, over its grid: ResNet-50 79.2 +- 1.7 on CUB; not run here
    """
    return RunConfig(
        recipe="transfer-fgvc",
        data=DataConfig(uri="", batch=256, augment=AugmentConfig(crop="evaluation")),
        model=ModelConfig(name="timm:resnet50", weights="timm"),
        optim=OptimConfig(name="sgd", lr=0.01, steps=20_000, warmup=0, weight_decay=1e-4, floor=0.0),
    )


def transfer_attention() -> RunConfig:
    """Fine-tuning of the attention layers alone.

    Source:    DeiT III, after Touvron et al. 2022 (arXiv 2203.09795): less memory, as accurate, better on small sets
    Command:   vitrail train transfer-attention --data photos/
    Expect:    the paper: + 0.2 on Flowers; not run here
    """
    base = _transfer("transfer-attention", 1e-4, 100)
    return replace(
        base,
        data=replace(base.data, batch=256, repeats=1, crop_ratio=1.0),
        model=ModelConfig(name="deit3_base", weights="timm"),
        optim=replace(base.optim, tune="attention"),
    )


def small_transfer() -> RunConfig:
    """From a run on one set of 32-pixel images to another.

    Command:   vitrail train small-transfer --data cifar10.npz --model.weights RUN [--optim.tune attention]
    Expect:    a ViT of six blocks from CIFAR-100, on a tenth of CIFAR-10, 40 epochs: 74.1 % (std 0.1, three seeds,
               studies/chained.py attention)
    """
    return RunConfig(
        recipe="small-transfer",
        data=DataConfig(uri="", batch=500, augment=AugmentConfig(crop="pad", padding=4, mixup=0.2, cutmix=1.0)),
        model=ModelConfig(name="vit_tiny_32"),
        optim=OptimConfig(lr=2e-4, epochs=30, warmup=2, weight_decay=0.05, clip=1.0),
        objective=SupervisedConfig(smoothing=0.1),
        engine=EngineConfig(evaluate_every=5, checkpoint_every=5, log_every=50),
    )
