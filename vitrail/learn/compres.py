"""CompRess: match a frozen teacher's similarity distribution over a queue of anchors (Abbasi Koohpayegani et al., 2020,
arXiv 2010.14713), and its baselines CC (cluster classification) and CRD (contrast)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.counter import seed_of
from vitrail.kernels.kmeans import kmeans
from vitrail.kernels.similarity import relation_loss, uncompiled
from vitrail.learn.bank import UNKNOWN, ImageMemory, attend_all, make_bank, processes, rank, sum_of_all
from vitrail.learn.config import ClustersConfig, CompresConfig, CrdConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.selfsupervised import PRECISIONS, MomentumCopy, SelfSupervised, unit
from vitrail.learn.teacher import Embedder, load_embedder
from vitrail.model.classifier import Classifier


def momentum_of_run(steps: int) -> float:
    """Decay of a momentum encoder that lags as far behind, for the length of its run, as CompRess' does.

    The paper's 0.999 lags by 1,000 of 650,000 steps (130 epochs of ImageNet in batches of 256).

    >>> momentum_of_run(650_000), round(momentum_of_run(5_273), 3), momentum_of_run(100)
    (0.999, 0.877, 0.0)
    """
    return min(0.999, max(0.0, 1 - 650 / steps))


class Compres(SelfSupervised):
    """KL between the teacher's softmax over a queue of its embeddings and the student's.

    One queue: the student, through a linear map where widths differ, is compared with the teacher's anchors. Two: with
    its momentum encoder's embeddings of the same images, in the same slots; so only relations are transferred and
    widths do not matter. All see the same crop; the batch is pushed after the loss.
    """

    frozen = ("embedder.teacher",)
    views = ViewSpec(1)

    def __init__(
        self, model: Classifier, config: CompresConfig, teacher: Classifier, index: NDArray[np.int64], steps: int
    ) -> None:
        super().__init__(model)
        self.options = config
        self.embedder = Embedder(teacher, model, config.teacher, config.teacher_size, index if config.cache else None)
        width, theirs = self.head.features, self.embedder.width
        momentum = momentum_of_run(steps) if config.momentum is None else config.momentum
        self.key = MomentumCopy(model, momentum) if config.queues == 2 else None
        adapted = config.queues == 1 and width != theirs
        self.adapter: nn.Module = nn.Linear(width, theirs) if adapted else nn.Identity()
        self.bank = make_bank(config.bank, theirs, 0 if self.key is None else width, PRECISIONS[config.bank_precision])

    @classmethod
    def build(cls, model: Classifier, config: CompresConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        return cls(model, config, teacher, facts.index, facts.steps)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        config, bank = self.options, self.bank
        teacher = unit(self.embedder(batch))
        seen = self.encode(batch.images)
        student = unit(self.adapter(seen.embedding))
        temperatures = config.temperature, config.temperature
        anchors = bank.here(second=self.key is not None)
        loss = relation_loss(student, teacher, anchors, bank.here(), *temperatures, by=attend_all)
        bank.push(teacher, second=None if self.key is None else self.key.embed(batch.images))
        return self.losses(loss, seen, batch)

    @property
    def phase(self) -> int:
        return int(self.embedder.complete)

    def after_step(self, step: int) -> None:
        self.embedder.after_step(step)
        if self.key is not None:
            self.key.follow(self.model, step)


def cluster_images(
    embedder: Embedder, images: Iterable[Batch], index: NDArray[np.int64], clusters: int
) -> NDArray[np.int64]:
    """Cluster of each image [len(index)] by k-means of the teacher's unit features; UNKNOWN: it was not among `images`.

    In a process group each process brings the images it was given; the first one finds the clusters for all, since
    k-means need not be the same to the last bit on two devices. Raises `ValueError` for more clusters than images.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    for batch in images:
        embedder = embedder.to(batch.index.device)
        parts.append((unit(embedder.ask(batch.images)), batch.index))
    rows, known = (torch.cat(column) for column in zip(*parts, strict=True))
    if processes() > 1:
        parts = [(rows, known)] * processes()
        dist.all_gather_object(parts, (rows.cpu(), known.cpu()))
        rows, known = (torch.cat(column).to(rows.device) for column in zip(*parts, strict=True))
    if len(rows) < clusters:
        raise ValueError(f"objective.clusters: {clusters} clusters of {len(rows)} training images; use fewer")
    table = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
    labels = [kmeans(rows, clusters).label.cpu() if rank() == 0 else None]
    if processes() > 1:
        dist.broadcast_object_list(labels)
    assert labels[0] is not None
    table[known.cpu()] = labels[0]
    return table[torch.from_numpy(index)].numpy()


