"""Adapters on any model: put on, switched, routed, merged, counted and taken off. The base is never changed.

apply(model, Nola(rank=8, coefficients=1000, targets=("mlp",)), "birds")   # in use, and all else frozen
use(model, "cars");  use(model, None)                                       # another one; the base alone
with route(model, ["birds", "cars", None]): logits = model(images)          # each sample its own, in one pass
merge(model);  unmerge(model)                                               # no cost at inference; bit for bit back

Prompts (`Vpt`) are no change of weights: they cannot be merged in place, but `merged_copy` keeps them in its trunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitrail.model.adapters.bank import Adapter, Bank, Route
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc, Vpt
from vitrail.model.adapters.dress import changed, dress, undress
from vitrail.model.adapters.quantise import rounded
from vitrail.model.adapters.targets import Piece, below, find, kind_of, pieces_of
from vitrail.model.adapters.vpt import make_prompts, prompted_trunk
from vitrail.schema import ConfigError, check

M = TypeVar("M", bound=nn.Module)
HEADS = ("head", "fc", "classifier", "score", "heads")
"""What a classifier is called at the top of a model that does not say so itself."""


@dataclass(frozen=True)
class Counts:
    """Numbers of an adapter."""

    trained: int  # coefficients, factors or prompts, and what it trains as a whole
    whole: int  # of these: classifier and norms
    stored: int  # what a file of it must hold: all of them, statistics of norms, and its seeds
    base: int  # parameters of the model below it

    @property
    def adapter(self) -> int:
        """Coefficients, factors or prompts alone."""
        return self.trained - self.whole


def apply(
    model: M,
    config: AdapterConfig,
    name: str = "default",
    *,
    pieces: Sequence[Piece] | None = None,
    whole: Sequence[str] | None = None,
) -> M:
    """Put an adapter on a model, in place, and use it; everything else is frozen. At first nothing changes,
    but by prompts, which are there from the start.

    A second call with the same name and other targets extends it (other coefficients for other layers). `pieces` and
    `whole` (names of what is trained as a whole) take the place of what the configuration would choose: a file knows
    them. Raises `ValueError` where a target matches nothing or cannot be adapted.
    """
    problems = check(config)
    if problems:
        raise ConfigError(problems)
    if not name or "." in name:
        raise ValueError(f"an adapter's name has no dots and is not empty, unlike {name!r}")
    if getattr(model, "folded", False):
        raise ValueError("a folded model is for inference only; adapt it before folding")
    bank = bank_of(model)
    if bank is None and hasattr(model, "adapters"):
        raise ValueError(f"{type(model).__name__} has an attribute `adapters` of its own, where ours would go")
    if bank is not None and bank.merged is not None:
        raise ValueError(f"adapter {bank.merged!r} is merged; unmerge it before you add one")
    names = _whole(model, config) if whole is None else list(whole)
    parts = _parts(model, config) if pieces is None else [(config, list(pieces))]
    for part, some in parts:
        _refuse(model, part, some, bank, name)
    layers = [piece.layer for _, some in parts for piece in some]
    if bank is None:
        bank = Bank()
        bank.trainable = tuple(n for n, p in model.named_parameters() if p.requires_grad)
        model.requires_grad_(False)
        model.add_module("adapters", bank)
    if name not in bank.named:
        bank.named[name] = Adapter()
    adapter = bank.adapter(name)
    for part, some in parts:
        _extend(model, bank, adapter, part, some)
    _own(model, bank, adapter, names)
    for layer in dict.fromkeys(layers):
        dress(model, bank, layer, "layer")
    for above in _above(layers):
        if not isinstance(model.get_submodule(above), (nn.ModuleList, nn.ModuleDict)):
            dress(model, bank, above, "scope")
    if not config.train_norms:
        for found, module in below(model):
            if isinstance(module, _BatchNorm):
                dress(model, bank, found, "still")
                module.eval()
    adapter.train(model.training)
    return use(model, name)


def use(model: M, name: str | None) -> M:
    """Let one adapter work and train, in place; `None` is the base alone. Nothing is copied."""
    bank = _bank(model)
    if name is not None:
        bank.adapter(name)
    if bank.merged is not None and name != bank.merged:
        raise ValueError(f"adapter {bank.merged!r} is merged into the weights; unmerge it before you use another")
    for which, trains in ((bank.active, False), (name, True)):
        if which is not None and which in bank.named:
            for parameter in bank.adapter(which).parameters():
                parameter.requires_grad_(trains)
    bank.active = name
    bank.bind(model, name)
    return model


@contextmanager
def route(model: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Inside, sample i of a batch takes adapter names[i]; `None` is the base. For inputs with the batch first."""
    bank = _bank(model)
    for name in dict.fromkeys(names):
        if name is not None:
            bank.adapter(name)
    if bank.merged is not None:
        raise ValueError(f"adapter {bank.merged!r} is merged into the weights; unmerge it before you route")
    before, bank.route = bank.route, Route(names)
    try:
        yield
    finally:
        bank.route = before


