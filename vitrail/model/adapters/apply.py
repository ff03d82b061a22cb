"""Adapters on any model: applied, switched, routed, merged, counted and removed. The base is never changed.

apply(model, Nola(rank=8, coefficients=1000, targets=("mlp",)), "birds")   # in use, and all else frozen
use(model, "cars");  use(model, None)                                       # another one; the base alone
logits = route(model, ["birds", "cars", None], images)                      # one per sample
merge(model);  unmerge(model)                                               # no cost at inference; bit for bit back

Prompts (`Vpt`) are no change of weights: they cannot be merged in place, but `merged_copy` keeps them in its trunk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc, Vpt
from vitrail.model.adapters.inject import (
    Adapter,
    AdapterSet,
    TargetMatrix,
    below,
    changed,
    find,
    inject,
    kind_of,
    matrices_of,
    restore,
)
from vitrail.model.adapters.methods import Prompts, rounded, straight_through
from vitrail.schema import ConfigError, check

M = TypeVar("M", bound=nn.Module)
HEADS = ("head", "fc", "classifier", "score", "heads")
"""Usual names of a classifier at the top of a model that does not say so itself."""


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of an adapter."""

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
    matrices: Sequence[TargetMatrix] | None = None,
    whole: Sequence[str] | None = None,
) -> M:
    """Put an adapter on a model, in place, and use it; everything else is frozen. At first nothing changes,
    but by prompts, which are there from the start.

    A second call with the same name and other targets extends it (other coefficients for other layers). `matrices` and
    `whole` (names of what is trained as a whole) take the place of what the configuration would choose: a file knows
    them. Raises `ValueError` where a target matches nothing or cannot be adapted.
    """
    if problems := check(config):
        raise ConfigError(problems)
    if not name or "." in name:
        raise ValueError(f"an adapter's name has no dots and is not empty, unlike {name!r}")
    if getattr(model, "folded", False):
        raise ValueError("a folded model is for inference only; adapt it before folding")
    adapters = adapters_of(model)
    if adapters is None and hasattr(model, "adapters"):
        raise ValueError(f"{type(model).__name__} has an attribute `adapters` of its own, where ours would go")
    if adapters is not None and adapters.merged is not None:
        raise ValueError(f"adapter {adapters.merged!r} is merged; unmerge it before you add one")
    whole = _whole(model, config) if whole is None else whole
    parts = _parts(model, config) if matrices is None else [(config, list(matrices))]
    for part, targets in parts:
        _check(model, part, targets, adapters, name)
    if adapters is None:
        adapters = AdapterSet()
        adapters.trainable = tuple(n for n, p in model.named_parameters() if p.requires_grad)
        model.requires_grad_(False)
        model.add_module("adapters", adapters)
    if name not in adapters.named:
        adapters.named[name] = Adapter()
    adapter = adapters.adapter(name)
    for part, targets in parts:
        if isinstance(part, Vpt):
            trunk = prompted_trunk(model)
            layers = len(trunk.blocks) if part.deep else 1
            with next(trunk.parameters()).device:
                prompts = Prompts(layers, part.tokens, trunk.width, trunk.config.patch, part.drop, part.bits)
            adapter.groups.append(prompts)
        else:
            adapter.extend(part, targets, _weight(model, targets[0].layer).device)
        adapter.configs.append(part)
        adapter.matrices.append(tuple(targets))
    state = base_state(model) if whole else {}
    for full in whole:
        adapters.base.add(full, state[full])
        if full not in adapter.own.tensors():
            values = state[full].detach().clone()
            adapter.own.add(full, nn.Parameter(values) if isinstance(state[full], nn.Parameter) else values)
    adapted = list(dict.fromkeys(target.layer for _, targets in parts for target in targets))
    inject(model, adapters, adapted, config.train_norms)
    adapter.train(model.training)
    return use(model, name)


