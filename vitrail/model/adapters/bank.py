"""The adapters of a model: whose turn it is, and the changes of weights while a forward pass lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc, Vpt
from vitrail.model.adapters.group import Change, Group
from vitrail.model.adapters.lora import LoraGroup
from vitrail.model.adapters.nola import NolaGroup
from vitrail.model.adapters.pranc import PrancGroup
from vitrail.model.adapters.targets import Piece
from vitrail.model.prompts import Prompts
from vitrail.schema import near

Found = dict[str, list[list[Change]]]


class Kept(nn.Module):
    """Parameters and buffers by their full names in the model; dots, which torch does not take, are slashes here."""

    def keep(self, name: str, value: Tensor) -> None:
        if isinstance(value, nn.Parameter):
            self.register_parameter(name.replace(".", "/"), value)
        else:
            self.register_buffer(name.replace(".", "/"), value)

    def get(self, name: str) -> Tensor | None:
        key = name.replace(".", "/")
        found = self._parameters.get(key)
        return self._buffers.get(key) if found is None else found

    def names(self) -> list[str]:
        return [key.replace("/", ".") for key in (*self._parameters, *self._buffers)]


class Adapter(nn.Module):
    """One adapter: groups of pieces, prompts, and what it trains whole (classifier, norms), by names of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[AdapterConfig] = []
        self.pieces: list[tuple[Piece, ...]] = []  # of each configuration
        self.groups = nn.ModuleList()
        self.own = Kept()
        self.places: dict[str, list[tuple[Piece, int, int]]] = {}  # of a layer: piece, its group, its row there

    @property
    def count(self) -> int:
        """Pieces that it adapts."""
        return sum(len(places) for places in self.places.values())

    def extend(self, config: AdapterConfig, pieces: Sequence[Piece], device: torch.device) -> None:
        """Adapt more pieces, those of one shape together."""
        shapes: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            shapes.setdefault(piece.shape, []).append(piece)
        first = self.count
        for alike in shapes.values():
            group = _group(config, alike, first, device)
            first += len(alike)
            for row, piece in enumerate(alike):
                self.places.setdefault(piece.layer, []).append((piece, len(self.groups), row))
            self.groups.append(group)
        self.configs.append(config)
        self.pieces.append(tuple(pieces))

    def prompt(self, config: Vpt, prompts: Prompts) -> None:
        """Bring prompts, which change no layer."""
        self.groups.append(prompts)
        self.configs.append(config)
        self.pieces.append(())

    @property
    def prompts(self) -> Prompts | None:
        for group in self.groups:
            if isinstance(group, Prompts):
                return group
        return None

    def group(self, number: int) -> Group:
        found = self.groups[number]
        assert isinstance(found, Group)
        return found

    def changes(self) -> list[list[Change]]:
        """Of every group, the changes of its pieces."""
        return [group.changes() if isinstance(group, Group) else [] for group in self.groups]


def _group(config: AdapterConfig, pieces: Sequence[Piece], first: int, device: torch.device) -> Group:
    if isinstance(config, Lora):
        return LoraGroup(config, pieces, first, device)
    if isinstance(config, Nola):
        return NolaGroup(config, pieces, first, device)
    assert isinstance(config, Pranc)
    return PrancGroup(config, pieces, first, device)


