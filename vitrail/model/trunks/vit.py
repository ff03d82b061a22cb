"""The trunk of our own architectures: stem, positions, blocks with an optional adaptive policy, final norm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vitrail.model.config import AdaptiveConfig, TrunkConfig
from vitrail.model.parts.block import STARTS, Block, ParallelBlock, drop_path_rates, make_norm
from vitrail.model.parts.stems import FourierPositions, build_stem, resize_positions, sinusoid
from vitrail.model.parts.tokens import AdaptivePolicy, Given, Probe, Tokens, gather, random_order
from vitrail.model.trunks.base import CHECKPOINTING, BaseTrunk

if TYPE_CHECKING:
    from vitrail.model.adapters.methods import Prompts

SMALL_GAIN = 0.01  # bf16 keeps 8 bits: what is added with a smaller gain loses most of its own


def build_policy(config: AdaptiveConfig, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> AdaptivePolicy:
    """The policy of a configuration, by its kind. Raises `ValueError` where it cannot work in the trunk."""
    module = import_module(f"vitrail.model.adaptive.{config.kind}")
    policy: AdaptivePolicy = getattr(module, f"{config.kind.capitalize()}Policy")(config, trunk, blocks, prefix)
    return policy


class Trunk(BaseTrunk):
    """A stack of residual blocks on patch tokens.

    `prefix` is how many learned tokens the head needs in front of the patches; `final_norm` is false where the head has
    layers of its own after which it normalises. Attribute names follow timm's ViT. Raises `ValueError` where the mixer
    cannot carry class tokens.
    """

    takes_prompts = True

    def __init__(self, config: TrunkConfig, prefix: int = 1, final_norm: bool = True) -> None:
        super().__init__()
        self.config, self.prefix, self.width, self.layers = config, prefix, config.width, config.depth
        self.patch_embed = build_stem(config.stem, config.patch, config.width, config.activation, config.channels)
        self.grid = self.patch_embed.grid(config.image_size, config.image_size)
        if config.class_token_at > config.depth:
            raise ValueError(f"class_token_at is {config.class_token_at}, but there are only {config.depth} blocks")
        # Positions for the prefix come first, as in timm; DeiT III has none for its class token, nor has a late one.
        placed = config.class_position and config.class_token_at == 0 and config.positions != "fourier"
        self.placed_prefix = prefix if placed else 0
        self.cls_token = nn.Parameter(torch.empty(1, prefix, config.width)) if prefix else None
        count = self.placed_prefix + self.grid[0] * self.grid[1]
        self.pos_embed: Tensor | nn.Parameter | FourierPositions | None
        if config.positions == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, count, config.width))
        elif config.positions == "fourier":
            self.pos_embed = FourierPositions(config.width)
        else:
            table = sinusoid(count, config.width) if config.positions == "sinusoid" else None
            self.register_buffer("pos_embed", table, persistent=False)
        self.pos_drop = nn.Dropout(config.position_drop)
        kind = Block if config.parallel == 1 else ParallelBlock
        rates = drop_path_rates(config.drop_path, config.depth, config.drop_path_rule)
        self.blocks = nn.ModuleList(kind(config, self.grid, i, rate) for i, rate in enumerate(rates))
        if prefix and not self._blocks()[0].mixers[0].takes_prefix:
            raise ValueError(
                f"the mixer {config.mixer.kind} works on patches only, a class token would learn nothing from them; "
                "use a head that pools patches: mean, class_attention, class_mlp, attention_pool, gramian"
            )
        if config.patch_drop:
            self._reject_patch_drop()
        self.norm = make_norm(config.norm, config.width, config.norm_eps) if final_norm else nn.Identity()
        self.policy: AdaptivePolicy | None = None
        if config.adaptive is not None:
            if config.class_token_at:
                raise ValueError("an adaptive policy needs its class token from the first block on: class_token_at 0")
            self.policy = build_policy(config.adaptive, config, cast("list[Block]", self._blocks()), prefix)
        self.prompts: Prompts | None = None
        if config.prompts:
            from vitrail.model.adapters.methods import Prompts

            self.reject_prompts()
            layers = config.depth if config.deep_prompts else 1
            self.prompts = Prompts(layers, config.prompts, config.width, config.patch)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        elif isinstance(self.pos_embed, Tensor) and not self.pos_embed.is_meta:
            self.fill_buffers()
        if self.cls_token is not None:
            # As timm's, nearly zero: its position embedding dominates at the start. SoT's positions are fixed.
            nn.init.trunc_normal_(self.cls_token, std=0.02 if self.config.positions == "sinusoid" else 1e-6)
        if self.config.start != "default" and not next(self.blocks.parameters()).is_meta:
            STARTS[self.config.start](self.blocks, self.config.depth)

    def fill_buffers(self) -> None:
        """Compute what is not stored: the fixed table of positions."""
        if isinstance(self.pos_embed, Tensor) and not isinstance(self.pos_embed, nn.Parameter):
            device = next(self.blocks.parameters()).device
            self.pos_embed = sinusoid(self.pos_embed.shape[1], self.width).to(device)

    def _blocks(self) -> list[Block | ParallelBlock]:
        return cast("list[Block | ParallelBlock]", list(self.blocks))

    @property
    def intermediates(self) -> list[str]:
        """Every name that `want` and `given` know."""
        if self.prompts is not None:
            return [f"tokens.{i}" for i in range(len(self.blocks))]
        more = ("tokens",) if self.policy is None else ("tokens", "kept")
        return [f"{kind}.{i}" for i, block in enumerate(self._blocks()) for kind in (*block.mixers[0].shows, *more)]

    def reject_prompts(self) -> None:
        """Raises `ValueError` where prompts cannot work."""
        if not self._blocks()[0].mixers[0].takes_prefix:
            raise ValueError(
                f"the mixer {self.config.mixer.kind} works on patches only, which would learn nothing from prompts; "
                "tune its weights: --model.adapter lora"
            )
        if self.policy is not None:
            raise ValueError(
                "an adaptive policy chooses among patches and does not know prompts; use --model.adapter lora, or a "
                "model without the policy"
            )

    def _reject_patch_drop(self) -> None:
        """Raises `ValueError` where patches cannot be left out."""
        needs = "a convolution over the grid (local)" if self.config.local else ""
        if not self._blocks()[0].mixers[0].takes_prefix:
            needs = f"the mixer {self.config.mixer.kind}"
        if self.config.adaptive is not None:
            needs = "an adaptive policy, which chooses among them,"
        if needs:
            raise ValueError(f"trunk.patch_drop leaves patches out, but {needs} needs all of them; use 0")

    def embed(self, images: Tensor) -> Tokens:
        """Images [batch, channels, height, width] to tokens with positions."""
        grid = self.patch_embed.grid(images.shape[-2], images.shape[-1])
        x = self.patch_embed(images)
        if self.placed_prefix:
            x = self._with_class_tokens(x)
        if isinstance(self.pos_embed, FourierPositions):
            x = x + self.pos_embed(grid)
        elif self.pos_embed is not None:
            x = x + resize_positions(self.pos_embed, self.placed_prefix, self.grid, grid)
        if self.prefix and not self.placed_prefix and self.config.class_token_at == 0:
            x = self._with_class_tokens(x)
        prefix = self.prefix if self.config.class_token_at == 0 else 0
        return Tokens(self._stream(self.pos_drop(x)), prefix, grid)

    def _stream(self, x: Tensor) -> Tensor:
        """Tokens in the precision in which blocks add to them.

        Under autocast that is its own, which halves what every norm and addition reads and writes. Branches that begin
        far below 1 would be rounded away there: with such gains the stream stays in float32.
        """
        config = self.config
        gain = min(1.0 if g is None else g for g in (config.layerscale, config.gate))
        if gain < SMALL_GAIN or x.is_meta or not torch.is_autocast_enabled(x.device.type):
            return x
        return x.to(torch.get_autocast_dtype(x.device.type))

    def _with_class_tokens(self, x: Tensor) -> Tensor:
        assert self.cls_token is not None
        return torch.cat([self.cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)

    def _enter(self, tokens: Tokens) -> Tokens:
        mask = tokens.mask
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(mask), self.prefix), mask], dim=1)
        prefix = self.prefix + tokens.prefix  # prompts may be there
        return replace(tokens, sequence=self._with_class_tokens(tokens.sequence), prefix=prefix, mask=mask)

    def _leave_out(self, tokens: Tokens) -> Tokens:
        """Patches of every image at random, as many as timm's PatchDropout leaves, in their order."""
        patches = tokens.patches
        kept = max(1, int(patches.shape[1] * (1 - self.config.patch_drop)))
        index, _ = random_order(len(patches), patches.shape[1], kept, patches.device)
        sequence = torch.cat([tokens.sequence[:, : tokens.prefix], gather(patches, index)], dim=1)
        return replace(tokens, sequence=sequence, index=index)

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Given] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        """Run the blocks. With `until=k` stop before block k and leave out the final norm (teachers).

        Prompts enter and leave here. With them only `tokens.LAYER` is shown, without prompts; else `ValueError`.
        """
        if self.training and self.config.patch_drop and tokens.index is None:
            if want or given:
                raise ValueError("what blocks compute is captured of all patches; train with trunk.patch_drop 0")
            tokens = self._leave_out(tokens)
        prompts = self.prompts
        if prompts is not None:
            prompts.reject(want, given or {})
            tokens = prompts.enter(tokens)
        probe = Probe(want, given or {}, self.intermediates) if want or given else None
        depth = len(self.blocks)
        late = self.config.class_token_at if self.prefix else 0
        passage = None if self.policy is None else self.policy.begin(tokens)
        for i, block in enumerate(self._blocks()):
            if until is not None and i >= until:
                break
            if late and i == late:
                tokens = self._enter(tokens)
            if prompts is not None and i:
                tokens = prompts.renew(tokens, i)
            tokens = block(tokens, probe) if passage is None else passage.run(cast("Block", block), i, tokens, probe)
            if prompts is not None and probe is not None and f"tokens.{i}" in probe.captured:
                probe.captured[f"tokens.{i}"], tokens = prompts.shown(tokens)
        if prompts is not None:
            tokens = prompts.leave(tokens)
        if passage is not None:
            tokens = passage.end(tokens)
        if until is None or until >= depth:
            if late == depth:
                tokens = self._enter(tokens)
            tokens = tokens.but(self.norm(tokens.sequence))
        return tokens, {} if probe is None else probe.captured

    def forward(self, images: Tensor) -> Tokens:
        return self.encode(self.embed(images))[0]

    def checkpoint_blocks(self) -> None:
        if self.policy is not None:
            raise ValueError(f"{CHECKPOINTING}: an adaptive policy runs parts of blocks by itself; use none")
        self.allow_checkpointing(self.blocks)
        for block in self._blocks():
            block.recompute = True

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay: 0 for stem and positions, i + 1 for block i.

        The final norm and a policy are as deep as the head, as in the fine-tuning code of MAE (arXiv 2111.06377).
        """
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return self.layers + 1 if name.startswith(("norm.", "policy.")) else 0