def use(model: M, name: str | None) -> M:
    """Let one adapter work and train, in place; `None` is the base alone. Nothing is copied."""
    adapters = required(model)
    if name is not None:
        adapters.adapter(name)
    if adapters.merged is not None and name != adapters.merged:
        raise ValueError(f"adapter {adapters.merged!r} is merged into the weights; unmerge it before you use another")
    for which, trains in ((adapters.active, False), (name, True)):
        if which is not None and which in adapters.named:
            for parameter in adapters.adapter(which).parameters():
                parameter.requires_grad_(trains)
    adapters.active = name
    adapters.bind(model)
    return model


def route(model: nn.Module, names: Sequence[str | None], inputs: Tensor) -> Tensor:
    """Outputs [batch, ...] of a batch of which sample i takes adapter names[i]; `None` is the base.

    Samples of one adapter pass together; the adapter in use stays in use.
    """
    active, distinct = required(model).active, list(dict.fromkeys(names))
    if len(inputs) != len(names):
        raise ValueError(
            f"adapters are named for {len(names)} samples, but there are {len(inputs)}; give one name per sample, and"
            " inputs whose first dimension is the batch"
        )
    rows = [[i for i, name in enumerate(names) if name == chosen] for chosen in distinct]
    try:
        outputs = [use(model, name)(inputs[samples]) for name, samples in zip(distinct, rows, strict=True)]
    finally:
        use(model, active)
    return torch.cat(outputs)[torch.tensor([i for samples in rows for i in samples]).argsort().to(inputs.device)]


def merge(model: M) -> M:
    """Add the changes of the adapter in use to the weights, in place. The base's are kept until `unmerge`.

    Raises `ValueError` where no adapter is in use, where it has prompts, or where a weight is no floating-point number
    (a quantised base).
    """
    adapters = required(model)
    if adapters.merged is not None:
        raise ValueError(f"adapter {adapters.merged!r} is merged already")
    if adapters.active is None:
        raise ValueError("no adapter is in use, so there is nothing to merge; call use(model, name) first")
    if adapters.adapter(adapters.active).prompts is not None:
        raise ValueError(
            f"adapter {adapters.active!r} has prompts, which are tokens and cannot be added to weights; use it as it"
            " is, or take merged_copy(model), whose trunk keeps them"
        )
    return _add_changes(model, adapters)


@torch.no_grad()
def _add_changes(model: M, adapters: AdapterSet) -> M:
    assert adapters.in_use is not None
    weights = {layer: _weight(model, layer) for layer in adapters.in_use.rows}
    for layer, weight in weights.items():
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise ValueError(
                f"{layer} has weights of type {weight.dtype}, to which nothing can be added; use the adapter unmerged"
            )
    adapters.enter()
    try:
        for layer, weight in weights.items():
            adapters.base_weights[layer] = weight.detach().clone()
            weight.copy_(changed(weight, kind_of(model.get_submodule(layer)), adapters.at(layer)))
    finally:
        adapters.leave()
    adapters.merged = adapters.active
    return model


@torch.no_grad()
def unmerge(model: M) -> M:
    """The base's weights again, the same bits; the adapter works next to them as before."""
    adapters = required(model)
    if adapters.merged is None:
        raise ValueError("no adapter is merged")
    for layer, weight in adapters.base_weights.items():
        _weight(model, layer).copy_(weight)
    adapters.base_weights.clear()
    adapters.merged = None
    return model


def merged_copy(model: M) -> M:
    """A copy without adapters whose weights have the changes of the one in use; the model itself stays as it is.

    For everything that reads weights where they lie. Prompts become a part of its trunk. Equal to the model to
    rounding. Raises `ValueError` where nothing can be added to the weights (a quantised base).
    """
    merged = copy.deepcopy(model)
    adapters = adapters_of(merged)
    if adapters is None:
        return merged
    if adapters.active is not None and adapters.merged is None:
        _add_changes(merged, adapters)
    _discard(merged, adapters)
    if adapters.in_use is not None and (prompts := adapters.in_use.prompts) is not None:
        owner, options = cast("Any", merged), {"prompts": prompts.count, "deep_prompts": prompts.deep}
        with torch.no_grad():
            prompts.values.copy_(straight_through(prompts.values, prompts.bits))
        prompts.drop, prompts.bits, owner.trunk.prompts = 0.0, None, prompts
        owner.trunk.config = replace(owner.trunk.config, **options)
        owner.spec = {**owner.spec, "trunk": {**owner.spec["trunk"], **options}}
    return merged


