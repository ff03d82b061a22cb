"""Names that parameters had in files of earlier versions.

Every file of ours is read through `current_names`: a model's weights, and checkpoints, whose names begin with a section
(`objective/model.head.q.weight`, `optimizer/model.head.q.weight/exp_avg`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

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
