"""Coarse labels: Grafit (Touvron et al. 2020, arXiv 2011.12982). Long-tailed data: LiVT (Xu et al. 2022, arXiv
2212.02015), masked autoencoding and then balanced BCE, which adds the log odds of the classes in training."""

from vitrail.recipes.row import Recipe

GRAFIT = {
    "grafit-imagenet": Recipe(
        "Grafit on ImageNet with coarse labels.",
        source="Grafit; SGD's momentum 0.9, weight decay 1e-4 and the EMA momentum 0.99 are ours",
        command="--data imagenet.csv --data.level coarse",
        expect="the paper: 69.1 % kNN, 42.9 % mAP on the fine classes; not run here",
        stated_in="Grafit (arXiv 2011.12982); decay, warm-up, momentum and widths are not given",
        stated={
            "data.batch": 1024,
            "objective": {"temperature": 0.05, "views": 4},
            "optim": {"name": "sgd", "lr": 0.1, "lr_batch": 256, "schedule": "cosine", "epochs": 600},
        },
        settings={
            "data.level": "coarse",
            "data.augment": {"rand_ops": 2, "rand_style": "timm", "rand_std": 0.5, "erasing": 0.25},
            "model": {"name": "timm:resnet50", "head.kind": "projected"},
            "objective.kind": "grafit",
            "optim": {"warmup": 5, "floor": 0.0, "weight_decay": 1e-4},
            "evaluators": ("knn",),
        },
    ),
    "grafit-transfer": Recipe(
        "Transfer of a trunk trained by Grafit to another data set.",
        source="Grafit: an MLP classifier, better than a linear one where the projector was an MLP "
        "(`--model.head.hidden none --model.head.mlp false` for that); momentum 0.9 and weight decay 1e-4 are ours",
        command="--data flowers/ --model.weights RUN [--optim.tune head]",
        expect="the paper, ResNet-50 from ImageNet: flowers 98.2 %, cars 92.5 %, food 89.5 %; not run here",
        stated_in="Grafit (arXiv 2011.12982); trunk fine-tuned, decay and momentum not given",
        stated={"optim.epochs": 240, "optim.schedule": "cosine", "optim.lr": 0.01, "data.batch": 512},
        settings={
            "data.augment": {"rand_ops": 2, "erasing": 0.25},
            "model": {"name": "timm:resnet50", "weights": "timm"},
            "model.head": {"kind": "mean", "hidden": 2048, "mlp": True},
            "optim": {"name": "sgd", "warmup": 5, "floor": 0.0, "weight_decay": 1e-4},
        },
    ),
    "grafit-cifar100": Recipe(
        "Grafit on CIFAR-100's twenty coarse classes.",
        base="grafit-imagenet",
        source="Grafit",
        command="--data cifar100.npz",
        expect="the paper: 77.7 % kNN, 55.7 % mAP on the hundred fine classes; not run here",
        stated_in="Grafit (arXiv 2011.12982)",
        stated={"objective.views": 8, "optim.epochs": 600},
        settings={
            "data.augment": {"scale": (0.2, 1.0), "rand_style": "torchvision", "rand_std": 0.0},
            "model": {"name": "cifar_resnet56", "head.hidden": 1024},
            "objective.predictor_hidden": 1024,
        },
    ),
    "small-grafit": Recipe(
        "Grafit on a small ResNet, in minutes.",
        base="grafit-cifar100",
        expect="in 8 epochs of coarse labels 22.4 % of CIFAR-100's fine classes by neighbours (std 0.9, three seeds, "
        "studies/grafit.yaml; cross entropy gives 30.8 %); 30 epochs not measured yet",
        settings={
            "data.batch": 500,
            "model": {"name": "cifar_resnet20", "head": {"width": 128, "hidden": 512}},
            "objective": {"views": 2, "predictor_hidden": 512},
            "optim": {"epochs": 30, "warmup": 1},
            "engine": {"log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
}

LONG_TAIL = {
    "livt-pretrain": Recipe(
        "The first stage of LiVT: masked autoencoding of the unbalanced data, without labels.",
        base="mae-pretrain",
        source="LiVT, with MAE's settings (arXiv 2111.06377, table 8); GeNIe (arXiv 2312.02548) uses its checkpoint",
        command="--data imagenet-lt.csv",
        expect="nothing by itself; fine-tuned without balanced BCE (row MAE of the paper): 54.5 %; not run here",
        stated_in="GeNIe (arXiv 2312.02548): masked autoencoding on the unbalanced data; settings are MAE's, table 8",
        stated={"model.name": "vit_base", "objective.mask": 0.75},
    ),
    "livt": Recipe(
        "The second stage of LiVT: fine-tuning with balanced BCE, for a long tail of rare classes.",
        base="mae-finetune",
        source="LiVT; its released run has batches of 2048, GeNIe (arXiv 2312.02548) 1024 with the same learning "
        "rate. Whether generated images count as training images of their class is not stated there: "
        "--objective.count_generated",
        command="--data imagenet-lt.csv --model.weights runs/livt-pretrain-...",
        expect="the papers: 60.9 % (Many 73.6, Med 56.4, Few 41.0); not run here, for want of ImageNet-LT",
        stated_in="GeNIe (arXiv 2312.02548) for epochs, learning rate and batch; LiVT's released settings for the rest",
        stated={
            "data": {"batch": 1024, "augment": {"rand_magnitude": 9, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}},
            "model.drop_path": 0.1,
            "objective": {"loss": "bce", "bce_sum": True, "logit_adjustment": 1.0, "smoothing": 0.1},
            "optim": {"epochs": 100, "lr": 8e-3, "warmup": 5, "weight_decay": 0.05, "layer_decay": 0.75},
        },
        settings={"model.name": "vit_base", "optim.lr_batch": None, "evaluators": ("classification", "long_tail")},
    ),
    "small-livt-pretrain": Recipe(
        "The first stage of LiVT for 32-pixel images on one accelerator.",
        base="small-mae",
        command="--data cifar100.npz --data.long_tail 100",
    ),
    "small-livt": Recipe(
        "The second stage of LiVT for 32-pixel images: balanced BCE on a long tail, evaluated by thirds of the "
        "classes.",
        base="small-transfer",
        command="--data cifar100.npz --data.long_tail 100 --model.weights RUN",
        settings={
            "data.augment": {"rand_ops": 2, "mixup": 0.8},
            "model.drop_path": 0.1,
            "objective": {"loss": "bce", "bce_sum": True, "logit_adjustment": 1.0},
            "optim": {"lr": 1e-3, "epochs": 100, "warmup": 5, "layer_decay": 0.75},
            "evaluators": ("classification", "long_tail", "long_tail_thirds"),
        },
    ),
}
