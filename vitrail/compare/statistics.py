"""Statistics of paired runs: permutation tests, bootstrap intervals, Holm's correction, disagreement of predictions.

Two kinds of chance are kept apart. Over *images*: would other test images of the same kind give these very models the
same order? Over *seeds*: would the same two recipes, trained again, come out in the same order? The interval covers
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LABELS = "labels"
EXACT_UP_TO = 16  # values whose signs are all tried, 2^15 ways; beyond that they are drawn
DRAWS = 10_000
LEAST = 1e-12  # rounding of the exact sum; no smaller p is ever reported
AT_ONCE = 2**22  # numbers of a draw held in memory

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Share of images with different top-1 predictions, for every pair (DeiT, arXiv 2012.12877, table 4).

    The first row are the labels: 1 - accuracy.
    """

    names: tuple[str, ...]
    rates: Tensor  # [names, names] float64; symmetric, zero on the diagonal

    def between(self, first: str, second: str) -> float:
        """The rate of one pair."""
        return float(self.rates[self.names.index(first), self.names.index(second)])

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "rates": self.rates.tolist()}


def disagreement(predictions: Mapping[str, Tensor], labels: Tensor) -> Disagreement:
    """Rates between the labels and every named prediction: logits [images, classes] or classes [images].

    Of equal logits the lower class number wins. Raises `ValueError` where predictions are not of the same images.

    >>> disagreement({"a": torch.tensor([0, 1]), "b": torch.tensor([0, 0])}, torch.tensor([0, 1])).rates.tolist()
    [[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.5, 0.5, 0.0]]
    """
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise ValueError(
            f"labels of shape {list(labels.shape)} are not class numbers [images]; decisions are compared where each "
            "image has one label"
        )
    if LABELS in predictions:
        raise ValueError(f"no prediction may be called {LABELS!r}: that is the first row")
    rows = [labels.detach().cpu().long()]
    for name, values in predictions.items():
        shape = list(values.shape)
        if values.ndim not in (1, 2) or len(values) != len(labels) or (values.ndim == 1 and values.is_floating_point()):
            raise ValueError(
                f"the prediction {name!r} has shape {shape}: logits [images, classes] or class numbers "
                f"[images] of the same {len(labels)} images are needed"
            )
        if values.isnan().any():
            raise ValueError(f"the prediction {name!r} has logits that are no numbers")
        rows.append((values.argmax(1) if values.ndim == 2 else values).detach().cpu().long())
    decisions = torch.stack(rows)
    different = (decisions[:, None] != decisions[None]).sum(-1).double()
    return Disagreement((LABELS, *predictions), different / len(labels))


def sign_flip_p(differences: Sequence[float] | Floats, *, draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: how often flipped signs give a mean as far from zero as this one.

    `differences` has one value per pair (a seed). Exact up to 16 pairs, by trying all signs; drawn beyond that. With n
    pairs no p is below 2 / 2^n, so five seeds can never be significant at 5 %, and six can.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    values = np.asarray(differences, np.float64)
    _check_pairs(values)
    observed = abs(values.sum())
    slack = 1e-12 * np.abs(values).sum()  # sums in another order differ by rounding
    if len(values) <= EXACT_UP_TO:
        ways = np.arange(2 ** (len(values) - 1))[:, None]  # the last sign stays: the other half mirrors this one
        signs = 1.0 - 2.0 * ((ways >> np.arange(len(values))) & 1)
        return float((np.abs(signs @ values) >= observed - slack).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(values)))
    return float((1 + (np.abs(signs @ values) >= observed - slack).sum()) / (1 + draws))


