"""SimA: attention without softmax."""

from __future__ import annotations

from torch import Tensor

from vitrail.kernels.sima_attention import Norm, Order, normalised, product, ragged_sima, sima
from vitrail.model.mixers.mixer import QkvMixer, without_padding
from vitrail.model.parts.tokens import Probe, Tokens


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
        if probe is None or not probe.concerns(*(f"{what}.{layer}" for what in self.shows)):
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
