"""The composition root: data, model, objective and engine from a `RunConfig`, and what `import vitrail` offers."""

from vitrail.api.benching import bench
from vitrail.api.comparing import compare_runs, compare_study
from vitrail.api.evaluation import evaluate, load
from vitrail.api.studies import Study
from vitrail.api.training import Run, resume, train
from vitrail.data.open import open_data
from vitrail.measure.saliency import explain
from vitrail.model.build import create_model, make_adaptive, replace_head
from vitrail.model.cost import cost
from vitrail.model.fold import fold_affine, fold_layerscale
from vitrail.model.zoo import list_models
from vitrail.recipes import recipe

__all__ = [
    "Run",
    "Study",
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
    "resume",
    "train",
]
