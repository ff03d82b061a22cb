"""Every way to judge a model, by name."""

from __future__ import annotations

from vitrail.measure.clustering import judge_clusters
from vitrail.measure.corruptions import judge_corruptions
from vitrail.measure.denoising import judge_denoising
from vitrail.measure.ensembles import judge_members
from vitrail.measure.episodes import judge_episodes
from vitrail.measure.evaluator import Evaluator, classify
from vitrail.measure.few_labels import judge_few
from vitrail.measure.language import judge_bleu, judge_perplexity
from vitrail.measure.long_tail import judge_long_tail, judge_thirds
from vitrail.measure.probe import judge_linear, judge_published
from vitrail.measure.retrieval import judge_neighbours, judge_purity, judge_retrieval

EVALUATORS: dict[str, Evaluator] = {
    "classification": classify,
    "knn": judge_neighbours,
    "retrieval": judge_retrieval,
    "members": judge_members,
    "linear": judge_linear,
    "linear_published": judge_published,
    "clusters": judge_clusters,
    "few": judge_few,
    "purity": judge_purity,
    "episodes": judge_episodes,
    "long_tail": judge_long_tail,
    "long_tail_thirds": judge_thirds,
    "corruptions": judge_corruptions,
    "denoising": judge_denoising,
    "perplexity": judge_perplexity,
    "bleu": judge_bleu,
}
WANT_TRAINING_IMAGES = frozenset({"knn", "retrieval", "linear", "linear_published", "clusters", "few", "purity"})
"""Those that compare with training images: their data must have a loader of them, as evaluation sees them."""
READ_EMBEDDINGS = WANT_TRAINING_IMAGES | {"episodes"}
"""Those that read the model's embedding alone: data with other classes than the model's will do."""