def merge(model: M) -> M:
    """Add the changes of the adapter in use to the weights, in place. The base's are kept aside until `unmerge`.

    Raises `ValueError` where no adapter is in use, where it has prompts, or where a weight is no floating-point number
    (a quantised base).
    """
    bank = _bank(model)
    if bank.merged is not None:
        raise ValueError(f"adapter {bank.merged!r} is merged already")
    if bank.active is None:
        raise ValueError("no adapter is in use, so there is nothing to merge; call use(model, name) first")
    if bank.adapter(bank.active).prompts is not None:
        raise ValueError(
            f"adapter {bank.active!r} has prompts, which are tokens and cannot be added to weights; use it as it is, or"
            " take merged_copy(model), whose trunk keeps them"
        )
    return add_changes(model, bank, bank.active)


@torch.no_grad()
def add_changes(model: M, bank: Bank, name: str) -> M:
    """`merge` for one adapter, whatever else it has."""
    for layer in bank.adapter(name).places:
        weight = cast("Tensor", model.get_submodule(layer)._parameters["weight"])
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise ValueError(
                f"{layer} has weights of type {weight.dtype}, to which nothing can be added; use the adapter unmerged"
            )
    bank.enter()
    try:
        for layer in bank.adapter(name).places:
            module = model.get_submodule(layer)
            weight = cast("Tensor", module._parameters["weight"])
            bank.aside[layer] = weight.detach().clone()
            weight.copy_(changed(weight, kind_of(module), bank.at(layer, name)))
    finally:
        bank.leave()
    bank.merged = name
    return model


@torch.no_grad()
def unmerge(model: M) -> M:
    """The base's weights again, the same bits; the adapter works beside them as before."""
    bank = _bank(model)
    if bank.merged is None:
        raise ValueError("no adapter is merged")
    for layer, kept in bank.aside.items():
        cast("Tensor", model.get_submodule(layer)._parameters["weight"]).copy_(kept)
    bank.aside.clear()
    bank.merged = None
    return model


def remove(model: M, name: str) -> M:
    """Take an adapter off; with the last one the model is what it was."""
    bank = _bank(model)
    bank.adapter(name)
    if bank.merged is not None:
        raise ValueError(f"adapter {bank.merged!r} is merged; unmerge it before you remove one")
    if bank.active == name:
        use(model, None)
    del bank.named[name]
    bank.last = None
    if not bank.named:
        bank.bind(model, None)
        undress(model, bank)
        del model.adapters
        for full, parameter in model.named_parameters():
            parameter.requires_grad_(full in bank.trainable)
    return model


def quantise(model: M, bits: int, name: str | None = None) -> M:
    """Round the coefficients (or factors) of an adapter to `bits` bits, in place: quantisation after training.

    Raises `ValueError` where it is merged: the weights would stay as they are.
    """
    if (merged := _bank(model).merged) is not None:
        raise ValueError(f"adapter {merged!r} is merged into the weights; unmerge it before you round it")
    adapter = _bank(model).adapter(_chosen(model, name))
    with torch.no_grad():
        for parameter in adapter.groups.parameters():
            parameter.copy_(rounded(parameter, bits))
    return model


