"""Softmax attention, fused or with its map where that is requested, and talking-heads attention."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.attention import packed_attention
from vitrail.kernels.ragged_attention import ragged_attention
from vitrail.model.mixers.mixer import QkvMixer, without_padding
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Probe, Tokens

WITHOUT_MAP = {"inference": 196, "training": 324}  # tokens from which on talking heads are faster without, on CUDA
FLASH_WIDTH = 256  # beyond which PyTorch has no flash attention of all channels: training is slower without the map


class SoftmaxMixer(QkvMixer):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    sequence, input [batch, tokens, width]; q, k, v [batch, heads, tokens, width / heads];
    map [batch, heads, tokens, tokens]
    """

    shows = ("input", "q", "k", "v", "attention")
    takes_packed = True
    fused = True  # nothing happens between scores, softmax and values

    def __init__(self, width: int, heads: int, qkv_bias: bool = True, attention_drop: float = 0.0) -> None:
        super().__init__(width, heads, qkv_bias)
        self.attention_drop = attention_drop

    def scores(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        """q kᵀ / √d; plus the logarithm of a key's size, minus infinity where it is padding."""
        # A contiguous transpose: the strided product is many times slower on some CPUs.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1).contiguous()
        if tokens.size is not None:
            scores = scores + _log_size(tokens, scores)
        return scores if tokens.mask is None else scores.masked_fill(~tokens.mask[:, None, None], float("-inf"))

    def attention(self, q: Tensor, k: Tensor, tokens: Tokens) -> Tensor:
        """The attention map, computed without the fused kernel."""
        return self.scores(q, k, tokens).softmax(-1)

    def mix(self, parts: tuple[Tensor, Tensor, Tensor], tokens: Tokens, attention: Tensor | None = None) -> Tensor:
        q, k, v = parts
        drop = self.attention_drop if self.training else 0.0
        if attention is None:
            mask = None if tokens.mask is None else tokens.mask[:, None, None]
            mask = mask if tokens.size is None else _log_size(tokens, q)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        else:
            out = F.dropout(attention, drop, self.training).to(v) @ v
        return self.leave(out)

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        if probe is not None and not probe.concerns(*(f"{kind}.{layer}" for kind in self.shows)):
            probe = None  # nothing of this layer is requested: the fused kernel runs
        if tokens.offsets is not None:
            if probe is not None:
                raise ValueError("q, k, v and maps of packed tokens cannot be shown; use adaptive form padded")
            if self.attention_drop and self.training:
                raise ValueError("packed attention has no dropout; use adaptive form padded, or attention_drop 0")
            return self.proj(ragged_attention(self.packed(x), tokens.offsets, most=tokens.most).flatten(1))
        return self.mixed(x, tokens, layer, probe)[0]

    def mixed(self, x: Tensor, tokens: Tokens, layer: int, probe: Probe | None) -> tuple[Tensor, Tensor, Tensor]:
        """The branch of tokens that are not packed, and its q and k."""
        if probe is None and self.fused and tokens.mask is None and not (self.attention_drop and self.training):
            qkv = self.packed(x)
            q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(packed_attention(qkv, tokens.size).flatten(2)), q, k
        q, k, v = self.shown(x, tokens, layer, probe)
        wanted = None if probe is None else probe.map(f"attention.{layer}", lambda: self.attention(q, k, tokens))
        return self.mix((q, k, v), tokens, wanted), q, k


def _log_size(tokens: Tokens, like: Tensor) -> Tensor:
    """What merged tokens add to scores [batch, heads, queries, keys], so that they weigh as all that they stand for."""
    assert tokens.size is not None
    assert tokens.mask is None
    return tokens.size.log()[:, None, None].to(like.dtype)


class TalkingHeadsMixer(SoftmaxMixer):
    """Attention whose heads are mixed linearly before and after the softmax (as in CaiT, arXiv 2103.17239).

    With the map [batch, heads, tokens, tokens], its heads are mixed, and its rows no longer sum to 1. Without it, both
    mixtures move to the other side of a product: a mixed head's scores Σ_h w_h (q_h · k_h) are one product of all
    channels, (w_1 q_1, w_2 q_2, ...) · (k_1, k_2, ...), and the values that all heads carry are mixed after the map was
    applied to them. That is plain attention, with the tokens of all mixed heads as queries. Names follow timm's CaiT.
    """

    takes_packed = False
    fused = False

    def __init__(
        self,
        width: int,
        heads: int,
        qkv_bias: bool = True,
        attention_drop: float = 0.0,
        stored_map: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        super().__init__(width, heads, qkv_bias, attention_drop)
        self.stored_map = stored_map
        self.proj_l = nn.Linear(heads, heads)
        self.proj_w = nn.Linear(heads, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        small_normal(getattr(self, "proj_l", None), getattr(self, "proj_w", None))

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
        q, k, v = parts
        if attention is None and not self._stores_map(q):
            return self.leave(self._without_map(q, k, v, tokens))
        return super().mix(parts, tokens, self.attention(q, k, tokens) if attention is None else attention)

    def _stores_map(self, q: Tensor) -> bool:
        if q.is_meta or (self.attention_drop and self.training):  # multiplications are counted as published
            return True
        if self.stored_map != "auto":
            return self.stored_map == "always"
        kind = "training" if torch.is_grad_enabled() and q.requires_grad else "inference"
        wide = kind == "training" and q.shape[1] * q.shape[3] > FLASH_WIDTH
        return not q.is_cuda or wide or q.shape[2] < WITHOUT_MAP[kind]

    def _without_map(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Mixed values [batch, heads, tokens, width / heads]."""
        batch, heads, count, depth = q.shape
        before, after = self.proj_l.weight.to(q), self.proj_w.weight.to(q)
        after = after + 0 * self.proj_l.bias.sum().to(q)  # the softmax does not see that bias; its gradient is 0
        queries = q.transpose(1, 2)[:, None] * before[:, None, :, None]  # [batch, mixed heads, tokens, heads, depth]
        queries = queries.reshape(batch, 1, heads * count, heads * depth)
        keys, values = (x.transpose(1, 2).flatten(2)[:, None] for x in (k, v))
        mask = None if tokens.mask is None else tokens.mask[:, None, None]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=depth**-0.5)
        mixed = torch.einsum("hg,bgnhd->bhnd", after, out.view(batch, heads, count, heads, depth))
        return mixed + self.proj_w.bias.to(q)[:, None, None] * without_padding(v, tokens).sum(2, keepdim=True)
