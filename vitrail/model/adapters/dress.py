"""Modules that behave differently while a model has adapters.

Their class becomes a subclass of what it was, so names, state dictionaries and `isinstance` stay as they are, and a
copy of the model is complete by itself; hooks would tie a copy to the adapters of the original. The dresses:

    layer   an adapted layer: adds the low-rank side path to what it computes. `weight` is then the changed weight, for
            whoever reads it in place of calling the layer: talking heads mix heads by it, the patch embedding is
            a product with it on CUDA, a head of one map a class reads its rows. A convolution, and a change that has no
            factors, work by it as well.
    scope   what lies above all adapted layers, up to the model: makes their changes at once when a pass begins and
            forgets them when it ends. Not only in `forward`: a classifier calls `encode` of its trunk, an objective
            `outputs` of the classifier.
    owner   a module of which an adapter has parameters of its own: a routed batch passes it adapter by adapter.
    prompted
            a trunk to which an adapter brings prompts: `prompts` are those of the one in use, and a routed batch passes
            `encode` adapter by adapter.
    still   BatchNorm of a frozen base: stays in evaluation, for training would move its statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from vitrail.model.adapters.bank import Bank, Route
from vitrail.model.adapters.group import Change, LowRank
from vitrail.model.adapters.targets import Kind, Piece, kind_of

ENTRANCES = ("forward", "encode", "forward_features", "forward_intermediates", "outputs", "stack", "tokens")
Changes = list[tuple[Piece, Change]]


class Seat:
    """What a dressed module knows of the adapters."""

    def __init__(self, bank: Bank, model: nn.Module, name: str, kind: Kind | None) -> None:
        self.bank, self.model, self.name, self.kind = bank, model, name, kind
        self.plain = False  # `weight` is the base's
        self.forced: Changes | None = None  # `weight` has these changes, whoever's turn it is


def dress(model: nn.Module, bank: Bank, name: str, role: str) -> None:
    """Let a module play a role, once."""
    module = model.get_submodule(name)
    roles = bank.dressed.setdefault(name, [])
    if role in roles:
        return
    if not roles:
        module.__dict__["_seat"] = Seat(bank, model, name, kind_of(module))
        module.__dict__["_undressed"] = type(module)
    roles.append(role)
    module.__class__ = ROLES[role](type(module))


def undress(model: nn.Module, bank: Bank) -> None:
    """Every module as it was."""
    for name in bank.dressed:
        module = model.get_submodule(name)
        module.__class__ = module.__dict__.pop("_undressed")
        module.__dict__.pop("_seat")
    bank.dressed.clear()


@cache
def _layer(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        seat: Seat = self._seat
        bank = seat.bank
        if bank.route is not None:
            return _routed(self, cls, x, bank.route)
        changes = bank.at(seat.name, bank.active)
        if not changes or not _beside(seat, changes):
            seat.forced = changes
            try:
                out: Tensor = cls.forward(self, x, *args, **options)
            finally:
                seat.forced = None
            return out
        return _added(_base(self, cls, x), x, *_stacked(changes, _outputs(self)))

    def weight(self: Any) -> Tensor:
        seat: Seat = self._seat
        base: Tensor = self._parameters["weight"]
        if seat.plain:
            return base
        changes = seat.forced
        if changes is None:
            if seat.bank.route is not None:
                raise ValueError(
                    f"{seat.name} is read, not called, so every sample cannot have its own; leave it out of the targets"
                )
            changes = seat.bank.at(seat.name, seat.bank.active)
        return changed(base, seat.kind, changes) if changes else base

    return type(cls.__name__, (cls,), {"forward": forward, "weight": property(weight), "__module__": cls.__module__})


@cache
def _scope(cls: type[nn.Module]) -> type[nn.Module]:
    def around(name: str) -> Callable[..., Any]:
        inner = getattr(cls, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            bank: Bank = self._seat.bank
            bank.enter()
            try:
                return inner(self, *args, **options)
            finally:
                bank.leave()

        return call

    made = {name: around(name) for name in ENTRANCES if callable(getattr(cls, name, None))}
    return type(cls.__name__, (cls,), {**made, "__module__": cls.__module__})


@cache
def _owner(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"forward": _apart(cls, "forward"), "__module__": cls.__module__})


@cache
def _prompted(cls: type[nn.Module]) -> type[nn.Module]:
    def prompts(self: Any) -> Any:
        bank: Bank = self._seat.bank
        own = None if bank.active is None else bank.adapter(bank.active).prompts
        return self._modules.get("prompts") if own is None else own

    made = {"encode": _apart(cls, "encode"), "prompts": property(prompts), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), made)


def _apart(cls: type[nn.Module], method: str) -> Callable[..., Any]:
    """A method that takes the samples of a routed batch adapter by adapter."""
    inner = getattr(cls, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        seat: Seat = self._seat
        route = seat.bank.route
        if route is None:
            return inner(self, *args, **options)

        def one(name: str | None, rows: list[int]) -> Any:
            with seat.bank.only(seat.model, name):
                some = _pytree.tree_map_only(Tensor, lambda t: _rows_of(t, rows, route, seat), (args, options))
                return inner(self, *some[0], **some[1])

        return _by_adapter(route, one)

    return call


@cache
def _still(cls: type[nn.Module]) -> type[nn.Module]:
    def train(self: Any, mode: bool = True) -> Any:
        return cls.train(self, False)

    return type(cls.__name__, (cls,), {"train": train, "__module__": cls.__module__})


ROLES: dict[str, Callable[..., type[nn.Module]]] = {
    "layer": _layer,
    "scope": _scope,
    "owner": _owner,
    "prompted": _prompted,
    "still": _still,
}


# Changes of one layer


def changed(base: Tensor, kind: Kind | None, changes: Changes) -> Tensor:
    """A weight with its changes, in the base's precision; added up in float32 at least."""
    wide = torch.promote_types(base.dtype, torch.float32)
    total = base.to(wide)
    for piece, change in changes:
        matrix = change.matrix().to(wide)
        if kind == "conv":
            total = total + matrix.view(base.shape)
            continue
        outputs = base.shape[1 if kind == "transposed" else 0]
        if piece.shape[0] != outputs:
            matrix = F.pad(matrix, (0, 0, piece.start, outputs - piece.stop))
        total = total + (matrix.T if kind == "transposed" else matrix)
    return total.to(base.dtype)


