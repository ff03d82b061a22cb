"""vitrail: image classifiers that are accurate for their cost.

>>> import vitrail
>>> model = vitrail.create_model("vit_micro_28", classes=10)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrail.moved import install
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.bench.run import bench as bench
    from vitrail.compare.run import compare_runs as compare_runs
    from vitrail.compare.run import compare_study as compare_study
    from vitrail.compare.study import Study as Study
    from vitrail.data.open import open_data as open_data
    from vitrail.fit.run import fit as fit
    from vitrail.measure.saliency import explain as explain
    from vitrail.model.build import create_model as create_model
    from vitrail.model.build import make_adaptive as make_adaptive
    from vitrail.model.build import replace_head as replace_head
    from vitrail.model.cost import cost as cost
    from vitrail.model.optimize import fold_affine as fold_affine
    from vitrail.model.optimize import fold_layerscale as fold_layerscale
    from vitrail.model.zoo import list_models as list_models
    from vitrail.recipes import recipe as recipe
    from vitrail.run.evaluate import evaluate as evaluate
    from vitrail.run.evaluate import load as load
    from vitrail.run.finish import Run as Run
    from vitrail.run.train import resume as resume
    from vitrail.run.train import train as train

PUBLIC = {  # name: its module, imported when the name is first asked for; list_models and recipe need no torch
    "bench": "bench.run",
    "compare_runs": "compare.run",
    "compare_study": "compare.run",
    "Study": "compare.study",
    "open_data": "data.open",
    "fit": "fit.run",
    "explain": "measure.saliency",
    "create_model": "model.build",
    "make_adaptive": "model.build",
    "replace_head": "model.build",
    "cost": "model.cost",
    "fold_affine": "model.optimize",
    "fold_layerscale": "model.optimize",
    "list_models": "model.zoo",
    "recipe": "recipes",
    "evaluate": "run.evaluate",
    "load": "run.evaluate",
    "Run": "run.finish",
    "resume": "run.train",
    "train": "run.train",
}
install()
__all__ = ["__version__", *PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(f"vitrail.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
