"""Few-shot episodes on frozen features: N classes, K labelled images of each, evaluated on other images.

Everything is embedded once; an episode is a choice of rows, by seed and number, and a linear classifier is fitted to
each. Images generated from the labelled ones (by diffusion, mixing, augmentation) are added by a hook, and methods are
compared on the same episodes with equally many images. The protocol is that of GeNIe (Koohpayegani et al. 2023, arXiv
2312.02548).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.counter import uniform
from vitrail.measure.config import EpisodeConfig
from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, evaluator
from vitrail.measure.linear_classifiers import CLASSIFIERS
from vitrail.measure.retrieval import embedded_split
from vitrail.quantities import percent
from vitrail.schema import ConfigError, check, near

EPISODE = 0x65706973  # keeps these numbers apart from those by which training images are drawn
CLASS, ROW, SUPPORT = range(3)
FLOATS_AT_ONCE = 1 << 25


def mean_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval: 1.96 std / sqrt(n), as few-shot papers print it.

    The deviation is that of the values themselves (divided by n). Raises `ValueError` without values.

    >>> mean_interval([0.25, 0.25, 0.75, 0.75])
    (0.5, 0.245)
    """
    if not len(values):
        raise ValueError("an interval needs at least one episode")
    return float(np.mean(values)), 1.96 * float(np.std(values)) / math.sqrt(len(values))


@dataclass(frozen=True, eq=False)
class Episodes:
    """Which rows of an embedded set make up each episode. In an episode its classes count from 0, in this order."""

    classes: Tensor  # [episodes, way]
    support: Tensor  # [episodes, way, shot] rows of the set that labelled images come from
    queries: Tensor  # [episodes, way, queries] rows of the evaluated set
    left_out: tuple[int, ...] = ()  # classes with too few images

    def __len__(self) -> int:
        return len(self.classes)

    def part(self, first: int, stop: int) -> Episodes:
        """Episodes `first` to `stop`."""
        part = slice(first, stop)
        return Episodes(self.classes[part], self.support[part], self.queries[part], self.left_out)


Extra = Callable[[Episodes], Tensor]
"""Features [episodes, way, extra, width] of images that join the labelled ones of each class."""


@dataclass(frozen=True, eq=False)
class FewShot:
    """Accuracy over episodes."""

    accuracy: NDArray[np.float64]  # [episodes]
    extra: int = 0  # images added to the labelled ones of each class

    @property
    def mean(self) -> float:
        return float(self.accuracy.mean())

    @property
    def interval(self) -> float:
        """Half the width of the mean's 95 % interval."""
        return mean_interval(self.accuracy)[1]

    def against(self, other: FewShot) -> FewShot:
        """The difference from another method on the same episodes, episode by episode."""
        return FewShot(self.accuracy - other.accuracy, self.extra)

    def to_json(self) -> dict[str, Any]:
        mean, interval = mean_interval(self.accuracy)
        return {"mean": mean, "interval": interval, "std": float(self.accuracy.std()), "extra": self.extra}


def draw_episodes(
    labels: Tensor,
    config: EpisodeConfig,
    *,
    support: Tensor | None = None,
    among: Sequence[int] | None = None,
    names: Sequence[str] = (),
) -> Episodes:
    """The episodes of a set with `labels` [images]: functions of seed and number, so more of them begin with the same.

    `support` are the labels of another set that labelled images come from (none: the same set, never an image twice).
    Queries do not change with `shot`, and the labelled images of fewer shots are among those of more. `among` are the
    classes to draw from (none: all); those with too few images are left out. Raises `ConfigError` for settings out of
    range, `ValueError` where too few classes remain.
    """
    problems = check(config)
    if problems:
        raise ConfigError(problems)
    here = _rows_of(labels.cpu().numpy())
    there = here if support is None else _rows_of(support.cpu().numpy())
    able: list[int] = []
    left_out: list[int] = []
    for c in sorted(set(here) | set(there) if among is None else set(among)):
        needed = config.queries + (config.shot if support is None else 0)
        enough = len(here.get(c, ())) >= needed and len(there.get(c, ())) >= config.shot
        (able if enough else left_out).append(c)
    if len(able) < config.way:
        images = f"{config.shot} labelled and {config.queries} query images"
        images += " in the same split" if support is None else ""
        problem = f"{config.way}-way episodes need {config.way} classes with {images}, and {len(able)} have so many"
        if left_out:
            poorest = min(left_out, key=lambda c: len(here.get(c, ())))
            name = names[poorest] if names else str(poorest)
            problem += f" ({name!r} has {len(here.get(poorest, ()))} to evaluate)"
        raise ValueError(f"{problem}; ask for fewer --way, --shot or --queries")
    classes = np.zeros((config.episodes, config.way), np.int64)
    shots = np.zeros((config.episodes, config.way, config.shot), np.int64)
    queries = np.zeros((config.episodes, config.way, config.queries), np.int64)
    choice = np.array(able)
    for episode in range(config.episodes):
        classes[episode] = _shuffled(choice, config.episode_seed, episode, CLASS)[: config.way]
        for i, c in enumerate(classes[episode].tolist()):
            rows = _shuffled(here[c], config.episode_seed, episode, ROW)
            queries[episode, i], rest = rows[: config.queries], rows[config.queries :]
            if support is not None:
                rest = _shuffled(there[c], config.episode_seed, episode, SUPPORT)
            shots[episode, i] = rest[: config.shot]
    chosen, labelled, evaluated = (torch.from_numpy(array).to(labels.device) for array in (classes, shots, queries))
    return Episodes(chosen, labelled, evaluated, tuple(left_out))


