"""Other image architectures on ImageNet, and their versions for 32-pixel images.

CaiT: Touvron et al. 2021, arXiv 2103.17239; ResMLP: Touvron et al. 2021, arXiv 2105.03404; PatchConvNet: Touvron et al.
2021, arXiv 2112.13692; second-order heads: SoT, Xie et al. 2021, arXiv 2104.10935; Gramian heads: Ryu et al. 2023,
arXiv 2310.16483. Smoothing of the first three is DeiT's: see `vitrail.recipes.plain_vits`.

Drop path of `resmlp-400` is 0.1 in every block. The text leaves it out and says that what is left out is DeiT's. The
default of the authors' model is 0, but their training script hands its own default, 0.1, to every model, so that a run
by DeiT's settings has it; there it is the same in all blocks. Test images are cropped at 0.9, as their README says.
"""

from vitrail.model.config import TrunkConfig
from vitrail.model.zoo import ZOO
from vitrail.recipes.plain_vits import REGNET
from vitrail.recipes.row import Recipe

PATCHCONVNETS = {
    name: spec.trunk.drop_path
    for name, spec in ZOO.items()
    if name.startswith("patchconvnet_") and isinstance(spec.trunk, TrunkConfig)
}
LESS_DROP_PATH = {  # of fine-tuning: 0.1 below that of training, at least 0
    name: {"model.drop_path": max(0.0, round(rate - 0.1, 3))} for name, rate in PATCHCONVNETS.items()
}
DECAY_OF_WIDE = {  # wider than S
    name: {"optim.weight_decay": 0.05}
    for name in PATCHCONVNETS
    if name.startswith(("patchconvnet_b", "patchconvnet_l"))
}

