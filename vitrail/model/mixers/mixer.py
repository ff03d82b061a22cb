"""Base classes of mixers: tokens in, tokens out, and the names of the intermediates they expose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Probe, Tokens
from vitrail.registry import part, settings

if TYPE_CHECKING:
    from vitrail.model.mixers.config import MixerConfig


def build_mixer(config: MixerConfig, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
    """The mixer of a configuration, by its kind, for tokens of `width` on a patch `grid`."""
    mixer: Mixer = part("mixer", config.kind).build(config, width, heads, grid)
    return mixer


class Mixer(nn.Module):
    """`forward(x, tokens, layer, probe)` mixes x [batch, tokens, width]; `tokens` tells prefix, grid and mask.

    `shows` names the intermediates that can be captured or replaced. `takes_prefix` is false where class tokens would
    not learn from patches. `takes_packed`: x may be packed [capacity, width]; otherwise it is padded at the door.
    `attention_products`: its matrix products of tokens with tokens are attention's own (counted
    apart by `cost`).
    """

    shows: ClassVar[tuple[str, ...]] = ()
    takes_prefix: ClassVar[bool] = True
    takes_packed: ClassVar[bool] = False
    attention_products: ClassVar[bool] = False

    @classmethod
    def build(cls, config: Any, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
        """The mixer that `config` describes, for tokens of `width` on a patch `grid`."""
        return cls(**settings(config))

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        raise NotImplementedError

    def last_linear(self) -> nn.Module | None:
        """The layer whose output is the branch, where a gain can be folded in."""
        return None


class QkvMixer(Mixer):
    """sequence [batch, tokens, width]; q, k, v [batch, heads, tokens, width / heads]. Names follow timm's."""

    attention_products = True
    fused_layers: ClassVar[dict[str, int]] = {"qkv": 3}

    def __init__(self, width: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.reset_parameters()

    @classmethod
    def build(cls, config: Any, width: int, heads: int, grid: tuple[int, int]) -> Mixer:
        return cls(width, heads, **settings(config))

    def reset_parameters(self) -> None:
        small_normal(self.qkv, self.proj)

    def last_linear(self) -> nn.Module:
        return self.proj

    def packed(self, x: Tensor) -> Tensor:
        """q, k and v as the linear layer leaves them, [batch, tokens, 3, heads, width / heads]."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1))

    def project(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.packed(x).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def shown(self, x: Tensor, tokens: Tokens, layer: int, probe: Probe | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; they, and what they are made of, captured or replaced where requested."""
        if probe is None:
            return self.project(x, tokens)
        q, k, v = self.project(probe(f"input.{layer}", x), tokens)
        return probe(f"q.{layer}", q), probe(f"k.{layer}", k), probe(f"v.{layer}", v)

    def leave(self, mixed: Tensor) -> Tensor:
        """Mixed values [batch, heads, tokens, width / heads] to the branch [batch, tokens, width]."""
        return self.proj(mixed.transpose(1, 2).flatten(2))


def without_padding(x: Tensor, tokens: Tokens) -> Tensor:
    """x [batch, heads, tokens, ...] with zeros for tokens that are not there, so that sums over tokens skip them."""
    return x if tokens.mask is None else x.masked_fill(~tokens.mask[:, None, :, None], 0.0)
