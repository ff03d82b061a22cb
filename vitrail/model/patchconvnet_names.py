"""Weights of PatchConvNet under their authors' names (Touvron et al. 2021, arXiv 2112.13692; facebookresearch/deit)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

PATCHCONVNET = (  # pattern of the authors' name -> ours, the first that matches
    (r"head\.", "head.fc."),
    (r"norm\.", "head.norm."),
    (r"cls_token", "head.cls_token"),
    (r"blocks_token_only\.(\d+)\.gamma_(\d)", r"head.blocks.\1.ls\2.gamma"),
    (r"blocks_token_only\.", "head.blocks."),
    (r"blocks\.(\d+)\.gamma_1", r"trunk.blocks.\1.ls1.gamma"),
    *(
        (rf"blocks\.(\d+)\.attn\.qkv_pos\.{place}\.", rf"trunk.blocks.\1.attn.{ours}.")
        for place, ours in (
            ("0", "fc1"),
            ("2", "depthwise"),
            (r"4\.conv_reduce", "squeeze"),
            (r"4\.conv_expand", "excite"),
            ("5", "fc2"),
        )
    ),
    # Convolutions stand at the even places of a sequence, activations between them.
    *((rf"patch_embed\.proj\.{2 * i}\.0\.", f"trunk.patch_embed.convs.{i}.") for i in range(4)),
)


def is_patchconvnet(state: Collection[str]) -> bool:
    return any(".attn.qkv_pos." in name for name in state)


def with_one_classifier(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with the classifiers of one map for each class, `head.0` to `head.999`, put together as `head`."""
    count = sum(name.startswith("head.") and name.endswith(".weight") for name in state)
    if "head.0.weight" not in state:
        return dict(state)
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    return kept | {f"head.{p}": torch.cat([state[f"head.{i}.{p}"] for i in range(count)]) for p in ("weight", "bias")}
