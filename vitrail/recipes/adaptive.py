"""Models with input-dependent compute, SimA, and attacks on the compute that adaptive models save.

ATS: Fayyaz et al. 2022, arXiv 2111.15667; SimA: Koohpayegani and Pirsiavash 2022, arXiv 2206.08898; A-ViT: Yin et al.
2022, arXiv 2112.07658; AdaViT: Meng et al. 2022, arXiv 2111.15668; attacks and defence: SlowFormer, Navaneet et al.
2023, arXiv 2310.02544.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import (
    AugmentConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SupervisedConfig,
)
from vitrail.learn.config import AttackConfig, DefenceConfig
from vitrail.model.adaptive.config import AdaptiveConfig, Adavit, Ats, Avit
from vitrail.model.mixers.config import Sima
from vitrail.recipes.deit import AUGMENT, small_deit

ATTACKED = Ats(layers=tuple(range(3, 10)), cap=(197.0,))  # SlowFormer samples in fewer blocks than ATS
TINY_WEIGHTS = (1.0, 0.2, 0.2, 0.2, 0.01, 0.01, 0.01)  # of its sampling blocks, in the attack
SMALL_AVIT = Avit(gate_center=5.0, ponder=0.01)  # the published loss weights are too small for a short run

BY_MODEL = {
    "avit": {
        "deit_small": {
            "model.trunk": {"adaptive": Avit(gate_center=75.0)},
            "optim.lr": 3e-4,
            "data.batch": 384,
        }
    },
    **{
        name: {"deit_small": {"model.trunk": {"adaptive": Avit(gate_center=75.0)}}}
        for name in ("attack-avit", "attack-avit-defence", "attack-cifar", "defence")
    },
}

PATCH = {"objective.size": 64, "objective.place": "top_left", "optim.name": "adamw"}
SAMPLED = {**PATCH, "optim.epochs": 2, "data.batch": 1024, "model.trunk.adaptive.layers": [3, 4, 5, 6, 7, 8, 9]}

STATED = {
    "ats-finetune": {
        "source": "ATS (arXiv 2111.15667): DeiT-S (the recipe of DynamicViT)",
        "optim.epochs": 30,
        "optim.name": "adamw",
        "optim.lr": 5e-4,
        "data.batch": 768,
        "optim.schedule": "cosine",
        "model.trunk.adaptive.layers": [3, 4, 5, 6, 7, 8, 9, 10, 11],
        "model.trunk.adaptive.cap": [197],
    },
    "sima": {
        "source": "SimA (arXiv 2206.08898): DeiT-S",
        "optim.epochs": 300,
        "optim.name": "adamw",
        "optim.lr": 5e-4,
        "optim.weight_decay": 0.05,
        "optim.schedule": "cosine",
        "data.batch": 1024,
        "data.crop_ratio": 1.0,
        "model.drop_path": 0.05,
        "data.augment.mixup": 0.8,
        "data.augment.cutmix": 1.0,
    },
    "avit": {
        "source": "A-ViT's released code: tiny",
        "optim.epochs": 100,
        "optim.lr": 5e-4,
        "optim.warmup": 5,
        "data.batch": 512,
        "model.trunk.adaptive.gate_scale": 10,
        "model.trunk.adaptive.gate_center": 30,
        "model.trunk.adaptive.eps": 0.01,
        "model.trunk.adaptive.ponder": 5e-4,
        "model.trunk.adaptive.prior": 1e-3,
    },
    "adavit": {
        "source": "AdaViT's released code: DeiT-S",
        "model.trunk.adaptive.patches": 0.5,
        "model.trunk.adaptive.heads": 0.5,
        "model.trunk.adaptive.branches": 0.5,
        "model.trunk.adaptive.usage": 2,
        "model.trunk.adaptive.temperature": 5,
        "model.trunk.adaptive.patch_threshold": 0.6,
        "model.trunk.adaptive.threshold": 0.5,
    },
    "attack-ats-tiny": {
        "source": "SlowFormer (arXiv 2310.02544)",
        **SAMPLED,
        "optim.lr": 0.4,
        "objective.layer_weights": [1.0, 0.2, 0.2, 0.2, 0.01, 0.01, 0.01],
    },
    "attack-ats-small": {
        "source": "SlowFormer (arXiv 2310.02544)",
        **SAMPLED,
        "optim.lr": 0.2,
        "objective.layer_weights": [1.0, 0.2, 0.05, 0.01, 0.005, 0.005, 0.005],
    },
    "attack-ats-base": {
        "source": "SlowFormer (arXiv 2310.02544)",
        **SAMPLED,
        "optim.lr": 0.2,
        "objective.layer_weights": [2.0, 0.1, 0.02, 0.01, 0.005, 0.005, 0.005],
    },
    "attack-avit": {
        "source": "SlowFormer (arXiv 2310.02544)",
        **PATCH,
        "optim.epochs": 1,
        "optim.lr": 0.2,
        "data.batch": 512,
    },
    "attack-avit-defence": {
        "source": "SlowFormer (arXiv 2310.02544): the attack inside the defence",
        **PATCH,
        "optim.steps": 500,
        "optim.lr": 0.8,
        "data.batch": 512,
    },
    "attack-adavit": {
        "source": "SlowFormer (arXiv 2310.02544)",
        **PATCH,
        "optim.epochs": 2,
        "optim.lr": 0.2,
        "data.batch": 128,
        "optim.weight_decay": 0,
    },
    "attack-cifar": {"source": "SlowFormer (arXiv 2310.02544)", **PATCH, "optim.lr": 0.2, "data.batch": 512},
    "defence": {
        "source": "SlowFormer (arXiv 2310.02544): five patches an epoch",
        "data.batch": 512,
        "objective.inner_steps": 500,
        "objective.inner_lr": 0.8,
        "objective.attack.size": 64,
    },
}


def _tuned(name: str, model: str, adaptive: AdaptiveConfig, *, batch: int, lr: float, epochs: float) -> RunConfig:
    """A trained DeiT that learns to spend less, with DeiT's augmentation."""
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=batch, augment=AUGMENT),
        model=ModelConfig(name=model, weights="timm", trunk={"adaptive": adaptive}),
        optim=OptimConfig(lr=lr, epochs=epochs, warmup=5, weight_decay=0.05),
        objective=SupervisedConfig(smoothing=0.1),
    )