ARCHITECTURES = {
    "cait-400": Recipe(
        "CaiT on ImageNet-1k from scratch; drop path and LayerScale come with the model.",
        base="deit-300",
        source="CaiT; drop path and LayerScale by model as the paper prints them",
        command="--data imagenet/ --model.name cait_s24",
        expect="the paper: S36 83.4 %, M36 83.7 %; not run here",
        stated_in="CaiT (arXiv 2103.17239)",
        stated={
            "data": {"batch": 1024, "repeats": 3, "crop_ratio": 1.0},
            "optim": {"epochs": 400, "name": "adamw", "lr": 1e-3, "warmup": 5, "weight_decay": 0.05},
        },
        settings={"model.name": "cait_s36", "model.drop_path": None, "optim.lr_batch": None},
    ),
    "cait-384": Recipe(
        "CaiT fine-tuned at 384 pixels.",
        base="cait-400",
        source="CaiT; the settings it leaves out are those of DeiT III (arXiv 2204.07118)",
        command="--data imagenet/ --model.weights RUN",
        expect="the paper: S36 83.4 -> 84.8 %; not run here",
        stated_in="CaiT (arXiv 2103.17239); values from DeiT III (arXiv 2204.07118)",
        stated={
            "data": {"batch": 512, "crop_ratio": 1.0},
            "model.image_size": 384,
            "optim": {"lr": 1e-5, "weight_decay": 0.1},
        },
        settings={"data.repeats": 1, "model.weights": "timm", "optim.epochs": 20, "optim.floor": 1e-6},
    ),
    "cait-distilled": Recipe(
        "CaiT with hard distillation and no distillation token.",
        base="cait-400",
        source="CaiT, ablation from DeiT-S to CaiT",
        command="--data imagenet/",
        expect="the paper: S36 at 384 pixels 84.8 -> 85.2 %; not run here",
        stated_in="CaiT (arXiv 2103.17239): hard distillation without a token",
        stated={"objective.mode": "hard"},
        settings={"objective": {"kind": "distillation", "teacher": REGNET, "labels.smoothing": 0.1}},
    ),
    "small-cait": Recipe(
        "CaiT for 32-pixel images.",
        base="small-deit",
        settings={"model.name": "cait_xxs12_32", "model.head": None, "model.drop_path": None},
    ),
    "resmlp-400": Recipe(
        "ResMLP on ImageNet-1k with LAMB; everything that is not stated is DeiT's.",
        base="deit-300",
        source="ResMLP; why drop path is 0.1: see vitrail/recipes/image_architectures.py",
        command="--data imagenet/ --model.name resmlp_s24",
        expect="the paper: S12 76.6, S24 79.4, S36 79.7 %; not run here",
        stated_in="ResMLP (arXiv 2105.03404); the authors' code (drop path) and README (test crop)",
        stated={
            "data": {"repeats": 3, "crop_ratio": 0.9},
            "model.drop_path": 0.1,
            "objective.loss": "cross_entropy",
            "optim": {"name": "lamb", "lr": 5e-3, "weight_decay": 0.2, "epochs": 400},
        },
        settings={"model.name": "resmlp_s24", "optim.lr_batch": None, "optim.eps": 1e-6},
    ),
    "resmlp-oldstyle-90": Recipe(
        "ResMLP trained as ResNets once were: SGD, steps, crops and flips.",
        source="ResMLP, which only names it; learning rate 0.1 at 256, weight decay 1e-4 and drops every 30 epochs "
        "are ResNet's usual",
        command="--data imagenet/ --model.name resmlp_s12",
        expect="the paper: S12 69.2 %, 7.4 below the modern recipe; not run here",
        stated_in="ResMLP (arXiv 2105.03404): 90 epochs, SGD, step schedule; the rest is ResNet's usual",
        stated={"optim.name": "sgd", "optim.schedule": "step", "optim.epochs": 90},
        settings={
            "data": {"batch": 256, "crop_ratio": 0.9},
            "model.name": "resmlp_s12",
            "optim": {"lr": 0.1, "lr_batch": 256, "warmup": 0, "step_every": 30, "weight_decay": 1e-4},
            "optim.nesterov": False,
        },
    ),
    "resmlp-distilled": Recipe(
        "ResMLP with DeiT's teacher, hard labels, no token.",
        base="resmlp-400",
        source="ResMLP",
        command="--data imagenet/",
        expect="the paper: S12 77.8, S24 80.8 %; not run here",
        stated_in="ResMLP (arXiv 2105.03404)",
        stated={"objective.mode": "hard", "optim.lr": 5e-3},
        settings={"objective": {"kind": "distillation", "teacher": REGNET, "labels.smoothing": 0.1}},
    ),
    "small-resmlp": Recipe(
        "ResMLP for 32-pixel images.",
        base="small-deit",
        expect="with Muon at 1e-3, batches of 250 and 12 epochs 43.6 % of CIFAR-100 (std 0.6, three seeds, "
        "studies/resmlp-mixers.yaml); as it stands not measured yet",
        settings={
            "model": {"name": "resmlp_t12_32", "head": None, "drop_path": None},
            "optim": {"name": "lamb", "lr": 5e-3, "weight_decay": 0.2, "eps": 1e-6},
        },
    ),
    "patchconvnet-1k": Recipe(
        "PatchConvNet on ImageNet-1k from scratch; drop path comes with the model.",
        base="deit-300",
        source="PatchConvNet; smoothing 0.1 and 5 epochs of warm-up, which it leaves out, are DeiT's",
        command="--data imagenet/ --model.name patchconvnet_s60",
        expect="the paper: S60 82.1, S120 83.2, B60 83.5, B120 84.1 %; not run here",
        stated_in="PatchConvNet (arXiv 2112.13692)",
        stated={
            "data": {"batch": 2048, "repeats": 3, "augment": {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.0}},
            "optim": {"epochs": 400, "name": "lamb", "lr": 3e-3, "weight_decay": 0.01, "clip": 0.0},
            "engine.ema": 0.0,
        },
        settings={
            "data.crop_ratio": 1.0,
            "model": {"name": "patchconvnet_s60", "drop_path": None},
            "optim": {"lr_batch": None, "eps": 1e-6},
        },
        by_model=DECAY_OF_WIDE,
    ),
    "patchconvnet-resolution": Recipe(
        "PatchConvNet fine-tuned at a higher resolution, with 0.1 less drop path.",
        base="patchconvnet-1k",
        source="PatchConvNet",
        command="--data imagenet/ --model.weights RUN --model.image_size 384",
        expect="not run here",
        stated={"optim.epochs": 10, "data.batch": 1024, "optim.lr": 1e-5, "optim.weight_decay": 0.01},
        settings={
            "data.repeats": 1,
            "model": {"image_size": 384, "drop_path": 0.05},
            "optim": {"warmup": 1, "floor": 1e-6},
        },
        by_model=LESS_DROP_PATH,
    ),
    "patchconvnet-21k": Recipe(
        "PatchConvNet on ImageNet-21k.",
        base="patchconvnet-1k",
        source="PatchConvNet",
        command="--data imagenet21k/",
        expect="not run here",
        stated={"data": {"batch": 2048, "repeats": 1}, "optim": {"epochs": 90, "lr": 3e-3, "weight_decay": 0.01}},
    ),
    "patchconvnet-21k-to-1k": Recipe(
        "From ImageNet-21k weights to ImageNet-1k.",
        base="patchconvnet-1k",
        source="PatchConvNet; weight decay is not stated: that of pre-training",
        command="--data imagenet/ --model.weights RUN",
        expect="not run here",
        stated={"optim.epochs": 100, "data.batch": 1024, "optim.lr": 5e-4},
        settings={"data.repeats": 1, "model.drop_path": 0.05},
        by_model=LESS_DROP_PATH,
    ),
    "patchconvnet-per-class": Recipe(
        "One pooling map for every class, fine-tuned from one map.",
        base="patchconvnet-resolution",
        source="PatchConvNet",
        command="--data imagenet/ --model.weights RUN",
        expect="the paper: from scratch 81.1 %, fine-tuned about as one map; not run here",
        stated_in="PatchConvNet (arXiv 2112.13692): as for resolution, one map per class",
        settings={
            # qkv_bias: as the one map has it, whose weights it takes
            "model": {"image_size": None, "head": {"kind": "attention_pool", "queries": "per_class", "qkv_bias": True}}
        },
        by_model=LESS_DROP_PATH,
    ),
    "small-patchconvnet": Recipe(
        "PatchConvNet for 32-pixel images.",
        base="small-deit",
        expect="with Muon at 1e-3, LayerScale from 0.1, batches of 250 and 12 epochs 25.5 % of CIFAR-100 (std 0.7, "
        "three seeds, studies/stem-pooling.yaml, in an earlier layout); as it stands not measured yet",
        settings={
            "model": {"name": "patchconvnet_t20_32", "head": None, "drop_path": None},
            "optim": {"name": "lamb", "lr": 3e-3, "weight_decay": 0.01, "eps": 1e-6},
        },
    ),
}

