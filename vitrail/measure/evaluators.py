"""Every way to judge a model, by name."""

from __future__ import annotations

from vitrail.measure.evaluate import Evaluator, classify
from vitrail.measure.retrieval import judge_neighbours, judge_retrieval

EVALUATORS: dict[str, Evaluator] = {
    "classification": classify,
    "knn": judge_neighbours,
    "retrieval": judge_retrieval,
}
WANT_TRAINING_IMAGES = frozenset({"knn", "retrieval"})
"""Those that compare with training images: their data must have a loader of them, as evaluation sees them."""
