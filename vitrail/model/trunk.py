"""Images to tokens: stem, positions, blocks, final norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.model.block import Block, drop_path_rates
from vitrail.model.config import TrunkConfig
from vitrail.model.positions import resize_positions
from vitrail.model.stems import PatchEmbed
from vitrail.model.tokens import Probe, Tokens


class Trunk(nn.Module):
    """A stack of residual blocks on patch tokens.

    `prefix` is how many learned tokens the head needs in front of the patches; `final_norm` is false where the head has
    layers of its own after which it normalises. Attribute names follow timm's ViT.
    """

    def __init__(self, config: TrunkConfig, prefix: int = 1, final_norm: bool = True) -> None:
        super().__init__()
        self.config = config
        self.prefix = prefix
        self.width = config.width
        self.patch_embed = PatchEmbed(config.patch, config.width)
        self.grid = self.patch_embed.grid(config.image_size, config.image_size)
        # Positions for the prefix come first, as in timm; DeiT III has none for its class token.
        self.placed_prefix = prefix if config.class_position else 0
        self.cls_token = nn.Parameter(torch.empty(1, prefix, config.width)) if prefix else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.placed_prefix + self.grid[0] * self.grid[1], config.width))
        self.pos_drop = nn.Dropout(config.position_drop)
        self.blocks = nn.ModuleList(Block(config, i, rate) for i, rate in enumerate(drop_path_rates(config)))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if final_norm else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    @property
    def intermediates(self) -> list[str]:
        """Every name that `want` and `given` know."""
        blocks = cast("list[Block]", list(self.blocks))
        return [f"{what}.{i}" for i, block in enumerate(blocks) for what in (*block.attn.shows, "tokens")]

    def embed(self, images: Tensor) -> Tokens:
        """Images [batch, 3, height, width] to tokens with positions."""
        grid = self.patch_embed.grid(images.shape[-2], images.shape[-1])
        x = self.patch_embed(images)
        positions = resize_positions(self.pos_embed, self.placed_prefix, self.grid, grid)
        if self.cls_token is not None:
            token = self.cls_token.expand(len(x), -1, -1).to(x.dtype)
            if self.placed_prefix:
                x = torch.cat([token, x], dim=1) + positions
            else:
                x = torch.cat([token, x + positions], dim=1)
        else:
            x = x + positions
        return Tokens(self.pos_drop(x), self.prefix, grid)

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Tensor] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        """Run the blocks. With `until=k` stop before block k and leave out the final norm (teachers)."""
        probe = Probe(want, given or {}, self.intermediates) if want or given else None
        blocks = list(self.blocks)
        for block in blocks[:until]:
            tokens = block(tokens, probe)
        if until is None or until >= len(blocks):
            tokens = tokens.but(self.norm(tokens.sequence))
        return tokens, {} if probe is None else probe.captured

    def forward(self, images: Tensor) -> Tokens:
        return self.encode(self.embed(images))[0]

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay: 0 for stem and positions, i + 1 for block i."""
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return self.config.depth + 1 if name.startswith("norm.") else 0

    @property
    def layers(self) -> int:
        """Number of depths that `layer_of` gives, the head's own not counted."""
        return self.config.depth + 1
