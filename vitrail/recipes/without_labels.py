"""Self-supervised and semi-supervised learning, and students that learn a teacher's embeddings.

BYOL: Grill et al. 2020, arXiv 2006.07733; MoCo-v2: Chen et al. 2020, arXiv 2003.04297; ISD: Tejankar et al. 2020, arXiv
2012.09259; MSF: Koohpayegani et al. 2021, arXiv 2105.07269; CMSF: Navaneet et al. 2021, arXiv 2112.04607; SupCon:
Khosla et al. 2020, arXiv 2004.11362; DINO: Caron et al. 2021, arXiv 2104.14294; UniSiam: Lu et al. 2022, arXiv
2207.09176; CompRess: Koohpayegani et al. 2020, arXiv 2010.14713; SimA: Koohpayegani and Pirsiavash 2022, arXiv
2206.08898; ResMLP: Touvron et al. 2021, arXiv 2105.03404.

Where the papers give the teacher weak views (crop and flip) and the model strong ones, so do these recipes; BYOL, MoCo
and ISD on a ResNet-18 have two strong ones. Step schedules are replaced by a cosine here. DINO's large views differ in
blur and solarising in its paper, and its small ones are not solarised; here all have the mean of the two large ones,
and saturation is jittered as much as brightness and contrast, where it has half of that. Learning rates are those of
batches of 256, and follow the batch. Small versions crop from 0.08 and do not blur, as the CIFAR recipes of solo-learn
and lightly; why those with a momentum encoder have a learning rate of 0.2 and a last BatchNorm:
docs/results/self-supervised.md.

Students see crops and flips only, as in CompRess: no colour jitter, in the small versions neither.
"""

from vitrail.recipes.row import Recipe

SGD = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.weight_decay": 1e-4, "data.batch": 256}
SHIFT = {
    **SGD,
    "model.head": {"hidden": 4096, "width": 512},
    "objective.momentum": 0.99,
    "objective.predictor_hidden": 4096,
    "optim": {"lr": 0.05, "schedule": "cosine", "epochs": 200},
}

