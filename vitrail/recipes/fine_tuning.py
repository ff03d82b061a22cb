"""Transfer from one data set to another, of all weights or by an adapter.

Settings of CaiT (Touvron et al. 2021, arXiv 2103.17239), DeiT III (Touvron et al. 2022, arXiv 2204.07118) and Gramian
heads (Ryu et al. 2023, arXiv 2310.16483). Adapters: NOLA, Koohpayegani et al. 2023, arXiv 2310.02556; LoRA, Hu et al.
2021, arXiv 2106.09685.
"""

from vitrail.recipes.row import Recipe

TRANSFER = {
    "transfer-cifar": Recipe(
        "From ImageNet to CIFAR, at 224 pixels: training's settings with a hundredth of the learning rate.",
        base="cait-400",
        source="CaiT; DeiT does not give its own settings",
        command="--data cifar100.npz --model.name deit_base",
        expect="the paper: CaiT S36 99.2 and 92.2 % (CIFAR-10, -100); not run here",
        stated={"optim.lr": 1e-5, "optim.epochs": 1000},
        settings={"data.crop_ratio": 0.875, "model.weights": "timm", "optim.floor": 1e-6},
    ),
    "transfer-flowers": Recipe(
        "From ImageNet to Flowers-102: a tenth of the learning rate.",
        base="transfer-cifar",
        source="CaiT",
        command="--data torchvision:Flowers102?root=data",
        expect="the paper: CaiT S36 98.8 %; not run here",
        stated={"optim.lr": 1e-4, "optim.epochs": 1000},
    ),
    "transfer-cars": Recipe(
        "From ImageNet to Stanford Cars.",
        base="transfer-cifar",
        source="CaiT",
        command="--data torchvision:StanfordCars?root=data",
        expect="the paper: CaiT S36 93.5 %; not run here",
        stated={"optim.lr": 1e-4, "optim.epochs": 1000},
    ),
    "transfer-inat": Recipe(
        "From ImageNet to iNaturalist.",
        base="transfer-cifar",
        source="CaiT",
        command="--data inaturalist/",
        expect="the paper: CaiT S36 77.1 and 80.6 % (2018, 2019); not run here",
        stated={"optim.lr": 1e-4, "optim.epochs": 360},
    ),
    "transfer-fgvc": Recipe(
        "Fine-grained data from ImageNet weights: one cell of the grid over which mean and spread are reported.",
        source="Gramian heads, appendix A.1; batch, momentum and the grid (7 learning rates 1e-4 to 1e-1, 7 ratios of "
        "weight decay to learning rate 1e-6 to 1e-3, and 0) are those of Kornblith et al. 2019, from memory; images "
        "at 256, centre crop of 224",
        command="--data cub/ --model.name timm:resnet50 --optim.lr 0.01",
        expect="the paper, over its grid: ResNet-50 79.2 +- 1.7 on CUB; not run here",
        stated_in="Gramian heads, appendix A.1: SGD, 20,000 iterations, final epoch; a grid of learning rates and "
        "decays",
        stated={"optim.name": "sgd", "optim.steps": 20_000, "data.augment.crop": "evaluation"},
        settings={
            "data.batch": 256,
            "model": {"name": "timm:resnet50", "weights": "timm"},
            "optim": {"lr": 0.01, "warmup": 0, "floor": 0.0, "weight_decay": 1e-4},
        },
    ),
    "transfer-attention": Recipe(
        "Fine-tuning of the attention layers alone.",
        base="transfer-cifar",
        source="DeiT III, after Touvron et al. 2022 (arXiv 2203.09795): less memory, as accurate, better on small sets",
        command="--data photos/",
        expect="the paper: + 0.2 on Flowers; not run here",
        stated_in="DeiT III (arXiv 2204.07118)",
        stated={"optim.tune": "attention"},
        settings={
            "data": {"batch": 256, "repeats": 1, "crop_ratio": 1.0},
            "model.name": "deit3_base",
            "optim": {"lr": 1e-4, "epochs": 100},
        },
    ),
    "small-transfer": Recipe(
        "From a run on one set of 32-pixel images to another.",
        command="--data cifar10.npz --model.weights RUN [--optim.tune attention]",
        expect="a ViT of six blocks from CIFAR-100, on a tenth of CIFAR-10, 40 epochs: 74.1 % (std 0.1, three seeds, "
        "studies/attention-only.yaml)",
        settings={
            "data": {"batch": 500, "augment": {"crop": "pad", "mixup": 0.2, "cutmix": 1.0}},
            "model.name": "vit_tiny_32",
            "objective.smoothing": 0.1,
            "optim": {"lr": 2e-4, "epochs": 30, "warmup": 2, "clip": 1.0},
            "engine": {"log_every": 50, "evaluate_every": 5, "checkpoint_every": 5},
        },
    ),
}

