"""Configuration of trunks and models, as data. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitrail.model.adapters.config import AdapterConfig
from vitrail.model.heads.config import HeadConfig
from vitrail.model.mixers.config import MixerConfig, Softmax
from vitrail.schema import Count, Depth, Fraction, NotNegative, Overrides, Pixels, Positive, Range, Whole, Width


@dataclass(frozen=True)
class Patchify:
    """Non-overlapping patches and one linear projection."""

    kind: Literal["patchify"] = "patchify"


@dataclass(frozen=True)
class ConvStem:
    """3x3 convolutions of stride 2 (PatchConvNet, XCiT)."""

    kind: Literal["conv"] = "conv"
    norm: bool = True
    """BatchNorm after each, as XCiT has it; PatchConvNet's published weights have none."""


@dataclass(frozen=True)
class SotStem:
    """SoT's convolutional token embedding (arXiv 2104.10935, supplement A)."""

    kind: Literal["sot"] = "sot"
    block: Literal["densenet", "resnet", "inception", "nonlocal"] = "densenet"


StemConfig = Patchify | ConvStem | SotStem


@dataclass(frozen=True)
class TrunkConfig:
    """Images to tokens: a stem, a stack of residual blocks, a final norm."""

    kind: Literal["blocks"] = "blocks"
    image_size: Pixels = 224
    width: Width = 768
    depth: Depth = 12
    heads: Width = 12
    patch: Pixels = 16
    channels: Count = 3
    """Of an image; `data.channels` sets it."""
    stem: StemConfig = field(default_factory=Patchify)
    mixer: MixerConfig = field(default_factory=Softmax)
    mlp_ratio: NotNegative = 4.0
    """Hidden width of the channel branch over the width (0: no channel branch)."""
    activation: Literal["gelu", "relu", "silu", "gelu_tanh"] = "gelu"
    norm: Literal["layernorm", "batchnorm", "affine", "none"] = "layernorm"
    norm_eps: Positive = 1e-6
    layerscale: NotNegative | None = None
    """Start of LayerScale (none: no LayerScale)."""
    layerscale_start: Literal["constant", "uniform"] = "constant"
    """Constant, or uniform in [0, 2 layerscale]."""
    layerscale_learned: bool = True
    layerscale_shift: bool = False
    """Add a learned shift after the gain (ResMLP's equations; its published counts have none)."""
    gate: NotNegative | None = None
    """Start of one scalar gain per branch, in place of LayerScale (ReZero: 0)."""
    start: Literal["default", "xavier", "fixup", "t_fixup"] = "default"
    """Initial weights: truncated normal of 0.02; Xavier, better for narrow models; Fixup (scalar gains of 1, last
    layers 0) and T-Fixup (scaled by depth), which need no norm."""
    local: bool = False
    """Local patch interaction between the mixing and the channel branch (XCiT)."""
    parallel: Depth = 1
    """Branches side by side in each block (2: ViT-H-26x2)."""
    drop_path: Fraction = 0.0
    drop_path_rule: Literal["linear", "uniform"] = "linear"
    """`linear`: from 0 in the first block to `drop_path` in the last; `uniform`: the same in every block."""
    positions: Literal["learned", "sinusoid", "fourier", "none"] = "learned"
    """`fourier`: a learned projection of sines and cosines of row and column (XCiT)."""
    class_position: bool = True
    """The class token has a position embedding (timm's DeiT III has none)."""
    class_token_at: Whole = 0
    """The block before which class tokens enter (ablation of CaiT, arXiv 2103.17239)."""
    position_drop: Fraction = 0.0
    patch_drop: Fraction = 0.0
    """Share of the patches of an image, drawn anew in each training step, that do not enter the blocks (PatchDropout,
    arXiv 2208.07220): steps are cheaper; evaluation sees all patches."""
    prompts: Whole = 0
    """Learned tokens without positions between class tokens and patches, which leave before the final norm: what the
    adapter `vpt` becomes in a merged copy. Trained with all the rest, they are registers."""
    deep_prompts: bool = False
    """Every block has prompts of its own; otherwise those of the first go on through all."""
    adaptive: AdaptiveConfig | None = None
    """How many tokens, heads and blocks an image gets (none: all)."""


