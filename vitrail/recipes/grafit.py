"""Grafit: fine representations from coarse labels (Touvron et al. 2020, arXiv 2011.12982)."""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, EngineConfig, GrafitConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.model.heads.config import Mean, Projected

STATED = {
    "grafit-imagenet": {
        "source": "Grafit (arXiv 2011.12982); decay, warm-up, momentum and widths are not given",
        "optim.name": "sgd",
        "optim.lr": 0.1,
        "optim.lr_batch": 256,
        "optim.schedule": "cosine",
        "data.batch": 1024,
        "optim.epochs": 600,
        "objective.temperature": 0.05,
        "objective.views": 4,
    },
    "grafit-transfer": {
        "source": "Grafit (arXiv 2011.12982); trunk fine-tuned, decay and momentum not given",
        "optim.epochs": 240,
        "optim.schedule": "cosine",
        "optim.lr": 0.01,
        "data.batch": 512,
    },
    "grafit-cifar100": {"source": "Grafit (arXiv 2011.12982)", "objective.views": 8, "optim.epochs": 600},
}


def grafit_imagenet() -> RunConfig:
    """Grafit on ImageNet with coarse labels.

    Source:    Grafit; SGD's momentum 0.9, weight decay 1e-4 and the EMA momentum 0.99 are ours
    Command:   vitrail train grafit-imagenet --data imagenet.csv --data.level coarse
    Expect:    the paper: 69.1 % kNN, 42.9 % mAP on the fine classes; not run here
    """
    return RunConfig(
        recipe="grafit-imagenet",
        data=DataConfig(
            uri="",
            batch=1024,
            level="coarse",
            augment=AugmentConfig(rand_ops=2, rand_magnitude=9, rand_std=0.5, rand_style="timm", erasing=0.25),
        ),
        model=ModelConfig(name="timm:resnet50", head=Projected()),
        optim=OptimConfig(name="sgd", lr=0.1, lr_batch=256, epochs=600, warmup=5, weight_decay=1e-4, floor=0.0),
        objective=GrafitConfig(views=4),
        evaluators=("knn",),
    )


def grafit_transfer() -> RunConfig:
    """Transfer of a trunk trained by Grafit to another data set.

    Source:    Grafit: an MLP classifier, better than a linear one where the projector was an MLP
               (`--model.head.hidden none --model.head.mlp false` for that); momentum 0.9 and weight decay 1e-4 are ours
    Command:   vitrail train grafit-transfer --data flowers/ --model.weights RUN [--optim.tune head]
    Expect:    the paper, ResNet-50 from ImageNet: flowers 98.2 %, cars 92.5 %, food 89.5 %; not run here
    """
    return RunConfig(
        recipe="grafit-transfer",
        data=DataConfig(uri="", batch=512, augment=AugmentConfig(rand_ops=2, rand_magnitude=9, erasing=0.25)),
        model=ModelConfig(name="timm:resnet50", weights="timm", head=Mean(hidden=2048, mlp=True)),
        optim=OptimConfig(name="sgd", lr=0.01, epochs=240, warmup=5, weight_decay=1e-4, floor=0.0),
    )


def grafit_cifar100() -> RunConfig:
    """Grafit on CIFAR-100's twenty coarse classes.

    Source:    Grafit
    Command:   vitrail train grafit-cifar100 --data cifar100.npz
    Expect:    the paper: 77.7 % kNN, 55.7 % mAP on the hundred fine classes; not run here
    """
    base = grafit_imagenet()
    augment = AugmentConfig(crop="resized", scale=(0.2, 1.0), rand_ops=2, rand_magnitude=9, erasing=0.25)
    return replace(
        base,
        recipe="grafit-cifar100",
        data=replace(base.data, augment=augment),
        model=ModelConfig(name="cifar_resnet56", head=Projected(hidden=1024)),
        objective=GrafitConfig(views=8, predictor_hidden=1024),
    )


def small_grafit() -> RunConfig:
    """Grafit on a small ResNet, in minutes.

    Command:   vitrail train small-grafit --data cifar100.npz
    Expect:    in 8 epochs of coarse labels 22.4 % of CIFAR-100's fine classes by neighbours (std 0.9, three seeds,
               studies/grafit.yaml; cross entropy gives 30.8 %); 30 epochs not measured yet
    """
    base = grafit_cifar100()
    return replace(
        base,
        recipe="small-grafit",
        data=replace(base.data, batch=500),
        model=ModelConfig(name="cifar_resnet20", head=Projected(width=128, hidden=512)),
        optim=replace(base.optim, epochs=30, warmup=1),
        objective=GrafitConfig(views=2, predictor_hidden=512),
        engine=EngineConfig(evaluate_every=10, checkpoint_every=10, log_every=50),
    )
