"""Options of every head: how tokens become logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Depth, Fraction, NotNegative, OneOf, Positive, Range, Whole, Width


class HeadOptions:
    """Base of the settings of heads: a new one subclasses it and registers its head (`vitrail.registry`)."""

    kind: str


HeadConfig = Annotated[HeadOptions, OneOf("head")]


@dataclass(frozen=True)
class ClassToken(HeadOptions):
    """One linear classifier on the class token."""

    kind: Literal["class_token"] = "class_token"
    drop: Fraction = 0.0
    copies: Depth = 1
    """Classifiers side by side, as a control for heads that have several."""
    hidden: Width | None = None
    """A linear layer to so many features before the classifier, as a control for heads that have more parameters."""


@dataclass(frozen=True)
class Mean(HeadOptions):
    """One linear classifier on the mean of the patch tokens."""

    kind: Literal["mean"] = "mean"
    drop: Fraction = 0.0
    copies: Depth = 1
    """Classifiers side by side, as a control for heads that have several."""
    hidden: Width | None = None
    """A linear layer to so many features before the classifier, as a control for heads that have more parameters."""
    mlp: bool = False
    """BatchNorm and ReLU after the `hidden` layer: the classifier is an MLP (Grafit's transfer)."""
    norm_after: bool = False
    """Apply the final norm to the mean instead of to every token (timm's `fc_norm`)."""


@dataclass(frozen=True)
class Distilled(HeadOptions):
    """Class token and distillation token, a linear classifier each (DeiT, arXiv 2012.12877)."""

    kind: Literal["distilled"] = "distilled"
    fusion: Literal["logits", "softmax"] = "logits"
    """Mean of logits (timm and the published weights), or sum of probabilities (the paper)."""


@dataclass(frozen=True)
class ClassAttention(HeadOptions):
    """Layers in which a class token reads the patches by attention (CaiT, arXiv 2103.17239; XCiT, arXiv 2106.09681)."""

    kind: Literal["class_attention"] = "class_attention"
    layers: Depth = 2
    heads: Width | None = None
    """Attention heads (none: the trunk's, or one for each 64 channels)."""
    mlp_ratio: Positive = 4.0
    layerscale: NotNegative | None = None
    """Start of LayerScale in these layers (none: as the trunk)."""
    scaled: bool = True
    """LayerScale in these layers, where the trunk has it."""
    token_in_keys: bool = True
    """The class token is among the keys and values."""
    attention: Literal["softmax", "sima"] = "softmax"
    """sima: without softmax, as in the trunk (as in the authors' code; the paper, arXiv 2206.08898, leaves it open)."""
    style: Literal["cait", "xcit"] = "cait"
    """xcit: normalised tokens are what is added to, and patches are rewritten along, as its weights need."""


@dataclass(frozen=True)
class ClassMlp(HeadOptions):
    """As class attention, with one learned linear map over patches in its place (ResMLP, arXiv 2105.03404)."""

    kind: Literal["class_mlp"] = "class_mlp"
    layers: Depth = 2
    mlp_ratio: Positive = 4.0


@dataclass(frozen=True)
class AttentionPool(HeadOptions):
    """Attention pooling of the patches, with one learned query or one per class (PatchConvNet, arXiv 2112.13692)."""

    kind: Literal["attention_pool"] = "attention_pool"
    heads: Width = 1
    queries: Literal["one", "per_class"] = "one"
    mlp_ratio: Positive = 3.0
    layerscale: NotNegative | None = None
    """Start of LayerScale (none: as the trunk, else 1: all information of the patches passes through it, and a small
    gain opens slowly)."""
    token_in_keys: bool = False
    """The learned vector is among the keys and values, as in the authors' code (only with one query)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as in the authors' code."""
    per_class_logit: Literal["own", "shared"] = "own"
    """per_class: a linear map for each class, or one shared by all."""


@dataclass(frozen=True)
class SecondOrder(HeadOptions):
    """Class token and second-order pooling of the patch tokens (SoT, arXiv 2104.10935, sections 3.2 and 3.3)."""

    kind: Literal["second_order"] = "second_order"
    pooling: Literal["mean", "covariance", "cross_covariance"] = "cross_covariance"
    """GAP, GCP (matrix square root) and MGCrP of the paper."""
    fusion: Literal["sum", "concat", "aggregate_all", "late", "class_only", "words_only"] = "sum"
    normalization: Literal["none", "scale", "signed_root", "layernorm", "svpn", "svpn_fast"] = "svpn_fast"
    """Of each cross-covariance matrix: singular-value power normalisation exact (svpn) or by power iteration."""
    alpha: Annotated[float, Range(0, 1, above=True)] = 0.5
    """Power of the singular values."""
    singular_values: Count = 1
    """svpn_fast: singular values estimated one by one."""
    iterations: Depth = 1
    """svpn_fast: power iterations for each."""
    heads: Width = 6
    rows: Width = 14
    columns: Width = 14
    center: Literal["none", "channel", "scalar"] = "none"
    """What is subtracted before the product: nothing (paper), channel means, one mean per head (authors' code)."""
    root_steps: Depth = 3
    """Newton-Schulz steps of the covariance's square root."""
    drop: Fraction = 0.0
    """Dropout on the pooled representation."""
    class_token: Literal["first", "last", "none"] = "first"
    late_rule: Literal["softmax", "logits"] = "softmax"
    """late: add probabilities (the paper) or logits (the authors' code) at test."""


@dataclass(frozen=True)
class Gramian(HeadOptions):
    """Several small heads, each querying the features with its Gram matrix (Ryu et al. 2023, arXiv 2310.16483)."""

    kind: Literal["gramian"] = "gramian"
    heads: Width = 5
    gram_width: Width = 192
    """Width to which features are contracted before the Gram matrix."""
    gram_layer: bool = False
    """One ConvNeXt block at the contracted width."""
    attention_width: Width | None = None
    """Inner width of class attention (none: a quarter of the features, a multiple of the attention heads)."""
    attention_heads: Width = 8
    embed_groups: Count = 8
    """Groups of the map from Gram vector to class token."""
    mlp_groups: Count = 4
    layerscale: NotNegative = 1e-4
    decorrelation: float = -0.8
    """Weight of the divergence between the heads' mean and each head; negative pushes heads apart.

    It is relative to the loss of each head, whatever that is: the authors average both over images and classes (binary
    cross entropy), and with a loss that is summed over classes or has none, so is the divergence. Where five heads of
    100 classes begin to differ, -0.8 pushes them apart with about 0.06 of the task's gradient at the logits."""
    reduction: Literal["task", "mean", "batch"] = "task"
    """Divergence reduced as the loss of each head; or always averaged over images and classes, or over images only."""
    limit: Fraction = 0.5
    """Largest share of the task loss that the decorrelation may take back; beyond, it is held there."""
    auxiliary: bool = False
    """Train a mean-pooling classifier along, so that heads can be left out at deployment."""


@dataclass(frozen=True)
class Branches(HeadOptions):
    """Several copies of a network's last layers and a gate that weighs them (ONE, arXiv 1806.04606)."""

    kind: Literal["branches"] = "branches"
    branches: Depth = 3
    blocks: Depth | None = None
    """Blocks that each branch has for itself (none: the last third; a CIFAR ResNet: its last stage)."""


@dataclass(frozen=True)
class Projected(HeadOptions):
    """A linear classifier and, in parallel, an embedding through a projector (Grafit, arXiv 2011.12982)."""

    kind: Literal["projected"] = "projected"
    pool: Literal["mean", "class_token"] = "mean"
    projector: Literal["mlp", "linear", "none"] = "mlp"
    width: Width = 256
    """Of the embedding."""
    hidden: Width = 4096
    """Of the projector's inner layer."""
    norm: bool = False
    """BatchNorm inside the projector (Grafit's parameter counts leave no room for it)."""
    last_norm: bool = False
    """BatchNorm without weights behind the projector, as SimSiam has it."""
    judged: Literal["projector", "trunk"] = "projector"
    """Representation on which kNN, linear probes and clustering are evaluated: Grafit uses the projector's output,
    self-supervised methods the trunk's, in front of a projector that only their loss needs."""


@dataclass(frozen=True)
class Own(HeadOptions):
    """The classifier that a timm model, or a denoiser, brings with it."""

    kind: Literal["own"] = "own"


@dataclass(frozen=True)
class NextToken(HeadOptions):
    """The next word of a text, of the whole vocabulary: what makes a decoder a language model (text models only)."""

    kind: Literal["next_token"] = "next_token"
    beams: Count = 1
    """Ways in which a completion is continued at the same time, when one is written (1: greedy)."""
    length_penalty: float = 1.0
    """Power of a completion's length by which beams are divided; above 0 prefers longer ones."""
    no_repeat: Whole = 0
    """So many words in a row are never written twice in one completion (0: no such rule)."""
    longest: Count = 64
    """Most tokens of a completion that is written."""
    judged: Whole | None = None
    """Prompts that are completed for BLEU, the first of the split (none: all; 0: no BLEU)."""
