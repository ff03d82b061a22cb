"""Attention transfer (Li et al. 2024, arXiv 2411.09702), and its teachers: MAE (He et al. 2021, arXiv 2111.06377)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitrail.config import (
    AttentionTransferConfig,
    AugmentConfig,
    DataConfig,
    EngineConfig,
    MaeConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SupervisedConfig,
)
from vitrail.recipes.deit import small_deit

TEACHERS = {
    "vit_base": "timm:vit_base_patch16_224.mae",
    "vit_large": "timm:vit_large_patch16_224.mae",
    "vit_huge": "timm:vit_huge_patch14_224.mae",
}
LABELS = SupervisedConfig(smoothing=0.1)
AUGMENT = AugmentConfig(rand_ops=2, rand_magnitude=9, rand_std=0.5, rand_style="timm", mixup=0.8, cutmix=1.0)
COMMON: dict[str, Any] = {
    "optim.name": "adamw",
    "optim.schedule": "cosine",
    "optim.lr_batch": 256,
    "data.augment.rand_magnitude": 9,
    "data.augment.rand_std": 0.5,
    "data.augment.mixup": 0.8,
    "data.augment.cutmix": 1.0,
}

STATED: dict[str, dict[str, Any]] = {
    "mae-pretrain": {
        "source": "MAE, table 8",
        "optim.name": "adamw",
        "optim.lr": 1.5e-4,
        "optim.lr_batch": 256,
        "optim.weight_decay": 0.05,
        "optim.betas": [0.9, 0.95],
        "data.batch": 4096,
        "optim.schedule": "cosine",
        "optim.warmup": 40,
        "optim.epochs": 800,
        "objective.mask": 0.75,
        "objective.normalise": True,
        "objective.decoder_width": 512,
        "objective.decoder_depth": 8,
        "model.drop_path": 0,
    },
    "mae-finetune": {
        **COMMON,
        "source": "MAE, table 9",
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.05,
        "optim.betas": [0.9, 0.999],
        "optim.layer_decay": 0.75,
        "data.batch": 1024,
        "optim.warmup": 5,
        "optim.epochs": 50,
        "objective.smoothing": 0.1,
        "model.drop_path": 0.1,
    },
    "mae-scratch": {
        **COMMON,
        "source": "MAE, table 11",
        "optim.lr": 1e-4,
        "optim.weight_decay": 0.3,
        "optim.betas": [0.9, 0.95],
        "data.batch": 4096,
        "optim.warmup": 20,
        "optim.epochs": 200,
        "objective.smoothing": 0.1,
        "model.drop_path": 0.2,
        "engine.ema": 0.9999,
    },
    "attention-copy": {
        **COMMON,
        "source": "attention transfer, appendix, recipe of attention copy",
        "optim.lr": 1e-3,
        "optim.floor": 2e-3,
        "optim.weight_decay": 0.05,
        "optim.betas": [0.9, 0.999],
        "optim.layer_decay": 0.75,
        "data.batch": 2048,
        "optim.warmup": 5,
        "optim.epochs": 100,
        "objective.labels.smoothing": 0.1,
        "model.drop_path": 0,
        "engine.ema": 0.9999,
        "objective.layers": "all",
    },
    "attention-copy-part": {"source": "the same: partial copies use beta2 0.95", "optim.betas": [0.9, 0.95]},
    "attention-distill": {
        **COMMON,
        "source": "attention transfer, appendix, recipe of attention distillation",
        "optim.lr": 1e-4,
        "optim.weight_decay": 0.3,
        "optim.betas": [0.9, 0.95],
        "optim.layer_decay": 1,
        "data.batch": 2048,
        "optim.warmup": 20,
        "optim.epochs": 200,
        "objective.labels.smoothing": 0.1,
        "model.drop_path": 0.2,
        "engine.ema": 0.9999,
        "objective.layers": "first:18",
        "objective.weight": 3,
    },
}

PARTS = {"vit_base": "last:8", "vit_large": "last:15", "vit_huge": "last:20"}
BY_MODEL: dict[str, dict[str, dict[str, Any]]] = {
    "mae-finetune": {
        "vit_base": {"optim.epochs": 100},
        "vit_huge": {"model.drop_path": 0.2},
    },
    "mae-scratch": {"vit_base": {"optim.epochs": 300, "model.drop_path": 0.1}},
    "attention-copy": {size: {"objective.teacher": name} for size, name in TEACHERS.items()},
    "attention-copy-part": {  # as large a part of the depth as 15 of 24
        size: {"objective.teacher": name, "objective.layers": PARTS[size]} for size, name in TEACHERS.items()
    },
    "attention-distill": {  # three quarters of the depth; the paper does not state it
        "vit_base": {"objective.teacher": TEACHERS["vit_base"], "objective.layers": "first:9"},
        "vit_huge": {"objective.teacher": TEACHERS["vit_huge"], "objective.layers": "first:24"},
    },
}


def mae_pretrain() -> RunConfig:
    """Masked autoencoding on ImageNet: a teacher without labels.

    Source:    MAE, table 8; positions of the trunk are learned here, fixed there
    Command:   vitrail train mae-pretrain --data imagenet/
    Expect:    the paper, fine-tuned: B 83.6, L 85.9, H 86.9 %; not run here, for want of ImageNet
    """
    return RunConfig(
        recipe="mae-pretrain",
        data=DataConfig(uri="", batch=4096, augment=AugmentConfig(scale=(0.2, 1.0))),
        model=ModelConfig(name="vit_large", drop_path=0.0),
        optim=OptimConfig(
            lr=1.5e-4, lr_batch=256, epochs=800, warmup=40, weight_decay=0.05, betas=(0.9, 0.95), floor=0.0
        ),
        objective=MaeConfig(),
        evaluators=("knn",),
    )


def mae_finetune() -> RunConfig:
    """All weights of a masked autoencoder, tuned for ImageNet: the "full transfer" of attention transfer.

    Source:    MAE, table 9
    Command:   vitrail train mae-finetune --data imagenet/ --model.weights runs/mae-pretrain-... [--model.name vit_base]
    Expect:    the papers: B 83.6, L 85.7-85.9, H 86.9 %; not run here
    """
    return RunConfig(
        recipe="mae-finetune",
        data=DataConfig(uri="", batch=1024, augment=AUGMENT),
        model=ModelConfig(name="vit_large", drop_path=0.1),
        optim=OptimConfig(lr=1e-3, lr_batch=256, epochs=50, warmup=5, weight_decay=0.05, layer_decay=0.75, floor=1e-6),
        objective=LABELS,
    )


def mae_scratch() -> RunConfig:
    """A ViT from scratch as the authors of MAE tuned it: the "no transfer" of attention transfer.

    Source:    MAE, table 11
    Command:   vitrail train mae-scratch --data imagenet/ --model.name vit_base
    Expect:    the papers: B 82.3-82.5, L 82.6-83.0, H 83.0-83.1 %; not run here
    """
    return RunConfig(
        recipe="mae-scratch",
        data=DataConfig(uri="", batch=4096, augment=AUGMENT),
        model=ModelConfig(name="vit_large", drop_path=0.2),
        optim=OptimConfig(
            lr=1e-4, lr_batch=256, epochs=200, warmup=20, weight_decay=0.3, betas=(0.9, 0.95), floor=1e-6
        ),
        objective=LABELS,
        engine=EngineConfig(ema=0.9999),
    )


def attention_copy() -> RunConfig:
    """Attention copy: a new ViT-L that uses the attention maps of a frozen, pre-trained one.

    Source:    attention transfer, appendix; the lowest learning rate, 2e-3, is absolute (peak 8e-3); the class token is
               classified here, the mean of the patch tokens there; the last block has 0.75 of the head's learning rate,
               as in MAE, in the authors' code all of it
    Command:   vitrail train attention-copy --data imagenet/ [--objective.teacher RUN]
    Expect:    the paper: L 85.1 % (scratch 83.0, fine-tuned 85.7); not run here
    """
    return RunConfig(
        recipe="attention-copy",
        data=DataConfig(uri="", batch=2048, augment=AUGMENT),
        model=ModelConfig(name="vit_large", drop_path=0.0),
        optim=OptimConfig(lr=1e-3, lr_batch=256, epochs=100, warmup=5, weight_decay=0.05, layer_decay=0.75, floor=2e-3),
        objective=AttentionTransferConfig(teacher=TEACHERS["vit_large"], mode="copy", labels=LABELS),
        engine=EngineConfig(ema=0.9999),
    )


def attention_copy_part() -> RunConfig:
    """Attention copy in some layers only: the last 15 of 24, where it saturates.

    Source:    the same; partial copies use beta2 0.95 for stability
    Command:   vitrail train attention-copy-part --data imagenet/ --objective.layers first:6
    Expect:    the paper: more layers are better, the last better than the first (a figure, no numbers); not run here
    """
    base = attention_copy()
    assert isinstance(base.objective, AttentionTransferConfig)
    return replace(
        base,
        recipe="attention-copy-part",
        optim=replace(base.optim, betas=(0.9, 0.95)),
        objective=replace(base.objective, layers="last:15"),
    )


def attention_distill() -> RunConfig:
    """Attention distillation: a new ViT-L trained to match the attention maps of a pre-trained one.

    Source:    attention transfer, appendix: 18 layers, weight 3 for the main result; all other results of the paper
               have weight 1; drop path is shared with the teacher, as in the authors' code
    Command:   vitrail train attention-distill --data imagenet/ [--objective.weight 1]
    Expect:    the paper: L 85.7 % (scratch 83.0, fine-tuned 85.7); not run here
    """
    return RunConfig(
        recipe="attention-distill",
        data=DataConfig(uri="", batch=2048, augment=AUGMENT),
        model=ModelConfig(name="vit_large", drop_path=0.2),
        optim=OptimConfig(
            lr=1e-4, lr_batch=256, epochs=200, warmup=20, weight_decay=0.3, betas=(0.9, 0.95), floor=1e-6
        ),
        objective=AttentionTransferConfig(
            teacher=TEACHERS["vit_large"],
            mode="distill",
            layers="first:18",
            weight=3.0,
            drop_path="shared",
            labels=LABELS,
        ),
        engine=EngineConfig(ema=0.9999),
    )


def small_mae() -> RunConfig:
    """Masked autoencoding of 32-pixel images on one accelerator: a teacher made at home.

    Command:   vitrail train small-mae --data cifar100.npz
    Expect:    not measured yet
    """
    return RunConfig(
        recipe="small-mae",
        data=DataConfig(uri="", batch=1000, augment=AugmentConfig(scale=(0.2, 1.0))),
        model=ModelConfig(name="vit_tiny_32"),
        optim=OptimConfig(lr=1e-3, epochs=200, warmup=10, weight_decay=0.05, betas=(0.9, 0.95), floor=0.0),
        objective=MaeConfig(decoder_width=96, decoder_depth=2, decoder_heads=3),
        engine=EngineConfig(evaluate_every=20, checkpoint_every=20, log_every=50),
        evaluators=("knn",),
    )


def small_attention_copy() -> RunConfig:
    """Attention copy for 32-pixel images, from a run of small-mae.

    Command:   vitrail train small-attention-copy --data cifar100.npz --objective.teacher RUN
    Expect:    not measured yet; small models may stay below scratch (the paper's ViT-B does)
    """
    return replace(
        small_deit(),
        recipe="small-attention-copy",
        model=ModelConfig(name="vit_tiny_32"),
        objective=AttentionTransferConfig(mode="copy", labels=LABELS),
    )


def small_attention_distill() -> RunConfig:
    """Attention distillation for 32-pixel images, from a run of small-mae.

    Command:   vitrail train small-attention-distill --data cifar100.npz --objective.teacher RUN
    Expect:    not measured yet
    """
    return replace(
        small_deit(),
        recipe="small-attention-distill",
        model=ModelConfig(name="vit_tiny_32", drop_path=0.1),
        objective=AttentionTransferConfig(mode="distill", layers="first:9", labels=LABELS),
    )
