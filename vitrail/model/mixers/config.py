"""Options of every mixer: how tokens exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.schema import Fraction


@dataclass(frozen=True)
class Softmax:
    """Scaled dot-product attention (architectures-and-training §2.3, eq. 3.1)."""

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = True
    attention_drop: Fraction = 0.0


MixerConfig = Softmax
