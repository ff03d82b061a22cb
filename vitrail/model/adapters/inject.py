"""Which layers of a model are adapted, its adapters, and how they act without changing its weights, names or state.

An adapted layer is replaced in its parent by an `AdaptedLayer`, of a subclass of the layer's type, which shares
parameters, buffers, hooks and names with it. Calling it adds the low-rank side path. Its `weight` is the changed
weight, for whoever reads it in place of calling the layer: talking heads mix heads by it, the patch embedding is a
product with it on CUDA, a head of one map per class reads its rows. A convolution and a change without factors work by
it as well.

Modules above all adapted layers begin a pass: changes of all layers are computed at once, and forgotten when it ends.
Not only in `forward`: a classifier calls `encode` of its trunk, an objective `outputs` of the classifier. These
methods, and `train` of a frozen BatchNorm, are overridden in the instance by a partial function, which `copy.deepcopy`
copies with its arguments, so that a copy of a model has its own adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import takewhile
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitrail.model.adapters.config import AdapterConfig
from vitrail.model.adapters.methods import GROUPS, AdapterGroup, Change, LowRank, Prompts
from vitrail.schema import near

ENTRANCES = ("forward", "encode", "forward_features", "forward_intermediates", "outputs", "stack", "tokens")
Kind = Literal["linear", "transposed", "conv"]
PARTS = ("q", "k", "v")
FUSED = ("qkv", "c_attn", "Wqkv")  # ours and timm's, GPT-2's, and others that stack q, k and v in thirds
ROLES = {
    "q": ("q", "q_proj", "query", "to_q", "wq", "q_lin"),
    "k": ("k", "k_proj", "key", "to_k", "wk", "k_lin"),
    "v": ("v", "v_proj", "value", "to_v", "wv", "v_lin"),
    "output": ("proj", "o_proj", "out_proj", "c_proj", "dense", "wo", "out_lin", "to_out"),
    "mlp": (
        *("fc1", "fc2", "c_fc", "c_proj", "gate_proj", "up_proj", "down_proj", "lin1", "lin2", "w1", "w2", "w3"),
        *("fc_in", "fc_out", "dense"),
    ),
}
SETS = {
    **{part: (part,) for part in PARTS},
    "qv": ("q", "v"),
    "qkv": PARTS,
    "attention": (*PARTS, "output"),
    "mlp": ("mlp",),
    "all": (),
}


@dataclass(frozen=True)
class TargetMatrix:
    """A weight, or a third of a fused one, as a matrix."""

    layer: str  # name of its module
    part: str  # of a fused layer: q, k or v; otherwise empty
    start: int  # first output of the layer that it computes
    shape: tuple[int, int]  # outputs and inputs; of a convolution, as square as its kernel allows

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.part}" if self.part else self.layer

    @property
    def stop(self) -> int:
        return self.start + self.shape[0]


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of layer that an adapter can change; none where it cannot."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv2d):
        return "conv"
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # transformers' linear layer of GPT-2
    weight = module._parameters.get("weight")
    return "transposed" if named and weight is not None and weight.ndim == 2 else None


def square(entries: int) -> tuple[int, int]:
    """Sides of the matrix of so many entries that is nearest to a square, for kernels as in NOLA (arXiv 2310.02556).

    >>> square(64 * 3 * 7 * 7), square(16 * 3 * 3 * 3)
    ((96, 98), (18, 24))
    """
    side = next(d for d in range(math.isqrt(entries), 0, -1) if entries % d == 0)
    return side, entries // side


def matrices_of(name: str, module: nn.Module) -> list[TargetMatrix]:
    """The matrices of a layer: one, or three where q, k and v are fused; none of a model that is one bare layer."""
    kind, weight = kind_of(module), module._parameters.get("weight")
    if kind is None or weight is None or not name:
        return []
    if kind == "conv":
        return [TargetMatrix(name, "", 0, square(weight.numel()))]
    outputs, inputs = weight.T.shape if kind == "transposed" else weight.shape
    leaf = name.rpartition(".")[2]
    if leaf in FUSED and (outputs == 3 * inputs or (leaf == "qkv" and outputs % 3 == 0)):
        third = outputs // 3
        return [TargetMatrix(name, part, i * third, (third, inputs)) for i, part in enumerate(PARTS)]
    return [TargetMatrix(name, "", 0, (outputs, inputs))]


def role_of(matrix: TargetMatrix) -> str:
    """q, k, v, output, mlp, or nothing, by the name of a layer and of what it lies in."""
    if matrix.part:
        return matrix.part
    *path, leaf = matrix.layer.split(".")
    if leaf.isdigit() and path:  # `to_out.0`
        leaf = path.pop()
    inside = any(part in ("attn", "attention") or "attention" in part or part.endswith("_attn") for part in path)
    return next((role for role in (*PARTS, "output" if inside else "mlp") if leaf in ROLES[role]), "")


def below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model without its adapters, by name."""
    adapters = model._modules.get("adapters")
    return model.named_modules(memo=set() if adapters is None else {adapters})


