"""Settings of the training objectives, one type per objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitrail.schema import Count, Fraction, NotNegative, OneOf, Positive, Range, Whole


class ObjectiveOptions:
    """Base of the settings of objectives."""

    kind: str

    def needs_labels(self) -> bool:
        """Whether it learns from labels; else they serve metrics only and images may have none."""
        return True

    def problems(self, run: Any) -> list[str]:
        """Problems of these settings in a run's `RunConfig`, a sentence each."""
        labels = getattr(self, "labels", None)
        return labels.label_problems("objective.labels") if isinstance(labels, SupervisedConfig) else []


class LabelFree(ObjectiveOptions):
    """Base of the settings of objectives that learn from images alone."""

    def needs_labels(self) -> bool:
        return False


ObjectiveConfig = Annotated[ObjectiveOptions, OneOf("objective")]


@dataclass(frozen=True)
class SupervisedConfig(ObjectiveOptions):
    """Supervised learning: cross entropy or binary cross entropy on labels."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """`bce`: one sigmoid per class (RSB, arXiv 2110.00476). Multi-label data always use it."""
    smoothing: Fraction = 0.0
    """Label smoothing: the true class keeps 1 - smoothing."""
    smoothing_style: Literal["all", "others"] = "all"
    """Share smoothing over all classes (torch) or over the other classes only (DeiT, arXiv 2012.12877)."""
    bce_threshold: Fraction | None = None
    """Targets above it become 1, the rest 0 (none: soft targets)."""
    bce_sum: bool = False
    """Sum over classes, then mean over the batch (else mean over both)."""
    class_weights: str = "none"
    """none; `balanced`: weigh a class by the inverse of its training frequency, mean weight 1; or weights by name, as
    "cat=3,lynx=0.5" (1 for those that are not named)."""
    logit_adjustment: NotNegative = 0.0
    """Strength with which the log of each class's training frequency is added to its logit, in training alone; 1 makes
    rare classes count as if all were as frequent (Menon et al., arXiv 2007.07314). With `bce` the log odds (LiVT, Xu et
    al., arXiv 2212.02015)."""
    count_generated: bool = True
    """Whether generated images count for frequencies (where the data tell them from real ones)."""
    classifier_loss: Literal["sum", "mean"] = "sum"
    """How the losses of several classifiers of one head are put together."""

    def problems(self, run: Any) -> list[str]:
        return self.label_problems("objective")

    def label_problems(self, where: str) -> list[str]:
        """Problems of how labels are learned; whether named classes exist is known with the data."""
        problems = []
        try:
            named_weights(self.class_weights)
        except ValueError as error:
            problems.append(f"{where}.class_weights: {error}")
        if self.loss == "bce" and self.bce_threshold == 0 and self.smoothing:  # every class would be a target
            problems.append(
                f"{where}.smoothing: with bce_threshold 0 every class of smoothed targets would be one to find; "
                "set smoothing 0, or bce_threshold none"
            )
        return problems


@dataclass(frozen=True)
class RegressionConfig(ObjectiveOptions):
    """Regression: one value per image, from a table with a column `value` or a .npz file with float labels."""

    kind: Literal["regression"] = "regression"
    loss: Literal["mse", "l1", "huber"] = "mse"
    """Squared, absolute or Huber error of values that are standardised by mean and deviation of the training images."""


def named_weights(text: str) -> dict[str, float]:
    """Weights by class of `class_weights`; empty for none and balanced. Raises `ValueError` for any other text.

    >>> named_weights("cat=3, lynx=0.5")
    {'cat': 3.0, 'lynx': 0.5}
    """
    if text in ("none", "balanced"):
        return {}
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        try:
            weights[name.strip()] = float(number)
        except ValueError:
            weights[""] = 0.0
    if "" in weights or not all(0 <= weight < float("inf") for weight in weights.values()):
        raise ValueError(f"{text!r} is not none, balanced or NAME=WEIGHT,NAME=WEIGHT with weights of 0 and more")
    return weights


@dataclass(frozen=True)
class DistillationConfig(ObjectiveOptions):
    """Knowledge distillation: labels and a teacher (DeiT, Touvron et al., 2020, arXiv 2012.12877).

    A head with a distillation token gives its class classifier the labels and the other one the teacher; any other head
    learns both with every classifier.
    """

    kind: Literal["distillation"] = "distillation"
    teacher: str = ""
    """A run folder, a model folder, timm:NAME with its published weights, or a weights file of a CIFAR ResNet."""
    mode: Literal["hard", "soft"] = "hard"
    """`hard`: the teacher's decision is a second label. `soft`: its probabilities, at `temperature`."""
    weight: Fraction | None = None
    """Share of the teacher (none: one half for hard, 0.1 for soft)."""
    temperature: Positive = 3.0
    """Of soft targets."""
    first: Literal["teacher", "student"] = "teacher"
    """Soft: KL(teacher || student), as usual, or KL(student || teacher), as DeiT's eq. 2 is printed."""
    cache: bool = False
    """Ask the teacher once for each image; only where views are fixed (crop evaluation, no flips, no mixing)."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""

    def problems(self, run: Any) -> list[str]:
        problems = super().problems(run)
        if not self.teacher and run.data.uri:
            problems.append("objective.teacher: name one: a run folder, timm:NAME, or a weights file of a CIFAR ResNet")
        return problems


@dataclass(frozen=True)
class GrafitConfig(ObjectiveOptions):
    """Fine-grained representations from coarse labels (Grafit, Touvron et al., 2020, arXiv 2011.12982).

    The sum of the parts with the weights below. The model's head must be `projected`: what it embeds is compared.
    """

    kind: Literal["grafit"] = "grafit"
    neighbours: NotNegative = 1.0
    """Weight of the neighbour loss (NCA) over the memory of all training images."""
    instance: NotNegative = 1.0
    """Weight of the instance loss: agreement of views with the momentum encoder."""
    classification: NotNegative = 0.0
    """Weight of the labels' cross entropy."""
    triplet: NotNegative = 0.0
    """Weight of the triplet loss within a batch."""
    views: Count = 4
    """Augmented views of each image (2 or more for `instance`; the others take the first)."""
    temperature: Positive = 0.05
    momentum: Fraction = 0.99
    """Decay of the momentum encoder."""
    predictor_hidden: Count = 4096
    triplet_margin: Positive = 0.2
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


