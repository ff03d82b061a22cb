"""Models with input-dependent compute, SimA, and attacks on the compute that adaptive models save.

ATS: Fayyaz et al. 2022, arXiv 2111.15667; SimA: Koohpayegani and Pirsiavash 2022, arXiv 2206.08898; A-ViT: Yin et al.
2022, arXiv 2112.07658; AdaViT: Meng et al. 2022, arXiv 2111.15668; attacks and defence: SlowFormer, Navaneet et al.
2023, arXiv 2310.02544, which samples in fewer blocks than ATS.
"""

from vitrail.recipes.row import Recipe

SMALL_GATE = {"deit_small": {"model.trunk.adaptive.gate_center": 75.0}}
PATCH = {"objective.size": 64, "objective.place": "top_left", "optim.name": "adamw"}
SAMPLED = {**PATCH, "optim.epochs": 2, "data.batch": 1024, "model.trunk.adaptive.layers": (3, 4, 5, 6, 7, 8, 9)}

ADAPTIVE = {
    "ats-finetune": Recipe(
        "ATS: a trained DeiT, fine-tuned on the tokens that it samples.",
        base="deit-300",
        source="ATS, appendix; warm-up and weight decay are not stated: DeiT's",
        hardware="the authors': 8 RTX 6000",
        expect="the paper: S 79.8 -> 79.7 % at 2.9 of 4.6 GMACs; not run here",
        stated_in="ATS (arXiv 2111.15667): DeiT-S (the recipe of DynamicViT)",
        stated={
            "data.batch": 768,
            "model.trunk.adaptive": {"layers": (3, 4, 5, 6, 7, 8, 9, 10, 11), "cap": (197.0,)},
            "optim": {"epochs": 30, "name": "adamw", "lr": 5e-4, "schedule": "cosine"},
        },
        settings={
            "data.repeats": 1,
            "model": {"name": "deit_small", "weights": "timm", "drop_path": None, "trunk.adaptive.kind": "ats"},
            "optim.lr_batch": None,
        },
    ),
    "sima": Recipe(
        "SimA: attention without softmax, from scratch.",
        base="deit-300",
        source="SimA; XCiT is trained for 400 epochs there",
        command="--data imagenet/ --model.name deit_small_sima",
        hardware="the authors': 8 RTX 6000, about 100 hours",
        expect="the paper: DeiT-S 79.8 %, as with softmax; not run here",
        stated_in="SimA (arXiv 2206.08898): DeiT-S",
        stated={
            "data": {"batch": 1024, "crop_ratio": 1.0, "augment": {"mixup": 0.8, "cutmix": 1.0}},
            "model.drop_path": 0.05,
            "optim": {"epochs": 300, "name": "adamw", "lr": 5e-4, "weight_decay": 0.05, "schedule": "cosine"},
        },
        settings={"data.repeats": 1, "model.name": "deit_small_sima", "optim.lr_batch": None},
    ),
    "avit": Recipe(
        "A-ViT: a trained DeiT whose tokens learn to halt.",
        base="ats-finetune",
        source="the released code; another learning rate, batch and gate for deit_small",
        command="--data imagenet/ --model.name deit_tiny",
        hardware="the authors': 4 GPUs",
        expect="released: T 71.4 % at 0.8, S 78.8 % at 3.6 GMACs; not run here",
        stated_in="A-ViT's released code: tiny",
        stated={
            "data.batch": 512,
            "model.trunk.adaptive": {"gate_scale": 10.0, "gate_center": 30.0, "eps": 0.01, "ponder": 5e-4},
            "model.trunk.adaptive.prior": 1e-3,
            "optim": {"epochs": 100, "lr": 5e-4, "warmup": 5},
        },
        settings={"model.name": "deit_tiny", "model.trunk.adaptive.kind": "avit"},
        by_model={"deit_small": {"model.trunk.adaptive.gate_center": 75.0, "optim.lr": 3e-4, "data.batch": 384}},
    ),
    "adavit": Recipe(
        "AdaViT: a trained DeiT learns which patches, heads and branches an image needs.",
        base="ats-finetune",
        source="the released code for gates, targets and weights; batch, learning rate and length are not stated: ours",
        expect="released: S 77.3 % at 2.3 GMACs; not run here",
        stated_in="AdaViT's released code: DeiT-S",
        stated={
            "model.trunk.adaptive": {"patches": 0.5, "heads": 0.5, "branches": 0.5, "usage": 2.0, "temperature": 5.0},
            "model.trunk.adaptive.patch_threshold": 0.6,
            "model.trunk.adaptive.threshold": 0.5,
        },
        settings={"data.batch": 512, "model.trunk.adaptive.kind": "adavit", "optim.epochs": 150},
    ),
    "attack": Recipe(
        "A universal patch that raises the compute of an adaptive model; `vitrail attack` starts from this.",
        source="SlowFormer; 300 steps are ours, the paper calls 1000 enough",
        command="--data photos/ --model.name NAME --model.weights RUN; or vitrail attack RUN",
        expect="CIFAR-100, 8 of 32 pixels: success 5 % (ATS), 12 % (A-ViT), 8 % (AdaViT); studies/adaptive.py",
        settings={
            "data.augment.crop": "evaluation",
            "model.trunk.adaptive.kind": "ats",
            "objective.kind": "attack",
            "optim": {"lr": 0.2, "epochs": 1, "steps": 300, "schedule": "constant", "warmup": 0, "weight_decay": 0.0},
            "engine.evaluate_every": 0,
        },
    ),
    "attack-ats-tiny": Recipe(
        "SlowFormer against ATS in DeiT-Ti.",
        base="attack",
        source="SlowFormer, appendix; victims are most likely not fine-tuned, which the paper does not state",
        command="--data imagenet/; evaluate: vitrail attack --resume RUN",
        hardware="the authors': 4 RTX 3090",
        expect="the paper: 0.84 -> 1.0 of 1.3 GMACs, success 35 %, 70.3 -> 1.2 %; not run here",
        stated_in="SlowFormer (arXiv 2310.02544)",
        stated={**SAMPLED, "optim.lr": 0.4, "objective.layer_weights": (1.0, 0.2, 0.2, 0.2, 0.01, 0.01, 0.01)},
        settings={"model.weights": "timm", "model.trunk.adaptive.cap": (197.0,), "optim.steps": None},
    ),
    "attack-ats-small": Recipe(
        "SlowFormer against ATS in DeiT-S.",
        base="attack-ats-tiny",
        source="SlowFormer, appendix",
        hardware="the authors': 4 RTX 3090",
        expect="the paper: 3.1 -> 4.0 of 4.6 GMACs, success 60 %, 79.2 -> 1.0 %; not run here",
        stated={**SAMPLED, "optim.lr": 0.2, "objective.layer_weights": (1.0, 0.2, 0.05, 0.01, 5e-3, 5e-3, 5e-3)},
        settings={"model.name": "deit_small"},
    ),
    "attack-ats-base": Recipe(
        "SlowFormer against ATS in DeiT-B.",
        base="attack-ats-tiny",
        source="SlowFormer, appendix",
        hardware="the authors': 4 RTX 3090",
        expect="the paper: 12.6 -> 15.4 of 17.6 GMACs, success 52 %, 81.3 -> 0.2 %; not run here",
        stated={**SAMPLED, "optim.lr": 0.2, "objective.layer_weights": (2.0, 0.1, 0.02, 0.01, 5e-3, 5e-3, 5e-3)},
        settings={"model.name": "deit_base"},
    ),
    "attack-avit": Recipe(
        "SlowFormer against A-ViT.",
        base="attack",
        source="SlowFormer, appendix; 4 epochs for patches of 32 pixels and less",
        command="--data imagenet/ --model.weights RUN; evaluate: vitrail attack --resume RUN",
        hardware="the authors': 4 RTX 3090",
        expect="the paper: T 0.87 -> 1.26 of 1.26 GMACs, success 100 %, 71.4 -> 4.7 %; not run here",
        stated_in="SlowFormer (arXiv 2310.02544)",
        stated={**PATCH, "optim.epochs": 1, "optim.lr": 0.2, "data.batch": 512},
        settings={"model.trunk.adaptive.kind": "avit", "optim.steps": None},
        by_model=SMALL_GATE,
    ),
    "attack-avit-defence": Recipe(
        "The short attack that adversarial training repeats: 500 steps at a high learning rate.",
        base="attack-avit",
        source="SlowFormer",
        command="--data imagenet/ --model.weights RUN",
        expect="the paper: success 34 % against a defended A-ViT-T (of the full attack); not run here",
        stated_in="SlowFormer (arXiv 2310.02544): the attack inside the defence",
        stated={**PATCH, "optim.steps": 500, "optim.lr": 0.8, "data.batch": 512},
        by_model=SMALL_GATE,
    ),
    "attack-adavit": Recipe(
        "SlowFormer against AdaViT.",
        base="attack",
        source="SlowFormer, appendix; whether 128 images are per GPU or in total is not stated",
        command="--data imagenet/ --model.weights RUN; evaluate: vitrail attack --resume RUN",
        hardware="the authors': 4 RTX 3090",
        expect="the paper: 2.25 -> 3.2 of 4.6 GMACs, success 40 %, 77.3 -> 0.4 %; not run here",
        stated_in="SlowFormer (arXiv 2310.02544)",
        stated={**PATCH, "optim.epochs": 2, "optim.lr": 0.2, "data.batch": 128, "optim.weight_decay": 0.0},
        settings={"model.name": "deit_small", "model.trunk.adaptive.kind": "adavit", "optim.steps": None},
    ),
    "attack-cifar": Recipe(
        "SlowFormer against A-ViT on CIFAR-10 at 224 pixels.",
        base="attack-avit",
        source="SlowFormer: images resized to 256, crop of 224; length not stated, 1000 steps as in its appendix",
        command="--data cifar10.npz --model.weights RUN; evaluate: vitrail attack --resume RUN",
        expect="the paper: 0.11 -> 0.58 of 1.26 GMACs, success 41 %, 95.8 -> 60.2 %; not run here",
        stated={**PATCH, "optim.lr": 0.2, "data.batch": 512},
        settings={"data.crop_ratio": 0.875, "optim.steps": 1000},
        by_model=SMALL_GATE,
    ),
    "defence": Recipe(
        "A-ViT trained adversarially, on images that carry patches learned against it.",
        base="avit",
        source="SlowFormer; length, learning rate and share of clean images are not stated: ours",
        command="--data imagenet/ --model.weights RUN; then vitrail attack on what it leaves",
        expect="the paper: T 65.8 % and success 34 % under attack, after 4.7 % and 100 %; not run here",
        stated_in="SlowFormer (arXiv 2310.02544): five patches per epoch",
        stated={"data.batch": 512, "objective": {"inner_steps": 500, "inner_lr": 0.8, "attack.size": 64}},
        settings={
            "model.weights": "none",
            "objective": {"kind": "defence", "labels.smoothing": 0.1},
            "optim": {"lr": 1e-4, "epochs": 30},
        },
        by_model=SMALL_GATE,
    ),
    "small-ats": Recipe(
        "A small ViT that samples its tokens, for 32-pixel images.",
        base="small-deit",
        source="small-deit, sampling from the first step; --model.weights RUN --optim.epochs 10 tunes a trained one",
        expect="ten epochs from a plain model of 61.8 %: 60.0 % of CIFAR-100 at 51 % of its cost (std 0.0, three "
        "seeds, studies/adaptive.py); from scratch not measured yet",
        settings={"model.head": None, "model.trunk.adaptive.kind": "ats"},
    ),
    "small-sima": Recipe(
        "A small ViT without softmax, for 32-pixel images.",
        base="small-deit",
        source="small-deit with the attention of sima",
        expect="with six blocks and 16 epochs 47.5 % of CIFAR-100 (std 0.1, three seeds, studies/sima.yaml; softmax "
        "48.5 %); 100 epochs not measured yet",
        settings={"model.trunk.mixer.kind": "sima"},
    ),
    "small-avit": Recipe(
        "A small ViT whose tokens halt, for 32-pixel images.",
        base="small-ats",
        source="small-deit; nothing halts at the start, and the ponder loss weighs twenty times as much as published",
        expect="15 epochs from a plain model of 61.8 %, ponder 0.0125, a gate set for its activations: 62.2 % of "
        "CIFAR-100 at 67 % of its cost (std 0.8, three seeds, studies/adaptive.py); from scratch not measured yet",
        settings={"model.trunk.adaptive": {"kind": "avit", "gate_center": 5.0, "ponder": 0.01}},
    ),
    "small-adavit": Recipe(
        "A small ViT that drops patches, heads and branches, for 32-pixel images.",
        base="small-ats",
        source="small-deit with the gates of adavit",
        expect="15 epochs from a plain model of 61.8 %: 54.7 % of CIFAR-100 at 44 % of its cost (std 1.5, three "
        "seeds, studies/adaptive.py); from scratch not measured yet",
        settings={"model.trunk.adaptive.kind": "adavit"},
    ),
    "small-attack-ats": Recipe(
        "A patch of 8 pixels against small-ats.",
        base="attack",
        source="attack-ats-tiny, its learning rate and weights (the last one for two blocks more); four of 64 tokens",
        command="--data cifar100.npz --model.weights RUN; or vitrail attack RUN",
        expect="not measured yet; with a learning rate of 0.2, equal weights and 300 steps: success 5 % (std 4, three "
        "seeds, studies/adaptive.py), 60.0 -> 54.8 % of CIFAR-100",
        settings={
            "data.batch": 250,
            "model.name": "vit_tiny_32",
            "objective": {"size": 8, "layer_weights": (1.0, 0.2, 0.2, 0.2, 0.01, 0.01, 0.01, 0.01, 0.01)},
            "optim": {"lr": 0.4, "steps": 500},
        },
    ),
    "small-attack-avit": Recipe(
        "A patch of 8 pixels against small-avit.",
        base="attack-avit",
        source="attack-avit",
        command="--data cifar100.npz --model.weights RUN; or vitrail attack RUN",
        expect="300 steps: success 12 % (std 1, three seeds, studies/adaptive.py), 62.2 -> 58.4 % of CIFAR-100",
        settings={
            "data.batch": 250,
            "model": {"name": "vit_tiny_32", "trunk.adaptive": {"gate_center": 5.0, "ponder": 0.01}},
            "objective.size": 8,
            "optim.steps": 500,
        },
    ),
    "small-attack-adavit": Recipe(
        "A patch of 8 pixels against small-adavit.",
        base="small-attack-avit",
        source="attack-adavit",
        expect="300 steps: success 8 % (std 1, three seeds, studies/adaptive.py), 54.7 -> 33.1 % of CIFAR-100",
        settings={"model.trunk.adaptive.kind": "adavit"},
    ),
    "small-defence": Recipe(
        "small-avit trained against its own patches.",
        base="small-avit",
        source="defence; a new patch every 50 steps of 1000 images, trained in 100",
        command="--data cifar100.npz --model.weights RUN",
        expect="eight epochs: a new patch's success 8 % and 60.0 % of CIFAR-100 under it, where as many epochs "
        "without patches leave 10 % and 56.7 % (three seeds, studies/adaptive.py)",
        settings={
            "objective": {"kind": "defence", "every": 50, "inner_steps": 100, "attack.size": 8},
            "objective.labels.smoothing": 0.1,
            "optim": {"lr": 3e-4, "epochs": 20, "warmup": 1},
        },
    ),
}
