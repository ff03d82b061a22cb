"""Students that learn a teacher's embeddings: CompRess (Koohpayegani et al. 2020, arXiv 2010.14713), baselines.

Students see crops and flips only, as in CompRess: no colour jitter, in the small versions neither.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import AugmentConfig, OptimConfig, RunConfig
from vitrail.learn.config import ClustersConfig, CompresConfig, CrdConfig, ObjectiveConfig, SimregConfig
from vitrail.model.heads.config import Projected
from vitrail.recipes.selfsupervised import SGD, paper, small_resnet

STATED = {
    "compres-1q": {
        "source": "CompRess (arXiv 2010.14713)",
        **SGD,
        "optim.lr": 0.01,
        "optim.epochs": 130,
        "objective.queues": 1,
        "objective.bank": 128_000,
        "objective.temperature": 0.04,
    },
    "compres-2q": {
        "source": "CompRess (arXiv 2010.14713)",
        **SGD,
        "optim.lr": 0.01,
        "optim.epochs": 130,
        "objective.queues": 2,
        "objective.bank": 128_000,
        "objective.temperature": 0.04,
        "objective.momentum": 0.999,
    },
    "reg": {
        "source": "CompRess (arXiv 2010.14713): ResNet-18",
        "optim.name": "adam",
        "optim.lr": 0.001,
        "optim.weight_decay": 1e-4,
        "optim.epochs": 100,
        "optim.schedule": "step",
        "optim.step_every": 40,
        "optim.step_factor": 0.1,
        "data.batch": 256,
        "objective.layers": 1,
        "objective.match": "raw",
    },
    "reg-bn": {
        "source": "CompRess (arXiv 2010.14713)",
        **SGD,
        "optim.lr": 0.1,
        "optim.epochs": 100,
        "optim.schedule": "step",
        "optim.step_every": 40,
        "optim.step_factor": 0.1,
        "objective.layers": 1,
        "objective.match": "batch_norm",
    },
    "cluster-classification": {
        "source": "CompRess (arXiv 2010.14713): ResNets",
        "optim.lr": 0.1,
        "optim.epochs": 100,
        "optim.schedule": "cosine",
        "objective.clusters": 16_000,
    },
    "crd": {"source": "CompRess (arXiv 2010.14713): no supervised term", "optim.lr": 0.05},
}


def _student(name: str, objective: ObjectiveConfig) -> RunConfig:
    base = paper(name, objective, rate=0.01, epochs=130, network="resnet18")
    data = replace(base.data, augment=AugmentConfig())
    return replace(base, data=data, model=replace(base.model, head=Projected(projector="none")))


def compres_1q() -> RunConfig:
    """CompRess with one queue: match the teacher's similarities to its anchors.

    Source:    CompRess; its learning rate falls to a fifth at epochs 90 and 120, a cosine here
    Command:   vitrail train compres-1q --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 62.6 % linear, 53.5 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    return _student("compres-1q", CompresConfig(queues=1))


def compres_2q() -> RunConfig:
    """CompRess with two queues: anchors of the student's own besides the teacher's.

    Source:    CompRess; its learning rate falls to a fifth at epochs 90 and 120, a cosine here
    Command:   vitrail train compres-2q --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 61.7 % linear, 53.4 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    return _student("compres-2q", CompresConfig(queues=2, momentum=0.999))


def reg() -> RunConfig:
    """Plain regression of a teacher's embedding, a baseline of CompRess.

    Source:    CompRess, appendix
    Command:   vitrail train reg --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 52.2 % linear, 41.7 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    base = _student("reg", SimregConfig(layers=1, match="raw"))
    optim = OptimConfig(
        name="adam", lr=1e-3, epochs=100, schedule="step", step_every=40, warmup=0, weight_decay=1e-4, floor=0.0
    )
    return replace(base, optim=optim)


def reg_bn() -> RunConfig:
    """Regression of a teacher's embedding, both normalised over the batch, a baseline of CompRess.

    Source:    CompRess, appendix
    Command:   vitrail train reg-bn --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 58.2 % linear, 47.3 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    base = _student("reg-bn", SimregConfig(layers=1, match="batch_norm"))
    return replace(base, optim=replace(base.optim, lr=0.1, epochs=100, schedule="step", step_every=40))


def cluster_classification() -> RunConfig:
    """Classification of k-means clusters of a teacher's features, the baseline CC of CompRess.

    Source:    CompRess, appendix; ours: weight decay and batch
    Command:   vitrail train cluster-classification --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 61.1 % linear, 51.1 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    base = _student("cluster-classification", ClustersConfig())
    return replace(base, optim=replace(base.optim, lr=0.1, epochs=100))


def crd() -> RunConfig:
    """CRD (Tian et al. 2019, arXiv 1910.10699): contrast with a teacher's embeddings, a baseline of CompRess.

    Source:    CompRess, appendix (learning rate); ours: its length; the rest is CRD's and CompRess' own
    Command:   vitrail train crd --data imagenet/ --objective.teacher RUN
    Expect:    the paper: 58.4 % linear, 43.7 % 1-NN, MoCo ResNet-50 to ResNet-18; not run here
    """
    base = _student("crd", CrdConfig())
    return replace(base, optim=replace(base.optim, lr=0.05, epochs=100))


def _small_student(name: str, objective: ObjectiveConfig, rate: float = 0.05) -> RunConfig:
    base = small_resnet(name, objective, Projected(projector="none"), rate)
    return replace(base, data=replace(base.data, augment=AugmentConfig()))


def small_compres() -> RunConfig:
    """A teacher's relations taken over by a small ResNet, in minutes.

    Command:   vitrail train small-compres --data cifar10.npz --objective.teacher RUN
    Expect:    after 30 epochs, with a bank of 16,384, from a ResNet-18 of 39.6 % of CIFAR-100 by 20 neighbours:
               36.5 % (one seed, studies/selfsupervised.py), made before students saw crops and flips only; to be made
               again
    """
    return _small_student("small-compres", CompresConfig(bank=4096), rate=0.2)


def small_simreg() -> RunConfig:
    """A teacher's embeddings regressed by a small ResNet, in minutes.

    Command:   vitrail train small-simreg --data cifar10.npz --objective.teacher RUN
    Expect:    not measured yet
    """
    return _small_student("small-simreg", SimregConfig())


def small_clusters() -> RunConfig:
    """A teacher's clusters told by a small ResNet, in minutes.

    Command:   vitrail train small-clusters --data cifar10.npz --objective.teacher RUN
    Expect:    not measured yet
    """
    return _small_student("small-clusters", ClustersConfig(clusters=500))


def small_crd() -> RunConfig:
    """A teacher's embeddings told apart by a small ResNet, in minutes.

    Command:   vitrail train small-crd --data cifar10.npz --objective.teacher RUN
    Expect:    not measured yet
    """
    return _small_student("small-crd", CrdConfig(negatives=4096))
