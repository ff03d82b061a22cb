"""Residual branches by depth: their LayerScale gains, and their norm relative to that of the stream.

As in CaiT (Touvron et al. 2021, arXiv 2103.17239).

Branches are `mixing` (attention or its replacement), `local` (XCiT's convolutions) and `channels` (the MLP); those
that stand side by side are summed. Known are blocks of ours and of plain timm ViTs: both name their parts alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.measure.looking import Mean
from vitrail.model.classifier import Classifier

PARTS = {"mixing": ("norm1", "ls1"), "local": ("norm3", "ls3"), "channels": ("norm2", "ls2")}
SIDE_BY_SIDE = {"mixing": "attns", "channels": "ffns"}  # lists of branches of a parallel block


def branch_parts(model: Classifier) -> list[dict[str, list[tuple[nn.Module, nn.Module]]]]:
    """For every block and branch the norms before and the gains behind it, one pair for each that stands beside.

    Nothing where blocks are not of this kind.
    """
    trunk: Any = model.trunk
    owner = getattr(trunk, "backbone", trunk)
    blocks = owner.blocks if hasattr(owner, "blocks") and getattr(trunk, "plain", True) else ()
    found = []
    for block in blocks:
        parts: dict[str, list[tuple[nn.Module, nn.Module]]] = {}
        for name, (norm, gain) in PARTS.items():
            beside = getattr(block, SIDE_BY_SIDE.get(name, ""), ())
            if beside and all(hasattr(b, "norm") and hasattr(b, "ls") for b in beside):
                parts[name] = [(b.norm, b.ls) for b in beside]
            elif getattr(block, norm, None) is not None and getattr(block, gain, None) is not None:
                parts[name] = [(getattr(block, norm), getattr(block, gain))]
        found.append(parts)
    return found if all(found) else []


def gain_values(gain: nn.Module) -> Tensor | None:
    """The learned numbers of a gain: LayerScale's, a gate's; none where a branch is added as it is."""
    for name in ("gamma", "gain"):
        values = getattr(gain, name, None)
        if isinstance(values, Tensor):
            return values.detach()
    return None


def layer_scales(model: Classifier) -> dict[str, list[float | None]]:
    """Mean magnitude of the gains of each branch, by depth; empty where no branch has a gain."""
    blocks = branch_parts(model)
    found: dict[str, list[float | None]] = {}
    for name in PARTS:
        depths: list[float | None] = []
        for parts in blocks:
            known = [v for _, gain in parts.get(name, ()) if (v := gain_values(gain)) is not None]
            depths.append(float(torch.cat([v.flatten() for v in known]).double().abs().mean()) if known else None)
        if any(value is not None for value in depths):
            found[name] = depths
    return found


class BranchRatios:
    """‖branch‖ / ‖stream‖ of every branch, all tokens of an image together, mean over images.

    The stream is what the branch reads, before its norm; the branch is what is added, gain included. Hooks are there
    only while `watching`.
    """

    def __init__(self, model: Classifier) -> None:
        self.blocks = branch_parts(model) if model.policy is None else []
        self.means: dict[tuple[str, int], Mean] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, every forward pass of the model counts."""
        hooks: list[Any] = []
        try:
            for depth, parts in enumerate(self.blocks):
                for name, pairs in parts.items():
                    hooks += self._watch(name, depth, pairs)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, name: str, depth: int, pairs: list[tuple[nn.Module, nn.Module]]) -> list[Any]:
        stream: list[Tensor] = []
        added: list[Tensor] = []

        def before(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if not stream:
                stream.append(given[0])

        def behind(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            added.append(out)
            if len(added) == len(pairs):
                ratio = _length(torch.stack(added).sum(0)) / _length(stream[0])
                self.means.setdefault((name, depth), Mean()).add(ratio, torch.ones(len(ratio), dtype=torch.bool))
                stream.clear()
                added.clear()

        made: list[Any] = [norm.register_forward_pre_hook(before) for norm, _ in pairs]
        return made + [gain.register_forward_hook(behind) for _, gain in pairs]

    def result(self) -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = {}
        for name in PARTS:
            depths = [self.means[name, i].values()[0] if (name, i) in self.means else None for i in self._depths()]
            if any(value is not None for value in depths):
                found[name] = depths
        return found

    def _depths(self) -> range:
        return range(len(self.blocks))


def _length(values: Tensor) -> Tensor:
    """Of [batch, ...], one number an image; float32, or more where the stream has more."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.flatten(1).norm(dim=1)
