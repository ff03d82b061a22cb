"""The policy that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.avit import AvitPolicy
from vitrail.model.adaptive.config import AdaptiveConfig, Adavit, Ats, Avit
from vitrail.model.adaptive.policy import AdaptivePolicy
from vitrail.model.block import Block
from vitrail.model.config import TrunkConfig


def build_policy(config: AdaptiveConfig, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> AdaptivePolicy:
    """Raises `ValueError` where the trunk is not one that the policy can work in."""
    if isinstance(config, Ats):
        return AtsPolicy(config, blocks, prefix)
    if isinstance(config, Avit):
        return AvitPolicy(config, blocks, prefix)
    assert isinstance(config, Adavit)
    return AdavitPolicy(config, trunk, blocks, prefix)
