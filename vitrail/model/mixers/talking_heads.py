"""Talking-heads attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.tokens import Tokens


class TalkingHeadsMixer(SoftmaxMixer):
    """Attention whose heads are mixed linearly before and after the softmax (as in CaiT, arXiv 2103.17239).

    The map [batch, heads, tokens, tokens] must exist to be mixed, so no fused kernel applies; its rows no longer sum
    to 1. Names follow timm's CaiT.
    """

    takes_packed = False
    fused = False

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, attention_drop: float = 0.0) -> None:
        super().__init__(width, heads, qkv_bias, attention_drop)
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in (getattr(self, "proj_l", None), getattr(self, "proj_w", None)):
            if layer is not None:
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    @staticmethod
    def _mix_heads(layer: nn.Linear, maps: Tensor) -> Tensor:
        mixed = torch.matmul(layer.weight.to(maps), maps.flatten(2)).view_as(maps)
        return mixed + layer.bias.to(maps)[:, None, None]

    def attention(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1).contiguous()
        scores = self._mix_heads(self.proj_l, scores)
        if tokens.mask is not None:  # after the mixing, which would spread infinities
            scores = scores.masked_fill(~tokens.mask[:, None, None], float("-inf"))
        maps = self._mix_heads(self.proj_w, scores.softmax(-1))
        return maps if tokens.mask is None else maps.masked_fill(~tokens.mask[:, None, None], 0.0)

    def mix(self, parts: tuple[Tensor, Tensor, Tensor], tokens: Tokens, attention: Tensor | None = None) -> Tensor:
        q, k, _ = parts
        return super().mix(parts, tokens, self.attention(q, k, tokens) if attention is None else attention)