@dataclass(frozen=True)
class OneConfig(ObjectiveOptions):
    """On-the-fly native ensemble (ONE, Lan et al., 2018, arXiv 1806.04606): branches learn labels and their gated
    ensemble."""

    kind: Literal["one"] = "one"
    temperature: Positive = 3.0
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)


@dataclass(frozen=True)
class LanguageModelConfig(ObjectiveOptions):
    """Next-token prediction of completions, given their prompts; the model's head must be `next_token`."""

    kind: Literal["language_model"] = "language_model"
    smoothing: Fraction = 0.0
    """Label smoothing: the true word keeps 1 - smoothing, the whole vocabulary shares the rest."""


Views = Literal["weak_strong", "strong_strong", "weak_weak"]


@dataclass(frozen=True)
class MomentumConfig(ObjectiveOptions):
    """Settings that objectives with a momentum teacher share. The model's head must be `projected`."""

    momentum: Fraction = 0.99
    """Decay of the momentum teacher."""
    momentum_end: Fraction | None = None
    """Its decay at the end of the run, on a cosine; 1 as in BYOL's paper (none: constant)."""


@dataclass(frozen=True)
class PairConfig(MomentumConfig):
    """Settings of objectives that show one view to the momentum teacher and another to the model."""

    views: Views = "strong_strong"
    """The teacher's and the model's: made by data.weak or data.augment (the papers' w/s, s/s, w/w)."""


@dataclass(frozen=True)
class BankConfig(PairConfig):
    """Settings that objectives with a bank of earlier embeddings share."""

    bank: Count = 128_000
    """Embeddings that the bank holds; the oldest make room."""
    bank_precision: Literal["float32", "bf16"] = "float32"