def ats_finetune() -> RunConfig:
    """ATS: a trained DeiT, fine-tuned on the tokens that it samples.

    Source:    ATS, appendix; warm-up and weight decay are not stated: DeiT's
    Command:   vitrail train ats-finetune --data imagenet/ --model.name deit_small
    Hardware:  the authors': 8 RTX 6000
    Expect:    the paper: S 79.8 -> 79.7 % at 2.9 of 4.6 GMACs; not run here
    """
    adaptive = Ats(layers=tuple(range(3, 12)), cap=(197.0,))
    return _tuned("ats-finetune", "deit_small", adaptive, batch=768, lr=5e-4, epochs=30)


def sima() -> RunConfig:
    """SimA: attention without softmax, from scratch.

    Source:    SimA; XCiT is trained for 400 epochs there
    Command:   vitrail train sima --data imagenet/ --model.name deit_small_sima
    Hardware:  the authors': 8 RTX 6000, about 100 hours
    Expect:    the paper: DeiT-S 79.8 %, as with softmax; not run here
    """
    return RunConfig(
        recipe="sima",
        data=DataConfig(uri="", batch=1024, crop_ratio=1.0, augment=AUGMENT),
        model=ModelConfig(name="deit_small_sima", drop_path=0.05),
        optim=OptimConfig(lr=5e-4, epochs=300, warmup=5, weight_decay=0.05),
        objective=SupervisedConfig(smoothing=0.1),
    )


def avit() -> RunConfig:
    """A-ViT: a trained DeiT whose tokens learn to halt.

    Source:    the released code; another rate, batch and gate for deit_small
    Command:   vitrail train avit --data imagenet/ --model.name deit_tiny
    Hardware:  the authors': 4 GPUs
    Expect:    released: T 71.4 % at 0.8, S 78.8 % at 3.6 GMACs; not run here
    """
    return _tuned("avit", "deit_tiny", Avit(), batch=512, lr=5e-4, epochs=100)


