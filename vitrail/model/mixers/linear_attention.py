"""Attentions of linear cost in the number of tokens: SimA, XCA (channels attend to channels), and kernel attentions.

q, k, v [batch, heads, tokens, dim]. Kernel attentions: out = f(q) (g(k)ᵀ v), divided by the row sums f(q) Σ g(k) where
features are positive and not normalised.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.sima_attention import EPS, Norm, Order, normalised, product, ragged_sima, sima
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


class SimaMixer(QkvMixer):
    """q̂ k̂ᵀ v, every channel of q and k divided by its norm over the image's own tokens (SimA).

    Koohpayegani and Pirsiavash 2022, arXiv 2206.08898.

    No exponential, and no 1/√d: entries of the map [batch, heads, tokens, tokens] may be negative and lie in
    [-dim, dim]. Either product may come first, the result is the same.
    """

    shows = ("input", "q", "k", "v", "attention")
    takes_packed = True

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, norm: Norm = "l1", order: Order = "auto") -> None:
        super().__init__(width, heads, qkv_bias)
        self.norm, self.order = norm, order

    def attention(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        """The map q̂ k̂ᵀ; nothing flows from or to padding."""
        return self.hat(q, tokens) @ self.hat(k, tokens).mT

    def hat(self, x: Tensor, tokens: Tokens) -> Tensor:
        """q̂ of q, or k̂ of k; its l2 norm over channels is SimA's saliency of a token."""
        return normalised(without_padding(x, tokens), self.norm)

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        if probe is None or not probe.concerns(*(f"{kind}.{layer}" for kind in self.shows)):
            packed = self.packed(x)
            if tokens.offsets is not None:
                return self.proj(ragged_sima(packed, tokens.offsets, self.norm).flatten(1))
            if tokens.mask is not None:  # zeros add nothing to a norm, nor to k̂ᵀ v
                packed = packed.masked_fill(~tokens.mask[..., None, None, None], 0.0)
            return self.proj(sima(packed, self.norm, self.order).flatten(2))
        q, k, v = self.shown(x, tokens, layer, probe)
        attention = probe.map(f"attention.{layer}", lambda: self.attention(q, k, tokens))
        if attention is not None:
            return self.leave(attention.to(v) @ v)
        return self.leave(product(self.hat(q, tokens), self.hat(k, tokens), v, self.order))


class XcaMixer(QkvMixer):
    """softmax(temperature q̂ᵀ k̂) [dim, dim] applied to the channels of v (XCiT, arXiv 2106.09681, eq. 3).

    q̂ and k̂ have length 1 over the image's own tokens in every channel. Patches meet only in the sums q̂ᵀ k̂, which is
    why XCiT adds `LocalPatchInteraction`. The map [batch, heads, dim, dim] is called `channels`.
    """

    shows = ("input", "q", "k", "v", "channels")

    def __init__(self, width: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__(width, heads, qkv_bias)
        self.temperature = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "temperature"):
            nn.init.ones_(self.temperature)

    def channels(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        """Which channels of v each channel of the output takes, rows that sum to 1."""
        q, k = (normalised(without_padding(x, tokens), "l2") for x in (q, k))
        return ((q.mT @ k) * self.temperature[:, None, None]).softmax(-1)

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        q, k, v = self.shown(x, tokens, layer, probe)
        channels = None
        if probe is not None:
            channels = probe.map(f"channels.{layer}", lambda: self.channels(q, k, tokens))
        if channels is None:
            channels = self.channels(q, k, tokens)
        return self.leave(v @ channels.to(v.dtype).mT)
