"""Initial weights other than the customary normal of 0.02, as compared in CaiT (arXiv 2103.17239)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vitrail.model.block import Mlp
from vitrail.model.mixers.qkv import QkvMixer


def xavier(module: nn.Module, depth: int) -> None:
    """Xavier weights in every linear layer. A deviation of 0.02 suits widths of several hundred; in a narrow model each
    layer would shrink its input several times, and learning starts slowly."""
    for part in module.modules():
        if isinstance(part, QkvMixer):
            for rows in part.qkv.weight.chunk(3):
                nn.init.xavier_uniform_(rows)
            nn.init.xavier_uniform_(part.proj.weight)
        elif isinstance(part, Mlp):
            nn.init.xavier_uniform_(part.fc1.weight)
            nn.init.xavier_uniform_(part.fc2.weight)


@torch.no_grad()
def fixup(module: nn.Module, depth: int) -> None:
    """Fixup: the last layer of every branch starts at 0, the others are scaled by depth^(-1/2).

    The exponent is -1/(2m - 2) for m = 2 layers per branch. Scalar gains of 1 and shifts stand in the block.
    """
    for part in module.modules():
        if isinstance(part, QkvMixer):
            part.qkv.weight.mul_(depth**-0.5)
            nn.init.zeros_(part.proj.weight)
        elif isinstance(part, Mlp):
            part.fc1.weight.mul_(depth**-0.5)
            nn.init.zeros_(part.fc2.weight)


@torch.no_grad()
def t_fixup(module: nn.Module, depth: int) -> None:
    """T-Fixup: Xavier weights; values, projections and the channel branch scaled by 0.67 depth^(-1/4)."""
    gain = 0.67 * depth**-0.25
    xavier(module, depth)
    for part in module.modules():
        if isinstance(part, QkvMixer):
            part.qkv.weight.chunk(3)[2].mul_(gain)
            part.proj.weight.mul_(gain)
        elif isinstance(part, Mlp):
            part.fc1.weight.mul_(gain)
            part.fc2.weight.mul_(gain)


STARTS: dict[str, Callable[[nn.Module, int], None]] = {"xavier": xavier, "fixup": fixup, "t_fixup": t_fixup}
"""By name of `TrunkConfig.start`; the default is what every module draws itself."""
