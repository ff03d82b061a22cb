"""Attentions of linear cost, to be compared with SimA: features of q times features of k, in either order.

q, k, v [batch, heads, tokens, dim]; out = f(q) (g(k)ᵀ v), divided by the row sums f(q) Σ g(k) where features are
positive and not normalised.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.sima_attention import EPS, product
from vitrail.model.mixers.mixer import QkvMixer, without_padding
from vitrail.model.parts.tokens import Probe, Tokens


class KernelMixer(QkvMixer):
    """Base class of the three; a subclass defines the features."""

    shows = ("input", "q", "k", "v", "attention")
    divided: ClassVar[bool] = True

    def features(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """f(q) and g(k), [batch, heads, tokens, features], g(k) without padding."""
        raise NotImplementedError

    def rows(self, q: Tensor, k: Tensor) -> Tensor:
        """Row sums of f(q) g(k)ᵀ, [batch, heads, tokens, 1], at least in float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        return (q.to(wide) * k.sum(-2, keepdim=True, dtype=wide)).sum(-1, keepdim=True).clamp_min(EPS)

    def attention(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        """The map [batch, heads, tokens, tokens]."""
        q, k = self.features(q, k, tokens)
        return (q @ k.mT) / self.rows(q, k) if self.divided else q @ k.mT

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        q, k = self.features(q, k, tokens)
        out = product(q, k, v)
        return (out / self.rows(q, k)).to(v.dtype) if self.divided else out

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        q, k, v = self.shown(x, tokens, layer, probe)
        if probe is None:
            return self.leave(self.mixed(q, k, v, tokens))
        attention = probe.map(f"attention.{layer}", lambda: self.attention(q, k, tokens))
        return self.leave(self.mixed(q, k, v, tokens) if attention is None else attention.to(v.dtype) @ v)


class EluKernelMixer(KernelMixer):
    """Features 1 + elu (linear transformers, arXiv 2006.16236)."""

    def features(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return 1 + F.elu(q), without_padding(1 + F.elu(k), tokens)


class EfficientMixer(KernelMixer):
    """q a distribution over channels, every channel of k a distribution over tokens (arXiv 1812.01243).

    Each row of the map then sums to 1 by itself.
    """

    divided = False

    def features(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        if tokens.mask is not None:
            k = k.masked_fill(~tokens.mask[:, None, :, None], float("-inf"))
        return q.softmax(-1).to(q.dtype), k.softmax(-2).to(k.dtype)


class CosFormerMixer(KernelMixer):
    """Features relu, and with `reweight` a preference for near patches (CosFormer, arXiv 2202.08791).

    On a grid the weight is cos(Δrow) cos(Δcolumn), angles from 0 to π/2: a product of cosines of differences is a sum
    of four products, so there are four times as many features. Class tokens have no position; they are placed in the
    middle of the grid.
    """

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, reweight: bool = False) -> None:
        super().__init__(width, heads, qkv_bias)
        self.reweight = reweight

    def features(self, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        q, k = F.relu(q), without_padding(F.relu(k), tokens)
        if not self.reweight:
            return q, k
        weights = self.weights(tokens, q)
        return tuple((x[..., None, :] * weights[..., None]).flatten(-2) for x in (q, k))  # type: ignore[return-value]

    @staticmethod
    def weights(tokens: Tokens, like: Tensor) -> Tensor:
        """cos cos, cos sin, sin cos and sin sin of each token's row and column, [batch or 1, 1, tokens, 4]."""
        rows, columns = tokens.grid
        place = torch.arange(rows * columns, device=like.device)[None] if tokens.index is None else tokens.index
        wide = torch.promote_types(like.dtype, torch.float32)
        row = place.div(columns, rounding_mode="floor").to(wide) / rows
        column = (place % columns).to(wide) / columns
        angles = torch.stack([row, column]) * (math.pi / 2)
        angles = F.pad(angles, (tokens.prefix, 0), value=math.pi / 4)
        (row_cos, column_cos), (row_sin, column_sin) = angles.cos().unbind(0), angles.sin().unbind(0)
        pairs = (row_cos * column_cos, row_cos * column_sin, row_sin * column_cos, row_sin * column_sin)
        return torch.stack(pairs, -1)[:, None].to(like.dtype)
