"""What flows through a trunk, and how intermediates are asked for or replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from vitrail.schema import near


@dataclass
class Tokens:
    """Tokens of a batch of images."""

    sequence: Tensor  # dense [batch, prefix + patches, width]
    prefix: int  # leading class / distillation / register tokens of every image
    grid: tuple[int, int]  # rows, columns of the patches
    mask: Tensor | None = None  # [batch, prefix + patches], true where a token is real
    index: Tensor | None = None  # [batch, patches], which original patch each surviving token is

    @property
    def patches(self) -> Tensor:
        """The patch tokens, [batch, patches, width]."""
        return self.sequence[:, self.prefix :]

    def but(self, sequence: Tensor) -> Tokens:
        """The same layout around another sequence."""
        return replace(self, sequence=sequence)


def _flatten(tokens: Tokens) -> tuple[list[Any], Any]:
    return [tokens.sequence, tokens.mask, tokens.index], (tokens.prefix, tokens.grid)


def _unflatten(leaves: Any, layout: Any) -> Tokens:
    sequence, mask, index = leaves
    return Tokens(sequence, layout[0], layout[1], mask, index)


_pytree.register_pytree_node(Tokens, _flatten, _unflatten, serialized_type_name="vitrail.Tokens")


Given = Tensor | Callable[[Tensor], Tensor]
"""What takes the place of a computed value: a tensor, or a function of that value (some heads of it)."""


class Probe:
    """Captures and replaces intermediates by name: `attention.3`, `q.0`, `k.0`, `v.0`, `tokens.7`.

    `want` names what is captured; `given` maps names to what takes the place of a computed value. Names that the model
    does not have are an error before anything runs: a silent empty answer would be worse. `keep.3`, which can only be
    given, is what drop path multiplies the two branches of block 3 by, [2, batch, 1, 1].
    """

    def __init__(self, want: Collection[str], given: Mapping[str, Given], known: Collection[str]) -> None:
        layers = {name.partition(".")[2] for name in known}
        for name in (*want, *given):
            kept = name in given and name not in want and name.startswith("keep.") and name[5:] in layers
            if name not in known and not kept:
                raise ValueError(f"no intermediate {name!r}{near(name, known)}; layers count from 0")
        self.want, self.given = frozenset(want), dict(given)
        self.captured: dict[str, Tensor] = {}

    def concerns(self, *names: str) -> bool:
        """Whether any of these is wanted or given."""
        return any(name in self.want or name in self.given for name in names)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """What the model goes on with under this name: the given value if there is one, else `value`."""
        if name in self.given:
            given = self.given[name]
            value = (given if isinstance(given, Tensor) else given(value)).to(value)
        if name in self.want:
            self.captured[name] = value
        return value

    def map(self, name: str, compute: Callable[[], Tensor]) -> Tensor | None:
        """An attention map where it is wanted or given, else None (the fused kernel runs)."""
        if name in self.given:
            given = self.given[name]
            value = given if isinstance(given, Tensor) else given(compute())
            if name in self.want:
                self.captured[name] = value
            return value
        return self(name, compute()) if name in self.want else None

    def keep(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """What drop path multiplies the two branches of a block by, where that is given: [batch, 1, 1] each."""
        given = self.given.get(f"keep.{layer}")
        return (given[0], given[1]) if isinstance(given, Tensor) else None


def reset(module: torch.nn.Module) -> None:
    """Draw the initial weights of every part anew, inner parts first (after `to_empty` from the meta device)."""
    for child in module.children():
        reset(child)
    draw = getattr(module, "reset_parameters", None)
    if callable(draw):
        draw()
