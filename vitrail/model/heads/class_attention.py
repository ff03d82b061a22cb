"""Heads that decode the patches into class tokens: class attention (CaiT, XCiT), ResMLP's class-MLP, and attention
pooling (PatchConvNet).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.sima_attention import normalised, product
from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import AttentionPool, ClassAttention, ClassMlp
from vitrail.model.heads.head import Head, LinearHead
from vitrail.model.parts.block import LayerScale, Mlp, make_norm
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens


class ClassAttentionMixer(nn.Module):
    """Attention from learned queries to the patches, and to the queries themselves where `token_in_keys`.

    CaiT (Touvron et al. 2021, arXiv 2103.17239) and PatchConvNet have one query, the class token; there may be one per
    class. Names follow timm.
    """

    def __init__(self, width: int, heads: int, token_in_keys: bool, qkv_bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} attention heads")
        self.heads, self.token_in_keys = heads, token_in_keys
        self.q, self.k, self.v = (nn.Linear(width, width, bias=qkv_bias) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.q, self.k, self.v, self.proj)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def parts(self, z: Tensor, mask: Tensor | None, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        first = 0 if self.token_in_keys else queries
        q, k, v = self.q(z[:, :queries]), self.k(z[:, first:]), self.v(z[:, first:])
        seen = None if mask is None else mask[:, None, None, first:]
        return self._split(q), self._split(k), self._split(v), seen

    def forward(self, z: Tensor, mask: Tensor | None, queries: int = 1) -> Tensor:
        """z [batch, queries + patches, width] to [batch, queries, width]; mask [batch, queries + patches]."""
        q, k, v, seen = self.parts(z, mask, queries)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.proj(out.transpose(1, 2).flatten(2))

    def map(self, z: Tensor, mask: Tensor | None, queries: int = 1) -> Tensor:
        """Attention of the queries, [batch, heads, queries, keys]."""
        q, k, _, seen = self.parts(z, mask, queries)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        return scores.softmax(-1)


class ClassSimaMixer(ClassAttentionMixer):
    """The same without softmax (SimA, arXiv 2206.08898): q and k are normalised over tokens.

    The norm of q needs the queries of all tokens, though only the class token's is read. Entries of its map may be
    negative, so it shows none.
    """

    def forward(self, z: Tensor, mask: Tensor | None, queries: int = 1) -> Tensor:
        q, k, v = (self._split(layer(z)) for layer in (self.q, self.k, self.v))
        if mask is not None:
            q, k = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (q, k))
        first = 0 if self.token_in_keys else queries
        q, k = normalised(q, "l1")[:, :, :queries], normalised(k[:, :, first:], "l1")
        out = product(q, k, v[:, :, first:], "qk_first")
        return self.proj(out.transpose(1, 2).flatten(2))


class ClassMlpMixer(nn.Module):
    """One linear map over [class token, patches], shared by all channels (class-MLP of ResMLP, arXiv 2105.03404)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(count, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.tokens)

    def forward(self, z: Tensor, mask: Tensor | None, queries: int = 1) -> Tensor:
        if z.shape[1] != self.tokens.in_features or mask is not None:
            raise ValueError(f"this head reads exactly {self.tokens.in_features - 1} patches, not {z.shape[1] - 1}")
        return self.tokens(z.transpose(1, 2)).transpose(1, 2)