POOLING = {
    "sot": Recipe(
        "SoT: class token and second-order pooling of patch tokens, on ImageNet-1k.",
        source="SoT, table S-3 and the authors' code",
        command="--data imagenet/ --model.name sot_small",
        expect="the paper: Tiny 80.3, Small 82.7, Base 83.5 %; not run here",
        stated_in="SoT, table S-3 (Tiny, Small); the authors' code for crop, jitter, EMA, cool-down",
        stated={
            "data": {"batch": 1024, "augment.jitter": 0.4},
            "data.augment": {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.25, "rand_magnitude": 9, "rand_std": 0.5},
            "model.drop_path": 0.1,
            "objective.smoothing": 0.1,
            "optim": {"name": "adamw", "epochs": 310, "cooldown": 10, "lr": 1e-3, "floor": 1e-5, "warmup": 5},
            "optim.weight_decay": 0.03,
            "optim.clip": 0.0,
            "engine.ema": 0.99996,
        },
        settings={"data.augment.rand_ops": 2, "data.augment.rand_style": "timm", "model.name": "sot_tiny"},
        by_model={"sot_base": {"data.batch": 512, "optim.lr": 5e-4, "optim.weight_decay": 0.065}},
    ),
    "gramian": Recipe(
        "Gramian attention heads on ImageNet-1k.",
        source="the authors' code, whose README says that it was improved after the paper",
        command="--data imagenet/ --model.name ga_convnext_tiny",
        expect="not run here",
        stated_in="Gramian heads, the authors' code",
        stated={
            "data": {"batch": 1024, "repeats": 3},
            "data.augment": {"rand_magnitude": 9, "mixup": 0.2, "cutmix": 1.0, "erasing": 0.0},
            "model.drop_path": 0.2,
            "objective": {"loss": "bce", "smoothing": 0.1},
            "optim": {"epochs": 300, "name": "lamb", "weight_decay": 0.05, "lr": 5e-3, "warmup": 3, "warmup_lr": 1e-6},
            "optim.floor": 1e-6,
        },
        settings={
            "data.augment": {"rand_ops": 2, "rand_style": "timm", "rand_std": 0.5},
            "model.name": "ga_convnext_tiny",
            "engine.accumulate": 4,
        },
        by_model={"ga_convnext_small": {"model.drop_path": 0.4}, "ga_convnext_base": {"model.drop_path": 0.5}},
    ),
    "small-sot": Recipe(
        "SoT for 32-pixel images.",
        base="small-deit",
        expect="12 epochs: 46.6 % of CIFAR-100 (std 0.3, three seeds, studies/second-order.yaml); 100 not measured yet",
        settings={"model.name": "sot_7_32", "model.head": None},
    ),
    "small-gramian": Recipe(
        "Gramian heads on a small ViT.",
        base="small-deit",
        expect="with six blocks and 15 epochs 49.1 % of CIFAR-100 (std 0.2, three seeds, studies/heads-vit.yaml; 46.3 "
        "% with a class token); 100 epochs not measured yet",
        settings={"model.name": "ga_vit_tiny_32", "model.head": None},
    ),
}
