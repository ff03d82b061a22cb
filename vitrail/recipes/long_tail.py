"""Long-tailed recognition: LiVT (Xu et al. 2022, arXiv 2212.02015), masked autoencoding and then balanced BCE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitrail.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, SupervisedConfig
from vitrail.recipes.attention_transfer import mae_pretrain, small_mae
from vitrail.recipes.deit import AUGMENT
from vitrail.recipes.transfer import small_transfer

BALANCED = SupervisedConfig(loss="bce", bce_sum=True, logit_adjustment=1.0, smoothing=0.1)
"""Balanced BCE: log odds of the class are added in training, and the loss is the classes' number times its mean."""

STATED: dict[str, dict[str, Any]] = {
    "livt-pretrain": {
        "source": "GeNIe (arXiv 2312.02548): masked autoencoding on the unbalanced data; settings are MAE's, table 8",
        "model.name": "vit_base",
        "objective.mask": 0.75,
    },
    "livt": {
        "source": "GeNIe (arXiv 2312.02548) for epochs, rate and batch; LiVT's released settings for the rest",
        "optim.epochs": 100,
        "optim.lr": 0.008,
        "data.batch": 1024,
        "optim.warmup": 5,
        "optim.weight_decay": 0.05,
        "optim.layer_decay": 0.75,
        "model.drop_path": 0.1,
        "objective.loss": "bce",
        "objective.bce_sum": True,
        "objective.logit_adjustment": 1,
        "objective.smoothing": 0.1,
        "data.augment.rand_magnitude": 9,
        "data.augment.erasing": 0.25,
        "data.augment.mixup": 0.8,
        "data.augment.cutmix": 1.0,
    },
}


def livt_pretrain() -> RunConfig:
    """The first stage of LiVT: masked autoencoding of the unbalanced data, without labels.

    Source:    LiVT, whose settings are MAE's (arXiv 2111.06377, table 8); GeNIe (arXiv 2312.02548) takes its checkpoint
    Command:   vitrail train livt-pretrain --data imagenet-lt.csv
    Expect:    nothing by itself; fine-tuned without balanced BCE (row MAE of the paper): 54.5 %; not run here
    """
    return replace(mae_pretrain(), recipe="livt-pretrain", model=ModelConfig(name="vit_base", drop_path=0.0))


def livt() -> RunConfig:
    """The second stage of LiVT: fine-tuning with balanced BCE, for a long tail of rare classes.

    Source:    LiVT; its released run has batches of 2048, GeNIe (arXiv 2312.02548) 1024 with the same learning rate.
               Whether generated images count as training images of their class is not stated there:
               --objective.count_generated
    Command:   vitrail train livt --data imagenet-lt.csv --model.weights runs/livt-pretrain-...
    Expect:    the papers: 60.9 % (Many 73.6, Med 56.4, Few 41.0); not run here, for want of ImageNet-LT
    """
    return RunConfig(
        recipe="livt",
        data=DataConfig(uri="", batch=1024, augment=AUGMENT),
        model=ModelConfig(name="vit_base", drop_path=0.1),
        optim=OptimConfig(lr=0.008, epochs=100, warmup=5, weight_decay=0.05, layer_decay=0.75, floor=1e-6),
        objective=BALANCED,
        evaluators=("classification", "long_tail"),
    )


def small_livt_pretrain() -> RunConfig:
    """The first stage of LiVT for 32-pixel images on one accelerator.

    Command:   vitrail train small-livt-pretrain --data cifar100.npz --data.long_tail 100
    Expect:    not measured yet
    """
    return replace(small_mae(), recipe="small-livt-pretrain")


def small_livt() -> RunConfig:
    """The second stage of LiVT for 32-pixel images: balanced BCE on a long tail, judged by thirds of the classes.

    Command:   vitrail train small-livt --data cifar100.npz --data.long_tail 100 --model.weights RUN
    Expect:    not measured yet
    """
    base = small_transfer()
    return replace(
        base,
        recipe="small-livt",
        data=replace(
            base.data,
            augment=AugmentConfig(crop="pad", padding=4, rand_ops=2, rand_magnitude=9, mixup=0.8, cutmix=1.0),
        ),
        model=ModelConfig(name="vit_tiny_32", drop_path=0.1),
        optim=replace(base.optim, lr=1e-3, epochs=100, warmup=5, layer_decay=0.75),
        objective=BALANCED,
        evaluators=("classification", "long_tail", "long_tail_thirds"),
    )
