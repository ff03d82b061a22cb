"""PatchConvNet's attention-based pooling: one map, several, or one for each class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.block import Mlp
from vitrail.model.heads.config import AttentionPool
from vitrail.model.heads.head import Head
from vitrail.model.residual import LayerScale
from vitrail.model.tokens import Tokens


class AttentionPoolHead(Head):
    """A learned query attends to the patches; weighted sum, projection, MLP, norm, classifier (§7.1).

    `per_class` has one query, hence one map, for each class, all in one batched product; each class's vector gives its
    logit by a linear map of its own or one shared by all (the thesis does not say; §12 item 7). The counts allow no
    biases on q, k and v, and fix the MLP ratio at 3.
    """

    own_norm = True

    def __init__(self, config: AttentionPool, width: int, classes: int, layerscale: float = 1.0) -> None:
        super().__init__()
        if width % config.heads:
            raise ValueError(f"width {width} cannot be cut into {config.heads} attention heads")
        self.per_class = config.queries == "per_class"
        if self.per_class and config.token_in_keys:
            raise ValueError("attention_pool: token_in_keys needs one query; per_class reads patches only")
        self.heads, self.token_in_keys = config.heads, config.token_in_keys
        self.own_logits = config.per_class_logit == "own"
        self.features = width
        start = layerscale if config.layerscale is None else config.layerscale
        self.query = nn.Parameter(torch.empty(1, classes if self.per_class else 1, width))
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.ls1: nn.Module = LayerScale(width, start)
        self.ls2: nn.Module = LayerScale(width, start)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), "gelu")
        if self.per_class:
            self.fc = nn.Linear(width, classes if self.own_logits else 1)
        else:
            self.fc = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.query, std=0.02)
        for layer in (self.q, self.k, self.v, self.proj, self.fc):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _parts(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        patches = tokens.patches
        token = self.query.expand(len(patches), -1, -1).to(patches.dtype)
        read = torch.cat([token, patches], 1) if self.token_in_keys else patches
        read = self.norm1(read)
        asked = self.norm1(token)
        mask = None
        if tokens.mask is not None:
            mask = tokens.mask[:, tokens.prefix :]
            if self.token_in_keys:
                mask = torch.cat([mask.new_ones(len(mask), 1), mask], 1)
            mask = mask[:, None, None]
        return token, self._split(self.q(asked)), self._split(self.k(read)), self._split(self.v(read)), mask

    def pooled(self, tokens: Tokens) -> Tensor:
        """The vector of each query after all layers, [batch, queries, width]."""
        token, q, k, v, mask = self._parts(tokens)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        token = token + self.ls1(self.proj(out.transpose(1, 2).flatten(2)))
        token = token + self.ls2(self.mlp(self.norm2(token)))
        return self.norm(token)

    def embed(self, tokens: Tokens) -> Tensor:
        return self.pooled(tokens).mean(1)

    def forward(self, tokens: Tokens) -> Tensor:
        pooled = self.pooled(tokens)
        if not self.per_class:
            return self.fc(pooled)
        if self.own_logits:  # class c's vector against row c: one product, no loop over classes
            return torch.einsum("bcw,cw->bc", pooled, self.fc.weight.to(pooled))[:, None] + self.fc.bias.to(pooled)
        return self.fc(pooled).transpose(1, 2)

    def maps(self, tokens: Tokens) -> Tensor:
        """Where the head looks, [batch, heads * queries, patches]: one map a head and query."""
        _, q, k, _, mask = self._parts(tokens)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return scores[..., -tokens.patches.shape[1] :].softmax(-1).flatten(1, 2)
