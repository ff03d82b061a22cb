"""Settings of evaluators that have any. No torch here: `vitrail --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitrail.schema import Count, Range, Whole

CLASS_COUNTS = "class_counts"  # where a model's `stated` has the real training images of each class


@dataclass(frozen=True)
class EpisodeConfig:
    """Few-shot episodes."""

    way: Annotated[int, Range(2)] = 5
    """classes of each"""
    shot: Count = 1
    """labelled images of each class"""
    queries: Count = 16
    """images of each class that are classified"""
    episodes: Annotated[int, Range(2)] = 600
    """how many"""
    support: Literal["judged", "train"] = "judged"
    """labelled images are from the evaluated split (judged), as queries are, or from train"""
    episode_seed: Whole = 0
    """the same seed draws the same ones"""


@dataclass(frozen=True)
class LongTailConfig:
    """Classes by their training images: Many, Med, Few."""

    groups: Literal["counts", "thirds"] = "counts"
    """by `many` and `few`, or equally many classes in each, by rank"""
    many: Whole = 100
    """Many have more training images than this"""
    few: Whole = 20
    """Few have fewer training images than this"""