@dataclass(frozen=True)
class ByolConfig(LabelFree, PairConfig):
    """Predict the momentum encoder's embedding of another view (BYOL, Grill et al., 2020, arXiv 2006.07733)."""

    kind: Literal["byol"] = "byol"
    predictor_hidden: Count = 4096
    symmetric: bool = False
    """Learn from both views, each against the other (else one way, which costs half: BYOL-asym)."""
    uniformity: NotNegative = 0.0
    """Weight of UniSiam's uniformity term over the batch (Lu et al., 2022, arXiv 2207.09176; published: 0.1, with
    `symmetric` and a momentum of 0, which makes the momentum encoder the model itself)."""
    uniformity_temperature: Positive = 2.0


@dataclass(frozen=True)
class MocoConfig(LabelFree, BankConfig):
    """Contrast the other view of an image with a bank of other images (MoCo, He et al., 2019, arXiv 1911.05722)."""

    kind: Literal["moco"] = "moco"
    symmetric: bool = False
    """Both views are query and key in turn; a step costs twice as much."""
    momentum: Fraction = 0.999
    bank: Count = 65_536
    temperature: Positive = 0.2


@dataclass(frozen=True)
class IsdConfig(LabelFree, BankConfig):
    """Match the momentum encoder's similarities to a queue of other images (ISD, Tejankar et al., 2020, arXiv
    2012.09259)."""

    kind: Literal["isd"] = "isd"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1
    """Of the online network."""
    teacher_temperature: Positive = 0.01
    """Of the momentum teacher; below the other one it sharpens what is learned."""


@dataclass(frozen=True)
class MsfConfig(LabelFree, BankConfig):
    """Move towards the mean of the nearest neighbours in a bank (MSF, Abbasi Koohpayegani et al., 2021, arXiv
    2105.07269)."""

    kind: Literal["msf"] = "msf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    k: Count = 5
    """Neighbours, the image itself among them; with 1 this is BYOL."""


@dataclass(frozen=True)
class CmsfConfig(BankConfig):
    """Mean shift among a constrained set of neighbours (CMSF, Navaneet et al., 2021, arXiv 2112.04607)."""

    kind: Literal["cmsf"] = "cmsf"
    views: Views = "weak_strong"
    predictor_hidden: Count = 4096
    constraint: Literal["self", "semi", "supervised"] = "self"
    """`self`: an older embedding of the same images; `supervised`: the label; `semi`: the label of a share of the
    images, and confident pseudo-labels of the others."""
    k: Count | None = 5
    """Neighbours, the image itself among them (none: all that are allowed, with labels only)."""
    pool: Count = 5
    """`self`: neighbours in the older embedding, among which `k` are chosen."""
    labelled: Fraction = 0.1
    """`semi`: share of every class whose labels may be used."""
    threshold: Fraction = 0.85
    """`semi`: probability above which a pseudo-label counts."""

    def needs_labels(self) -> bool:
        return self.constraint != "self"


@dataclass(frozen=True)
class FixmatchConfig(ObjectiveOptions):
    """Few labels, and confident predictions of weak views as labels of strong ones (FixMatch, arXiv 2001.07685)."""

    kind: Literal["fixmatch"] = "fixmatch"
    labelled: Fraction = 0.1
    """Share of every class whose labels may be used (0.0008 of CIFAR-10: 4 per class)."""
    ratio: Count = 7
    """Images without a label that are drawn for each one with a label."""
    threshold: Fraction = 0.95
    """Probability from which a prediction is a label."""
    weight: NotNegative = 1.0
    """Of such labels, relative to 1 for true ones."""

    def problems(self, run: Any) -> list[str]:
        mixed = run.data.sampling != "shuffle" or run.data.augment.mixup or run.data.augment.cutmix
        return ["objective: fixmatch needs data.sampling shuffle, and mixup and cutmix of 0"] if mixed else []


