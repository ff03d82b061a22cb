"""Trace of an adaptive forward pass: tokens, heads and branches used by every block for every image."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.utils import _pytree


@dataclass
class BlockUse:
    """What one block worked on, [batch] each (floats; prefix tokens are counted)."""

    entering: Tensor  # tokens whose keys and values were made
    leaving: Tensor  # tokens that were updated and went on
    heads: Tensor  # heads that mixed
    mixing: Tensor  # 1 where the mixing branch ran, else 0
    channels: Tensor  # 1 where the channel branch ran, else 0


@dataclass
class Trace:
    """Every block's use, in order, and what training may push on.

    `losses` holds differentiable values by name, [batch] each, as the policy defines them. `overflow` is true where a
    packed batch had less room than it needed: its result is then worthless and must be computed with more.
    """

    blocks: tuple[BlockUse, ...] = ()
    losses: dict[str, Tensor] = field(default_factory=dict)
    overflow: Tensor | None = None


def _register(cls: type[Any]) -> None:
    names = [f.name for f in fields(cls)]
    _pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, n) for n in names], None),
        lambda leaves, _: cls(*leaves),
        serialized_type_name=f"vitrail.{cls.__name__}",
    )


_register(BlockUse)
_register(Trace)
