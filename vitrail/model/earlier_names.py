"""Names and layouts that models had in files of earlier versions.

Every file of ours is read through `current_names`: a model's weights, and checkpoints, whose names begin with a section
(`objective/model.head.q.weight`, `optimizer/model.head.q.weight/exp_avg`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from vitrail.model.config import ModelConfig
from vitrail.model.heads.config import AttentionPool

T = TypeVar("T")

# Attention pooling had its layer's parameters beside the classifier; now it is the layer of class attention.
ATTENTION_POOL = (
    (r"query\b", "cls_token"),
    (r"(norm1|norm2|ls1|ls2|mlp)\.", r"blocks.0.\2."),
    (r"([qkv]|proj)\.", r"blocks.0.attn.\2."),
)


def current_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under the names that they have now.

    >>> current_names({"head.query": 1, "head.q.weight": 2, "head.fc.weight": 3})
    {'head.cls_token': 1, 'head.blocks.0.attn.q.weight': 2, 'head.fc.weight': 3}
    """
    heads = {found[1] for name in tensors if (found := re.search(r"(?:^|/)((?:[^/]*\.)?head\.)query(?:/|$)", name))}
    return {_current(name, heads): value for name, value in tensors.items()}


def _current(name: str, heads: set[str]) -> str:
    for head in heads:
        for pattern, now in ATTENTION_POOL:
            renamed, changed = re.subn(rf"(^|/){re.escape(head)}{pattern}", rf"\1{head}{now}", name)
            if changed:
                return renamed
    return name


def earlier_layout(chosen: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """The model of a run that is resumed, with the parts that its name stood for when the checkpoint was written.

    `stored` are the names in the checkpoint. PatchConvNets had BatchNorm in the stem and no biases in the pooling.
    """
    if not chosen.name.startswith("patchconvnet_") or "objective/model.trunk.patch_embed.norms.0.weight" not in stored:
        return chosen
    trunk = {"stem": {"kind": "conv", "norm": True}, **chosen.trunk}
    return replace(chosen, trunk=trunk, head=AttentionPool() if chosen.head is None else chosen.head)
