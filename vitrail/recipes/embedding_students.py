"""Students that learn a teacher's embeddings: CompRess (Koohpayegani et al. 2020, arXiv 2010.14713), baselines.

Students see crops and flips only, as in CompRess: no colour jitter, in the small versions neither.
"""

from vitrail.recipes.row import Recipe
from vitrail.recipes.without_labels import SGD

STUDENTS = {
    "compres-1q": Recipe(
        "CompRess with one queue: match the teacher's similarities to its anchors.",
        source="CompRess; its learning rate falls to a fifth at epochs 90 and 120, a cosine here",
        command="--data imagenet/ --objective.teacher RUN",
        expect="the paper: 62.6 % linear, 53.5 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated_in="CompRess (arXiv 2010.14713)",
        stated={
            **SGD,
            "objective": {"queues": 1, "bank": 128_000, "temperature": 0.04},
            "optim": {"lr": 0.01, "epochs": 130},
        },
        settings={
            "model": {"name": "timm:resnet18", "head": {"kind": "projected", "projector": "none"}},
            "objective.kind": "compres",
            "optim": {"lr_batch": 256, "warmup": 0, "floor": 0.0, "nesterov": False},
            "evaluators": ("classification", "knn"),
        },
    ),
    "compres-2q": Recipe(
        "CompRess with two queues: anchors of the student's own besides the teacher's.",
        base="compres-1q",
        source="CompRess; its learning rate falls to a fifth at epochs 90 and 120, a cosine here",
        expect="the paper: 61.7 % linear, 53.4 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated={
            **SGD,
            "objective": {"queues": 2, "bank": 128_000, "temperature": 0.04, "momentum": 0.999},
            "optim": {"lr": 0.01, "epochs": 130},
        },
    ),
    "reg": Recipe(
        "Plain regression of a teacher's embedding, a baseline of CompRess.",
        base="compres-1q",
        source="CompRess, appendix",
        expect="the paper: 52.2 % linear, 41.7 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated_in="CompRess (arXiv 2010.14713): ResNet-18",
        stated={
            "data.batch": 256,
            "objective": {"layers": 1, "match": "raw"},
            "optim": {"name": "adam", "lr": 1e-3, "weight_decay": 1e-4, "epochs": 100, "schedule": "step"},
            "optim.step_every": 40,
            "optim.step_factor": 0.1,
        },
        settings={"objective.kind": "simreg", "optim.lr_batch": None, "optim.nesterov": True},
    ),
    "reg-bn": Recipe(
        "Regression of a teacher's embedding, both normalised over the batch, a baseline of CompRess.",
        base="compres-1q",
        source="CompRess, appendix",
        expect="the paper: 58.2 % linear, 47.3 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated={
            **SGD,
            "objective": {"layers": 1, "match": "batch_norm"},
            "optim": {"lr": 0.1, "epochs": 100, "schedule": "step", "step_every": 40, "step_factor": 0.1},
        },
        settings={"objective.kind": "simreg"},
    ),
    "cluster-classification": Recipe(
        "Classification of k-means clusters of a teacher's features, the baseline CC of CompRess.",
        base="compres-1q",
        source="CompRess, appendix; ours: weight decay and batch",
        expect="the paper: 61.1 % linear, 51.1 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated_in="CompRess (arXiv 2010.14713): ResNets",
        stated={"optim.lr": 0.1, "optim.epochs": 100, "optim.schedule": "cosine", "objective.clusters": 16_000},
        settings={"objective.kind": "clusters"},
    ),
    "crd": Recipe(
        "CRD (Tian et al. 2019, arXiv 1910.10699): contrast with a teacher's embeddings, a baseline of CompRess.",
        base="compres-1q",
        source="CompRess, appendix (learning rate); ours: its length; the rest is CRD's and CompRess' own",
        expect="the paper: 58.4 % linear, 43.7 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here",
        stated_in="CompRess (arXiv 2010.14713): no supervised term",
        stated={"optim.lr": 0.05},
        settings={"objective.kind": "crd", "optim.epochs": 100},
    ),
    "small-compres": Recipe(
        "A teacher's similarities matched by a small ResNet, in minutes.",
        base="compres-1q",
        command="--data cifar10.npz --objective.teacher RUN",
        expect="after 30 epochs, with a bank of 16,384, from a ResNet-18 of 39.6 % of CIFAR-100 by 20 neighbours: "
        "36.5 % (one seed, studies/selfsupervised.py), measured before students saw crops and flips only; to be "
        "repeated",
        settings={
            "model.name": "cifar_resnet20",
            "objective.bank": 4096,
            "optim": {"lr": 0.2, "epochs": 50, "warmup": 1},
            "engine": {"log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-simreg": Recipe(
        "A teacher's embeddings regressed by a small ResNet, in minutes.",
        base="small-compres",
        settings={"objective.kind": "simreg", "optim.lr": 0.05},
    ),
    "small-clusters": Recipe(
        "A teacher's clusters classified by a small ResNet, in minutes.",
        base="small-compres",
        settings={"objective.kind": "clusters", "objective.clusters": 500, "optim.lr": 0.05},
    ),
    "small-crd": Recipe(
        "A teacher's embeddings contrasted by a small ResNet, in minutes.",
        base="small-compres",
        settings={"objective.kind": "crd", "objective.negatives": 4096, "optim.lr": 0.05},
    ),
}
