"""Labels at several levels of a taxonomy: which class an image has at each, and which level is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vitrail.data.source import DataSet, Level
from vitrail.schema import near

FINEST = "fine"  # name of the level that `labels` of a source are on


def with_finest(
    classes: tuple[str, ...], multilabel: bool, coarser: Mapping[str, tuple[str, ...]]
) -> tuple[Level, ...]:
    """All levels, finest first, given the classes of the coarser ones in order; none where there are no coarser ones.

    Images with several labels have no single class at the finest level, so there it is left out.
    """
    if not coarser:
        return ()
    finest = () if multilabel else (Level(FINEST, classes),)
    return (*finest, *(Level(name, names) for name, names in coarser.items()))


def stacked(labels: NDArray[np.int64], coarser: list[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """[images, levels] of labels [images] (or [images, classes], left out as in `with_finest`) and the coarser ones."""
    if not coarser:
        return None
    columns = [labels, *coarser] if labels.ndim == 1 else coarser
    return np.stack(columns, 1).astype(np.int64)


def choose_level(data: DataSet, name: str) -> DataSet:
    """The data set whose labels and classes are those of a level (empty: as they are); `levels` keeps all of them.

    Raises `ValueError` for a level that is not there.
    """
    if not name:
        return data
    names = [level.name for level in data.levels]
    if name not in names:
        has = f"it has {', '.join(names)}" if names else "it has one level of labels only; leave this empty"
        raise ValueError(f"data.level: {data.uri} has no level {name!r} ({has}){near(name, names)}")
    if name == FINEST:
        return data
    column = names.index(name)
    splits = {}
    for key, split in data.splits.items():
        if split.levels is None:
            raise ValueError(f"data.level: split {key} of {data.uri} has no labels of level {name!r}; add them to it")
        splits[key] = replace(split, labels=np.ascontiguousarray(split.levels[:, column]))
    level = data.levels[column]
    if len(level.classes) < 2:
        raise ValueError(f"data.level: level {name!r} of {data.uri} has only one class ({', '.join(level.classes)})")
    note = f"labels are of level {name}: {len(level.classes)} classes, {len(data.classes)} at the finest"
    return replace(data, classes=level.classes, splits=splits, multilabel=False, notes=(*data.notes, note))
