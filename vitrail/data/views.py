"""Augmentations of the views of an image: weak, strong, small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.data.augment import Augment
from vitrail.data.batch import ViewSpec
from vitrail.data.config import AugmentConfig, PreprocessConfig


def view_augments(
    spec: ViewSpec, strong: AugmentConfig, weak: AugmentConfig, preprocess: PreprocessConfig
) -> list[Augment]:
    """An augmentation for each view; those of equal settings are one object.

    Raises `ValueError` where a view wants another share of the image than a crop of its kind can give.
    """
    made: dict[tuple[AugmentConfig, PreprocessConfig], Augment] = {}
    found = []
    for view in spec.all():
        config = weak if view.weak else strong
        if view.scale is not None:
            if config.crop != "resized":
                name = "weak" if view.weak else "augment"
                raise ValueError(f"data.{name}.crop: views of several scales need resized crops, not {config.crop}")
            config = replace(config, scale=view.scale)
        seen = preprocess if view.size is None else replace(preprocess, size=view.size)
        if (config, seen) not in made:
            made[config, seen] = Augment(config, seen)
        found.append(made[config, seen])
    return found


def stored_alike(augments: Sequence[Augment]) -> bool:
    """Whether images stored once serve all of these: a resized crop takes any size, the other crops take their own."""
    crops = {augment.config.crop for augment in augments}
    sizes = {augment.preprocess.size for augment in augments}
    return len(crops) == 1 and (crops == {"resized"} or len(sizes) == 1)
