"""vitrail: image classifiers that are accurate for their cost.

>>> import vitrail
>>> model = vitrail.create_model("vit_micro_28", classes=10)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.api import (
        Run,
        Study,
        bench,
        compare_runs,
        compare_study,
        cost,
        create_model,
        evaluate,
        explain,
        fold_affine,
        fold_layerscale,
        list_models,
        load,
        make_adaptive,
        open_data,
        recipe,
        replace_head,
        train,
    )

__all__ = [
    "Run",
    "Study",
    "__version__",
    "bench",
    "compare_runs",
    "compare_study",
    "cost",
    "create_model",
    "evaluate",
    "explain",
    "fold_affine",
    "fold_layerscale",
    "list_models",
    "load",
    "make_adaptive",
    "open_data",
    "recipe",
    "replace_head",
    "train",
]

_QUICK = {"list_models": "vitrail.model.zoo", "recipe": "vitrail.recipes"}  # need no torch


def __getattr__(name: str) -> Any:
    """Parts are imported when they are first asked for: `import vitrail` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_QUICK.get(name, "vitrail.api")), name)


def __dir__() -> list[str]:
    return __all__
