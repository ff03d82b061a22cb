"""Options of every adaptive policy: how much of a trunk an image gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.schema import Count, Fraction, NotNegative, Positive, Whole


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


AdaptiveConfig = Ats | Avit | Adavit