def _beside(seat: Seat, changes: Changes) -> bool:
    """Whether a side path does, which needs no changed weight and no gradient of its size."""
    return seat.kind != "conv" and all(isinstance(change, LowRank) for _, change in changes)


def _outputs(layer: Any) -> int:
    weight: Tensor = layer._parameters["weight"]
    return int(weight.shape[1 if layer._seat.kind == "transposed" else 0])


def _base(layer: Any, cls: type[nn.Module], x: Tensor) -> Tensor:
    if cls.forward is nn.Linear.forward:
        return F.linear(x, layer._parameters["weight"], layer.bias)
    layer._seat.plain = True
    try:
        out: Tensor = cls.forward(layer, x)
        return out
    finally:
        layer._seat.plain = False


def _stacked(changes: Changes, outputs: int) -> tuple[Tensor, Tensor]:
    """One up [outputs, ranks] and one down [ranks, inputs] for all pieces of a layer."""
    pairs = [(piece, change) for piece, change in changes if isinstance(change, LowRank)]
    if len(pairs) == 1 and pairs[0][0].shape[0] == outputs:
        return pairs[0][1].up, pairs[0][1].down
    ranks, before, ups = sum(len(change.down) for _, change in pairs), 0, []
    for piece, (up, down) in pairs:
        after = ranks - before - len(down)
        ups.append(F.pad(up, (before, after, piece.start, outputs - piece.stop)))
        before += len(down)
    return torch.stack(ups).sum(0), torch.cat([change.down for _, change in pairs])


def _added(out: Tensor, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """out [..., outputs] + x downᵀ upᵀ"""
    inner = F.linear(x.to(out.dtype), down.to(out.dtype))
    # One product that begins from `out`: nothing of its size is written beside it.
    rows, ranks = out.reshape(-1, out.shape[-1]), inner.reshape(-1, inner.shape[-1])
    return torch.addmm(rows, ranks, up.to(out.dtype).T).view(out.shape)


# Routed batches


def _routed(layer: Any, cls: type[nn.Module], x: Tensor, route: Route) -> Tensor:
    seat: Seat = layer._seat
    route.check(len(x), seat.name)
    changes = {name: seat.bank.at(seat.name, name) for name in route.distinct}
    if all(_beside(seat, some) for some in changes.values()):
        out = _base(layer, cls, x)
        if not any(changes.values()):
            return out
        return _each(out, x, [_stacked(some, _outputs(layer)) if some else None for some in changes.values()], route)

    def one(name: str | None, rows: list[int]) -> Tensor:
        seat.forced = changes[name]
        try:
            return cls.forward(layer, x[rows])
        finally:
            seat.forced = None

    made: Tensor = _by_adapter(route, one)
    return made


def _each(out: Tensor, x: Tensor, factors: list[tuple[Tensor, Tensor] | None], route: Route) -> Tensor:
    """out [batch, ..., outputs] + the side path of every sample's own adapter."""
    present = [pair for pair in factors if pair is not None]
    rank = max(len(down) for _, down in present)
    none = (present[0][0][:, :0], present[0][1][:0])
    pairs = [none if pair is None else pair for pair in factors]
    index = route.index(x.device)
    ups = torch.stack([F.pad(up, (0, rank - up.shape[1])) for up, _ in pairs]).to(out.dtype)[index]
    downs = torch.stack([F.pad(down, (0, 0, 0, rank - len(down))) for _, down in pairs]).to(out.dtype)[index]
    rows = x.reshape(len(x), -1, x.shape[-1]).to(out.dtype)
    return out + (rows @ downs.mT @ ups.mT).view(out.shape)


def _by_adapter(route: Route, one: Callable[[str | None, list[int]], Any]) -> Any:
    """Outputs of the samples of each adapter, put back in the order of the batch."""
    parts = [one(name, rows) for name, rows in route.rows.items()]
    order = [row for rows in route.rows.values() for row in rows]
    leaves, spec = zip(*(_pytree.tree_flatten(part) for part in parts), strict=True)

    def together(*same: Any) -> Any:
        if not isinstance(same[0], Tensor):
            return same[0]
        back = torch.empty(len(order), dtype=torch.long, device=same[0].device)
        back[order] = torch.arange(len(order), device=same[0].device)
        return torch.cat(same)[back]

    return _pytree.tree_unflatten([together(*same) for same in zip(*leaves, strict=True)], spec[0])


def _rows_of(tensor: Tensor, rows: list[int], route: Route, seat: Seat) -> Tensor:
    route.check(len(tensor) if tensor.ndim else 0, seat.name)
    return tensor[rows]