@dataclass(frozen=True)
class CifarResNet:
    """A ResNet for 32-pixel images: 3x3 stem, three stages of widths 16, 32 and 64 (arXiv 1512.03385)."""

    kind: Literal["cifar_resnet"] = "cifar_resnet"
    depth: Depth = 20
    """6n + 2 with basic blocks, 9n + 2 with bottlenecks."""
    block: Literal["basic", "bottleneck"] = "basic"
    shortcut: Literal["pad", "project"] = "pad"
    """Basic blocks: zero-padded (option A) or projected (option B) shortcuts; bottlenecks always project."""
    image_size: Pixels = 32
    channels: Count = 3
    """Of an image; `data.channels` sets it."""


NoiseScheduleName = Literal["cosine", "scaled_linear"]
NoisePrediction = Literal["v", "eps"]


@dataclass(frozen=True)
class DenoiserConfig:
    """A class-conditional U-Net for small images: a diffusion model."""

    kind: Literal["denoiser"] = "denoiser"
    image_size: Pixels = 32
    width: Width = 96
    """Channels at the full side."""
    multipliers: tuple[Count, ...] = (1, 2, 2)
    """Channels of each level over `width`; each level has half the side of the one before."""
    depth: Depth = 2
    """Residual blocks of each level on the way down (one more on the way up)."""
    heads: Width = 4
    attention: tuple[Count, ...] = (8,)
    """Sides, in places, of the levels with self-attention; the middle always has it."""
    drop: Fraction = 0.1
    schedule: NoiseScheduleName = "cosine"
    """How the signal fades; `scaled_linear` is Stable Diffusion's. Set by the objective that trains it."""
    prediction: NoisePrediction = "v"
    """Prediction target: velocity or noise. Set by the objective that trains it."""
    draws: Count = 2
    """As a classifier: times at which every class is tried."""


@dataclass(frozen=True)
class TimmBackbone:
    """Any timm model as a trunk."""

    kind: Literal["timm"] = "timm"
    name: str = "resnet50"
    image_size: Pixels | None = None
    """None: the model's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that timm's constructor takes."""
    stages: bool = False
    """Aggregate the features of all stages (as GA, arXiv 2310.16483) instead of the last alone."""
    taps: Whole = 0
    """With stages: maps taken inside the third stage, besides its end."""
    width: Width | None = None
    """With stages: width of the gathered features (none: of the last stage)."""
    narrow: bool = False
    """Make the last stage itself that wide, too (as in the released GA-ConvNeXts)."""
    grid: Count = 14
    """With stages: rows and columns to which maps are brought."""


@dataclass(frozen=True)
class GuideConfig:
    """Attention transfer from one trunk to another, by layers and heads (Li et al. 2024, arXiv 2411.09702)."""

    teacher: TrunkConfig | None = None
    """The other trunk, as far as it is needed (none: stored tensors)."""
    prefix: Whole = 1
    """Its class tokens."""
    target: Literal["map", "q", "k", "v", "qk", "features"] = "map"
    layers: tuple[tuple[int, int], ...] = ()
    """Pairs: a layer that takes, and the layer it takes from."""
    heads: tuple[tuple[int, int], ...] = ()
    """Pairs of heads, the same in every layer."""
    tokens: Count = 1
    aggregate: Literal["none", "examples", "layers", "heads", "queries"] = "none"
    maps: bool = False
    """Maps are made: they are averaged, or heads of different widths stand side by side."""
    share_drop_path: bool = False
    size: Count | None = None
    """Image size that the other trunk sees (none: the same)."""
    scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """With `shift`: from one normalisation to the other."""
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stored: tuple[int, ...] = ()
    """Shape of stored tensors."""


@dataclass(frozen=True)
class Guided:
    """A trunk whose attention is another trunk's (attention copy)."""

    kind: Literal["guided"] = "guided"
    student: TrunkConfig = field(default_factory=TrunkConfig)
    guide: GuideConfig = field(default_factory=GuideConfig)

    @property
    def image_size(self) -> int:
        return self.student.image_size


