"""Visual prompts as an adapter: which trunks take them, and what they are in a model without adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from vitrail.model.adapters.config import Vpt
from vitrail.model.adapters.quantise import straight_through
from vitrail.model.prompts import Prompts
from vitrail.model.trunks.guided import GuidedTrunk
from vitrail.model.trunks.vit import Trunk


def prompted_trunk(model: nn.Module) -> Trunk:
    """The trunk of a model, which can take prompts. Raises `ValueError` where it cannot."""
    trunk = getattr(model, "trunk", None)
    if not isinstance(trunk, Trunk) or isinstance(trunk, GuidedTrunk):
        name = getattr(model, "spec", {}).get("name") or type(model).__name__
        raise ValueError(
            f"prompts go before our own blocks, and {name} has other ones (timm's, a text model's, a ResNet's, or under"
            " a guide); use --model.adapter lora, or a name such as vit_*, deit_*, deit3_* or cait_*"
        )
    if trunk._modules.get("prompts") is not None:
        raise ValueError("this trunk has prompts of its own already; adapt it otherwise (lora), or train all of it")
    trunk.refuse_prompts()
    return trunk


def make_prompts(config: Vpt, trunk: Trunk) -> Prompts:
    """New prompts for a trunk, where its weights are."""
    layers = len(trunk.blocks) if config.deep else 1
    with next(trunk.parameters()).device:
        return Prompts(layers, config.tokens, trunk.width, trunk.config.patch, config.drop, config.bits)


@torch.no_grad()
def adopt(model: nn.Module, prompts: Prompts) -> None:
    """Make prompts a part of the trunk, in place, and of what the model says of itself."""
    trunk, owner = cast("Trunk", model.trunk), cast("Any", model)
    own = {"prompts": prompts.count, "deep_prompts": prompts.deep}
    trunk.config = replace(trunk.config, prompts=prompts.count, deep_prompts=prompts.deep)
    layers, count, width = prompts.values.shape
    trunk.prompts = Prompts(layers, count, width, trunk.config.patch).to(prompts.values).train(prompts.training)
    trunk.prompts.values.copy_(straight_through(prompts.values, prompts.bits))
    owner.spec = {**owner.spec, "trunk": {**owner.spec["trunk"], **own}}