class Clusters(SelfSupervised):
    """The baseline CC of CompRess: classify the cluster of the teacher's features that an image is in.

    Cross entropy of a linear classifier on the embedding; its labels are the clusters [images] of the training set.
    Clusters are computed before the run, from un-augmented images, and stored in checkpoints. A resumed run computes
    the teacher's features again, and takes the clusters of the checkpoint.
    """

    views = ViewSpec(1)
    edge_layers = ("classify",)
    cluster: Tensor  # [largest index + 1]

    def __init__(
        self, model: Classifier, config: ClustersConfig, clusters: NDArray[np.int64], index: NDArray[np.int64]
    ) -> None:
        super().__init__(model)
        self.classify = nn.Linear(self.head.features, config.clusters)
        table = torch.full((int(index.max()) + 1,), UNKNOWN, dtype=torch.int64)
        table[torch.from_numpy(index)] = torch.from_numpy(clusters)
        self.register_buffer("cluster", table)

    @classmethod
    def build(cls, model: Classifier, config: ClustersConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        if facts.images is None:
            raise ValueError("objective clusters reads all training images first, and was given none")
        embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        clusters = cluster_images(embedder, facts.images(), facts.index, config.clusters)
        return cls(model, config, clusters, facts.index)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(batch.images)
        logits, wanted = self.classify(seen.embedding).float(), self.cluster[batch.index]
        loss = F.cross_entropy(logits, wanted, ignore_index=UNKNOWN)
        right = (logits.argmax(1) == wanted).float().mean()
        return self.losses(loss, seen, batch, cluster_top1=right)


def noise_contrast(own: Tensor, others: Tensor, constant: Tensor, images: int) -> Tensor:
    """Noise-contrastive estimation, mean over the batch, of scores over their temperature: own [batch], others
    [batch, negatives].

    exp(score) / constant is taken as the probability of being the same image, negatives / images as that of noise.
    """
    noise = np.log(others.shape[1] / images)
    same, different = own - constant.log() - noise, others - constant.log() - noise  # log odds against noise
    return (F.softplus(-same) + F.softplus(different).sum(1)).mean()


class Crd(SelfSupervised):
    """CRD: contrast the teacher's embedding of an image with its embeddings of others, and the other way round.

    Contrastive representation distillation (Tian et al., 2019, arXiv 1910.10699) without its supervised term, a
    baseline of CompRess. Both embeddings go through linear maps to one width and are compared with memories of the
    other's, by image. The images of a batch share their negatives, which the authors' code draws for each of them: one
    matrix product in place of a gather of batch x negatives rows. The constants of the softmaxes are set in the first
    step and are kept, as the authors do.
    """

    frozen = ("embedder.teacher",)
    views = ViewSpec(1)
    constants: Tensor  # [2]: the student's, the teacher's; 0 before the first step
    chosen: Tensor  # rows of this step's negatives [negatives]

    def __init__(self, model: Classifier, config: CrdConfig, teacher: Classifier, index: NDArray[np.int64]) -> None:
        super().__init__(model)
        self.options = config
        self.embedder = Embedder(teacher, model, config.teacher, config.teacher_size)
        self.of_student = nn.Linear(self.head.features, config.width)
        self.of_teacher = nn.Linear(self.embedder.width, config.width)
        self.students, self.teachers = (ImageMemory(index, config.width) for _ in range(2))
        self.register_buffer("constants", torch.zeros(2))
        self.register_buffer("chosen", torch.zeros(config.negatives, dtype=torch.int64), persistent=False)

    @classmethod
    def build(cls, model: Classifier, config: CrdConfig, facts: TrainingFacts) -> Objective:
        teacher = load_embedder(config.teacher, model, config.teacher_size)
        return cls(model, config, teacher, facts.index)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = self.encode(batch.images)
        student = unit(self.of_student(seen.embedding))
        teacher = unit(self.of_teacher(self.embedder(batch)))
        return self.losses(self.compare(student, teacher, batch), seen, batch)

    @uncompiled
    def compare(self, student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
        """The loss of unit vectors [batch, width], after which the memories move halfway to them."""
        losses = []
        for i, (vectors, memory) in enumerate(((student, self.teachers), (teacher, self.students))):
            with torch.autocast(vectors.device.type, enabled=False):
                own = (vectors * memory.rows[memory.where(batch.index)]).sum(1) / self.options.temperature
                others = vectors @ memory.rows[self.chosen].T / self.options.temperature
            self._set_constant(i, own, others)
            losses.append(noise_contrast(own, others, self.constants[i].clone(), len(memory)))
        for memory, vectors in ((self.students, student), (self.teachers, teacher)):
            moved = memory.rows[memory.where(batch.index)] + vectors.detach()
            memory.update(batch.index, unit(moved), share=1.0)
        return losses[0] + losses[1]

    def before_step(self, step: int) -> None:
        self.chosen.copy_(self.draw(step))

    def draw(self, step: int) -> Tensor:
        """Rows of the negatives [negatives] of a step; others in every process."""
        device = self.constants.device
        generator = torch.Generator(device).manual_seed(seed_of("negative", step, rank()))
        return torch.randint(len(self.students), (self.options.negatives,), generator=generator, device=device)

    @torch.no_grad()
    def _set_constant(self, i: int, own: Tensor, others: Tensor) -> None:
        mean = torch.cat([own[:, None], others], 1).exp().mean()
        first = sum_of_all(mean) / processes() * len(self.students)
        self.constants[i] = torch.where(self.constants[i] == 0, first, self.constants[i])
