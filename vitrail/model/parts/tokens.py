"""Tokens of a trunk, how intermediates are captured or replaced, and the contract of adaptive policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from vitrail.kernels.packing import unpack
from vitrail.schema import near

if TYPE_CHECKING:
    from vitrail.model.parts.block import Block


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


@dataclass
class Tokens:
    """Tokens of a batch of images: dense, padded and masked, or packed.

    Packed, the sequence is a table [capacity, width] in which image b has the rows from `offsets[b]` to
    `offsets[b + 1]`; rows beyond the last are padding, so that the capacity can be static.
    """

    sequence: Tensor  # dense [batch, prefix + patches, width], or packed [capacity, width]
    prefix: int  # leading class / distillation / register tokens of every image
    grid: tuple[int, int]  # rows, columns of the patches
    mask: Tensor | None = None  # dense: [batch, prefix + patches], true where a token is real
    index: Tensor | None = (
        None  # [batch, patches], packed [capacity]: which original patch each surviving token is; beyond them: none
    )
    offsets: Tensor | None = None  # packed: [batch + 1]
    most: int = 0  # packed: tokens that an image can have at most
    trace: Trace | None = None  # what an adaptive policy spent
    size: Tensor | None = None  # dense: [batch, prefix + patches], how many patches each token is the mean of (ToMe)

    @property
    def patches(self) -> Tensor:
        """The patch tokens, [batch, patches, width]."""
        assert self.offsets is None
        return self.sequence[:, self.prefix :]

    def but(self, sequence: Tensor) -> Tokens:
        """The same layout around another sequence."""
        return replace(self, sequence=sequence)

    def token(self, place: int) -> Tensor:
        """One prefix token of every image, [batch, width]."""
        if self.offsets is None:
            return self.sequence[:, place]
        rows = self.offsets[:-1] + place
        return self.sequence[rows.clamp_max(len(self.sequence) - 1)]  # images that an overflow cut off have none

    def counts(self) -> Tensor:
        """How many tokens each image has, prefix tokens among them: [batch], float32."""
        if self.offsets is not None:
            return self.offsets.diff().to(torch.float32)
        if self.mask is not None:
            return self.mask.sum(1, dtype=torch.float32)
        batch, tokens = self.sequence.shape[:2]
        return torch.full((batch,), float(tokens), device=self.sequence.device)

    def padded(self) -> Tokens:
        """The same dense: padded and masked where it was packed."""
        if self.offsets is None:
            return self
        sequence, mask = unpack(self.sequence, self.offsets, self.most)
        index = None
        if self.index is not None:
            index = unpack(self.index[:, None], self.offsets, self.most)[0][:, self.prefix :, 0]
        return replace(self, sequence=sequence, mask=mask, index=index, offsets=None, most=0)

    def kept(self) -> Tensor:
        """Which of the original patches are left, [batch, rows * columns], 1 or 0."""
        dense = self.padded()
        batch, patches = len(dense.sequence), self.grid[0] * self.grid[1]
        if dense.index is None:
            everything = torch.ones(batch, patches, device=dense.sequence.device)
            return everything if dense.mask is None else dense.mask[:, dense.prefix :].to(everything)
        real = torch.ones_like(dense.index) if dense.mask is None else dense.mask[:, dense.prefix :]
        real = real.to(torch.float32)
        kept = torch.zeros(batch, patches + 1, device=real.device).scatter_reduce(1, dense.index, real, "amax")
        return kept[:, :patches]

    def original(self) -> Tensor:
        """Which original patch each patch token is, [batch, patches]."""
        if self.index is not None:
            return self.index
        batch, count = self.sequence.shape[:2]
        return torch.arange(count - self.prefix, device=self.sequence.device).expand(batch, -1)


def random_order(batch: int, patches: int, visible: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of visible and of hidden patches, [batch, visible] and [batch, patches - visible], each in order.

    Drawn on the device from its own generator: nothing is decided on the host.
    """
    order = torch.rand(batch, patches, device=device).argsort(1)
    return order[:, :visible].sort(1).values, order[:, visible:].sort(1).values


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [batch, rows, width] by index [batch, chosen]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _register(cls: type[Any], *layout: str) -> None:
    """Make a dataclass a pytree whose leaves are its fields, but for those of `layout`."""
    names = [f.name for f in fields(cls) if f.name not in layout]
    _pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, n) for n in names], tuple(getattr(value, n) for n in layout)),
        lambda leaves, constants: cls(
            **dict(zip(names, leaves, strict=True)), **dict(zip(layout, constants, strict=True))
        ),
        serialized_type_name=f"vitrail.{cls.__name__}",
    )


