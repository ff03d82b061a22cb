"""Second-order head: classifies from the class token and second-order statistics of the patch tokens (SoT).

Xie et al. 2021, arXiv 2104.10935, sections 3.2 and 3.3. The patch tokens of a text model are its word tokens.

words (patch tokens) [batch, tokens, width], mask [batch, tokens]; a pooled vector is [batch, features]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.covariance import (
    cross_covariance,
    matrix_sqrt_newton_schulz,
    signed_root,
    svpn,
    svpn_fast,
    upper_triangle,
)
from vitrail.model.heads.config import SecondOrder
from vitrail.model.heads.head import Head, mean_of_probabilities
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens

WITH_CLASS_TOKEN = ("sum", "concat", "late", "class_only")


class SecondOrderHead(Head):
    """Class token and pooled patch tokens, fused before the softmax or after it.

    `fc` classifies the class token (with `concat` both vectors, with the width of both), `fc_words` the pooled patch
    tokens. Patch tokens are those behind the prefix; with `class_token="last"` the last real token is the class token
    and the others are patch tokens. Masked tokens change nothing, whatever they hold. An image whose patch tokens are
    all masked pools to zeros (detecting this would synchronise with the device at every step); a sequence without any
    patch token is a ValueError.

    `late` gives two classifiers, class token first, each with its own loss; `late_rule` says how `fuse` joins them.
    """

    edge_layers = ("fc", "fc_words")

    def __init__(self, config: SecondOrder, width: int, classes: int) -> None:
        super().__init__()
        _check(config)
        fusion = config.fusion
        self.config = config
        self.prefix = 1 if config.class_token == "first" else 0
        self.classifiers = 2 if fusion == "late" else 1
        self.pool = None if fusion == "class_only" else POOLINGS[config.pooling](config, width)
        pooled = 0 if self.pool is None else self.pool.features
        self.features = pooled + (width if fusion in WITH_CLASS_TOKEN else 0)
        self.drop = nn.Dropout(config.drop)
        first = self.features if fusion == "concat" else width
        self.fc = nn.Linear(first, classes) if fusion in WITH_CLASS_TOKEN else None
        self.fc_words = None if fusion in ("concat", "class_only") else nn.Linear(pooled, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.fc, self.fc_words)

    def embed(self, tokens: Tokens) -> Tensor:
        """The vectors that are classified, class token first, `[batch, features]`."""
        return torch.cat([v for v in self._vectors(tokens) if v is not None], dim=1)

    def forward(self, tokens: Tokens) -> Tensor:
        token, words = self._vectors(tokens)
        words = None if words is None else self.drop(words)
        pairs = [(self.fc, token), (self.fc_words, words)]
        if self.config.fusion == "concat":
            pairs = [(self.fc, torch.cat([v for v in (token, words) if v is not None], dim=1))]
        # Pooled vectors are float32 also in a half-precision model.
        stack = torch.stack([fc(v.to(fc.weight.dtype)) for fc, v in pairs if fc is not None and v is not None], dim=1)
        return stack.sum(1, keepdim=True) if self.config.fusion == "sum" else stack

    def biases(self) -> list[list[Tensor]]:
        parts: list[Tensor] = [layer.bias for layer in (self.fc, self.fc_words) if layer is not None]
        return [parts] if self.classifiers == 1 else [[part] for part in parts]

    def fuse(self, stack: Tensor) -> Tensor:
        """`late`: log of the mean probability (`softmax`) or sum of logits (`logits`); else the only logits."""
        if stack.shape[1] == 1:
            return stack[:, 0]
        if self.config.late_rule == "logits":
            return stack.sum(1)
        return mean_of_probabilities(stack)

    def _vectors(self, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
        """The class token [batch, width] and the pooled patch tokens [batch, features], where the fusion uses them."""
        token, words, mask = self._split(tokens)
        if self.pool is None:
            return token, None
        if words.shape[1] == 0:
            raise ValueError(
                f"the second_order head got {tokens.sequence.shape[1]} tokens per image, none of them a patch to pool; "
                "use fusion class_only or a longer sequence"
            )
        return token, self.pool(words, mask)

    def _split(self, tokens: Tokens) -> tuple[Tensor | None, Tensor, Tensor | None]:
        fusion, place, prefix = self.config.fusion, self.config.class_token, tokens.prefix
        sequence, mask = tokens.sequence, None
        if tokens.mask is not None:
            mask = tokens.mask.bool()
            # Zeros first, not only in the product: 0 * NaN in the projection's gradient would be NaN.
            sequence = sequence.masked_fill(~mask[..., None], 0)
        words, real = sequence[:, prefix:], None if mask is None else mask[:, prefix:]
        together = fusion == "aggregate_all"
        token: Tensor | None = None
        if place == "first" and fusion != "words_only":
            if prefix == 0:
                raise ValueError(
                    "the second_order head looks for a class token in front, and this trunk has none; "
                    "use class_token none with fusion words_only"
                )
            token = sequence[:, 0]
            if together:  # registers and the like stay out
                words = torch.cat([sequence[:, :1], words], dim=1)
                real = None if mask is None or real is None else torch.cat([mask[:, :1], real], dim=1)
        elif place == "last":
            if words.shape[1] == 0:
                raise ValueError("the second_order head got no token at all; the class token is the last real one")
            if real is None:
                token, words = words[:, -1], words if together else words[:, :-1]
            else:
                last = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).argmax(1, keepdim=True)
                token = words.take_along_dim(last[..., None], 1)[:, 0]
                real = real if together else real.scatter(1, last, False)
        return token if fusion in WITH_CLASS_TOKEN else None, words, real


class MeanPooling(nn.Module):
    """The mean of the patch tokens (GAP)."""

    def __init__(self, config: SecondOrder, width: int) -> None:
        super().__init__()
        self.features = width

    def forward(self, words: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return words.mean(1)
        return words.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class CovariancePooling(nn.Module):
    """Square root of one covariance, upper triangle (GCP; SoT, table 2).

    Patch tokens are first projected to the width whose triangle is as long as the cross-covariances would be.
    """

    def __init__(self, config: SecondOrder, width: int) -> None:
        super().__init__()
        size = math.isqrt(2 * config.heads * config.rows * config.columns)
        self.features = size * (size + 1) // 2
        self.center, self.steps = config.center, config.root_steps
        self.project = nn.Linear(width, size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.project)

    def forward(self, words: Tensor, mask: Tensor | None) -> Tensor:
        x = self.project(words).mT
        return upper_triangle(matrix_sqrt_newton_schulz(cross_covariance(x, x, mask, self.center), self.steps))


class CrossCovariancePooling(nn.Module):
    """Normalised cross-covariances of two projections of the patch tokens, concatenated over heads (MGCrP, eq. 2-3).

    Every head projects the whole width: one matrix product, rows of all heads first, then columns of all heads.
    """

    def __init__(self, config: SecondOrder, width: int) -> None:
        super().__init__()
        self.heads, self.rows, self.columns, self.center = config.heads, config.rows, config.columns, config.center
        self.features = config.heads * config.rows * config.columns
        self.project = nn.Linear(width, config.heads * (config.rows + config.columns), bias=False)
        self.norm = NORMALIZATIONS[config.normalization](config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.project)

    def matrices(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        """The cross-covariances before normalisation, [batch, heads, rows, columns]."""
        x, y = self.project(words).mT.split((self.heads * self.rows, self.heads * self.columns), dim=1)
        x, y = x.unflatten(1, (self.heads, self.rows)), y.unflatten(1, (self.heads, self.columns))
        return cross_covariance(x, y, None if mask is None else mask[:, None], self.center)

    def forward(self, words: Tensor, mask: Tensor | None) -> Tensor:
        return self.norm(self.matrices(words, mask)).flatten(1)


class PowerNorm(nn.Module):
    """Exact singular-value power normalisation of every matrix (SoT, section 3.3.1)."""

    host_decision = "a singular value decomposition waits for the device"

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, matrices: Tensor) -> Tensor:
        return svpn(matrices, self.alpha)


class FastPowerNorm(nn.Module):
    """Singular-value power normalisation by power iteration (SoT, section 3.3.2).

    The initial vector is learned and shared by all images and heads (authors' code): one iteration suffices once it
    points along the typical first singular vector.
    """

    def __init__(self, config: SecondOrder) -> None:
        super().__init__()
        self.alpha, self.singular_values, self.iterations = config.alpha, config.singular_values, config.iterations
        self.start = nn.Parameter(torch.empty(config.columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.start)

    def forward(self, matrices: Tensor) -> Tensor:
        return svpn_fast(matrices, self.alpha, self.singular_values, self.iterations, self.start)


class ScaleNorm(nn.Module):
    """One learned positive factor 1/tau for all matrices, from rows^-0.5; learned as its logarithm, so positive."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.log_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_scale, -0.5 * math.log(self.rows))

    def forward(self, matrices: Tensor) -> Tensor:
        return matrices * self.log_scale.to(matrices.dtype).exp()


class SignedRootNorm(nn.Module):
    """Signed root of every entry, then unit length (EPN).

    Length of the whole representation, as the paper words it; the authors' code normalises along the rows.
    """

    def forward(self, matrices: Tensor) -> Tensor:
        return F.normalize(signed_root(matrices).flatten(1), dim=1)


class RowNorm(nn.LayerNorm):
    """LayerNorm of every row of every matrix."""

    def forward(self, matrices: Tensor) -> Tensor:
        return super().forward(matrices.to(self.weight.dtype))


POOLINGS: dict[str, Any] = {
    "mean": MeanPooling,
    "covariance": CovariancePooling,
    "cross_covariance": CrossCovariancePooling,
}
"""By `config.pooling`: patch tokens, mask -> [batch, features]."""
NORMALIZATIONS: dict[str, Callable[[SecondOrder], nn.Module]] = {
    "none": lambda config: nn.Identity(),
    "scale": lambda config: ScaleNorm(config.rows),
    "signed_root": lambda config: SignedRootNorm(),
    "layernorm": lambda config: RowNorm(config.columns),
    "svpn": lambda config: PowerNorm(config.alpha),
    "svpn_fast": FastPowerNorm,
}
"""By `config.normalization`: [batch, heads, rows, columns] -> as many values per image."""


def _check(config: SecondOrder) -> None:
    if config.class_token == "none" and config.fusion in WITH_CLASS_TOKEN:
        raise ValueError(
            f"the second_order head has no class token to use in fusion {config.fusion!r} with class_token 'none'; "
            "use fusion words_only, or class_token first or last"
        )
    pooled = config.fusion != "class_only"
    second, cross = pooled and config.pooling != "mean", pooled and config.pooling == "cross_covariance"
    fast = cross and config.normalization == "svpn_fast"
    used = {  # whether a setting has any effect given the others
        "pooling": pooled,
        "drop": pooled,
        **dict.fromkeys(("heads", "rows", "columns", "center"), second),
        "root_steps": second and not cross,
        "normalization": cross,
        "alpha": fast or (cross and config.normalization == "svpn"),
        **dict.fromkeys(("singular_values", "iterations"), fast),
        "late_rule": config.fusion == "late",
    }
    if used["singular_values"] and config.singular_values > min(config.rows, config.columns):
        raise ValueError(
            f"the second_order head has matrices of {config.rows} x {config.columns}, which have no "
            f"{config.singular_values} singular values; use at most {min(config.rows, config.columns)}"
        )
    default = SecondOrder()
    ignored = [n for n, relevant in used.items() if not relevant and getattr(config, n) != getattr(default, n)]
    if ignored:
        warnings.warn(
            f"the second_order head with fusion {config.fusion}, pooling {config.pooling} and normalization "
            f"{config.normalization} does not use {', '.join(ignored)}",
            stacklevel=3,
        )
