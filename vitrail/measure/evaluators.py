"""Every way to judge a model, by name."""

from __future__ import annotations

from vitrail.measure.clusters import judge_clusters
from vitrail.measure.corruptions import judge_corruptions
from vitrail.measure.evaluate import Evaluator, classify
from vitrail.measure.few_labels import judge_few
from vitrail.measure.members import judge_members
from vitrail.measure.neighbourhoods import judge_purity
from vitrail.measure.probe import judge_linear
from vitrail.measure.retrieval import judge_neighbours, judge_retrieval

EVALUATORS: dict[str, Evaluator] = {
    "classification": classify,
    "knn": judge_neighbours,
    "retrieval": judge_retrieval,
    "members": judge_members,
    "linear": judge_linear,
    "clusters": judge_clusters,
    "few": judge_few,
    "purity": judge_purity,
    "corruptions": judge_corruptions,
}
WANT_TRAINING_IMAGES = frozenset({"knn", "retrieval", "linear", "clusters", "few", "purity"})
"""Those that compare with training images: their data must have a loader of them, as evaluation sees them."""