def find(model: nn.Module, targets: Sequence[str], leave: Sequence[str] = ()) -> list[TargetMatrix]:
    """The matrices that any target names, in the order of the model, without layers named in `leave`.

    Raises `ValueError` where a target names nothing.
    """
    known = [matrix for name, module in below(model) if name not in leave for matrix in matrices_of(name, module)]
    chosen: set[TargetMatrix] = set()
    for target in targets:
        matching = {matrix for matrix in known if _matches(matrix, target)}
        if not matching:
            raise ValueError(_without_match(model, target, known, leave))
        chosen |= matching
    if not chosen:
        raise ValueError("an adapter without targets adapts nothing; name some, for instance qv, mlp or all")
    return [matrix for matrix in known if matrix in chosen]


def _matches(matrix: TargetMatrix, target: str) -> bool:
    if target in SETS:
        return target == "all" or role_of(matrix) in SETS[target]
    return _fits(matrix.name, target) or _fits(matrix.layer, target)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name or its end, from a dot on."""
    return fnmatchcase(f".{name}", f"*.{pattern}")


def _without_match(model: nn.Module, target: str, known: list[TargetMatrix], leave: Sequence[str]) -> str:
    matching = [m for name, m in below(model) if name not in leave and target not in SETS and _fits(name, target)]
    if others := {type(module).__name__ for module in matching}:
        return (
            f"what {target!r} matches cannot be adapted: {', '.join(sorted(others))}; adapters work on nn.Linear,"
            " nn.Conv2d and Conv1D"
        )
    examples = ", ".join(matrix.name for matrix in known[:4]) or "no linear layer and no convolution"
    return (
        f"no layer matches the target {target!r}{near(target, SETS)}; use {', '.join(SETS)} or a pattern of names"
        f" (here: {examples}{', ...' if len(known) > 4 else ''})"
    )


Changes = list[tuple[TargetMatrix, Change]]


class NamedTensors(nn.Module):
    """Parameters and buffers by their full names in the model; dots, which torch does not take, are slashes here."""

    def add(self, name: str, value: Tensor) -> None:
        if isinstance(value, nn.Parameter):
            self.register_parameter(name.replace(".", "/"), value)
        else:
            self.register_buffer(name.replace(".", "/"), value)

    def tensors(self) -> dict[str, Tensor]:
        members = {**self._parameters, **self._buffers}
        return {key.replace("/", "."): tensor for key, tensor in members.items() if tensor is not None}


class Adapter(nn.Module):
    """One adapter: groups of matrices, prompts, and what it trains whole (classifier, norms), by names of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[AdapterConfig] = []
        self.matrices: list[tuple[TargetMatrix, ...]] = []  # of each configuration
        self.groups = nn.ModuleList()
        self.own = NamedTensors()
        self.rows: dict[str, list[tuple[TargetMatrix, int, int]]] = {}  # of a layer: matrix, its group, its row there

    @property
    def count(self) -> int:
        """Matrices that it adapts."""
        return sum(map(len, self.rows.values()))

    @property
    def prompts(self) -> Prompts | None:
        return next((group for group in self.groups if isinstance(group, Prompts)), None)

    def group(self, number: int) -> AdapterGroup:
        return cast("AdapterGroup", self.groups[number])

    def extend(self, config: AdapterConfig, matrices: Sequence[TargetMatrix], device: torch.device) -> None:
        """Adapt more matrices, those of one shape together."""
        for shape in dict.fromkeys(matrix.shape for matrix in matrices):
            alike = [matrix for matrix in matrices if matrix.shape == shape]
            group = GROUPS[config.kind](config, shape, len(alike), self.count, device)
            for row, matrix in enumerate(alike):
                self.rows.setdefault(matrix.layer, []).append((matrix, len(self.groups), row))
            self.groups.append(group)

    def changes(self) -> list[list[Change]]:
        """The changes of every group's matrices."""
        return [group.changes() if isinstance(group, AdapterGroup) else [] for group in self.groups]


