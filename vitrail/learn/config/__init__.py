"""Settings of the training objectives."""

from __future__ import annotations

from vitrail.learn.config.attacks import AttackConfig, DefenceConfig
from vitrail.learn.config.labels import (
    DistillationConfig,
    GrafitConfig,
    LanguageModelConfig,
    OneConfig,
    SupervisedConfig,
    named_weights,
)
from vitrail.learn.config.pictures import AttentionTransferConfig, DiffusionConfig, MaeConfig
from vitrail.learn.config.students import ClustersConfig, CompresConfig, CrdConfig, SimregConfig
from vitrail.learn.config.unlabelled import (
    BankConfig,
    ByolConfig,
    CmsfConfig,
    DinoConfig,
    IsdConfig,
    MocoConfig,
    MomentumConfig,
    MsfConfig,
    PairConfig,
    ProtonwConfig,
    SupconConfig,
    Views,
)

__all__ = [
    "WITHOUT_LABELS",
    "AttackConfig",
    "AttentionTransferConfig",
    "BankConfig",
    "ByolConfig",
    "ClustersConfig",
    "CmsfConfig",
    "CompresConfig",
    "CrdConfig",
    "DefenceConfig",
    "DiffusionConfig",
    "DinoConfig",
    "DistillationConfig",
    "GrafitConfig",
    "IsdConfig",
    "LanguageModelConfig",
    "MaeConfig",
    "MocoConfig",
    "MomentumConfig",
    "MsfConfig",
    "ObjectiveConfig",
    "OneConfig",
    "PairConfig",
    "ProtonwConfig",
    "SimregConfig",
    "SupconConfig",
    "SupervisedConfig",
    "Views",
    "learns_without_labels",
    "named_weights",
]

ObjectiveConfig = (
    SupervisedConfig
    | DistillationConfig
    | GrafitConfig
    | OneConfig
    | AttentionTransferConfig
    | MaeConfig
    | DiffusionConfig
    | LanguageModelConfig
    | ByolConfig
    | MocoConfig
    | IsdConfig
    | MsfConfig
    | CmsfConfig
    | CompresConfig
    | SimregConfig
    | ClustersConfig
    | CrdConfig
    | DinoConfig
    | SupconConfig
    | ProtonwConfig
    | AttackConfig
    | DefenceConfig
)

WITHOUT_LABELS = ("mae", "byol", "moco", "isd", "msf", "compres", "simreg", "clusters", "crd", "dino")


def learns_without_labels(config: ObjectiveConfig) -> bool:
    """Whether labels serve metrics only, so that unlabelled images can be used."""
    return config.kind in WITHOUT_LABELS or (isinstance(config, CmsfConfig) and config.constraint == "self")
