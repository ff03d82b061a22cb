"""Parameter-efficient adaptation: LoRA and NOLA on frozen trunks, and NOLA from scratch.

NOLA: Koohpayegani et al. 2023, arXiv 2310.02556; LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.model.adapters.config import Lora, Nola
from vitrail.recipes.transfer import small_transfer

STATED = {
    "nola-vit": {
        "source": "NOLA (arXiv 2310.02556): MLP of ViT-B, 5 or 10 images a class",
        "model.adapter.rank": 4,
        "model.adapter.targets": ["mlp"],
        "optim.epochs": 50,
        "optim.weight_decay": 0,
        "data.batch": 64,
        "data.shots": 10,
    },
    "lora-vit": {
        "source": "NOLA (arXiv 2310.02556): the baseline beside it",
        "model.adapter.rank": 4,
        "model.adapter.targets": ["qkv"],
        "optim.epochs": 50,
        "data.batch": 64,
        "data.shots": 10,
    },
    "nola-resnet": {
        "source": "NOLA (arXiv 2310.02556): 12,876 numbers in all, 1,376 of them of norms",
        "model.name": "cifar_resnet20",
        "model.adapter.coefficients": 250,
        "model.adapter.head_coefficients": 1000,
        "optim.name": "adam",
        "optim.lr": 0.001,
        "data.batch": 256,
    },
}
FEW = RunConfig(
    data=DataConfig(uri="", batch=64, shots=10, augment=AugmentConfig(crop="evaluation")),
    model=ModelConfig(name="vit_base", weights="timm"),
    optim=OptimConfig(lr=1e-3, epochs=50, warmup=0, weight_decay=0.0),
    engine=EngineConfig(evaluate_every=10, checkpoint_every=10),
)


def nola_vit() -> RunConfig:
    """A ViT-B for a new task from ten images per class: a seed and 49,152 coefficients besides the classifier.

    Source:    NOLA; k = l = 1024 is inferred from the printed 47K (of 2^20); the learning rate is one of 5e-3, 1e-3,
               5e-4; scale, schedule and augmentation are not given: 1, cosine, flips
    Command:   vitrail train nola-vit --data photos/
    Expect:    the paper, CIFAR-10 / CIFAR-100 / CUB / Caltech-101: 92.2 / 81.3 / 81.7 / 90.6 %; not run here
    """
    adapter = Nola(rank=4, coefficients=1024, targets=("mlp",))
    return replace(FEW, recipe="nola-vit", model=replace(FEW.model, adapter=adapter))


def lora_vit() -> RunConfig:
    """The same with LoRA on queries, keys and values.

    Source:    NOLA. The paper's 147,456 parameters are rank 1 on the fused layer, or on queries and values alone; its
               text says q, k and v, each with a rank of its own, which gives the 221,184 used here
    Command:   vitrail train lora-vit --data photos/
    Expect:    the paper, CIFAR-10 / CIFAR-100 / CUB / Caltech-101: 93.1 / 81.6 / 82.4 / 90.8 %; not run here
    """
    return replace(FEW, recipe="lora-vit", model=replace(FEW.model, adapter=Lora(rank=4, targets=("qkv",))))


def nola_resnet() -> RunConfig:
    """A ResNet-20 from scratch, in the subspace that 12,876 parameters span around its random initialisation.

    Source:    NOLA: 19 convolutions of 250 + 250, the classifier of 1000 + 1000, norms as they are; rank, length
               and augmentation are not given: 8 (fewer than the 10 classes), 200 epochs, crops and flips
    Command:   vitrail train nola-resnet --data cifar10.npz
    Expect:    the paper: 82.4 % on CIFAR-10 (dense 88.9); not run here
    """
    adapter = Nola(
        rank=8, coefficients=250, head_coefficients=1000, targets=("all",), train_head=False, train_norms=True
    )
    return RunConfig(
        recipe="nola-resnet",
        data=DataConfig(uri="", batch=256, augment=AugmentConfig(crop="pad", padding=4)),
        model=ModelConfig(name="cifar_resnet20", adapter=adapter),
        optim=OptimConfig(name="adam", lr=1e-3, epochs=200, warmup=0, weight_decay=0.0, floor=0.0),
        engine=EngineConfig(evaluate_every=10, checkpoint_every=10, log_every=100),
    )


def _small(name: str, adapter: Lora | Nola, rate: float) -> RunConfig:
    base = small_transfer()
    return replace(
        base,
        recipe=name,
        model=replace(base.model, adapter=adapter),
        optim=replace(base.optim, lr=rate, epochs=20, weight_decay=0.0),
    )


def small_nola() -> RunConfig:
    """From a run on one set of 32-pixel images to another, as a seed and some thousand numbers.

    Command:   vitrail train small-nola --data cifar10.npz --model.weights RUN [--model.adapter.coefficients 1000]
    Expect:    not measured yet
    """
    return _small("small-nola", Nola(rank=8, coefficients=500, targets=("mlp",)), 2e-2)


def small_lora() -> RunConfig:
    """From a run on one set of 32-pixel images to another, by low-rank changes of queries and values.

    Command:   vitrail train small-lora --data cifar10.npz --model.weights RUN [--model.adapter.rank 1]
    Expect:    not measured yet
    """
    return _small("small-lora", Lora(rank=4, targets=("qv",)), 5e-3)
