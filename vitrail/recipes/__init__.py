"""Named, typed run configurations, one family a file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.config import RunConfig

RECIPES: dict[str, str] = {
    "demo": "vitrail.recipes.start",
    "finetune": "vitrail.recipes.start",
    "vit": "vitrail.recipes.start",
    "speedrun-cifar10": "vitrail.recipes.speedrun",
}
"""Name of every recipe -> module that holds the function of that name (`-` becomes `_`)."""


def recipe(name: str) -> RunConfig:
    """The configuration of a named recipe. Raises `ValueError` with near matches for an unknown name."""
    from vitrail.schema import near

    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}{near(name, RECIPES)} (`vitrail list recipes` names all)")
    made: RunConfig = getattr(import_module(RECIPES[name]), name.replace("-", "_"))()
    return made


def about(name: str) -> str:
    """What a recipe's own description says."""
    from inspect import cleandoc

    return cleandoc(getattr(import_module(RECIPES[name]), name.replace("-", "_")).__doc__ or "")
