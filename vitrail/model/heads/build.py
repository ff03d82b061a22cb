"""A head from its configuration."""

from __future__ import annotations

from vitrail.model.heads.class_token import ClassTokenHead
from vitrail.model.heads.config import ClassToken, HeadConfig, Mean
from vitrail.model.heads.head import Head
from vitrail.model.heads.mean import MeanHead


def build_head(config: HeadConfig, width: int, classes: int) -> Head:
    """The head that `config` describes, for tokens of `width`."""
    if isinstance(config, ClassToken):
        return ClassTokenHead(width, classes, config.drop)
    if isinstance(config, Mean):
        return MeanHead(width, classes, config.drop, config.norm_after)
    raise ValueError(f"the head {config.kind!r} belongs to timm models; choose class_token or mean")
