"""First runs: the demonstration, fine-tuning, a ViT from scratch, the least time to an accuracy, a diffusion model."""

from vitrail.recipes.row import Recipe

START = {
    "demo": Recipe(
        "A small ViT on the embedded slice of Fashion-MNIST: the whole path in minutes on two CPU cores.",
        source="chosen by hand from validation accuracies of 47 trial runs of learning rate, decay, width, stem, "
        "head, flips, batch and initialisation. Test accuracies of six earlier settings were seen on the way (72.5 to "
        "84.5 %), and the search went on because of the last: read 85.9 % as slightly optimistic. Other seeds were "
        "not run",
        hardware="2 cores of an x86 machine, torch 2.15",
        expect="85.9 % of the 2,000 test images (95 % interval 84.3 to 87.4; seed 0 only, 85.85 with the host "
        "loader), about two and a half minutes",
        settings={
            # No flips: all shoes of this data set point the same way.
            "data": {"uri": "embedded:fashion", "batch": 50, "augment": {"crop": "pad", "padding": 1, "flip": 0.0}},
            "model.name": "vit_micro_28",
            "optim": {"epochs": 36, "warmup": 1, "weight_decay": 0.1, "clip": 1.0},
            "engine": {"ema": 0.999, "evaluate_every": 3, "checkpoint_every": 3},
        },
    ),
    "finetune": Recipe(
        "Start from published weights and adapt the whole model to your photographs.",
        command="--data photos/",
        expect="depends on the photographs; not measured here",
        settings={
            "data": {"batch": 64, "augment": {"scale": (0.3, 1.0), "jitter": 0.2}},
            "model": {"name": "deit_small", "weights": "timm", "drop_path": 0.1},
            "objective.smoothing": 0.1,
            "optim": {"lr": 1e-4, "lr_batch": 64, "epochs": 20, "warmup": 1, "floor": 1e-6, "clip": 1.0},
            "optim.layer_decay": 0.75,
        },
    ),
    "scratch": Recipe(
        "Train a network for 1,000 to 10,000 photographs from scratch, where no published weights can be had.",
        source="chosen on held-out training images of Imagenette at 128 pixels (studies/scratch-tuning.yaml, 2,270 "
        "images, 100 epochs, one seed): 88.2 % there (86.4 % at half of the learning rate), a ResNet-18 at that "
        "82.5 %, under SGD 79.0 %, and with flips and crops only 76.6 %",
        command="--data photos/",
        hardware="one H200",
        expect="depends on the photographs; not measured on test images yet",
        settings={
            "data.batch": 64,
            "data.augment": {"scale": (0.35, 1.0), "trivial": True, "mixup": 0.2, "cutmix": 1.0},
            "model": {"name": "timm:resnet26d", "image_size": 128},
            "objective.smoothing": 0.1,
            "optim": {"name": "muon", "lr": 4e-3, "epochs": 100, "warmup": 5, "weight_decay": 0.1, "momentum": 0.95},
            "optim.clip": 1.0,
            "engine": {"ema": 0.99, "evaluate_every": 5},
        },
    ),
    "vit": Recipe(
        "Train a plain ViT from scratch, with the augmentation that it needs.",
        source="DeiT's recipe (Touvron et al. 2021, arXiv 2012.12877, table 9), shortened; no repeated augmentation",
        command="--data photos/ --model.name deit_tiny",
        expect="depends on the data; not measured here",
        settings={
            "data": {"batch": 256, "augment": {"rand_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}},
            "model.drop_path": 0.1,
            "objective.smoothing": 0.1,
            "optim": {"lr": 5e-4, "lr_batch": 512, "epochs": 100, "warmup": 5, "clip": 1.0},
            "engine.ema": 0.999,
        },
    ),
}

FROM_SCRATCH = {
    "speedrun-cifar10": Recipe(
        "A plain ViT from raw pixels to 94 % of CIFAR-10 in the least time on one accelerator.",
        command="--data cifar10.npz; ten seeds, timed: python studies/speedrun.py",
        expect="92.0 % (std 0.2 over ten seeds) in 46.9 s on one H200, compilation apart: two points short of its goal",
        settings={
            "data": {"uri": "torchvision:CIFAR10?root=data", "batch": 1000, "loader": "device"},
            "data.augment": {"crop": "pad", "rand_ops": 1, "rand_magnitude": 6, "mixup": 0.2, "cutmix": 1.0},
            "model": {"name": "vit_small_32", "head.kind": "mean", "trunk.depth": 8},
            "objective.smoothing": 0.1,
            "optim": {"name": "muon", "lr": 2e-3, "epochs": 50, "warmup": 2, "weight_decay": 0.1, "momentum": 0.95},
            "optim.clip": 1.0,
            "engine": {"ema": 0.998, "log_every": 200, "evaluate_every": 0, "checkpoint_every": 0},
        },
    ),
    # The generator of GeNIe (arXiv 2312.02548) where no weights can be downloaded. Flips are its only augmentation: it
    # would learn to generate any other.
    "small-diffusion": Recipe(
        "A class-conditional diffusion model of 32-pixel images, in minutes on one accelerator.",
        command="--data cifar10.npz",
        expect="not measured yet; top-1 is that of the class under which noise is predicted best",
        settings={
            "data": {"batch": 512, "augment.crop": "evaluation"},
            "model.name": "denoiser_32",
            "objective.kind": "diffusion",
            "optim": {"lr": 4e-4, "epochs": 120, "warmup": 2, "weight_decay": 0.0, "clip": 1.0},
            "engine": {"ema": 0.9995, "log_every": 100, "evaluate_every": 10, "checkpoint_every": 20},
            "evaluators": ("denoising",),
        },
    ),
}