class AdapterSet(nn.Module):
    """All adapters of a model. Registered there as `adapters`, so that they move, train and are stored with it."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()
        self.base = NamedTensors()  # of the base: what some adapter replaces by its own
        self.active: str | None = None
        self.merged: str | None = None
        self.base_weights: dict[str, Tensor] = {}  # of layers, while an adapter is merged into them
        self.trainable: tuple[str, ...] = ()  # parameters of the base that had a gradient before
        self.depth = 0  # of nested entrances of a pass
        self.changes: list[list[Change]] | None = None  # of this pass, by group and row
        self.with_grad = False  # the pass began with gradients
        self.previous: list[list[Change]] | None = None  # of the last such pass, for blocks recomputed in its backward
        self.recomputed: set[str] = set()  # layers that build their own graph there (re-entrant checkpoints)

    def forward(self, x: Any) -> Any:
        """The identity: an `nn.Sequential` that has adapters calls all that is registered in it."""
        return x

    def adapter(self, name: str) -> Adapter:
        """Raises `ValueError` for a name that is not there."""
        if name not in self.named:
            have = ", ".join(self.named) or "none"
            raise ValueError(f"no adapter {name!r}{near(name, list(self.named))} (there are: {have})")
        return cast("Adapter", self.named[name])

    @property
    def in_use(self) -> Adapter | None:
        return None if self.active is None else self.adapter(self.active)

    def enter(self) -> None:
        """A pass begins: all changes are computed at once, so that layers share one generation of bases."""
        if self.depth == 0 and self.merged is None:
            self.previous, self.with_grad = None, torch.is_grad_enabled()
            self.changes = None if self.in_use is None else self.in_use.changes()
        self.depth += 1

    def leave(self) -> None:
        """It ends, and nothing of it remains: the next one may follow a step of the optimiser."""
        self.depth -= 1
        if self.depth == 0:
            if self.with_grad and not torch.compiler.is_compiling():
                self.previous = self.changes
            self.changes = None

    def at(self, layer: str) -> Changes:
        """Changes that the adapter in use makes in a layer; computed here and now where no pass has done so."""
        adapter = self.in_use
        if adapter is None or self.merged is not None:
            return []
        ready = self._ready(layer)
        return [
            (matrix, adapter.group(group).changes(slice(row, row + 1))[0] if ready is None else ready[group][row])
            for matrix, group, row in adapter.rows.get(layer, ())
        ]

    def _ready(self, layer: str) -> list[list[Change]] | None:
        """Changes that this pass has computed, or that the last one had for a block which is computed again.

        A checkpoint that is not re-entrant wants the very operations of the first time; a re-entrant one runs the first
        time without gradients, and then needs its own changes to take its share of the gradient through.
        """
        if torch.compiler.is_compiling():
            return self.changes
        if self.changes is not None:
            if self.with_grad and not torch.is_grad_enabled():
                self.recomputed.add(layer)
            return self.changes
        in_backward = torch._C._current_graph_task_id() >= 0
        return self.previous if in_backward and layer not in self.recomputed else None

    def bind(self, model: nn.Module) -> None:
        """Let the model hold whole tensors and prompts of the adapter in use, and the base's where it has none."""
        adapter = self.in_use
        own = {} if adapter is None else adapter.own.tensors()
        for full, base in self.base.tensors().items():
            path, _, leaf = full.rpartition(".")
            module = model.get_submodule(path)
            tensors: dict[str, Any] = module._parameters if isinstance(base, nn.Parameter) else module._buffers
            tensors[leaf] = own.get(full, base)
        trunk = model._modules.get("trunk")
        if trunk is not None and getattr(trunk, "takes_prompts", False) and "prompts" not in trunk._modules:
            trunk.__dict__["prompts"] = None if adapter is None else adapter.prompts  # parameters of the adapter alone

    def extra_repr(self) -> str:
        return f"in use: {self.active}" + (", merged" if self.merged is not None else "")

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins outside of any pass."""
        return {**self.__dict__, "depth": 0, "changes": None, "previous": None}


class AdaptedLayer(nn.Module):
    """A layer with the changes of the adapter in use; first among the base classes of its type, before the layer's."""

    base_layer: nn.Module  # the layer as it was
    layer_name: str
    layer_kind: str | None
    adapters: AdapterSet

    @property
    def weight(self) -> Tensor:
        base, changes = cast("Tensor", self._parameters["weight"]), self.adapters.at(self.layer_name)
        return changed(base, self.layer_kind, changes) if changes else base

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        changes = self.adapters.at(self.layer_name)
        if changes and (self.layer_kind == "conv" or not all(isinstance(change, LowRank) for _, change in changes)):
            return cast("Tensor", super().forward(x, *args, **options))
        out = cast("Tensor", self.base_layer.forward(x, *args, **options))
        if not changes:
            return out
        # A side path needs no changed weight and no gradient of its size.
        up, down = stacked(changes, out.shape[-1])
        inner = F.linear(x.to(out.dtype), down.to(out.dtype))
        # One product that begins from `out`: nothing more of its size is written.
        rows, ranks = out.reshape(-1, out.shape[-1]), inner.reshape(-1, inner.shape[-1])
        return torch.addmm(rows, ranks, up.to(out.dtype).T).view(out.shape)

    def train(self, mode: bool = True) -> Self:
        self.base_layer.training = mode
        return super().train(mode)


