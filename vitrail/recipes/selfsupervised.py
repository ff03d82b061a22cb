"""Self-supervised and semi-supervised representation learning.

BYOL: Grill et al. 2020, arXiv 2006.07733; MoCo-v2: Chen et al. 2020, arXiv 2003.04297; ISD: Tejankar et al. 2020, arXiv
2012.09259; MSF: Koohpayegani et al. 2021, arXiv 2105.07269; CMSF: Navaneet et al. 2021, arXiv 2112.04607; SupCon:
Khosla et al. 2020, arXiv 2004.11362; DINO: Caron et al. 2021, arXiv 2104.14294; UniSiam: Lu et al. 2022, arXiv
2207.09176; CompRess: Koohpayegani et al. 2020, arXiv 2010.14713; SimA: Koohpayegani and Pirsiavash 2022, arXiv
2206.08898; ResMLP: Touvron et al. 2021, arXiv 2105.03404.

Where the papers give the teacher weak views (crop and flip) and the model strong ones, so do these recipes; BYOL, MoCo
and ISD on a ResNet-18 have two strong ones. Step schedules are replaced by a cosine here. DINO's
large views differ in blur and solarising in its paper, and its small ones are not solarised; here all have the mean of
the two large ones, and saturation is jittered as much as brightness and contrast, where it has half of that.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.learn.config import (
    ByolConfig,
    CmsfConfig,
    DinoConfig,
    IsdConfig,
    MocoConfig,
    MsfConfig,
    ObjectiveConfig,
    SupconConfig,
)
from vitrail.model.heads.config import Projected

STRONG = AugmentConfig(scale=(0.2, 1.0), jitter=0.4, hue=0.1, jitter_chance=0.8, grey=0.2, blur=0.5)
# Crops from 0.08 and no blur, as the CIFAR recipes of solo-learn and lightly have it.
SMALL = replace(STRONG, scale=(0.08, 1.0), blur=0.0)
LARGE_VIEWS = replace(STRONG, scale=(0.4, 1.0), blur=0.55, solarise=0.1)
# Rates are those of batches of 256, and follow the batch.
SGD_256 = OptimConfig(name="sgd", lr_batch=256, nesterov=False, warmup=0, weight_decay=1e-4, floor=0.0)

SGD = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.weight_decay": 1e-4, "data.batch": 256}
SHIFT = {
    **SGD,
    "optim.lr": 0.05,
    "optim.schedule": "cosine",
    "optim.epochs": 200,
    "objective.momentum": 0.99,
    "objective.predictor_hidden": 4096,
    "model.head.hidden": 4096,
    "model.head.width": 512,
}
STATED = {
    "byol-asym": {
        "source": "ISD (arXiv 2012.09259): ResNet-50",
        **SHIFT,
        "objective.symmetric": False,
        "objective.views": "strong_strong",
    },
    "moco-v2": {
        "source": "CompRess (arXiv 2010.14713): 200 epochs, momentum 0.999, lr 0.03; the rest as MoCo-v2's own",
        "optim.lr": 0.03,
        "optim.epochs": 200,
        "objective.momentum": 0.999,
    },
    "isd-r18": {
        "source": "ISD (arXiv 2012.09259): ResNet-18, strong / strong",
        **SGD,
        "optim.lr": 0.01,
        "optim.epochs": 200,
        "model.head.projector": "none",
        "objective.predictor_hidden": 512,
        "objective.temperature": 0.02,
        "objective.teacher_temperature": 0.02,
        "objective.momentum": 0.999,
        "objective.bank": 128_000,
        "objective.views": "strong_strong",
    },
    "isd": {
        "source": "ISD (arXiv 2012.09259): ResNet-50",
        **SHIFT,
        "objective.temperature": 0.1,
        "objective.teacher_temperature": 0.01,
        "objective.bank": 128_000,
        "objective.views": "weak_strong",
    },
    "msf": {
        "source": "MSF (arXiv 2105.07269): w/s, 128K bank; the authors' code for jitter",
        **SHIFT,
        "objective.k": 5,
        "objective.bank": 128_000,
        "objective.views": "weak_strong",
        "data.weak.scale": [0.2, 1.0],
        "data.weak.flip": 0.5,
        "data.augment.jitter": 0.4,
        "data.augment.hue": 0.1,
        "data.augment.jitter_chance": 0.8,
        "data.augment.grey": 0.2,
        "data.augment.blur": 0.5,
    },
    "cmsf-self": {
        "source": "CMSF (arXiv 2112.04607)",
        **SHIFT,
        "objective.constraint": "self",
        "objective.k": 5,
        "objective.pool": 5,
        "objective.bank": 128_000,
    },
    "cmsf-semi": {
        "source": "CMSF (arXiv 2112.04607): ImageNet with a tenth of its labels",
        **SHIFT,
        "objective.constraint": "semi",
        "objective.k": 10,
        "objective.labelled": 0.1,
        "objective.threshold": 0.85,
        "objective.bank": 128_000,
    },
    "cmsf-sup": {
        "source": "CMSF (arXiv 2112.04607)",
        **SHIFT,
        "objective.constraint": "supervised",
        "objective.k": 10,
        "objective.bank": 128_000,
    },
    "supcon": {"source": "CMSF (arXiv 2112.04607)", "objective.temperature": 0.1, "optim.warmup": 10},
    "resmlp-dino": {"source": "ResMLP (arXiv 2105.03404): 300 epochs; the rest by reference", "optim.epochs": 300},
    "sima-dino": {
        "source": "SimA (arXiv 2206.08898)",
        "model.name": "xcit_s12_p16_sima",
        "optim.name": "adamw",
        "optim.lr": 0.00025,
        "optim.schedule": "cosine",
        "optim.weight_decay": 0.04,
        "optim.weight_decay_end": 0.4,
        "optim.epochs": 100,
        "data.batch": 256,
    },
}


def paper(
    name: str, objective: ObjectiveConfig, rate: float = 0.05, epochs: float = 200, network: str = "resnet50"
) -> RunConfig:
    """What the papers have in common."""
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=256, augment=STRONG),
        model=ModelConfig(name=f"timm:{network}", head=Projected(width=512, hidden=4096, norm=True, judged="trunk")),
        optim=replace(SGD_256, lr=rate, epochs=epochs),
        objective=objective,
        evaluators=("classification", "knn"),
    )


def byol_asym() -> RunConfig:
    """Asymmetric BYOL: predict the momentum encoder's embedding of another view.

    Source:    ISD, its BYOL-asym baseline
    Command:   vitrail train byol-asym --data imagenet/
    Expect:    the paper: 69.3 % linear, 55.0 % 1-NN on ImageNet; not run here
    """
    return paper("byol-asym", ByolConfig())


def moco_v2() -> RunConfig:
    """MoCo-v2: contrast the other view of an image with a queue of 65,536 negatives.

    Source:    MoCo-v2; schedule, momentum and learning rate as CompRess has them
    Command:   vitrail train moco-v2 --data imagenet/
    Expect:    the paper: 67.5 % linear, 50.9 % 1-NN on ImageNet; not run here
    """
    base = paper("moco-v2", MocoConfig(), rate=0.03)
    return replace(base, model=replace(base.model, head=Projected(width=128, hidden=2048, judged="trunk")))


def isd_r18() -> RunConfig:
    """ISD on a ResNet-18: one temperature, no projector.

    Source:    ISD; its learning rate falls to a fifth at epochs 140 and 180, a cosine here
    Command:   vitrail train isd-r18 --data imagenet/
    Expect:    the paper: 53.8 % linear, 41.5 % 1-NN on ImageNet; not run here
    """
    objective = IsdConfig(
        momentum=0.999, temperature=0.02, teacher_temperature=0.02, predictor_hidden=512, views="strong_strong"
    )
    base = paper("isd-r18", objective, rate=0.01, network="resnet18")
    return replace(base, model=replace(base.model, head=Projected(projector="none")))


def isd() -> RunConfig:
    """ISD on a ResNet-50: match the momentum encoder's sharper similarities to other images.

    Source:    ISD
    Command:   vitrail train isd --data imagenet/
    Expect:    the paper: 69.8 % linear, 59.2 % 1-NN on ImageNet; not run here
    """
    return paper("isd", IsdConfig())


def msf() -> RunConfig:
    """MSF: move towards the mean of five nearest neighbours, the image itself among them.

    Source:    MSF
    Command:   vitrail train msf --data imagenet/
    Expect:    the paper: 72.1 % linear, 62.0 % 1-NN on ImageNet; not run here
    """
    return paper("msf", MsfConfig())


def cmsf_self() -> RunConfig:
    """CMSF without labels: neighbours constrained by those of an earlier embedding.

    Source:    CMSF
    Command:   vitrail train cmsf-self --data imagenet/
    Expect:    the paper: 73.0 % linear, 63.2 % 1-NN on ImageNet; not run here
    """
    return paper("cmsf-self", CmsfConfig())


def cmsf_semi() -> RunConfig:
    """CMSF with a tenth of the labels: neighbours of the same label or confident pseudo-label.

    Source:    CMSF
    Command:   vitrail train cmsf-semi --data imagenet/
    Expect:    the paper: 69.9 % after its fine-tuning with a tenth of ImageNet's labels; not run here
    """
    return paper("cmsf-semi", CmsfConfig(constraint="semi", k=10))


def cmsf_sup() -> RunConfig:
    """CMSF with labels: the ten nearest neighbours of the same class.

    Source:    CMSF
    Command:   vitrail train cmsf-sup --data imagenet/
    Expect:    the paper: 76.4 % linear on ImageNet, 80.1 % mean of ten transfers; not run here
    """
    return paper("cmsf-sup", CmsfConfig(constraint="supervised", k=10))


def supcon() -> RunConfig:
    """SupCon: contrast within a batch, by label.

    Source:    CMSF, its SupCon baseline (temperature, warm-up); learning rate and batch are its common ones
    Command:   vitrail train supcon --data imagenet/
    Expect:    the paper: 77.5 % linear on ImageNet; not run here
    """
    base = paper("supcon", SupconConfig())
    head = Projected(width=128, hidden=2048, norm=True, judged="trunk")
    return replace(base, model=replace(base.model, head=head), optim=replace(base.optim, warmup=10))


def _dino(name: str, model: ModelConfig, objective: DinoConfig, optim: OptimConfig, batch: int) -> RunConfig:
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=batch, augment=LARGE_VIEWS),
        model=replace(model, head=Projected(width=256, hidden=2048, judged="trunk")),
        optim=replace(optim, warmup=10, weight_decay=0.04, weight_decay_end=0.4, clip=3.0, floor=1e-6),
        objective=objective,
        engine=EngineConfig(ema=0.996),
        evaluators=("classification", "knn"),
    )


def resmlp_dino() -> RunConfig:
    """DINO on a ResMLP, which takes a fixed number of patches: two global views, no local ones.

    Source:    ResMLP (300 epochs); the rest is DINO's for a ViT-S
    Command:   vitrail train resmlp-dino --data imagenet/
    Expect:    the paper: S12 76.5 %, S24 79.9 % after fine-tuning on ImageNet; not run here
    """
    optim = OptimConfig(lr=5e-4, lr_batch=256, epochs=300)
    return _dino("resmlp-dino", ModelConfig(name="resmlp_s12"), DinoConfig(local_views=0), optim, batch=1024)


def sima_dino() -> RunConfig:
    """DINO on an XCiT without softmax; its patch tokens are mean-pooled in place of a class token.

    Source:    SimA; ours: warm-up, views and temperatures, which are DINO's
    Command:   vitrail train sima-dino --data imagenet/
    Hardware:  the authors': 4 RTX 3090, about 100 hours
    Expect:    the paper: 75.5 % linear, 71.2 % 20-NN on ImageNet; not run here
    """
    optim = OptimConfig(lr=0.00025, lr_batch=256, epochs=100)
    return _dino("sima-dino", ModelConfig(name="xcit_s12_p16_sima"), DinoConfig(), optim, batch=256)


SMALL_HEAD = Projected(width=128, hidden=512, norm=True, judged="trunk")


def small_resnet(name: str, objective: ObjectiveConfig, head: Projected = SMALL_HEAD, rate: float = 0.05) -> RunConfig:
    """What the small versions have in common."""
    return RunConfig(
        recipe=name,
        data=DataConfig(uri="", batch=256, augment=SMALL),
        model=ModelConfig(name="cifar_resnet20", head=head),
        optim=replace(SGD_256, lr=rate, epochs=50, warmup=1),
        objective=objective,
        engine=EngineConfig(evaluate_every=10, checkpoint_every=10, log_every=50),
        evaluators=("classification", "knn"),
    )


def _small_pair(name: str, objective: ObjectiveConfig) -> RunConfig:
    """With a slow copy; why this rate and a last BatchNorm: docs/results/self-supervised.md."""
    return small_resnet(name, objective, replace(SMALL_HEAD, last_norm=True), rate=0.2)


def small_byol() -> RunConfig:
    """BYOL on a small ResNet, in minutes.

    Command:   vitrail train small-byol --data cifar10.npz
    Expect:    CIFAR-10: 64.3 % by 20 neighbours, 65.0 % linear (test images, one seed)
    """
    return _small_pair("small-byol", ByolConfig(predictor_hidden=512))


def small_unisiam() -> RunConfig:
    """UniSiam on a small ResNet: a backbone for few-shot episodes, in minutes.

    Source:    UniSiam, the backbone of GeNIe (arXiv 2312.02548); its projector has three layers, two here
    Command:   vitrail train small-unisiam --data cifar10.npz
    Expect:    CIFAR-10: 57.4 % by 20 neighbours, 60.1 % linear (test images, one seed)
    """
    objective = ByolConfig(momentum=0.0, symmetric=True, uniformity=0.1, predictor_hidden=128)
    return small_resnet("small-unisiam", objective, Projected(width=512, hidden=512, norm=True, judged="trunk"))


def small_moco() -> RunConfig:
    """MoCo on a small ResNet, in minutes.

    Command:   vitrail train small-moco --data cifar10.npz
    Expect:    CIFAR-10: 67.2 % by 20 neighbours, 66.4 % linear (test images, one seed)
    """
    return _small_pair("small-moco", MocoConfig(momentum=0.99, bank=4096))


def small_isd() -> RunConfig:
    """ISD on a small ResNet, in minutes.

    Command:   vitrail train small-isd --data cifar10.npz
    Expect:    CIFAR-10: 60.8 % by 20 neighbours, 61.1 % linear (test images, one seed)
    """
    return _small_pair("small-isd", IsdConfig(predictor_hidden=512, bank=4096))


def small_msf() -> RunConfig:
    """Mean shift on a small ResNet, in minutes.

    Command:   vitrail train small-msf --data cifar10.npz
    Expect:    CIFAR-10: 60.0 % by 20 neighbours, 61.5 % linear (test images, one seed)
    """
    return _small_pair("small-msf", MsfConfig(predictor_hidden=512, bank=4096))


def small_cmsf() -> RunConfig:
    """Constrained mean shift on a small ResNet, in minutes; other constraints by --objective.constraint.

    Command:   vitrail train small-cmsf --data cifar10.npz
    Expect:    not measured yet
    """
    return _small_pair("small-cmsf", CmsfConfig(predictor_hidden=512, bank=4096))


def small_supcon() -> RunConfig:
    """Supervised contrast on a small ResNet, in minutes.

    Command:   vitrail train small-supcon --data cifar10.npz
    Expect:    not measured yet
    """
    return small_resnet("small-supcon", SupconConfig())


def small_dino() -> RunConfig:
    """DINO on a small ViT, in minutes: two large views and four of half the side.

    The teacher's temperature stays where the authors' begins, small views cover a fifth of the image at least, and the
    projector has BatchNorm (an option of the authors): without these the teacher's answers became uniform within 200
    steps on embedded:fashion, and embeddings differed along a line.

    Command:   vitrail train small-dino --data cifar10.npz
    Expect:    not measured yet
    """
    objective = DinoConfig(
        prototypes=4096,
        local_views=4,
        local_size=16,
        local_scale=(0.2, 0.5),
        momentum=0.99,
        teacher_temperature=0.04,
    )
    base = small_resnet("small-dino", objective)
    return replace(
        base,
        data=replace(base.data, augment=replace(SMALL, scale=(0.4, 1.0), solarise=0.1)),
        model=ModelConfig(name="vit_tiny_32", head=Projected(width=256, hidden=1024, norm=True, judged="trunk")),
        optim=OptimConfig(
            lr=5e-4, lr_batch=256, epochs=50, warmup=5, weight_decay=0.04, weight_decay_end=0.4, clip=3.0
        ),
        engine=replace(base.engine, ema=0.99),
    )
