"""ResNet-18 for 32-pixel images, registered with timm as `resnet18_32`.

timm's own begins with a 7x7 convolution of stride 2 and a pooling of stride 2, which leave one pixel of 32 at its end.
As usual for CIFAR, the first convolution here is 3x3 of stride 1 and the pooling is left out: 11.17 M parameters with
10 classes, 0.56 GMACs, a last map of 4x4. All else, the start included, is timm's ResNet.
"""

from __future__ import annotations

from typing import Any

import timm
from timm.models import register_model
from torch import nn

SIZE = {"input_size": (3, 32, 32), "test_input_size": None, "pool_size": (4, 4), "crop_pct": 1.0, "test_crop_pct": None}


@register_model
def resnet18_32(pretrained: bool = False, **options: Any) -> nn.Module:
    """Raises `ValueError` where published weights are asked for: there are none."""
    if pretrained:
        raise ValueError("resnet18_32 has no published weights; train it")
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    model: Any = timm.create_model("resnet18", **options)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **SIZE}
    return model