def remove(model: M, name: str) -> M:
    """Take an adapter off; with the last one the model is what it was."""
    adapters = required(model)
    adapters.adapter(name)
    if adapters.merged is not None:
        raise ValueError(f"adapter {adapters.merged!r} is merged; unmerge it before you remove one")
    if adapters.active == name:
        use(model, None)
    del adapters.named[name]
    adapters.previous = None
    if not adapters.named:
        _discard(model, adapters)
    return model


def _discard(model: nn.Module, adapters: AdapterSet) -> None:
    restore(model)
    del model.adapters
    for full, parameter in model.named_parameters():
        parameter.requires_grad_(full in adapters.trainable)


def quantise(model: M, bits: int, name: str | None = None) -> M:
    """Round the coefficients (or factors) of an adapter to `bits` bits, in place: quantisation after training.

    Raises `ValueError` where it is merged: the weights would stay as they are.
    """
    if (merged := required(model).merged) is not None:
        raise ValueError(f"adapter {merged!r} is merged into the weights; unmerge it before you round it")
    with torch.no_grad():
        for parameter in _chosen(model, name).groups.parameters():
            parameter.copy_(rounded(parameter, bits))
    return model


def counts(model: nn.Module, name: str | None = None) -> Counts:
    """Parameters that an adapter trains and stores (none: the one in use)."""
    adapter = _chosen(model, name)
    parameters = [t for t in base_state(model).values() if isinstance(t, nn.Parameter)]
    counted = (adapter.groups.parameters(), adapter.own.parameters(), adapter.own.buffers(), parameters)
    coefficients, whole, statistics, base = (sum(tensor.numel() for tensor in tensors) for tensors in counted)
    seeds = len({config.seed for config in adapter.configs if isinstance(config, (Nola, Pranc))})
    return Counts(coefficients + whole, whole, coefficients + whole + statistics + seeds, base)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the model below its adapters, whichever is in use or merged."""
    adapters = adapters_of(model)
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state |= model.named_buffers(remove_duplicate=False)
    if adapters is None:
        return state
    kept = adapters.base.tensors() | {f"{layer}.weight": weight for layer, weight in adapters.base_weights.items()}
    return {full: kept.get(full, tensor) for full, tensor in state.items() if not full.startswith("adapters.")}


def adapters_of(model: nn.Module) -> AdapterSet | None:
    """The adapters of a model; none where it has none."""
    adapters = model._modules.get("adapters")
    return adapters if isinstance(adapters, AdapterSet) else None


def required(model: nn.Module, to: str = "") -> AdapterSet:
    """The adapters of a model that must have some; `to` completes the sentence of the `ValueError` otherwise."""
    adapters = adapters_of(model)
    if adapters is None:
        raise ValueError(f"this {type(model).__name__} has no adapters{to}; apply one first")
    return adapters


def _chosen(model: nn.Module, name: str | None) -> Adapter:
    adapters = required(model)
    name = adapters.active if name is None else name
    if name is None:
        raise ValueError("no adapter is in use; say which one is meant")
    return adapters.adapter(name)


def _weight(model: nn.Module, layer: str) -> Tensor:
    return cast("Tensor", model.get_submodule(layer)._parameters["weight"])


def _check(
    model: nn.Module, config: AdapterConfig, matrices: list[TargetMatrix], adapters: AdapterSet | None, name: str
) -> None:
    """Raises `ValueError` for matrices that cannot be adapted, and for a trunk that takes no prompts."""
    named: Any = {} if adapters is None else adapters.named
    extended = named[name] if name in named else Adapter()
    if isinstance(config, Vpt):
        prompted_trunk(model)
        if extended.prompts is not None:
            raise ValueError(f"adapter {name!r} has prompts already; give the new one another name")
    taken = [target.name for targets in extended.matrices for target in targets]
    if any(isinstance(module, _BatchNorm) for _, module in below(model)):
        for other in named:
            if any(c.train_norms != config.train_norms for c in named[other].configs):
                raise ValueError(
                    f"adapter {other!r} has train_norms {not config.train_norms}; adapters of a model with BatchNorm"
                    " must agree on it"
                )
    users: dict[int, list[str]] = {}
    for path, module in below(model):
        for leaf, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append(f"{path}.{leaf}")
    for target in matrices:
        layer = f"{target.layer}.weight"
        if sharing := [full for full in users[id(_weight(model, target.layer))] if full != layer]:
            raise ValueError(
                f"{target.layer} shares its weight with {sharing[0].removesuffix('.weight')}, which would change, too,"
                " when the adapter is merged; leave it out of the targets or untie the two"
            )
        if isinstance(config, (Lora, Nola)) and config.rank > min(target.shape):
            raise ValueError(
                f"rank {config.rank} is larger than {target.name}, a matrix of {target.shape[0]} x {target.shape[1]};"
                f" use at most {min(target.shape)}, or leave the layer out of the targets"
            )
        if target.name in taken:
            raise ValueError(f"adapter {name!r} adapts {target.name} already; give the new one another name")


def head_names(model: nn.Module) -> list[str]:
    """Parameters of the classifier of any model: as it says itself, or by the usual names; none where it has none."""
    if callable(names := getattr(model, "head_parameters", None)):
        return sorted(names())
    getter = getattr(model, "get_classifier", None)
    head = getter() if callable(getter) else None
    paths = [name for name, module in below(model) if isinstance(head, nn.Module) and module is head and name]
    paths = paths or [name for name in HEADS if isinstance(getattr(model, name, None), nn.Module)][:1]
    return [full for full, _ in model.named_parameters() if full.startswith(tuple(f"{path}." for path in paths))]


def _whole(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Names of what is trained as a whole: parameters of the head and of norms, and statistics of these."""
    names = head_names(model) if config.train_head else []
    for path, module in below(model):
        if config.train_norms and "norm" in type(module).__name__.lower():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            names += [f"{path}.{leaf}" if path else leaf for leaf, _ in tensors]
    return list(dict.fromkeys(names))


