"""Cross-covariance attention: channels attend to channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.kernels.sima_attention import normalised
from vitrail.model.mixers.mixer import QkvMixer, without_padding
from vitrail.model.parts.tokens import Probe, Tokens


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
        if probe is None:
            channels = self.channels(q, k, tokens)
        else:
            given = probe.map(f"channels.{layer}", lambda: self.channels(q, k, tokens))
            channels = self.channels(q, k, tokens) if given is None else given
        return self.leave(v @ channels.to(v.dtype).mT)