def few_shot(
    features: Tensor,
    episodes: Episodes,
    classifiers: Sequence[str] = tuple(CLASSIFIERS),
    *,
    support: Tensor | None = None,
    extra: Extra | None = None,
    normalise: bool = True,
) -> dict[str, FewShot]:
    """Accuracy of each classifier on `episodes` of the evaluated set's `features` [images, width].

    `support` are the features of the set that labelled images come from (none: the same). With `normalise` all
    features have unit length.
    """
    options: dict[str, Any] = {"support": support, "normalise": normalise}
    return compare_few_shot(features, episodes, {"": extra}, classifiers, **options)[""]


def compare_few_shot(
    features: Tensor,
    episodes: Episodes,
    methods: Mapping[str, Extra | None],
    classifiers: Sequence[str] = tuple(CLASSIFIERS),
    *,
    support: Tensor | None = None,
    free: Collection[str] = (),
    normalise: bool = True,
) -> dict[str, dict[str, FewShot]]:
    """Method -> classifier -> accuracy on the same episodes; a method is a hook for extra images (none: no such).

    All methods must add equally many images to a class, but those named in `free` (labelled images alone, or a row at
    equal compute). Raises `ValueError` where budgets differ, before anything is fitted.
    """
    for name in classifiers:
        if name not in CLASSIFIERS:
            raise ValueError(f"no classifier {name!r}{near(name, CLASSIFIERS)}; there are {', '.join(CLASSIFIERS)}")
    if not len(episodes):
        raise ValueError("there are no episodes to evaluate on")
    pool = features if support is None else support
    way = episodes.classes.shape[1]
    right: dict[str, dict[str, list[Tensor]]] = {m: {c: [] for c in classifiers} for m in methods}
    budgets: dict[str, int] = {}
    rows = way * (episodes.support.shape[2] + episodes.queries.shape[2])
    size = max(1, FLOATS_AT_ONCE // max(1, 2 * rows * features.shape[1]))
    for first in range(0, len(episodes), size):
        part = episodes.part(first, first + size)
        added = {name: None if hook is None else hook(part) for name, hook in methods.items()}
        for name, more in added.items():
            wanted = [*part.classes.shape, "extra", features.shape[1]]
            if more is not None and (more.ndim != 4 or [*more.shape[:2], "extra", more.shape[3]] != wanted):
                raise ValueError(f"method {name!r} gave features of shape {list(more.shape)}; {wanted} are needed")
        count = {name: 0 if more is None else more.shape[2] for name, more in added.items()}
        if budgets and count != budgets:
            raise ValueError("a method adds more images in some episodes than in others; give each the same number")
        budgets = count
        _check_equal(budgets, free)
        queries = _flat(features[part.queries], normalise)
        numbers = torch.arange(way, device=features.device)
        target = numbers.repeat_interleave(part.queries.shape[2])
        for name, more in added.items():
            known = pool[part.support]
            if more is not None:
                known = torch.cat([known, more.to(known)], 2)
            label = numbers.repeat_interleave(known.shape[2]).expand(len(part), -1)
            known = _flat(known, normalise)
            for classifier in classifiers:
                fitted = CLASSIFIERS[classifier](known, label, way)
                hits = fitted.scores(queries).argmax(-1) == target
                right[name][classifier].append(hits.double().mean(1))
    return {
        name: {c: FewShot(torch.cat(parts).cpu().numpy(), budgets[name]) for c, parts in each.items()}
        for name, each in right.items()
    }


def aimed_at(features: Tensor, source: Tensor, target: Tensor) -> Extra:
    """The hook of GeNIe: for each class, images generated for it from labelled images of the episode's other classes.

    `features` [images, width] of images generated from row `source` [images] for class `target` [images]; (way - 1) *
    shot are added to each class. Raises `ValueError` for two images of one pair, and later for a missing pair.
    """
    most = int(target.max()) + 1
    key = source.long() * most + target.long()
    order = key.argsort()
    key, rows = key[order], features[order]
    if bool((key[1:] == key[:-1]).any()):
        raise ValueError("two images were generated from one image for the same class; give one of them")

    def extra(episodes: Episodes) -> Tensor:
        way = episodes.classes.shape[1]
        device = episodes.support.device
        others = torch.tensor([[other for other in range(way) if other != c] for c in range(way)], device=device)
        sources = episodes.support[:, others].flatten(2)  # [episodes, way, (way - 1) * shot]
        aims = episodes.classes[..., None].expand_as(sources)
        wanted = (sources * most + aims).to(key.device)
        row = torch.searchsorted(key, wanted).clamp(max=len(key) - 1)
        missing = (key[row] != wanted) | (aims >= most).to(key.device)
        if bool(missing.any()):
            where = tuple(missing.nonzero()[0].tolist())
            pair = f"row {int(sources[where])} for class {int(aims[where])}"
            raise ValueError(f"no image was generated from {pair}, which an episode needs")
        return rows[row]

    return extra


def episode_table(results: Mapping[str, Any]) -> ResultTable:
    """Accuracy of every classifier over the episodes."""
    kind = f"{results['way']}-way {results['shot']}-shot, {results['queries']} queries per class"
    title = f"{results['episodes']} episodes, {kind}"
    if results["left_out"]:
        title += f"\n{len(results['left_out'])} classes with too few images are left out"
    rows = [
        (name, percent(row["mean"]), f"± {100 * row['interval']:.1f}", f"{100 * row['std']:.1f}")
        for name, row in results["classifiers"].items()
    ]
    return ResultTable(title, ("classifier", "accuracy", "95 % interval", "std over episodes"), rows)


@evaluator("embedding", table=episode_table)
def evaluate_episodes(
    model: Model,
    data: Loaders,
    config: EpisodeConfig | None = None,
    classes: Sequence[str] = (),
    **where: Unpack[Where],
) -> Findings:
    """Few-shot accuracy of linear classifiers on the frozen embedding.

    `classes` are those to draw from (none: all of the data's).
    """
    config = config or EpisodeConfig()
    queries = embedded_split(model, data, data.split, **where)
    apart = config.support == "train" and data.split != "train"
    labelled = embedded_split(model, data, "train", **where) if apart else queries
    names = list(data.classes)
    unknown = [name for name in classes if name not in names]
    if unknown:
        raise ValueError(f"the data have no class {unknown[0]!r}{near(unknown[0], names)}")
    support, among = labelled.label if apart else None, [names.index(name) for name in classes] or None
    episodes = draw_episodes(queries.label, config, support=support, among=among, names=names)
    results = few_shot(queries.embedding, episodes, support=labelled.embedding)
    table = {name: getattr(config, name) for name in ("way", "shot", "queries", "episodes", "support")}
    table |= {"seed": config.episode_seed, "left_out": [names[c] for c in episodes.left_out]}
    table["classifiers"] = {name: result.to_json() for name, result in results.items()}
    numbers = {f"episodes_{name}": result.mean for name, result in results.items()}
    return {"numbers": numbers, "tables": {"episodes": table}, "pictures": {}}


def _rows_of(labels: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    if labels.ndim != 1:
        raise ValueError("episodes need one label per image; these data have several")
    order = np.argsort(labels, kind="stable")
    classes, first = np.unique(labels[order], return_index=True)
    return dict(zip(classes.tolist(), np.split(order, first[1:]), strict=True))


def _shuffled(values: NDArray[np.int64], seed: int, episode: int, what: int) -> NDArray[np.int64]:
    order: NDArray[np.int64] = values[np.argsort(uniform(seed, EPISODE, episode, what, values), kind="stable")]
    return order


def _check_equal(budgets: Mapping[str, int], free: Collection[str]) -> None:
    bound = {name: count for name, count in budgets.items() if name not in free}
    if len(set(bound.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in bound.items())
        raise ValueError(
            f"methods add different numbers of images to a class ({counts}); give all the same budget, or name those "
            "that may differ as free"
        )


def _flat(features: Tensor, normalise: bool) -> Tensor:
    """[episodes, way, images, width] -> [episodes, way * images, width]."""
    flat = features.flatten(1, 2).double()
    return F.normalize(flat, dim=-1) if normalise else flat