@dataclass(frozen=True)
class DinoConfig(LabelFree, MomentumConfig):
    """Predict from small views what the momentum teacher predicts from large ones (DINO, Caron et al., 2021, arXiv
    2104.14294).

    Two large views are made by data.augment; small ones too, of a smaller share of the image.
    """

    kind: Literal["dino"] = "dino"
    momentum: Fraction = 0.996
    momentum_end: Fraction | None = 1.0
    prototypes: Annotated[int, Range(2)] = 65_536
    """Learned directions over which the softmaxes go."""
    temperature: Positive = 0.1
    """Of the student."""
    teacher_temperature: Positive = 0.07
    teacher_temperature_start: Positive = 0.04
    teacher_warmup: Fraction = 0.3
    """Share of the run in which the teacher's temperature rises from its start."""
    centre_momentum: Fraction = 0.9
    """Decay of the centre, the running mean of the teacher's scores that is subtracted from them."""
    freeze_last: Fraction = 0.01
    """Share of the run in which the prototypes do not learn yet (the authors: one epoch of a hundred)."""
    local_views: Whole = 8
    """Small views of each image."""
    local_size: Count | None = 96
    """Their side in pixels (none: the model's, where it can see no other)."""
    local_scale: tuple[Fraction, Fraction] = (0.05, 0.4)
    """Share of the image's area that they cover; large ones: data.augment.scale."""


@dataclass(frozen=True)
class SupconConfig(ObjectiveOptions):
    """Supervised contrast within a batch (SupCon, Khosla et al., 2020, arXiv 2004.11362)."""

    kind: Literal["supcon"] = "supcon"
    temperature: Positive = 0.1


@dataclass(frozen=True)
class ProtonwConfig(BankConfig):
    """Classification by the class means of a bank (the baseline ProtoNW of CMSF, arXiv 2112.04607)."""

    kind: Literal["protonw"] = "protonw"
    predictor_hidden: Count = 4096
    temperature: Positive = 0.1


@dataclass(frozen=True)
class EmbeddingTeacher(LabelFree):
    """Settings that objectives with a frozen teacher's embeddings share."""

    teacher: str = ""
    """A run folder, a model folder, or timm:NAME with its published weights; its classes do not matter."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: its own)."""


@dataclass(frozen=True)
class CompresConfig(EmbeddingTeacher):
    """Match a frozen teacher's similarity distribution over a queue of anchors (CompRess, Abbasi Koohpayegani et al.,
    2020, arXiv 2010.14713)."""

    kind: Literal["compres"] = "compres"
    queues: Annotated[int, Range(1, 2)] = 1
    """1: compare with the teacher's anchors, through a linear map where widths differ. 2: with those of the
    student's momentum encoder."""
    temperature: Positive = 0.04
    bank: Count = 128_000
    """Embeddings that a queue holds; the oldest make room."""
    bank_precision: Literal["float32", "bf16"] = "float32"
    momentum: Fraction | None = None
    """Two queues: decay of the student's momentum encoder. None: 1 - 650 / steps, at least 0 and at most 0.999, so that
    it lags by the share of the run that the paper's 0.999 does in 650,000 steps (0.15 %)."""
    cache: bool = False
    """Embed each image once by the teacher and keep the embedding of its first view."""


@dataclass(frozen=True)
class SimregConfig(EmbeddingTeacher):
    """Regress a frozen teacher's embedding (SimReg, Navaneet et al., 2022, arXiv 2201.05131)."""

    kind: Literal["simreg"] = "simreg"
    layers: Count = 4
    """Of the predictor, which is discarded after training; 1 is plain regression."""
    hidden: Count | None = None
    """Width between the predictor's layers (none: twice the embedding)."""
    match: Literal["unit", "raw", "batch_norm"] = "unit"
    """Compare unit vectors, embeddings as they are, or both normalised over the batch."""


@dataclass(frozen=True)
class ClustersConfig(EmbeddingTeacher):
    """Classify the cluster of a frozen teacher's features (the baseline CC of CompRess, arXiv 2010.14713)."""

    kind: Literal["clusters"] = "clusters"
    clusters: Annotated[int, Range(2)] = 16_000