class ClassBlock(nn.Module):
    """norm -> mixer -> gain, added to the class token; then norm -> MLP -> gain. Patches are read, never written.

    token [batch, queries, width]: one class token, or one query for each class.
    """

    def __init__(
        self, mixer: nn.Module, width: int, mlp_ratio: float, norm: str, layerscale: float | None, act: str = "gelu"
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(norm, width), make_norm(norm, width)
        self.attn = mixer
        self.mlp = Mlp(width, int(width * mlp_ratio), act)
        self.ls1: nn.Module = nn.Identity() if layerscale is None else LayerScale(width, layerscale)
        self.ls2: nn.Module = nn.Identity() if layerscale is None else LayerScale(width, layerscale)

    def forward(self, token: Tensor, patches: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The class token after this layer, and what the next layer reads."""
        z = self.norm1(torch.cat([token, patches], 1))
        token = token + self.ls1(self.attn(z, mask, token.shape[1]))
        return token + self.ls2(self.mlp(self.norm2(token))), patches


class XcitClassBlock(ClassBlock):
    """The same as published weights of XCiT need it.

    The MLP is added to the normalised token, not to the token; patches go along: their own norm is added to them, they
    are normalised and doubled.
    """

    def forward(self, token: Tensor, patches: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        z = self.norm1(torch.cat([token, patches], 1))
        token = self.norm2(token + self.ls1(self.attn(z, mask)))
        return token + self.ls2(self.mlp(token)), 2 * self.norm2(patches + self.ls1(z[:, 1:]))


class ClassDecoderHead(LinearHead):
    """A learned class token, or `queries` of them, that pass through layers of their own, then norm and classifier.

    The trunk keeps its patches unnormalised for it: the final norm is applied to the class token alone (CaiT normalises
    all tokens, but only this one is read).
    """

    own_norm = True

    def __init__(self, blocks: list[ClassBlock], width: int, classes: int, norm: str, queries: int = 1) -> None:
        super().__init__(width, classes)
        self.cls_token = nn.Parameter(torch.empty(1, queries, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = make_norm(norm, width)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "cls_token"):
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def _inputs(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Class tokens of every image, patches, and which of both are real."""
        patches = tokens.patches
        token = self.cls_token.expand(len(patches), -1, -1).to(patches.dtype)
        if tokens.mask is None:
            return token, patches, None
        real = tokens.mask[:, tokens.prefix :]
        return token, patches, torch.cat([real.new_ones(token.shape[:2]), real], 1)

    def pooled(self, tokens: Tokens) -> Tensor:
        """The vector of each query after all layers, [batch, queries, width]."""
        token, patches, mask = self._inputs(tokens)
        for block in self.blocks:
            token, patches = block(token, patches, mask)
        return self.norm(token)

    def embed(self, tokens: Tokens) -> Tensor:
        return self.pooled(tokens).mean(1)

    def maps(self, tokens: Tokens) -> Tensor | None:
        """Attention of the first layer to the patches, [batch, heads * queries, patches]."""
        first = self.blocks[0]
        assert isinstance(first, ClassBlock)
        if not isinstance(first.attn, ClassAttentionMixer) or isinstance(first.attn, ClassSimaMixer):
            return None
        token, patches, mask = self._inputs(tokens)
        weights = first.attn.map(first.norm1(torch.cat([token, patches], 1)), mask, token.shape[1])
        seen = weights[..., -patches.shape[1] :].flatten(1, 2)
        return seen / seen.sum(-1, keepdim=True)


class ClassAttentionHead(ClassDecoderHead):
    """Layers of class attention (CaiT, Touvron et al. 2021, arXiv 2103.17239; XCiT; SimA in place of softmax)."""

    @classmethod
    def build(cls, config: ClassAttention, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        heads = config.heads or (trunk.heads if trunk is not None else max(1, width // 64))
        start = trunk.layerscale if config.layerscale is None and trunk is not None else config.layerscale
        act = "gelu" if trunk is None else trunk.activation
        block = XcitClassBlock if config.style == "xcit" else ClassBlock
        mixer = ClassSimaMixer if config.attention == "sima" else ClassAttentionMixer
        options = (width, config.mlp_ratio, "layernorm", start if config.scaled else None, act)
        blocks = [block(mixer(width, heads, config.token_in_keys), *options) for _ in range(config.layers)]
        return cls(blocks, width, classes, "layernorm")


class ClassMlpHead(ClassDecoderHead):
    """The same with one learned linear map over the patches in place of attention (ResMLP, arXiv 2105.03404)."""

    @classmethod
    def build(cls, config: ClassMlp, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        if trunk is None:
            raise ValueError(
                "class_mlp reads a fixed number of patches, which this trunk does not fix; use class_attention"
            )
        count, options = (trunk.image_size // trunk.patch) ** 2 + 1, (config.mlp_ratio, trunk.norm, trunk.layerscale)
        blocks = [ClassBlock(ClassMlpMixer(count), width, *options) for _ in range(config.layers)]
        return cls(blocks, width, classes, trunk.norm)


class AttentionPoolHead(ClassDecoderHead):
    """One layer of class attention whose query is learned, or one query for each class (Touvron et al. 2021, arXiv
    2112.13692, section 3).

    `per_class` has one query, hence one map, for each class, all in one batched product; each class's vector gives its
    logit by a linear map of its own, as in the authors' code, or one shared by all. An MLP ratio of 3 gives the printed
    parameter counts.
    """

    def __init__(self, config: AttentionPool, width: int, classes: int, layerscale: float = 1.0) -> None:
        per_class = config.queries == "per_class"
        if per_class and config.token_in_keys:
            raise ValueError("attention_pool: token_in_keys needs one query; per_class reads patches only")
        start = layerscale if config.layerscale is None else config.layerscale
        mixer = ClassAttentionMixer(width, config.heads, config.token_in_keys, config.qkv_bias)
        block = ClassBlock(mixer, width, config.mlp_ratio, "layernorm", start)
        super().__init__([block], width, classes, "layernorm", queries=classes if per_class else 1)
        self.per_class, self.own_logits = per_class, config.per_class_logit == "own"
        if per_class and not self.own_logits:
            self.fc = nn.Linear(width, 1)
            self.reset_parameters()

    @classmethod
    def build(cls, config: AttentionPool, width: int, classes: int, trunk: TrunkConfig | None = None) -> Head:
        inherited = trunk.layerscale if trunk is not None and trunk.layerscale is not None else 1.0
        return cls(config, width, classes, inherited)

    def forward(self, tokens: Tokens) -> Tensor:
        if not self.per_class:
            return super().forward(tokens)
        pooled = self.pooled(tokens)
        if self.own_logits:  # class c's vector against row c: one product, no loop over classes
            return torch.einsum("bcw,cw->bc", pooled, self.fc.weight.to(pooled))[:, None] + self.fc.bias.to(pooled)
        return self.fc(pooled).transpose(1, 2)
