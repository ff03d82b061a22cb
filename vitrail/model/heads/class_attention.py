"""Heads that decode the patches into one class token: class attention of CaiT and XCiT, ResMLP's class-MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.sima import normalised, product
from vitrail.model.block import Mlp
from vitrail.model.heads.head import LinearHead
from vitrail.model.norms import make_norm
from vitrail.model.residual import LayerScale
from vitrail.model.tokens import Tokens


class ClassAttentionMixer(nn.Module):
    """Attention from the class token to [class token, patches] (CaiT, eq. 3.8-3.12). Names follow timm."""

    def __init__(self, width: int, heads: int, token_in_keys: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} attention heads")
        self.heads, self.token_in_keys = heads, token_in_keys
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.q, self.k, self.v, self.proj):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def parts(self, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        read = z if self.token_in_keys else z[:, 1:]
        q, k, v = self._split(self.q(z[:, :1])), self._split(self.k(read)), self._split(self.v(read))
        seen = None if mask is None else (mask if self.token_in_keys else mask[:, 1:])[:, None, None]
        return q, k, v, seen

    def forward(self, z: Tensor, mask: Tensor | None) -> Tensor:  # z [batch, 1 + patches, width] -> [batch, 1, width]
        q, k, v, seen = self.parts(z, mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.proj(out.transpose(1, 2).flatten(2))

    def map(self, z: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of the class token, [batch, heads, keys]."""
        q, k, _, seen = self.parts(z, mask)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        return scores.softmax(-1)[:, :, 0]


class ClassSimaMixer(ClassAttentionMixer):
    """The same without softmax (SimA, efficiency-1 §2.B): q and k are normalised over tokens.

    The norm of q needs the queries of all tokens, though only the class token's is read. Entries of its map may be
    negative, so it shows none.
    """

    def forward(self, z: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = ~mask[:, None, :, None]
        q, k, v = (self._split(layer(z)) for layer in (self.q, self.k, self.v))
        if mask is not None:
            q, k = q.masked_fill(mask, 0.0), k.masked_fill(mask, 0.0)
        first = 0 if self.token_in_keys else 1
        out = product(normalised(q, "l1")[:, :, :1], normalised(k[:, :, first:], "l1"), v[:, :, first:], "qk_first")
        return self.proj(out.transpose(1, 2).flatten(2))


class ClassMlpMixer(nn.Module):
    """One linear map over [class token, patches], shared by all channels (ResMLP's class-MLP, §6.1)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(count, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.tokens.weight, std=0.02)
        nn.init.zeros_(self.tokens.bias)

    def forward(self, z: Tensor, mask: Tensor | None) -> Tensor:
        if z.shape[1] != self.tokens.in_features or mask is not None:
            raise ValueError(f"this head reads exactly {self.tokens.in_features - 1} patches, not {z.shape[1] - 1}")
        return self.tokens(z.transpose(1, 2)).transpose(1, 2)


class ClassBlock(nn.Module):
    """norm -> mixer -> gain, added to the class token; then norm -> MLP -> gain. Patches are read, never written."""

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
        token = token + self.ls1(self.attn(z, mask))
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
    """A learned class token that passes through layers of its own, then norm and classifier.

    The trunk keeps its patches unnormalised for it: the final norm is applied to the class token alone (CaiT normalises
    all tokens, but only this one is read).
    """

    own_norm = True

    def __init__(self, blocks: list[ClassBlock], width: int, classes: int, norm: str) -> None:
        super().__init__(width, classes)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = make_norm(norm, width)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "cls_token"):
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    @staticmethod
    def _mask(tokens: Tokens) -> Tensor | None:
        if tokens.mask is None:
            return None
        real = tokens.mask[:, tokens.prefix :]
        return torch.cat([real.new_ones(len(real), 1), real], 1)

    def embed(self, tokens: Tokens) -> Tensor:
        patches, mask = tokens.patches, self._mask(tokens)
        token = self.cls_token.expand(len(patches), -1, -1).to(patches.dtype)
        for block in self.blocks:
            token, patches = block(token, patches, mask)
        return self.norm(token)[:, 0]

    def maps(self, tokens: Tokens) -> Tensor | None:
        """Attention of the first layer to the patches, one map a head."""
        first = self.blocks[0]
        assert isinstance(first, ClassBlock)
        if not isinstance(first.attn, ClassAttentionMixer) or isinstance(first.attn, ClassSimaMixer):
            return None
        patches = tokens.patches
        token = self.cls_token.expand(len(patches), -1, -1).to(patches.dtype)
        weights = first.attn.map(first.norm1(torch.cat([token, patches], 1)), self._mask(tokens))
        seen = weights[:, :, -patches.shape[1] :]
        return seen / seen.sum(-1, keepdim=True)
