"""Named run configurations, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from vitrail.config import DataConfig, RunConfig, from_mapping
from vitrail.recipes.adaptive_compute import ADAPTIVE
from vitrail.recipes.coarse_and_rare import GRAFIT, LONG_TAIL
from vitrail.recipes.fine_tuning import ADAPTERS, TRANSFER
from vitrail.recipes.image_architectures import ARCHITECTURES, POOLING
from vitrail.recipes.mae_and_attention import ATTENTION_TRANSFER
from vitrail.recipes.plain_vits import DEIT, DEIT3
from vitrail.recipes.row import flat
from vitrail.recipes.starting_points import FROM_SCRATCH, START
from vitrail.recipes.text_models import LANGUAGE, SEQUENCES, TEXT
from vitrail.recipes.without_labels import SELFSUPERVISED, STUDENTS
from vitrail.schema import build, near, plain

T = TypeVar("T")

RECIPES = {
    **(START | DEIT | ARCHITECTURES | DEIT3 | POOLING | TRANSFER | GRAFIT | SELFSUPERVISED | STUDENTS),
    **(ATTENTION_TRANSFER | ADAPTIVE | LONG_TAIL | ADAPTERS | FROM_SCRATCH | TEXT | SEQUENCES | LANGUAGE),
}
"""Name of every recipe -> its row."""


def recipe(name: str, model: str | None = None) -> RunConfig:
    """The configuration of a named recipe, for another model where one is named: what depends on its size follows.

    Raises `ValueError` with near matches for an unknown name.
    """
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}{near(name, RECIPES)} (`vitrail list recipes` names all)")
    row = RECIPES[name]
    config = recipe(row.base) if row.base else RunConfig(data=DataConfig(uri=""))
    changes = {"recipe": name, **flat(row.settings), **flat(row.stated)}
    for path in [path for path in changes if path.endswith(".kind")]:  # parts first, then their settings
        kind = changes.pop(path)
        for key in reversed(path.split(".")):
            kind = {key: kind}
        config = build(RunConfig, kind, config)
    config = with_values(config, changes)
    if model is None or model == config.model.name:
        return config
    without = {"model.drop_path": None} if model.startswith("cifar_resnet") else {}  # it has none
    return with_values(config, {"model.name": model, **without, **row.by_model.get(model, {})})


def configured(name: str, values: Mapping[str, Any]) -> RunConfig:
    """A recipe with nested settings over it, as flags and YAML give them; what depends on the model follows theirs.

    Raises `ConfigError` with every problem at once.
    """
    chosen = values.get("model")
    model = chosen.get("name") if isinstance(chosen, Mapping) else None
    return from_mapping(values, recipe(name, model if isinstance(model, str) else None))


def with_values(config: T, changes: Mapping[str, Any]) -> T:
    """A configuration with some of its settings changed, named as on the command line."""
    changed: Any = config
    for path, value in changes.items():
        section, _, rest = path.partition(".")
        mapping = isinstance(changed, Mapping)  # overrides of a trunk
        inner = changed.get(section) if mapping else getattr(changed, section)
        new = with_values(inner, {rest: value}) if rest else value
        changed = {**changed, section: new} if mapping else replace(changed, **{section: new})
    return cast(T, changed)


def about(name: str) -> str:
    """What a recipe is, where its settings come from, its command and what to expect."""
    return RECIPES[name].header(f"vitrail train {name} {_inherited(name, 'command')}".strip())


def stated(name: str) -> dict[str, Any]:
    """Settings as published, by dotted path, and the publication as `source`; empty where there is none."""
    row = RECIPES[name]
    if not row.stated and not row.stated_in:
        return {}
    return {"source": _inherited(name, "stated_in"), **plain(flat(row.stated))}


def _inherited(name: str, text: str) -> str:
    row = RECIPES[name]
    return getattr(row, text) or (_inherited(row.base, text) if row.base else "")