def adavit() -> RunConfig:
    """AdaViT: a trained DeiT learns which patches, heads and branches an image needs.

    Source:    the released code for gates, targets and weights; batch, rate and length are not stated: ours
    Command:   vitrail train adavit --data imagenet/ --model.name deit_small
    Expect:    released: S 77.3 % at 2.3 GMACs; not run here
    """
    return _tuned("adavit", "deit_small", Adavit(), batch=512, lr=5e-4, epochs=150)


def _attack(name: str, model: ModelConfig, *, batch: int, lr: float, epochs: float = 1, **options: object) -> RunConfig:
    """A patch of 64 pixels in the corner: AdamW at a constant rate, no decay, images as evaluation sees them."""
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=batch, augment=AugmentConfig(crop="evaluation")),
        model=model,
        optim=OptimConfig(lr=lr, epochs=epochs, schedule="constant", warmup=0, weight_decay=0.0),
        objective=AttackConfig(**options),  # type: ignore[arg-type]
        engine=EngineConfig(evaluate_every=0),
    )


def attack() -> RunConfig:
    """A universal patch that raises the compute of an adaptive model; `vitrail attack` starts from this.

    Command:   vitrail attack RUN; or vitrail train attack --data photos/ --model.name NAME --model.weights RUN
    Source:    SlowFormer; 300 steps are ours, the paper calls 1000 enough
    Expect:    CIFAR-100, 8 of 32 pixels: 5 % of what ATS saves, 12 % of A-ViT's, 8 % of AdaViT's (studies/adaptive.py)
    """
    made = _attack("attack", ModelConfig(trunk={"adaptive": Ats()}), batch=128, lr=0.2)
    return replace(made, optim=replace(made.optim, steps=300))


def attack_ats_tiny() -> RunConfig:
    """SlowFormer against ATS in DeiT-Ti.

    Command:   vitrail train attack-ats-tiny --data imagenet/; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer, appendix; victims are most likely not fine-tuned, which the paper does not state
    Hardware:  the authors': 4 RTX 3090
    Expect:    the paper: 0.84 -> 1.0 of 1.3 GMACs, success 35 %, 70.3 -> 1.2 %; not run here
    """
    return _attack("attack-ats-tiny", _victim("deit_tiny"), batch=1024, lr=0.4, epochs=2, layer_weights=TINY_WEIGHTS)


def attack_ats_small() -> RunConfig:
    """SlowFormer against ATS in DeiT-S.

    Command:   vitrail train attack-ats-small --data imagenet/; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer, appendix
    Hardware:  the authors': 4 RTX 3090
    Expect:    the paper: 3.1 -> 4.0 of 4.6 GMACs, success 60 %, 79.2 -> 1.0 %; not run here
    """
    weights = (1.0, 0.2, 0.05, 0.01, 0.005, 0.005, 0.005)
    return _attack("attack-ats-small", _victim("deit_small"), batch=1024, lr=0.2, epochs=2, layer_weights=weights)


def attack_ats_base() -> RunConfig:
    """SlowFormer against ATS in DeiT-B.

    Command:   vitrail train attack-ats-base --data imagenet/; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer, appendix
    Hardware:  the authors': 4 RTX 3090
    Expect:    the paper: 12.6 -> 15.4 of 17.6 GMACs, success 52 %, 81.3 -> 0.2 %; not run here
    """
    weights = (2.0, 0.1, 0.02, 0.01, 0.005, 0.005, 0.005)
    return _attack("attack-ats-base", _victim("deit_base"), batch=1024, lr=0.2, epochs=2, layer_weights=weights)


def _victim(name: str) -> ModelConfig:
    return ModelConfig(name=name, weights="timm", trunk={"adaptive": ATTACKED})