def counts(model: nn.Module, name: str | None = None) -> Counts:
    """Numbers that an adapter trains and stores (none: the one in use)."""
    bank = _bank(model)
    adapter = bank.adapter(_chosen(model, name))
    coefficients = sum(p.numel() for p in adapter.groups.parameters())
    whole = sum(p.numel() for p in adapter.own.parameters())
    statistics = sum(b.numel() for b in adapter.own.buffers())
    seeds = len({config.seed for config in adapter.configs if isinstance(config, (Nola, Pranc))})
    below = sum(t.numel() for t in base_state(model).values() if isinstance(t, nn.Parameter))
    return Counts(coefficients + whole, whole, coefficients + whole + statistics + seeds, below)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the model below its adapters, whichever is in use or merged."""
    bank = bank_of(model)
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if bank is None:
        return dict(pairs)
    kept = {full: bank.base.get(full) for full in bank.base.names()}
    aside = {f"{layer}.weight": weight for layer, weight in bank.aside.items()}
    found: dict[str, Tensor] = {}
    for full, tensor in pairs:
        if not full.startswith("adapters."):
            below = kept.get(full)
            found[full] = aside.get(full, tensor if below is None else below)
    return found


def bank_of(model: nn.Module) -> Bank | None:
    """The adapters of a model; none where it has none."""
    found = model._modules.get("adapters")
    return found if isinstance(found, Bank) else None


def _bank(model: nn.Module) -> Bank:
    bank = bank_of(model)
    if bank is None:
        raise ValueError(f"this {type(model).__name__} has no adapters; apply one first")
    return bank


def _chosen(model: nn.Module, name: str | None) -> str:
    name = _bank(model).active if name is None else name
    if name is None:
        raise ValueError("no adapter is in use; say which one is meant")
    return name


def _refuse(model: nn.Module, config: AdapterConfig, pieces: list[Piece], bank: Bank | None, name: str) -> None:
    """Raises `ValueError` for pieces that cannot be adapted, and for a trunk that takes no prompts."""
    if isinstance(config, Vpt):
        prompted_trunk(model)
        if bank is not None and name in bank.named and bank.adapter(name).prompts is not None:
            raise ValueError(f"adapter {name!r} has prompts already; give the new one another name")
    users: dict[int, list[str]] = {}
    for path, module in below(model):
        for leaf, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append(f"{path}.{leaf}")
    taken: set[str] = set()
    if bank is not None and name in bank.named:
        taken = {piece.name for places in bank.adapter(name).places.values() for piece, _, _ in places}
    still = any(isinstance(module, _BatchNorm) for _, module in below(model))
    for other in () if bank is None or not still else bank.named:
        unlike = [c for c in bank.adapter(other).configs if c.train_norms != config.train_norms]  # type: ignore[union-attr]
        if unlike:
            raise ValueError(
                f"adapter {other!r} has train_norms {unlike[0].train_norms}; adapters of a model with BatchNorm must"
                " agree on it"
            )
    for piece in pieces:
        weight = model.get_submodule(piece.layer)._parameters["weight"]
        others = [full for full in users[id(weight)] if full != f"{piece.layer}.weight"]
        if others:
            raise ValueError(
                f"{piece.layer} shares its weight with {others[0].removesuffix('.weight')}, which would change, too,"
                " when the adapter is merged; leave it out of the targets or untie the two"
            )
        if isinstance(config, (Lora, Nola)) and config.rank > min(piece.shape):
            raise ValueError(
                f"rank {config.rank} is larger than {piece.name}, a matrix of {piece.shape[0]} x {piece.shape[1]}; use"
                f" at most {min(piece.shape)}, or leave the layer out of the targets"
            )
        if piece.name in taken:
            raise ValueError(f"adapter {name!r} adapts {piece.name} already; give the new one another name")


def _above(layers: list[str]) -> list[str]:
    """The modules above all of these layers, from the model down to the lowest."""
    paths = [layer.split(".") for layer in layers]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return [".".join(shared[:i]) for i in range(len(shared) + 1)]


def head_names(model: nn.Module) -> list[str]:
    """Parameters of the classifier of any model: as it says itself, or by the usual names; none where it has none."""
    said = getattr(model, "head_parameters", None)
    if callable(said):
        return sorted(said())
    given = getattr(model, "get_classifier", None)
    found = given() if callable(given) else None
    names = [n for n, m in below(model) if isinstance(found, nn.Module) and m is found and n]
    names = names or [name for name in HEADS if isinstance(getattr(model, name, None), nn.Module)][:1]
    starts = tuple(f"{name}." for name in names)
    return [full for full, _ in model.named_parameters() if full.startswith(starts)] if starts else []


def _whole(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Names of what is trained as a whole: parameters of the head and of norms, and statistics of these."""
    names = head_names(model) if config.train_head else []
    if config.train_norms:
        for path, module in below(model):
            if "norm" in type(module).__name__.lower():
                tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
                names += [f"{path}.{leaf}" if path else leaf for leaf, _ in tensors]
    return list(dict.fromkeys(names))


