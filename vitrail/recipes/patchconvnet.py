"""PatchConvNet: attention-based pooling on a convolutional trunk (Touvron et al. 2021, arXiv 2112.13692).

Smoothing is shared over all classes (`smoothing_style: all`), as in the authors' code; see `vitrail.recipes.deit`.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, SupervisedConfig
from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import AttentionPool
from vitrail.model.zoo import ZOO
from vitrail.recipes.deit import small_deit

AUGMENT = AugmentConfig(rand_ops=2, rand_magnitude=9, rand_std=0.5, rand_style="timm", mixup=0.8, cutmix=1.0)


def less_drop_path(name: str) -> dict[str, float]:
    """Drop path of fine-tuning: 0.1 below that of training, at least 0."""
    trunk = ZOO[name].trunk
    assert isinstance(trunk, TrunkConfig)
    return {"model.drop_path": max(0.0, round(trunk.drop_path - 0.1, 3))}


STATED = {
    "patchconvnet-1k": {
        "source": "PatchConvNet (arXiv 2112.13692)",
        "optim.epochs": 400,
        "data.batch": 2048,
        "optim.name": "lamb",
        "optim.lr": 3e-3,
        "optim.weight_decay": 0.01,
        "data.augment.mixup": 0.8,
        "data.augment.cutmix": 1.0,
        "data.repeats": 3,
        "optim.clip": 0,
        "engine.ema": 0,
        "data.augment.erasing": 0,
    },
    "patchconvnet-resolution": {
        "source": "PatchConvNet (arXiv 2112.13692)",
        "optim.epochs": 10,
        "data.batch": 1024,
        "optim.lr": 1e-5,
        "optim.weight_decay": 0.01,
    },
    "patchconvnet-21k": {
        "source": "PatchConvNet (arXiv 2112.13692)",
        "optim.epochs": 90,
        "data.batch": 2048,
        "optim.lr": 3e-3,
        "optim.weight_decay": 0.01,
        "data.repeats": 1,
    },
    "patchconvnet-21k-to-1k": {
        "source": "PatchConvNet (arXiv 2112.13692)",
        "optim.epochs": 100,
        "data.batch": 1024,
        "optim.lr": 5e-4,
    },
    "patchconvnet-per-class": {"source": "PatchConvNet (arXiv 2112.13692): as for resolution, one map a class"},
}
SIZES = [name for name, spec in ZOO.items() if name.startswith("patchconvnet_") and isinstance(spec.trunk, TrunkConfig)]
WIDER = {"optim.weight_decay": 0.05}  # than S
BY_MODEL = {
    "patchconvnet-1k": {name: WIDER for name in SIZES if name.startswith(("patchconvnet_b", "patchconvnet_l"))},
    "patchconvnet-resolution": {name: less_drop_path(name) for name in SIZES},
    "patchconvnet-21k-to-1k": {name: less_drop_path(name) for name in SIZES},
    "patchconvnet-per-class": {name: less_drop_path(name) for name in SIZES},
}


def patchconvnet_1k() -> RunConfig:
    """PatchConvNet on ImageNet-1k from scratch; drop path comes with the model.

    Source:    PatchConvNet; smoothing 0.1 and 5 epochs of warm-up, which it leaves out, are DeiT's
    Command:   vitrail train patchconvnet-1k --data imagenet/ --model.name patchconvnet_s60
    Expect:    the paper: S60 82.1, S120 83.2, B60 83.5, B120 84.1 %; not run here
    """
    return RunConfig(
        recipe="patchconvnet-1k",
        data=DataConfig(uri="", batch=2048, repeats=3, crop_ratio=1.0, augment=AUGMENT),
        model=ModelConfig(name="patchconvnet_s60"),
        optim=OptimConfig(name="lamb", lr=3e-3, epochs=400, warmup=5, weight_decay=0.01, eps=1e-6),
        objective=SupervisedConfig(smoothing=0.1),
    )


def patchconvnet_resolution() -> RunConfig:
    """PatchConvNet fine-tuned at a higher resolution, with 0.1 less drop path.

    Source:    PatchConvNet
    Command:   vitrail train patchconvnet-resolution --data imagenet/ --model.weights RUN --model.image_size 384
    Expect:    not run here
    """
    base = patchconvnet_1k()
    return replace(
        base,
        recipe="patchconvnet-resolution",
        data=replace(base.data, batch=1024, repeats=1),
        model=ModelConfig(name="patchconvnet_s60", image_size=384, drop_path=0.05),
        optim=OptimConfig(name="lamb", lr=1e-5, epochs=10, warmup=1, weight_decay=0.01, eps=1e-6, floor=1e-6),
    )


def patchconvnet_21k() -> RunConfig:
    """PatchConvNet on ImageNet-21k.

    Source:    PatchConvNet
    Command:   vitrail train patchconvnet-21k --data imagenet21k/
    Expect:    not run here
    """
    base = patchconvnet_1k()
    return replace(
        base,
        recipe="patchconvnet-21k",
        data=replace(base.data, repeats=1),
        optim=replace(base.optim, epochs=90),
    )


def patchconvnet_21k_to_1k() -> RunConfig:
    """From ImageNet-21k weights to ImageNet-1k.

    Source:    PatchConvNet; weight decay is not stated: that of pre-training
    Command:   vitrail train patchconvnet-21k-to-1k --data imagenet/ --model.weights RUN
    Expect:    not run here
    """
    base = patchconvnet_1k()
    return replace(
        base,
        recipe="patchconvnet-21k-to-1k",
        data=replace(base.data, batch=1024, repeats=1),
        model=ModelConfig(name="patchconvnet_s60", drop_path=0.05),
        optim=OptimConfig(name="lamb", lr=5e-4, epochs=100, warmup=5, weight_decay=0.01, eps=1e-6),
    )


def patchconvnet_per_class() -> RunConfig:
    """One pooling map for every class, fine-tuned from one map.

    Source:    PatchConvNet
    Command:   vitrail train patchconvnet-per-class --data imagenet/ --model.weights RUN
    Expect:    the paper: from scratch 81.1 %, fine-tuned about as one map; not run here
    """
    base = patchconvnet_resolution()
    head = AttentionPool(queries="per_class", qkv_bias=True)  # as the one map has it, whose weights it takes
    model = ModelConfig(name="patchconvnet_s60", head=head, drop_path=0.05)
    return replace(base, recipe="patchconvnet-per-class", model=model)


def small_patchconvnet() -> RunConfig:
    """PatchConvNet for 32-pixel images.

    Command:   vitrail train small-patchconvnet --data cifar100.npz
    Expect:    with Muon at 1e-3, LayerScale from 0.1, batches of 250 and 12 epochs 25.5 % of CIFAR-100 (std 0.7, three
               seeds, studies/stem-pooling.yaml, in an earlier layout); as it stands not measured yet
    """
    base = small_deit()
    return replace(
        base,
        recipe="small-patchconvnet",
        model=ModelConfig(name="patchconvnet_t20_32"),
        optim=replace(base.optim, name="lamb", lr=3e-3, weight_decay=0.01, eps=1e-6),
    )