@dataclass(frozen=True)
class CrdConfig(EmbeddingTeacher):
    """Contrast a frozen teacher's embedding of an image with those of others (CRD, Tian et al., 2019, arXiv
    1910.10699)."""

    kind: Literal["crd"] = "crd"
    width: Count = 128
    """To which both embeddings are mapped."""
    negatives: Count = 16_384
    temperature: Positive = 0.07


@dataclass(frozen=True)
class MaeConfig(LabelFree):
    """Masked autoencoding: masked patches are predicted from visible ones, without labels (MAE, He et al., 2021, arXiv
    2111.06377)."""

    kind: Literal["mae"] = "mae"
    mask: Fraction = 0.75
    """Share of the patches that is masked."""
    decoder_width: Count = 512
    decoder_depth: Count = 8
    decoder_heads: Count = 16
    normalise: bool = True
    """Pixels of every patch are brought to mean 0 and deviation 1 before they are compared."""


@dataclass(frozen=True)
class DiffusionConfig(ObjectiveOptions):
    """Class-conditional denoising diffusion; the model must be a denoiser."""

    kind: Literal["diffusion"] = "diffusion"
    prediction: Literal["v", "eps"] = "v"
    """Prediction target: velocity, or the noise itself."""
    schedule: Literal["cosine", "scaled_linear"] = "cosine"
    """How the signal fades; `scaled_linear` is Stable Diffusion's."""
    drop_label: Fraction = 0.1
    """Share of labels that are withheld, for guidance."""
    min_snr: Positive | None = None
    """Cap of the weight of times with little noise; 5 is usual (none: no weights)."""


@dataclass(frozen=True)
class AttentionTransferConfig(ObjectiveOptions):
    """Labels, and the attention of a teacher (attention transfer, Li et al., 2024, arXiv 2411.09702).

    `copy`: the student uses the teacher's attention, and needs it at inference, too. `distill`: it has its own, which
    is drawn to the teacher's; the teacher is dropped after training.
    """

    kind: Literal["attention_transfer"] = "attention_transfer"
    teacher: str = ""
    """A run or model folder, timm:NAME of a plain ViT, random (untrained), or a .safetensors file with `attention.0`
    and so on: [heads, tokens, tokens], or with images in front, by stable index (distill, fixed views)."""
    mode: Literal["copy", "distill"] = "distill"
    target: Literal["map", "q", "k", "v", "qk", "features"] = "map"
    """What is taken. Distilled maps: cross entropy; all else: mean squared error. Copying q and k is copying maps."""
    layers: str = "all"
    """Layers of the student that take: all, first:K, last:K, or a list such as 0,1,5."""
    heads: str = "all"
    """Heads of the student that take: all, first:K, last:K, or a list."""
    layer_map: tuple[Whole, ...] = ()
    """Teacher's layer for each of them (empty: the same; needed where depths differ)."""
    head_map: tuple[Whole, ...] = ()
    """Teacher's head for each of them (empty: the same; needed where numbers of heads differ)."""
    aggregate: Literal["none", "examples", "layers", "heads", "queries"] = "none"
    """Average the teacher's maps over this before they are taken; examples: a running mean over training."""
    weight: NotNegative = 1.0
    """Of the distillation loss, relative to 1 for the labels (the paper: 3 for its main result, 1 elsewhere)."""
    head_reduction: Literal["mean", "sum"] = "mean"
    """Over heads; always the mean over images and queries, and the sum over layers."""
    drop_path: Literal["off", "shared"] = "off"
    """The teacher's: none, or the student's masks for both."""
    teacher_size: Count | None = None
    """Image size that the teacher sees (none: the student's)."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""

    def problems(self, run: Any) -> list[str]:
        problems = super().problems(run)
        if run.model.adapter is not None and self.mode == "copy":
            problems.append(
                "model.adapter: copied attention takes the place of adapted layers; use --objective.mode distill"
            )
        if run.model.adapter is not None and run.model.adapter.kind == "vpt":
            problems.append("model.adapter: with vpt, attention has places for prompts, which no teacher has; use lora")
        if not self.teacher and run.data.uri:
            known = "a run folder, timm:NAME of a plain ViT, random, or a file of stored maps"
            problems.append(f"objective.teacher: name one: {known}")
        return problems