SELFSUPERVISED = {
    "byol-asym": Recipe(
        "Asymmetric BYOL: predict the momentum encoder's embedding of another view.",
        source="ISD, its BYOL-asym baseline",
        command="--data imagenet/",
        expect="the paper: 69.3 % linear, 55.0 % 1-NN on ImageNet; not run here",
        stated_in="ISD (arXiv 2012.09259): ResNet-50",
        stated={**SHIFT, "objective.symmetric": False, "objective.views": "strong_strong"},
        settings={
            "data.augment": {"scale": (0.2, 1.0), "jitter": 0.4, "hue": 0.1, "jitter_chance": 0.8, "grey": 0.2},
            "data.augment.blur": 0.5,
            "model": {"name": "timm:resnet50", "head": {"kind": "projected", "norm": True, "judged": "trunk"}},
            "objective.kind": "byol",
            "optim": {"lr_batch": 256, "warmup": 0, "floor": 0.0, "nesterov": False},
            "evaluators": ("classification", "knn"),
        },
    ),
    "moco-v2": Recipe(
        "MoCo-v2: contrast the other view of an image with a queue of 65,536 negatives.",
        base="byol-asym",
        source="MoCo-v2; schedule, momentum and learning rate as CompRess has them",
        expect="the paper: 67.5 % linear, 50.9 % 1-NN on ImageNet; not run here",
        stated_in="CompRess (arXiv 2010.14713): 200 epochs, momentum 0.999, lr 0.03; the rest as MoCo-v2's own",
        stated={"optim.lr": 0.03, "optim.epochs": 200, "objective.momentum": 0.999},
        settings={"model.head": {"width": 128, "hidden": 2048, "norm": False}, "objective.kind": "moco"},
    ),
    "isd-r18": Recipe(
        "ISD on a ResNet-18: one temperature, no projector.",
        base="byol-asym",
        source="ISD; its learning rate falls to a fifth at epochs 140 and 180, a cosine here",
        expect="the paper: 53.8 % linear, 41.5 % 1-NN on ImageNet; not run here",
        stated_in="ISD (arXiv 2012.09259): ResNet-18, strong / strong",
        stated={
            **SGD,
            "model.head.projector": "none",
            "objective": {"predictor_hidden": 512, "temperature": 0.02, "teacher_temperature": 0.02, "momentum": 0.999},
            "objective.bank": 128_000,
            "objective.views": "strong_strong",
            "optim": {"lr": 0.01, "epochs": 200},
        },
        settings={
            "model": {"name": "timm:resnet18", "head": {"width": 256, "norm": False, "judged": "projector"}},
            "objective.kind": "isd",
        },
    ),
    "isd": Recipe(
        "ISD on a ResNet-50: match the momentum encoder's sharper similarities to other images.",
        base="byol-asym",
        source="ISD",
        expect="the paper: 69.8 % linear, 59.2 % 1-NN on ImageNet; not run here",
        stated={
            **SHIFT,
            "objective": {"temperature": 0.1, "teacher_temperature": 0.01, "bank": 128_000, "views": "weak_strong"},
        },
        settings={"objective.kind": "isd"},
    ),
    "msf": Recipe(
        "MSF: move towards the mean of five nearest neighbours, the image itself among them.",
        base="byol-asym",
        source="MSF",
        expect="the paper: 72.1 % linear, 62.0 % 1-NN on ImageNet; not run here",
        stated_in="MSF (arXiv 2105.07269): w/s, 128K bank; the authors' code for jitter",
        stated={
            **SHIFT,
            "data.weak": {"scale": (0.2, 1.0), "flip": 0.5},
            "data.augment": {"jitter": 0.4, "hue": 0.1, "jitter_chance": 0.8, "grey": 0.2, "blur": 0.5},
            "objective": {"k": 5, "bank": 128_000, "views": "weak_strong"},
        },
        settings={"objective.kind": "msf"},
    ),
    "cmsf-self": Recipe(
        "CMSF without labels: neighbours constrained by those of an earlier embedding.",
        base="byol-asym",
        source="CMSF",
        expect="the paper: 73.0 % linear, 63.2 % 1-NN on ImageNet; not run here",
        stated_in="CMSF (arXiv 2112.04607)",
        stated={**SHIFT, "objective": {"constraint": "self", "k": 5, "pool": 5, "bank": 128_000}},
        settings={"objective.kind": "cmsf"},
    ),
    "cmsf-semi": Recipe(
        "CMSF with a tenth of the labels: neighbours of the same label or confident pseudo-label.",
        base="cmsf-self",
        source="CMSF",
        expect="the paper: 69.9 % after its fine-tuning with a tenth of ImageNet's labels; not run here",
        stated_in="CMSF (arXiv 2112.04607): ImageNet with a tenth of its labels",
        stated={
            **SHIFT,
            "objective": {"constraint": "semi", "k": 10, "labelled": 0.1, "threshold": 0.85, "bank": 128_000},
        },
    ),
    "cmsf-sup": Recipe(
        "CMSF with labels: the ten nearest neighbours of the same class.",
        base="cmsf-self",
        source="CMSF",
        expect="the paper: 76.4 % linear on ImageNet, 80.1 % mean of ten transfers; not run here",
        stated={**SHIFT, "objective.constraint": "supervised", "objective.k": 10, "objective.bank": 128_000},
    ),
    "supcon": Recipe(
        "SupCon: contrast within a batch, by label.",
        base="byol-asym",
        source="CMSF, its SupCon baseline (temperature, warm-up); learning rate and batch are its common ones",
        expect="the paper: 77.5 % linear on ImageNet; not run here",
        stated_in="CMSF (arXiv 2112.04607)",
        stated={"objective.temperature": 0.1, "optim.warmup": 10},
        settings={"model.head.width": 128, "model.head.hidden": 2048, "objective.kind": "supcon"},
    ),
    "resmlp-dino": Recipe(
        "DINO on a ResMLP, which takes a fixed number of patches: two global views, no local ones.",
        base="byol-asym",
        source="ResMLP (300 epochs); the rest is DINO's for a ViT-S",
        expect="the paper: S12 76.5 %, S24 79.9 % after fine-tuning on ImageNet; not run here",
        stated_in="ResMLP (arXiv 2105.03404): 300 epochs; the rest by reference",
        stated={"optim.epochs": 300},
        settings={
            "data": {"batch": 1024, "augment": {"scale": (0.4, 1.0), "solarise": 0.1, "blur": 0.55}},
            "model": {"name": "resmlp_s12", "head": {"width": 256, "hidden": 2048, "norm": False}},
            "objective": {"kind": "dino", "local_views": 0},
            "optim": {"name": "adamw", "lr": 5e-4, "warmup": 10, "floor": 1e-6, "weight_decay": 0.04},
            "optim.weight_decay_end": 0.4,
            "optim.nesterov": True,
            "optim.clip": 3.0,
            "engine.ema": 0.996,
        },
    ),
    "sima-dino": Recipe(
        "DINO on an XCiT without softmax; its patch tokens are mean-pooled in place of a class token.",
        base="resmlp-dino",
        source="SimA; ours: warm-up, views and temperatures, which are DINO's",
        hardware="the authors': 4 RTX 3090, about 100 hours",
        expect="the paper: 75.5 % linear, 71.2 % 20-NN on ImageNet; not run here",
        stated_in="SimA (arXiv 2206.08898)",
        stated={
            "data.batch": 256,
            "model.name": "xcit_s12_p16_sima",
            "optim": {"name": "adamw", "lr": 2.5e-4, "schedule": "cosine", "weight_decay": 0.04},
            "optim.weight_decay_end": 0.4,
            "optim.epochs": 100,
        },
        settings={"objective.local_views": 8},
    ),
    "small-byol": Recipe(
        "BYOL on a small ResNet, in minutes.",
        base="byol-asym",
        command="--data cifar10.npz",
        expect="CIFAR-10: 64.3 % by 20 neighbours, 65.0 % linear (test images, one seed)",
        settings={
            "data.augment": {"scale": (0.08, 1.0), "blur": 0.0},
            "model": {"name": "cifar_resnet20", "head": {"width": 128, "hidden": 512, "last_norm": True}},
            "objective.predictor_hidden": 512,
            "optim": {"lr": 0.2, "epochs": 50, "warmup": 1},
            "engine": {"log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-unisiam": Recipe(
        "UniSiam on a small ResNet: a backbone for few-shot episodes, in minutes.",
        base="small-byol",
        source="UniSiam, the backbone of GeNIe (arXiv 2312.02548); its projector has three layers, two here",
        expect="CIFAR-10: 57.4 % by 20 neighbours, 60.1 % linear (test images, one seed)",
        settings={
            "model.head": {"width": 512, "last_norm": False},
            "objective": {"momentum": 0.0, "predictor_hidden": 128, "symmetric": True, "uniformity": 0.1},
            "optim.lr": 0.05,
        },
    ),
    "small-moco": Recipe(
        "MoCo on a small ResNet, in minutes.",
        base="small-byol",
        expect="CIFAR-10: 67.2 % by 20 neighbours, 66.4 % linear (test images, one seed)",
        settings={"objective.kind": "moco", "objective.momentum": 0.99, "objective.bank": 4096},
    ),
    "small-isd": Recipe(
        "ISD on a small ResNet, in minutes.",
        base="small-byol",
        expect="CIFAR-10: 60.8 % by 20 neighbours, 61.1 % linear (test images, one seed)",
        settings={"objective.kind": "isd", "objective.bank": 4096, "objective.predictor_hidden": 512},
    ),
    "small-msf": Recipe(
        "Mean shift on a small ResNet, in minutes.",
        base="small-byol",
        expect="CIFAR-10: 60.0 % by 20 neighbours, 61.5 % linear (test images, one seed)",
        settings={"objective.kind": "msf", "objective.bank": 4096, "objective.predictor_hidden": 512},
    ),
    "small-cmsf": Recipe(
        "Constrained mean shift on a small ResNet, in minutes; other constraints by --objective.constraint.",
        base="small-byol",
        settings={"objective.kind": "cmsf", "objective.bank": 4096, "objective.predictor_hidden": 512},
    ),
    "small-fixmatch": Recipe(
        "FixMatch on a small ResNet: 4 labels per class of CIFAR-10, pseudo-labels for the rest.",
        source="FixMatch (Sohn et al. 2020, arXiv 2001.07685): a WRN-28-2, 2^20 steps, RandAugment and cutout; here "
        "a ResNet-20, 100 epochs, TrivialAugment and erasing",
        command="--data cifar10.npz",
        expect="a ResNet-18 with 250 labels: 60.6 % of CIFAR-10 (one seed; docs/results/trust.md); the paper, after "
        "100 times as many steps: 94.9, and 86.2 with 40 labels",
        settings={
            "data": {"batch": 512, "augment": {"crop": "pad", "trivial": True, "erasing": 1.0}, "weak.crop": "pad"},
            "model.name": "cifar_resnet20",
            "objective": {"kind": "fixmatch", "labelled": 0.0008},
            "optim": {"name": "sgd", "lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 100, "warmup": 0},
            "engine": {"ema": 0.999, "log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
    "small-supcon": Recipe(
        "Supervised contrast on a small ResNet, in minutes.",
        base="small-byol",
        settings={"model.head.last_norm": False, "objective.kind": "supcon", "optim.lr": 0.05},
    ),
    "small-dino": Recipe(
        "DINO on a small ViT, in minutes: two large views and four of half the side.",
        base="sima-dino",
        source="DINO; the teacher's temperature stays where the authors' begins, small views cover a fifth of the "
        "image at least, and the projector has BatchNorm (an option of the authors): without these the teacher's "
        "predictions became uniform within 200 steps on embedded:fashion, and embeddings differed along a line",
        command="--data cifar10.npz",
        settings={
            "data.augment.blur": 0.0,
            "model": {"name": "vit_tiny_32", "head": {"hidden": 1024, "norm": True}},
            "objective": {"momentum": 0.99, "prototypes": 4096, "teacher_temperature": 0.04, "local_views": 4},
            "objective.local_size": 16,
            "objective.local_scale": (0.2, 0.5),
            "optim": {"lr": 5e-4, "epochs": 50, "warmup": 5, "floor": 1e-5},
            "engine": {"ema": 0.99, "log_every": 50, "evaluate_every": 10, "checkpoint_every": 10},
        },
    ),
}

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
        "36.5 % (one seed, studies/students-without-labels.yaml), measured before students saw crops and flips only; "
        "to be repeated",
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