_register(BlockUse)
_register(Trace)
_register(Tokens, "prefix", "grid", "most")

Given = Tensor | Callable[[Tensor], Tensor]
"""What takes the place of a computed value: a tensor, or a function of that value (some heads of it)."""


class Probe:
    """Captures and replaces intermediates by name: `attention.3`, `q.0`, `k.0`, `v.0`, `input.0` (of which these three
    are made), `tokens.7`, `kept.5`.

    `want` names what is captured; `given` maps names to what takes the place of a computed value. Names that the model
    does not have are an error before anything runs: a silent empty answer would be worse. `keep.3`, which can only be
    given, is what drop path multiplies the two branches of block 3 by, [2, batch, 1, 1].
    """

    def __init__(self, want: Collection[str], given: Mapping[str, Given], known: Collection[str]) -> None:
        layers = {name.partition(".")[2] for name in known}
        for name in (*want, *given):
            kept = name in given and name not in want and name.startswith("keep.") and name[5:] in layers
            if name not in known and not kept:
                kinds = ", ".join(sorted({full.partition(".")[0] for full in known}))
                raise ValueError(f"no intermediate {name!r}{near(name, known)}; there are {kinds}; layers count from 0")
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
        if not self.concerns(name):
            return None
        given = self.given.get(name)
        value = given if isinstance(given, Tensor) else compute() if given is None else given(compute())
        if name in self.want:
            self.captured[name] = value
        return value

    def keep(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """What drop path multiplies the two branches of a block by, where that is given: [batch, 1, 1] each."""
        given = self.given.get(f"keep.{layer}")
        return (given[0], given[1]) if isinstance(given, Tensor) else (None, None)


class AdaptivePolicy(nn.Module):
    """Decides what of each block an image gets. Parameters, if it has any, are trained with the trunk."""

    same_cost: ClassVar[bool] = False  # whether every image of a size costs the same, whatever it shows

    @property
    def static(self) -> bool:
        """Whether inference is the same device work for all images of a size, so that a CUDA graph may hold it."""
        return False

    def begin(self, tokens: Tokens) -> Passage:
        """The way of one batch: a new object for every forward pass, so that nothing is left from the last one."""
        raise NotImplementedError

    def losses(self, trace: Trace) -> dict[str, Tensor]:
        """Losses of the policy itself, by name and already weighted."""
        return {}


class Passage:
    """One batch on its way: `run` for each block in order, then `end`, which hands over the trace."""

    def __init__(self) -> None:
        self.blocks: list[BlockUse] = []
        self.losses: dict[str, Tensor] = {}
        self.overflow: Tensor | None = None
        self._constants: dict[float, Tensor] = {}

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        raise NotImplementedError

    def end(self, tokens: Tokens) -> Tokens:
        """Tokens for the final norm, with the trace."""
        tokens.trace = Trace(tuple(self.blocks), self.losses, self.overflow)
        return tokens

    def used(
        self,
        block: Block,
        entering: Tensor,
        leaving: Tensor,
        heads: Tensor | None = None,
        branches: Tensor | None = None,
    ) -> None:
        """Record one block; all heads and both branches [batch, 2] were used where they are not given."""
        ones = self._filled(1.0, entering)
        heads = self._filled(float(getattr(block.attn, "heads", 1)), entering) if heads is None else heads
        mixing, channels = (ones, ones) if branches is None else branches.unbind(1)
        self.blocks.append(BlockUse(entering, leaving, heads, mixing, channels))

    def _filled(self, value: float, like: Tensor) -> Tensor:
        """This value for every image, filled in once for all blocks."""
        if value not in self._constants:
            self._constants[value] = torch.full_like(like, value)
        return self._constants[value]


def show_kept(probe: Probe | None, i: int, tokens: Tokens) -> None:
    """Let a probe see which of the original patches are left after block i: `kept.i`, [batch, patches], 0 or 1."""
    if probe is not None and f"kept.{i}" in probe.want:
        probe(f"kept.{i}", tokens.kept())
