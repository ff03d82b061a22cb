"""Plain ViTs on ImageNet: DeiT (Touvron et al. 2021, arXiv 2012.12877) and DeiT III (Touvron et al. 2022, arXiv
2204.07118), with RSB A2, the ResNet's recipe.

Label smoothing of these recipes and of those that take their settings (CaiT, ResMLP, PatchConvNet) is
`smoothing_style: all`: the smoothed mass is shared over all classes, the true one included. That is what the authors'
code does, whose targets are timm's; the text shares it over the other classes (`others`). At 1,000 classes and 0.1 the
true class has 0.9001 in one and 0.9 in the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from vitrail.recipes.row import Recipe

REGNET = "timm:regnety_160.deit_in1k"  # DeiT's teacher
DROP_1K = {"tiny": 0.0, "small": 0.0, "base": 0.1, "large": 0.4, "huge": 0.5, "huge52": 0.5, "huge26x2": 0.5}
DROP_21K = {**DROP_1K, "large": 0.3}
"""DeiT III: drop path by size, as the paper prints it."""
LOW = {"huge": 154, "huge52": 126, "huge26x2": 126}  # of 14 pixels per patch side


def drops(
    rates: Mapping[str, float], more: float = 0.0, sizes: Mapping[str, int] | None = None
) -> dict[str, dict[str, float]]:
    """Drop path of DeiT III by model, and its image size where `sizes` has one."""
    rows = {f"deit3_{size}": {"model.drop_path": round(rate + more, 3)} for size, rate in rates.items()}
    for size, pixels in (sizes or {}).items():
        rows[f"deit3_{size}"]["model.image_size"] = pixels
    return rows


DEIT = {
    "deit-300": Recipe(
        "DeiT's own recipe: a plain ViT on ImageNet-1k from scratch.",
        source="DeiT, table 9; RandAugment is timm's, as there; drop path rises linearly",
        command="--data imagenet/ --model.name deit_small",
        hardware="the authors': 8 V100 (Ti, S: under 3 days on 4)",
        expect="the paper: Ti 72.2, S 79.8, B 81.8 %; not run here, for want of ImageNet",
        stated_in="DeiT (arXiv 2012.12877)",
        stated={
            "data": {"batch": 1024, "repeats": 3},
            "data.augment": {"rand_magnitude": 9, "rand_std": 0.5, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25},
            "model.drop_path": 0.1,
            "objective.smoothing": 0.1,
            "optim": {"epochs": 300, "name": "adamw", "lr": 5e-4, "lr_batch": 512, "schedule": "cosine", "warmup": 5},
            "optim.weight_decay": 0.05,
            "optim.clip": 0.0,
        },
        settings={"data.augment.rand_ops": 2, "data.augment.rand_style": "timm", "model.name": "deit_base"},
    ),
    "deit-1000-distilled": Recipe(
        "DeiT with a distillation token and a convolutional teacher, the long schedule.",
        base="deit-300",
        source="DeiT, tables 3 and 5; teacher RegNetY-16GF (82.9 %)",
        command="--data imagenet/ --model.name deit_small_distilled",
        expect="the paper: Ti 76.6, S 82.6, B 84.2 %; not run here",
        stated={
            "data": {"batch": 1024, "repeats": 3},
            "objective": {"mode": "hard", "labels.smoothing": 0.1},
            "optim.epochs": 1000,
        },
        settings={"model.name": "deit_base_distilled", "objective": {"kind": "distillation", "teacher": REGNET}},
    ),
    "deit-resolution": Recipe(
        "Fine-tuning at a higher resolution, with training's augmentation kept.",
        base="deit-300",
        source="DeiT and, for the settings it leaves out, DeiT III (arXiv 2204.07118)",
        command="--data imagenet/ --model.weights runs/deit-300-... --model.name deit_base",
        expect="the paper: B 81.8 -> 83.1 %; not run here",
        stated_in="DeiT (arXiv 2012.12877) (epochs, size); DeiT III (arXiv 2204.07118) (the rest)",
        stated={
            "data": {"batch": 512, "repeats": 1},
            "model.image_size": 384,
            "optim": {"epochs": 25, "lr": 1e-5, "weight_decay": 0.1},
        },
        settings={"model.weights": "timm", "optim.lr_batch": None, "optim.floor": 1e-6},
    ),
    "small-deit": Recipe(
        "DeiT's recipe for 32-pixel images on one accelerator.",
        source="deit-300 with the device's own RandAugment (torchvision's operations) and a moving average; Muon in "
        "place of AdamW and the mean of the patches in place of the class token, chosen on held-out training images "
        "(studies/small-deit-tuning.yaml: 74.9 % there, 63.2 % with AdamW and a class token)",
        command="--data cifar100.npz",
        expect="CIFAR-100, ViT-Ti/4, all 50,000 images: 75.4 % of test (std 0.4, three seeds, studies/small-deit.yaml)",
        settings={
            "data.batch": 1000,
            "data.augment": {"crop": "pad", "rand_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0},
            "model": {"name": "vit_tiny_32", "drop_path": 0.1, "head.kind": "mean"},
            "objective.smoothing": 0.1,
            "optim": {"name": "muon", "lr": 2e-3, "epochs": 100, "warmup": 5, "weight_decay": 0.1, "momentum": 0.95},
            "optim.clip": 1.0,
            "engine": {"ema": 0.999, "log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-deit-distilled": Recipe(
        "A small ViT with a distillation token, taught by a convolutional network.",
        base="small-deit",
        command="--data cifar10.npz --objective.teacher RUN",
        expect="with six blocks and 20 epochs 78.8 % of CIFAR-10 by a ResNet-56 of 92.5 % (std 0.4, three seeds, "
        "studies/distillation.yaml; 77.4 % without the teacher); 100 epochs not measured yet",
        settings={
            "model": {"name": "deit_tiny_distilled_32", "head": None},
            "objective": {"kind": "distillation", "labels.smoothing": 0.1},
        },
    ),
}

DEIT3 = {
    "deit3-1k-400": Recipe(
        "DeiT III on ImageNet-1k from scratch: 3-Augment, binary cross entropy, LAMB.",
        source="DeiT III, table 1; drop path by size as printed; the authors' code binarises mixed targets, as here",
        command="--data imagenet/ --model.name deit3_large",
        expect="the paper: S 80.4, B 83.1, L 84.2 %; not run here",
        stated_in="DeiT III (arXiv 2204.07118)",
        stated={
            "data": {"batch": 2048, "crop_ratio": 1.0, "repeats": 3, "augment.crop": "resized"},
            "data.augment": {"three": True, "jitter": 0.3, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.0},
            "objective": {"loss": "bce", "smoothing": 0.0},
            "optim": {"name": "lamb", "lr": 3e-3, "schedule": "cosine", "warmup": 5, "weight_decay": 0.02, "clip": 1.0},
            "optim.epochs": 400,
        },
        settings={"model.name": "deit3_base", "model.drop_path": 0.1, "objective.bce_threshold": 0.0},
        by_model=drops(DROP_1K),
    ),
    "deit3-1k-800": Recipe(
        "DeiT III for 800 epochs: more decay, 0.05 more drop path for every 200 epochs.",
        base="deit3-1k-400",
        source="DeiT III",
        command="--data imagenet/",
        expect="the paper: S 81.4, B 83.7, L 84.5 %; not run here",
        stated={"optim.epochs": 800, "optim.weight_decay": 0.05},
        settings={"model.drop_path": 0.2},
        by_model=drops(DROP_1K, 0.1),
    ),
    "deit3-lowres": Recipe(
        "Training at a lower resolution; `deit3-resolution --model.image_size 224` follows.",
        base="deit3-1k-400",
        source="DeiT III; the effect is that of FixRes (Touvron et al. 2019, arXiv 1906.06423)",
        command="--data imagenet/ --model.image_size 192",
        expect="the paper: B 83.5 % after fine-tuning at 224, against 83.1 % trained there; not run here",
        stated_in="DeiT III (arXiv 2204.07118): train at 192, then deit3-resolution at 224",
        stated={"model.image_size": 192},
        by_model=drops(DROP_1K, sizes=LOW),
    ),
    "deit3-21k-90": Recipe(
        "DeiT III on ImageNet-21k: simple random crops, no mixup, cross entropy.",
        base="deit3-1k-400",
        source="DeiT III, table 1",
        command="--data imagenet21k/",
        expect="the paper, after 21k -> 1k: S 82.6, B 85.2, L 86.8 %; not run here",
        stated={
            "data": {"batch": 2048, "crop_ratio": 1.0, "repeats": 1, "augment.crop": "simple"},
            "data.augment": {"three": True, "jitter": 0.3, "mixup": 0.0, "cutmix": 1.0, "erasing": 0.0},
            "objective": {"loss": "cross_entropy", "smoothing": 0.1},
            "optim": {"name": "lamb", "lr": 3e-3, "schedule": "cosine", "warmup": 5, "weight_decay": 0.02, "clip": 1.0},
            "optim.epochs": 90,
        },
        settings={"objective.bce_threshold": None},
        by_model=drops(DROP_21K),
    ),
    "deit3-21k-240": Recipe(
        "DeiT III on ImageNet-21k, the long schedule.",
        base="deit3-21k-90",
        source="DeiT III",
        expect="the paper, after 21k -> 1k: S 83.1, B 85.7, L 87.0 %; not run here",
        stated_in="DeiT III (arXiv 2204.07118): drop path + 0.05",
        stated={"optim.epochs": 240},
        settings={"model.drop_path": 0.15},
        by_model=drops(DROP_21K, 0.05),
    ),
    "deit3-21k-to-1k": Recipe(
        "From ImageNet-21k weights to ImageNet-1k.",
        base="deit3-21k-90",
        source="DeiT III, table 1",
        command="--data imagenet/ --model.weights RUN",
        expect="see deit3-21k-90",
        stated={
            "data": {"batch": 2048, "augment.crop": "simple"},
            "objective.smoothing": 0.1,
            "optim": {"lr": 3e-4, "epochs": 50},
        },
        by_model=drops(DROP_21K),
    ),
    "deit3-resolution": Recipe(
        "DeiT III fine-tuned at another resolution: DeiT's AdamW, cross entropy and RandAugment in place of its own.",
        base="deit-resolution",
        source="the paper gives the learning rate, batch, length and decay; the authors' README the optimiser, "
        "smoothing, RandAugment 9/0.5 and no clipping. Its colour jitter has no effect in timm with RandAugment",
        command="--data imagenet/ --model.weights RUN --model.image_size 384",
        expect="the paper: B at 384 85.0 %; not run here",
        stated_in="DeiT III, fine-tuning at a higher resolution (learning rate to repeats); the authors' README (the "
        "rest)",
        stated={
            "data": {"batch": 512, "repeats": 1, "augment": {"three": False, "erasing": 0.0, "jitter": 0.0}},
            "data.augment": {"rand_magnitude": 9, "rand_std": 0.5, "rand_style": "timm", "mixup": 0.8, "cutmix": 1.0},
            "objective": {"loss": "cross_entropy", "smoothing": 0.1},
            "optim": {"lr": 1e-5, "epochs": 20, "weight_decay": 0.1, "name": "adamw", "schedule": "cosine"},
            "optim.warmup": 5,
            "optim.warmup_lr": 1e-6,
            "optim.clip": 0.0,
        },
        settings={"data.crop_ratio": 1.0, "model.name": "deit3_base"},
        by_model=drops(DROP_1K, sizes=dict.fromkeys(LOW, 224)),  # what they are fine-tuned at
    ),
    "rsb-a2": Recipe(
        "ResNet strikes back, A2: the ResNet-50 with which ViT recipes are compared.",
        source="RSB (Wightman et al. 2021, arXiv 2110.00476), as DeiT III prints it in table 1",
        command="--data imagenet/",
        expect="the paper: 79.7 +- 0.1 % over 100 seeds; not run here",
        stated_in="DeiT III (arXiv 2204.07118), column RSB ResNet-50",
        stated={
            "data": {"batch": 2048, "repeats": 3, "crop_ratio": 0.95},
            "data.augment": {"rand_magnitude": 7, "rand_std": 0.5, "mixup": 0.2, "cutmix": 1.0, "erasing": 0.0},
            "objective": {"loss": "bce", "smoothing": 0.0},
            "optim": {"name": "lamb", "lr": 5e-3, "warmup": 5, "weight_decay": 0.02, "clip": 1.0, "epochs": 300},
        },
        settings={
            "data.augment": {"rand_ops": 2, "rand_style": "timm"},
            "model": {"name": "timm:resnet50", "drop_path": 0.05},
            "objective.bce_threshold": 0.0,
        },
    ),
    "small-deit3": Recipe(
        "DeiT III for 32-pixel images.",
        command="--data cifar100.npz",
        expect="with six blocks, Muon at 2e-3 and 20 epochs 25.9 % of CIFAR-100 (std 0.3, three seeds, "
        "studies/augmentations.yaml), with its LAMB 16.9 %, both measured before the blur scaled with the image and "
        "to be repeated; 100 epochs not measured yet",
        settings={
            "data.batch": 1000,
            "data.augment": {"crop": "pad", "jitter": 0.3, "three": True, "mixup": 0.8, "cutmix": 1.0},
            "model": {"name": "deit3_tiny_32", "drop_path": 0.05},
            "objective": {"loss": "bce", "bce_threshold": 0.0},
            "optim": {"name": "lamb", "lr": 3e-3, "epochs": 100, "warmup": 5, "weight_decay": 0.02, "clip": 1.0},
            "engine": {"log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-rsb": Recipe(
        "A ResNet for 32-pixel images under a modern recipe.",
        base="small-deit3",
        expect="in 16 epochs, batches of 250, 32.7 % of CIFAR-100 (std 1.0, three seeds, studies/recipe-swap.yaml); "
        "100 epochs not measured yet",
        settings={
            "data.augment": {"jitter": 0.0, "three": False, "rand_ops": 2, "rand_magnitude": 7, "mixup": 0.2},
            "model": {"name": "cifar_resnet56", "drop_path": None},
            "optim.lr": 5e-3,
        },
    ),
}