def sign_flip_p_whole(differences: Sequence[int] | Whole) -> float:
    """The same test for whole numbers, exact for any number of pairs (images).

    Sums of +-v have the characteristic function prod cos(v t); its inverse transform is their whole distribution. With
    values of -1, 0 and 1 this is McNemar's exact test. Values below 1e-12 are given as 1e-12.

    >>> sign_flip_p_whole([1, 2, 3])
    0.25
    """
    values = np.asarray(differences)
    _check_pairs(values)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"whole numbers are needed, not {values.dtype}; sign_flip_p takes any")
    observed, reach = int(abs(values.sum())), int(np.abs(values).sum())
    if observed == 0:
        return 1.0
    size = 2 ** (2 * reach + 1).bit_length()  # sums from -reach to reach, without overlap
    angle = 2 * np.pi * np.arange(size // 2 + 1) / size
    wave = np.ones_like(angle)
    for value, count in zip(*np.unique(np.abs(values[values != 0]), return_counts=True), strict=True):
        wave *= np.cos(angle * value) ** int(count)
    chances = np.fft.irfft(wave, size)
    return float(np.clip(2 * chances[observed : reach + 1].sum(), LEAST, 1.0))


def paired_interval(
    difference: NDArray[np.int64] | Floats, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of the mean of `difference` [seeds, images], seeds and images both drawn anew.

    `difference` is the hits of one model minus those of the other. Whole rows and whole columns are drawn with
    replacement, because one seed meets all images and one image all seeds. With one seed only images are drawn: the
    interval then says nothing of training again. Differences of seeds are widened by sqrt(n / (n - 1)), for resamples
    of n things vary less than they do: by half with two seeds.
    """
    values = np.asarray(difference)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(
            f"differences have shape {list(values.shape)}: [seeds, images] is needed, one of each at least"
        )
    seeds, images = values.shape
    # Images on which all seeds differ alike are one kind; how many of a kind are drawn is all that matters.
    kinds, counts = np.unique(values, axis=1, return_counts=True)
    share = counts / images
    widen = (seeds / (seeds - 1)) ** 0.5 if seeds > 1 else 1.0
    generator = np.random.default_rng(seed)
    means = []
    step = max(1, AT_ONCE // kinds.shape[1])
    for start in range(0, draws, step):
        count = min(step, draws - start)
        per_seed = generator.multinomial(images, share, count) @ kinds.T / images  # [draws, seeds]
        weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), count) / seeds
        centre = per_seed.mean(1)
        means.append(centre + widen * ((per_seed * weights).sum(1) - centre))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def holm(values: Sequence[float]) -> list[float]:
    """p-values raised so that the chance of any false one among them stays what each alone claims (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    raised, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        raised[index] = highest
    return raised


def _check_pairs(values: NDArray) -> None:
    if values.ndim != 1 or not len(values):
        raise ValueError(f"differences have shape {list(values.shape)}: one value per pair is needed, at least one")


def pareto(
    cost: Sequence[float], value: Sequence[float], cost_noise: Sequence[float] = (), value_noise: Sequence[float] = ()
) -> list[bool]:
    """Which points are on the Pareto front: no other is cheaper and not worse, or better and not more expensive.

    Noise is half the width of each point's interval (none: exact); two points differ where their distance is more than
    that of both. Several points of which no two differ in cost, and none is beaten, have no front.

    >>> pareto([1, 2, 3, 3], [0.5, 0.4, 0.9, 0.8])
    [True, False, True, False]
    """
    cheaper, better = (_above(v, n) for v, n in (([-c for c in cost], cost_noise), (value, value_noise)))
    beats = (cheaper & ~better.T) | (better & ~cheaper.T)
    front = len(cost) == 1 or cheaper.any() or beats.any()
    return [bool(front and not by.any()) for by in beats.T]


def _above(values: Sequence[float], noise: Sequence[float]) -> NDArray[np.bool_]:
    """[points, points]: whether the first is higher than the second by more than the noise of both."""
    points, wide = np.asarray(values, float), np.asarray(noise or [0.0] * len(values), float)
    return np.asarray(points[:, None] - points > np.hypot(wide[:, None], wide))