def _parts(model: nn.Module, config: AdapterConfig) -> list[tuple[AdapterConfig, list[Piece]]]:
    """Which pieces a configuration adapts; a classifier with coefficients of its own is a part by itself."""
    if isinstance(config, Vpt):
        return [(config, [])]
    many = None if isinstance(config, Lora) else config.head_coefficients
    if many is None or isinstance(config, Lora):
        leave = _layers_of(head_names(model)) if config.train_head else []
        return [(config, find(model, config.targets, leave=leave))]
    if config.train_head:
        raise ValueError("head_coefficients adapts the classifier, which train_head trains as a whole; set one of them")
    head = _layers_of(head_names(model))
    own = [piece for path, module in below(model) if path in head for piece in pieces_of(path, module)]
    if not own:
        raise ValueError("head_coefficients: the model has no linear classifier to adapt; leave it out")
    body = find(model, config.targets, leave=head)
    if isinstance(config, Pranc):
        return [
            (replace(config, head_coefficients=None), body),
            (replace(config, coefficients=many, head_coefficients=None), own),
        ]
    of_head = replace(config, coefficients=many, coefficients_in=None, head_coefficients=None)
    return [(replace(config, head_coefficients=None), body), (of_head, own)]


def _layers_of(names: list[str]) -> list[str]:
    return list({name.rpartition(".")[0] for name in names})


def _extend(model: nn.Module, bank: Bank, adapter: Adapter, config: AdapterConfig, pieces: list[Piece]) -> None:
    if isinstance(config, Vpt):
        adapter.prompt(config, make_prompts(config, prompted_trunk(model)))
        dress(model, bank, "trunk", "prompted")
    else:
        weight = cast("Tensor", model.get_submodule(pieces[0].layer)._parameters["weight"])
        adapter.extend(config, pieces, weight.device)


def _own(model: nn.Module, bank: Bank, adapter: Adapter, names: list[str]) -> None:
    """Give an adapter copies of what it trains as a whole. They start from the base's."""
    for full in names:
        path, _, leaf = full.rpartition(".")
        module = model.get_submodule(path)
        if bank.base.get(full) is None:
            held = module._parameters.get(leaf)
            bank.base.keep(full, cast("Tensor", module._buffers[leaf]) if held is None else held)
        if adapter.own.get(full) is None:
            base = cast("Tensor", bank.base.get(full))
            copy = base.detach().clone()
            adapter.own.keep(full, nn.Parameter(copy) if isinstance(base, nn.Parameter) else copy)
        dress(model, bank, path, "owner")