@cache
def _adapted_type(cls: Any) -> Any:
    return type(f"Adapted{cls.__name__}", (AdaptedLayer, cls), {"__module__": cls.__module__})


def inject(model: nn.Module, adapters: AdapterSet, layers: Sequence[str], train_norms: bool) -> None:
    """Let adapters act on these layers; without trained norms, every BatchNorm keeps the statistics of the base."""
    for name in layers:
        layer = model.get_submodule(name)
        if not isinstance(layer, AdaptedLayer):
            cls = _adapted_type(cast("Any", type(layer)))
            adapted = cls.__new__(cls)
            more = {"base_layer": layer, "layer_name": name, "layer_kind": kind_of(layer), "adapters": adapters}
            adapted.__dict__.update(layer.__dict__, **more)
            _replace(model, {layer: adapted})
    paths = zip(*(name.split(".") for name in layers), strict=False)
    above = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, paths)]
    for module in (model.get_submodule(".".join(above[:i])) for i in range(len(above) + 1)):
        for method in ENTRANCES:
            if callable(getattr(type(module), method, None)):
                module.__dict__[method] = partial(_in_pass, module, method, adapters)
    for _, module in below(model):
        if isinstance(module, _BatchNorm) and not train_norms:
            module.__dict__["train"] = partial(_stay_in_evaluation, module)
            module.eval()


def restore(model: nn.Module) -> None:
    """Every module as it was."""
    _replace(model, {module: module.base_layer for module in model.modules() if isinstance(module, AdaptedLayer)})
    for module in model.modules():
        for method, call in list(module.__dict__.items()):
            if isinstance(call, partial) and call.func in (_in_pass, _stay_in_evaluation):
                del module.__dict__[method]


def _replace(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Exchange modules wherever the model holds them."""
    for module in list(model.modules()):
        children = module._modules  # not `named_children`, which gives a module that is there twice once
        children.update({name: new[child] for name, child in children.items() if child is not None and child in new})


def _in_pass(module: nn.Module, method: str, adapters: AdapterSet, *args: Any, **options: Any) -> Any:
    adapters.enter()
    try:
        return getattr(type(module), method)(module, *args, **options)
    finally:
        adapters.leave()


def _stay_in_evaluation(norm: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(norm, mode=False)


def changed(base: Tensor, kind: str | None, changes: Changes) -> Tensor:
    """A weight with its changes, in the base's precision; added up in float32 at least."""
    wide = torch.promote_types(base.dtype, torch.float32)
    total = base.to(wide)
    for target, change in changes:
        matrix = (change.matrix() if isinstance(change, LowRank) else change).to(wide)
        if kind == "conv":
            total = total + matrix.view(base.shape)
            continue
        outputs = base.shape[1 if kind == "transposed" else 0]
        if target.shape[0] != outputs:
            matrix = F.pad(matrix, (0, 0, target.start, outputs - target.stop))
        total = total + (matrix.T if kind == "transposed" else matrix)
    return total.to(base.dtype)


def stacked(changes: Changes, outputs: int) -> tuple[Tensor, Tensor]:
    """One up [outputs, ranks] and one down [ranks, inputs] for all matrices of a layer, whose changes have factors."""
    pairs = [(target, cast("LowRank", change)) for target, change in changes]
    if len(pairs) == 1 and pairs[0][0].shape[0] == outputs:
        return pairs[0][1]
    ranks, before, ups = sum(len(change.down) for _, change in pairs), 0, []
    for target, (up, down) in pairs:
        ups.append(F.pad(up, (before, ranks - before - len(down), target.start, outputs - target.stop)))
        before += len(down)
    return torch.stack(ups).sum(0), torch.cat([change.down for _, change in pairs])