def _parts(model: nn.Module, config: AdapterConfig) -> list[tuple[AdapterConfig, list[TargetMatrix]]]:
    """Which matrices a configuration adapts; a classifier with its own number of coefficients is a part by itself."""
    if isinstance(config, Vpt):
        return [(config, [])]
    head = list({name.rpartition(".")[0] for name in head_names(model)})
    if isinstance(config, Lora) or config.head_coefficients is None:
        return [(config, find(model, config.targets, leave=head if config.train_head else []))]
    if config.train_head:
        raise ValueError("head_coefficients adapts the classifier, which train_head trains as a whole; set one of them")
    classifier = [target for path, module in below(model) if path in head for target in matrices_of(path, module)]
    if not classifier:
        raise ValueError("head_coefficients: the model has no linear classifier to adapt; leave it out")
    body: Any = replace(config, head_coefficients=None)
    of_head = replace(body, coefficients=config.head_coefficients)
    if isinstance(of_head, Nola):
        of_head = replace(of_head, coefficients_in=None)
    return [(body, find(model, config.targets, leave=head)), (of_head, classifier)]


def prompted_trunk(model: nn.Module) -> Any:
    """The trunk of a model, which can take prompts. Raises `ValueError` where it cannot."""
    trunk: Any = getattr(model, "trunk", None)
    if not getattr(trunk, "takes_prompts", False):
        name = getattr(model, "spec", {}).get("name") or type(model).__name__
        raise ValueError(
            f"prompts go before our own blocks, and {name} has other ones (timm's, a text model's, a ResNet's, or under"
            " a guide); use --model.adapter lora, or a name such as vit_*, deit_*, deit3_* or cait_*"
        )
    if trunk._modules.get("prompts") is not None:
        raise ValueError("this trunk has prompts of its own already; adapt it otherwise (lora), or train all of it")
    trunk.reject_prompts()
    return trunk