def attack_avit() -> RunConfig:
    """SlowFormer against A-ViT.

    Command:   vitrail train attack-avit --data imagenet/ --model.weights RUN; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer, appendix; 4 epochs for patches of 32 pixels and less
    Hardware:  the authors': 4 RTX 3090
    Expect:    the paper: T 0.87 -> 1.26 of 1.26 GMACs, success 100 %, 71.4 -> 4.7 %; not run here
    """
    model = ModelConfig(name="deit_tiny", trunk={"adaptive": Avit()})
    return _attack("attack-avit", model, batch=512, lr=0.2)


def attack_avit_defence() -> RunConfig:
    """The short attack that adversarial training repeats: 500 steps at a high learning rate.

    Command:   vitrail train attack-avit-defence --data imagenet/ --model.weights RUN
    Source:    SlowFormer
    Expect:    the paper: success 34 % against a defended A-ViT-T (of the full attack); not run here
    """
    made = replace(attack_avit(), recipe="attack-avit-defence")
    return replace(made, optim=replace(made.optim, lr=0.8, steps=500))


def attack_adavit() -> RunConfig:
    """SlowFormer against AdaViT.

    Command:   vitrail train attack-adavit --data imagenet/ --model.weights RUN; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer, appendix; whether 128 images are per GPU or in total is not stated
    Hardware:  the authors': 4 RTX 3090
    Expect:    the paper: 2.25 -> 3.2 of 4.6 GMACs, success 40 %, 77.3 -> 0.4 %; not run here
    """
    model = ModelConfig(name="deit_small", trunk={"adaptive": Adavit()})
    return _attack("attack-adavit", model, batch=128, lr=0.2, epochs=2)


def attack_cifar() -> RunConfig:
    """SlowFormer against A-ViT on CIFAR-10 at 224 pixels.

    Command:   vitrail train attack-cifar --data cifar10.npz --model.weights RUN; evaluate: vitrail attack --resume RUN
    Source:    SlowFormer: images resized to 256, crop of 224; length not stated, 1000 steps as in its appendix
    Expect:    the paper: 0.11 -> 0.58 of 1.26 GMACs, success 41 %, 95.8 -> 60.2 %; not run here
    """
    made = replace(attack_avit(), recipe="attack-cifar")
    return replace(made, data=replace(made.data, crop_ratio=0.875), optim=replace(made.optim, steps=1000))


def defence() -> RunConfig:
    """A-ViT trained adversarially, on images that carry patches learned against it.

    Command:   vitrail train defence --data imagenet/ --model.weights RUN; then vitrail attack on what it leaves
    Source:    SlowFormer; length, learning rate and share of clean images are not stated: ours
    Expect:    the paper: T 65.8 % and success 34 % under attack, after 4.7 % and 100 %; not run here
    """
    base = _tuned("defence", "deit_tiny", Avit(), batch=512, lr=1e-4, epochs=30)
    return replace(
        base,
        model=replace(base.model, weights="none"),
        objective=DefenceConfig(every=500, labels=SupervisedConfig(smoothing=0.1)),
    )


def _small(name: str, adaptive: AdaptiveConfig) -> RunConfig:
    model = ModelConfig(name="vit_tiny_32", drop_path=0.1, trunk={"adaptive": adaptive})  # with its class token
    return replace(small_deit(), recipe=name, model=model)


def small_ats() -> RunConfig:
    """A small ViT that samples its tokens, for 32-pixel images.

    Command:   vitrail train small-ats --data cifar100.npz
    Source:    small-deit with sampling from the first step; --model.weights RUN --optim.epochs 10 tunes a trained one
    Expect:    ten epochs from a plain model of 61.8 %: 60.0 % of CIFAR-100 at 51 % of its cost (std 0.0, three seeds,
               studies/adaptive.py); from scratch not measured yet
    """
    return _small("small-ats", Ats())


def small_sima() -> RunConfig:
    """A small ViT without softmax, for 32-pixel images.

    Command:   vitrail train small-sima --data cifar100.npz
    Source:    small-deit with the attention of sima
    Expect:    with six blocks and 16 epochs 47.5 % of CIFAR-100 (std 0.1, three seeds, studies/sima.yaml; softmax
               48.5 %); 100 epochs not measured yet
    """
    base = small_deit()
    return replace(base, recipe="small-sima", model=replace(base.model, trunk={"mixer": Sima()}))