ADAPTERS = {
    "nola-vit": Recipe(
        "A ViT-B for a new task from ten images per class: a seed and 49,152 coefficients besides the classifier.",
        source="NOLA; k = l = 1024 is inferred from the printed 47K (of 2^20); the learning rate is one of 5e-3, "
        "1e-3, 5e-4; scale, schedule and augmentation are not given: 1, cosine, flips",
        command="--data photos/",
        expect="the paper, CIFAR-10 / CIFAR-100 / CUB / Caltech-101: 92.2 / 81.3 / 81.7 / 90.6 %; not run here",
        stated_in="NOLA (arXiv 2310.02556): MLP of ViT-B, 5 or 10 images per class",
        stated={
            "data": {"batch": 64, "shots": 10},
            "model.adapter": {"rank": 4, "targets": ("mlp",)},
            "optim": {"epochs": 50, "weight_decay": 0.0},
        },
        settings={
            "data.augment.crop": "evaluation",
            "model": {"name": "vit_base", "weights": "timm", "adapter": {"kind": "nola", "coefficients": 1024}},
            "optim.warmup": 0,
            "engine": {"evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "lora-vit": Recipe(
        "The same with LoRA on queries, keys and values.",
        base="nola-vit",
        source="NOLA. The paper's 147,456 parameters are rank 1 on the fused layer, or on queries and values alone; "
        "its text says q, k and v, each with a rank of its own, which gives the 221,184 used here",
        expect="the paper, CIFAR-10 / CIFAR-100 / CUB / Caltech-101: 93.1 / 81.6 / 82.4 / 90.8 %; not run here",
        stated_in="NOLA (arXiv 2310.02556): its LoRA baseline",
        stated={
            "data": {"batch": 64, "shots": 10},
            "model.adapter": {"rank": 4, "targets": ("qkv",)},
            "optim.epochs": 50,
        },
        settings={"model.adapter.kind": "lora"},
    ),
    "nola-resnet": Recipe(
        "A ResNet-20 from scratch, in the subspace that 12,876 parameters span around its random initialisation.",
        source="NOLA: 19 convolutions of 250 + 250, the classifier of 1000 + 1000, norms as they are; rank, length "
        "and augmentation are not given: 8 (fewer than the 10 classes), 200 epochs, crops and flips",
        command="--data cifar10.npz",
        expect="the paper: 82.4 % on CIFAR-10 (dense 88.9); not run here",
        stated_in="NOLA (arXiv 2310.02556): 12,876 parameters in all, 1,376 of them of norms",
        stated={
            "data.batch": 256,
            "model": {"name": "cifar_resnet20", "adapter": {"coefficients": 250, "head_coefficients": 1000}},
            "optim": {"name": "adam", "lr": 1e-3},
        },
        settings={
            "data.augment.crop": "pad",
            "model.adapter": {"kind": "nola", "targets": ("all",), "train_head": False, "train_norms": True},
            "optim": {"epochs": 200, "warmup": 0, "floor": 0.0, "weight_decay": 0.0},
            "engine": {"log_every": 100, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-nola": Recipe(
        "From a run on one set of 32-pixel images to another, as a seed and some thousand parameters.",
        base="small-transfer",
        command="--data cifar10.npz --model.weights RUN [--model.adapter.coefficients 1000]",
        settings={
            "model.adapter": {"kind": "nola", "coefficients": 500, "targets": ("mlp",)},
            "optim": {"lr": 0.02, "epochs": 20, "weight_decay": 0.0},
        },
    ),
    "small-lora": Recipe(
        "From a run on one set of 32-pixel images to another, by low-rank changes of queries and values.",
        base="small-nola",
        command="--data cifar10.npz --model.weights RUN [--model.adapter.rank 1]",
        settings={"model.adapter.kind": "lora", "optim.lr": 5e-3},
    ),
}