@dataclass(frozen=True)
class TextBackbone:
    """Any transformers encoder or decoder as a trunk: sentences to tokens (as SoT, arXiv 2104.10935, section 4.3)."""

    kind: Literal["text"] = "text"
    name: str = "bert"
    """`bert`, `gpt`, `resmlp` or `resmlp-attention`: a small one whose vocabulary is the words of the training texts;
    else a folder or hub name."""
    length: Count = 128
    """Most tokens of a text; what is longer is cut."""
    class_token: Literal["first", "last"] | None = None
    """Where the token stands that sums up: first in BERT's family, last in GPT's (none: as the architecture has it)."""
    sep_is_word: bool = False
    """Separators count as words where words are pooled. Padding never does."""
    pooler: bool = False
    """BERT's own layer (linear, tanh) on the class token, where the model has one."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """transformers' configuration, so that nothing else is needed to build it again (empty: read from `name`)."""


OWN_TEXT = ("text:bert", "text:gpt", "text:resmlp", "text:resmlp-attention")
"""Small text models, without published weights; the last two are an encoder and a decoder."""
AnyTrunkConfig = TrunkConfig | CifarResNet | TimmBackbone | Guided | DenoiserConfig
"""Of images: what the zoo names."""


@dataclass(frozen=True)
class TrunkOverrides(TrunkConfig):
    """What a name may fix, of any kind of trunk: those of a denoiser and of a text model besides. Building the model
    tells what it has."""

    multipliers: tuple[Count, ...] = (1, 2, 2)
    attention: tuple[Count, ...] = (8,)
    drop: Fraction = 0.1
    draws: Count = 2
    length: Count = 128
    class_token: Literal["first", "last"] | None = None
    sep_is_word: bool = False
    pooler: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from which weights."""

    name: str = "deit_tiny"
    """A name of `vitrail list models`, `timm:NAME`, or for texts `text:FOLDER` (or a name of transformers)."""
    weights: str = "none"
    """none, timm (published weights of that name), a run or model folder, or a weights file; text: hub (those that the
    folder or name comes with; hub:fetch asks the network for what is not there)."""
    image_size: Pixels | None = None
    """Side of the square input (none: the model's own)."""
    head: HeadConfig | None = None
    """Head other than the model's own (`--model.head mean`)."""
    drop_path: Fraction | None = None
    trunk: Annotated[Mapping[str, Any], Overrides(TrunkOverrides)] = field(default_factory=dict)
    """Anything else the name fixes: --model.trunk.depth 4, --model.trunk.width 64, ..."""
    adapter: AdapterConfig | None = None
    """Freeze these weights and train an adapter (`--model.adapter nola`), which alone is stored (none: train them)."""


@dataclass(frozen=True)
class Ats:
    """Adaptive token sampling: each image keeps the tokens that its class token attends to (ATS, arXiv 2111.15667).

    It has no parameters and can be switched on in any trained ViT.
    """

    kind: Literal["ats"] = "ats"
    layers: tuple[Whole, ...] = ()
    """Blocks that sample, counted from 0 (none: from a quarter of the depth to the last; 3 to 11 of 12)."""
    cap: tuple[Positive, ...] = (1.0,)
    """Sampling points, for all layers or one per layer: above 1 a number, up to 1 a share of the patches that enter the
    block. No more than that many are kept. Several points may fall on one patch, so a number may exceed the patches."""
    least: Count = 8
    """A share never asks for fewer points than this."""
    sampling: Literal["inverse", "nearest", "top", "random", "uniform"] = "inverse"
    """`inverse`: the strict inverse of the distribution function; `nearest`: the token whose value of it is nearest, as
    the paper words it, which contradicts the property it states; `top`: the highest scores; `random`: the inverse at
    points that are drawn anew, so that a token with the share s of all scores is kept with probability 1 - (1 - s)^K;
    `uniform`: the control that ignores scores, as many distinct tokens as there are points, all equally likely."""
    order: Literal["raster", "sorted"] = "raster"
    """Tokens under the distribution function: as they lie in the image, or by rising score."""
    score: Literal["class", "column", "random"] = "class"
    """What a patch is worth: attention of the class token, of all tokens, or of one other token drawn at random."""
    value_norm: bool = True
    """Times the length of its value."""
    keep_class: bool = True
    """The class token stays whatever its score; otherwise it takes part in the sampling."""
    form: Literal["auto", "padded", "packed"] = "auto"
    """How a batch with different counts is held: rows of one table, or padded and masked. `auto`: packed for inference
    on CUDA, padded elsewhere."""
    capacity: tuple[Positive, ...] = ()
    """Packed, in an optimised model: rows per image that are allocated after each sampling block, averaged over a
    batch; set by calibration. None: the host synchronises with the device after every block to learn the size."""


@dataclass(frozen=True)
class Avit:
    """A-ViT: each token halts when its own halting scores add up to 1 (arXiv 2112.07658). No parameters."""

    kind: Literal["avit"] = "avit"
    gate_scale: Positive = 10.0
    gate_center: float = 30.0
    """Halting score: sigmoid(gate_scale * first channel - gate_center). Published: 30 for tiny, 75 for small models."""
    eps: Fraction = 0.01
    """A token halts when its scores exceed 1 - eps."""
    ponder: NotNegative = 5e-4
    """Weight of the mean number of blocks that tokens take."""
    prior: NotNegative = 1e-3
    """Weight of the divergence of mean halting scores from a bell around `prior_center`."""
    prior_center: Whole | None = None
    """Block, counted from 0, before which nearly all halting should have happened (none: two thirds of the depth, 8 of
    12 as published)."""
    prior_std: Positive = 1.0
    """Width of the bell, in blocks."""
    form: Literal["auto", "padded", "packed"] = "auto"
    """What happens to halted tokens where no gradient is wanted: they are taken out of the batch, which is packed
    (`auto`, `packed`); `padded`: they are only masked, shapes stay."""


@dataclass(frozen=True)
class Adavit:
    """AdaViT: a small network before each block selects patches, heads and branches (arXiv 2111.15668)."""

    kind: Literal["adavit"] = "adavit"
    patches: Fraction = 0.5
    """Share of patches that training aims at."""
    heads: Fraction = 0.5
    """Share of heads."""
    branches: Fraction = 0.5
    """Share of mixing and channel branches."""
    usage: NotNegative = 2.0
    """Weight of the squared differences from these shares."""
    usage_of: Literal["batch", "image"] = "batch"
    """What is compared with them: the mean of a batch, so that images may differ, or every image by itself."""
    temperature: Positive = 5.0
    """Of the Gumbel sigmoid in training."""
    patch_threshold: Fraction = 0.6
    """Probability above which a patch is kept at test time."""
    threshold: Fraction = 0.5
    """The same for heads and branches."""
    whole: Whole = 1
    """Blocks at the beginning that are never cut."""
    form: Literal["auto", "padded", "packed"] = "auto"
    """What happens to dropped tokens and branches where no gradient is wanted: not computed (`packed`; `auto` on
    CUDA), or computed and multiplied by 0, in fixed shapes (`padded`)."""


@dataclass(frozen=True)
class Tome:
    """Token merging: the most similar patches become one (ToMe, arXiv 2210.09461).

    It has no parameters and can be switched on in any trained ViT. Every image has as many tokens as any other.
    """

    kind: Literal["tome"] = "tome"
    r: NotNegative = 8.0
    """Patches merged away in a block, mean over merging blocks (8.5: 8 and 9 in turn); at most half of those there."""
    layers: tuple[Whole, ...] = ()
    """Blocks that merge, counted from 0 (none: all, as published). Fewer with a larger r spend less time on merging."""
    schedule: Literal["constant", "decreasing"] = "constant"
    """`decreasing`: linearly from 2 r in the first merging block to 0 in the last."""
    proportional: bool = True
    """Proportional attention: a merged token gets as much attention as the patches that it stands for."""


@dataclass(frozen=True)
class Evit:
    """The patches that the class token attends to most go on, the rest as one token (EViT, arXiv 2202.07800).

    It has no parameters and can be switched on in any trained ViT. Every image has as many tokens as any other.
    """

    kind: Literal["evit"] = "evit"
    keep: Annotated[float, Range(0, 1, above=True)] = 0.7
    """Share of the patch tokens that a layer keeps, rounded up."""
    layers: tuple[Whole, ...] = ()
    """Blocks that reduce, counted from 0 (none: at a quarter, half and three quarters; 3, 6 and 9 of 12)."""


AdaptiveConfig = Ats | Avit | Adavit | Tome | Evit