def small_avit() -> RunConfig:
    """A small ViT whose tokens halt, for 32-pixel images.

    Command:   vitrail train small-avit --data cifar100.npz
    Source:    small-deit; nothing halts at the start, and the ponder loss presses twenty times as hard as published
    Expect:    15 epochs from a plain model of 61.8 %, ponder 0.0125, a gate set for its stream: 62.2 % of CIFAR-100
               at 67 % of its cost (std 0.8, three seeds, studies/adaptive.py); from scratch not measured yet
    """
    return _small("small-avit", SMALL_AVIT)


def small_adavit() -> RunConfig:
    """A small ViT that drops patches, heads and branches, for 32-pixel images.

    Command:   vitrail train small-adavit --data cifar100.npz
    Source:    small-deit with the gates of adavit
    Expect:    15 epochs from a plain model of 61.8 %: 54.7 % of CIFAR-100 at 44 % of its cost (std 1.5, three seeds,
               studies/adaptive.py); from scratch not measured yet
    """
    return _small("small-adavit", Adavit())


def _small_attack(
    name: str, adaptive: AdaptiveConfig, lr: float = 0.2, layer_weights: tuple[float, ...] = ()
) -> RunConfig:
    model = ModelConfig(name="vit_tiny_32", trunk={"adaptive": adaptive})
    made = _attack(name, model, batch=250, lr=lr, size=8, layer_weights=layer_weights)
    return replace(made, optim=replace(made.optim, steps=500))


def small_attack_ats() -> RunConfig:
    """A patch of 8 pixels against small-ats.

    Command:   vitrail train small-attack-ats --data cifar100.npz --model.weights RUN; or vitrail attack RUN
    Source:    attack-ats-tiny, its rate and weights (the last one for two blocks more); four of 64 tokens
    Expect:    not measured yet; with a rate of 0.2, equal weights and 300 steps: success 5 % (std 4, three seeds,
               studies/adaptive.py), 60.0 -> 54.8 % of CIFAR-100
    """
    return _small_attack("small-attack-ats", Ats(), 0.4, (*TINY_WEIGHTS, *(TINY_WEIGHTS[-1],) * 2))


def small_attack_avit() -> RunConfig:
    """A patch of 8 pixels against small-avit.

    Command:   vitrail train small-attack-avit --data cifar100.npz --model.weights RUN; or vitrail attack RUN
    Source:    attack-avit
    Expect:    300 steps: success 12 % (std 1, three seeds, studies/adaptive.py), 62.2 -> 58.4 % of CIFAR-100
    """
    return _small_attack("small-attack-avit", SMALL_AVIT)


def small_attack_adavit() -> RunConfig:
    """A patch of 8 pixels against small-adavit.

    Command:   vitrail train small-attack-adavit --data cifar100.npz --model.weights RUN; or vitrail attack RUN
    Source:    attack-adavit
    Expect:    300 steps: success 8 % (std 1, three seeds, studies/adaptive.py), 54.7 -> 33.1 % of CIFAR-100
    """
    return _small_attack("small-attack-adavit", Adavit())


def small_defence() -> RunConfig:
    """small-avit trained against its own patches.

    Command:   vitrail train small-defence --data cifar100.npz --model.weights RUN
    Source:    defence; a new patch every 50 steps of 1000 images, made in 100
    Expect:    eight epochs: a new patch's success 8 % and 60.0 % of CIFAR-100 under it, where as many epochs without
               patches leave 10 % and 56.7 % (three seeds, studies/adaptive.py)
    """
    base = _small("small-defence", SMALL_AVIT)
    attack = AttackConfig(size=8)
    return replace(
        base,
        optim=replace(base.optim, lr=3e-4, epochs=20, warmup=1),
        objective=DefenceConfig(every=50, inner_steps=100, attack=attack, labels=SupervisedConfig(smoothing=0.1)),
    )