class Route:
    """Which adapter each sample of a batch takes; none is the base alone."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = tuple(names)
        self.distinct = tuple(dict.fromkeys(names))
        self.rows = {name: [i for i, own in enumerate(names) if own == name] for name in self.distinct}
        self._index: dict[torch.device, Tensor] = {}

    def index(self, device: torch.device) -> Tensor:
        """Of each sample, the place of its adapter among the distinct ones."""
        if device not in self._index:
            places = [self.distinct.index(name) for name in self.names]
            self._index[device] = torch.tensor(places, device=device)
        return self._index[device]

    def check(self, samples: int, where: str) -> None:
        if samples != len(self.names):
            raise ValueError(
                f"adapters are named for {len(self.names)} samples, but {where} got {samples} rows; give one name a"
                " sample, and inputs whose first dimension is the batch (no packed tokens, no windows)"
            )


class Bank(nn.Module):
    """All adapters of a model. Registered there as `adapters`, so that they move, train and are stored with it."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()
        self.base = Kept()  # of the base: what some adapter replaces by its own
        self.active: str | None = None
        self.merged: str | None = None
        self.route: Route | None = None
        self.aside: dict[str, Tensor] = {}  # while merged: weights of the base
        self.trainable: tuple[str, ...] = ()  # parameters of the base that had a gradient before
        self.dressed: dict[str, list[str]] = {}  # modules that behave differently, and how
        self.depth = 0
        self.found: Found | None = None
        self.graded = False  # the pass began with gradients
        self.last: Found | None = None  # of the last such pass, for blocks that are computed again in its backward
        self.again: set[str] = set()  # layers that build a graph of their own there (re-entrant checkpoints)

    def forward(self, x: Any) -> Any:
        """Nothing: an `nn.Sequential` that has adapters calls all that is registered in it."""
        return x

    def adapter(self, name: str) -> Adapter:
        """Raises `ValueError` for a name that is not there."""
        if name not in self.named:
            have = ", ".join(self.named) or "none"
            raise ValueError(f"no adapter {name!r}{near(name, list(self.named))} (there are: {have})")
        found = self.named[name]
        assert isinstance(found, Adapter)
        return found

    def enter(self) -> None:
        """A forward pass begins: all changes are made at once, so that layers share one generation of bases."""
        if self.depth == 0 and self.merged is None:
            names = (self.active,) if self.route is None else self.route.distinct
            self.last, self.graded = None, torch.is_grad_enabled()
            self.found = {name: self.adapter(name).changes() for name in names if name is not None}
        self.depth += 1

    def leave(self) -> None:
        """It ends, and nothing of it remains: the next one may follow a step of the optimiser."""
        self.depth -= 1
        if self.depth == 0:
            if self.graded and not torch.compiler.is_compiling():
                self.last = self.found
            self.found = None

    def at(self, layer: str, name: str | None) -> list[tuple[Piece, Change]]:
        """What an adapter changes in a layer; made here and now where no forward pass has made it."""
        if name is None or self.merged is not None:
            return []
        adapter = self.adapter(name)
        ready = self._ready(layer, name)
        made = []
        for piece, group, row in adapter.places.get(layer, ()):
            if ready is None:
                made.append((piece, adapter.group(group).changes(slice(row, row + 1))[0]))
            else:
                made.append((piece, ready[group][row]))
        return made

    def _ready(self, layer: str, name: str) -> list[list[Change]] | None:
        """Changes that this pass has made, or that the last one had made for a block which is computed again.

        A checkpoint that is not re-entrant wants the very operations of the first time; a re-entrant one runs the first
        time without gradients, and then needs changes of its own to take its share of the gradient through.
        """
        if torch.compiler.is_compiling():
            return None if self.found is None else self.found.get(name)
        if self.found is not None:
            if self.graded and not torch.is_grad_enabled():
                self.again.add(layer)
            return self.found.get(name)
        if self.last is not None and layer not in self.again and torch._C._current_graph_task_id() >= 0:
            return self.last.get(name)
        return None

    def bind(self, model: nn.Module, name: str | None) -> None:
        """Let the model hold what an adapter owns as a whole, and the base's where it owns nothing."""
        own = None if name is None else self.adapter(name).own
        for full in self.base.names():
            value = None if own is None else own.get(full)
            value = self.base.get(full) if value is None else value
            path, _, leaf = full.rpartition(".")
            module = model.get_submodule(path)
            (module._parameters if isinstance(value, nn.Parameter) else module._buffers)[leaf] = value  # type: ignore[assignment]

    @contextmanager
    def only(self, model: nn.Module, name: str | None) -> Iterator[None]:
        """For a part of a routed batch: everything as if this adapter were in use."""
        before = self.active, self.route
        self.active, self.route = name, None
        self.bind(model, name)
        try:
            yield
        finally:
            self.active, self.route = before
            self.bind(model, self.active)

    def extra_repr(self) -> str:
        return f"in use: {self.active}" + (", merged" if self.merged is not None else "")

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "depth": 0,
            "found": None,
            "last": None,
            "route": None,
        }  # a copy begins outside of any forward pass
