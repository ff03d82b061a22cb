"""ResNet-18 for 32-pixel images, as `timm:resnet18_32` wherever this file was imported.

timm's own begins with a 7x7 convolution of stride 2 and a pooling of stride 2, which leave one pixel of 32 at its end.
As usual for CIFAR, the first convolution is here 3x3 of stride 1 and the pooling is left out: 11.2 M parameters, 0.56
GMACs, a last map of 4x4. Models that were saved are read again by whoever imported this file.
"""

from __future__ import annotations

from typing import Any

import timm
from timm.models import register_model
from torch import nn


@register_model
def resnet18_32(pretrained: bool = False, **options: Any) -> nn.Module:
    """Raises `ValueError` where published weights are asked for: there are none."""
    if pretrained:
        raise ValueError("resnet18_32 has no published weights; train it")
    options.pop("pretrained_cfg", None)
    options.pop("pretrained_cfg_overlay", None)
    options.pop("cache_dir", None)
    model = timm.create_model("resnet18", **options)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
