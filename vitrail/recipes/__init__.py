"""Named, typed run configurations, one family a file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vitrail.config import RunConfig

T = TypeVar("T")

FAMILIES: dict[str, tuple[str, ...]] = {
    "start": ("demo", "finetune", "vit"),
    "deit": ("deit-300", "deit-1000-distilled", "deit-resolution", "small-deit", "small-deit-distilled"),
    "cait": ("cait-400", "cait-384", "cait-distilled", "small-cait"),
    "resmlp": ("resmlp-400", "resmlp-oldstyle-90", "resmlp-distilled", "small-resmlp"),
    "patchconvnet": (
        "patchconvnet-1k",
        "patchconvnet-resolution",
        "patchconvnet-21k",
        "patchconvnet-21k-to-1k",
        "patchconvnet-per-class",
        "small-patchconvnet",
    ),
    "deit3": (
        "deit3-1k-400",
        "deit3-1k-800",
        "deit3-lowres",
        "deit3-21k-90",
        "deit3-21k-240",
        "deit3-21k-to-1k",
        "deit3-resolution",
        "rsb-a2",
        "small-deit3",
        "small-rsb",
    ),
    "pooling": ("sot", "gramian", "small-sot", "small-gramian"),
    "transfer": (
        "transfer-cifar",
        "transfer-flowers",
        "transfer-cars",
        "transfer-inat",
        "transfer-fgvc",
        "transfer-attention",
        "small-transfer",
    ),
    "grafit": ("grafit-imagenet", "grafit-transfer", "grafit-cifar100", "small-grafit"),
    "selfsupervised": (
        "byol-asym",
        "moco-v2",
        "isd-r18",
        "isd",
        "msf",
        "cmsf-self",
        "cmsf-semi",
        "cmsf-sup",
        "supcon",
        "resmlp-dino",
        "sima-dino",
        "small-byol",
        "small-unisiam",
        "small-moco",
        "small-isd",
        "small-msf",
        "small-cmsf",
        "small-supcon",
        "small-dino",
    ),
    "students": (
        "compres-1q",
        "compres-2q",
        "reg",
        "reg-bn",
        "cluster-classification",
        "crd",
        "small-compres",
        "small-simreg",
        "small-clusters",
        "small-crd",
    ),
    "attention_transfer": (
        "mae-pretrain",
        "mae-finetune",
        "mae-scratch",
        "attention-copy",
        "attention-copy-part",
        "attention-distill",
        "small-mae",
        "small-attention-copy",
        "small-attention-distill",
    ),
    "adaptive": (
        "ats-finetune",
        "sima",
        "avit",
        "adavit",
        "attack",
        "attack-ats-tiny",
        "attack-ats-small",
        "attack-ats-base",
        "attack-avit",
        "attack-avit-defence",
        "attack-adavit",
        "attack-cifar",
        "defence",
        "small-ats",
        "small-sima",
        "small-avit",
        "small-adavit",
        "small-attack-ats",
        "small-attack-avit",
        "small-attack-adavit",
        "small-defence",
    ),
    "long_tail": ("livt-pretrain", "livt", "small-livt-pretrain", "small-livt"),
    "adapters": ("nola-vit", "lora-vit", "nola-resnet", "small-nola", "small-lora"),
    "speedrun": ("speedrun-cifar10",),
    "diffusion": ("small-diffusion",),
    "text": ("text", "text-gpt", "text-spanbert", "text-roberta", "small-text"),
    "sequences": ("small-seq2seq",),
    "language": ("nola-gpt2", "lora-gpt2", "nola-llama2", "lora-llama2", "small-gpt2", "small-nola-gpt2"),
}
RECIPES: dict[str, str] = {name: f"vitrail.recipes.{family}" for family, names in FAMILIES.items() for name in names}
"""Name of every recipe -> module that holds the function of that name (`-` becomes `_`).

Besides its functions a module may hold `STATED` (what the source prints, by setting) and `BY_MODEL` (settings that
depend on the model, by recipe and model).
"""


def recipe(name: str, model: str | None = None) -> RunConfig:
    """The configuration of a named recipe, for another model where one is named: what depends on its size follows.

    Raises `ValueError` with near matches for an unknown name.
    """
    from vitrail.schema import near

    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}{near(name, RECIPES)} (`vitrail list recipes` names all)")
    module = import_module(RECIPES[name])
    made: RunConfig = getattr(module, name.replace("-", "_"))()
    if model is None or model == made.model.name:
        return made
    changes: Mapping[str, Any] = getattr(module, "BY_MODEL", {}).get(name, {}).get(model, {})
    without: Mapping[str, Any] = {"model.drop_path": None} if model.startswith("cifar_resnet") else {}  # it has none
    return with_values(made, {"model.name": model, **without, **changes})


def configured(name: str, values: Mapping[str, Any]) -> RunConfig:
    """A recipe with nested settings over it, as flags and YAML give them; what depends on the model follows theirs.

    Raises `ConfigError` with every problem at once.
    """
    from vitrail.config import from_mapping

    chosen = values.get("model")
    model = chosen.get("name") if isinstance(chosen, Mapping) else None
    return from_mapping(values, recipe(name, model if isinstance(model, str) else None))


def with_values(config: T, changes: Mapping[str, Any]) -> T:
    """A configuration with some of its settings changed, named as on the command line."""
    from dataclasses import replace

    for path, value in changes.items():
        section, _, rest = path.partition(".")
        inner = getattr(config, section)
        config = replace(config, **{section: with_values(inner, {rest: value}) if rest else value})  # type: ignore[type-var]
    return config


def about(name: str) -> str:
    """What a recipe's own description says."""
    from inspect import cleandoc

    return cleandoc(getattr(import_module(RECIPES[name]), name.replace("-", "_")).__doc__ or "")


def stated(name: str) -> dict[str, Any]:
    """What the recipe's source prints, by setting, and the `source` itself; empty where there is none."""
    found: dict[str, Any] = getattr(import_module(RECIPES[name]), "STATED", {}).get(name, {})
    return found
