"""Photographs of the data as a deployed model gets them, by which its latency is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from PIL.Image import Image

from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.counter import uniform
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.folder import decoded_at
from vitrail.data.sources.packed import FAR_MORE, of_files, pays_to_shrink, side_needed
from vitrail.model.assemble import default_preprocess

PICTURES = 32  # of train, that stand for what the deployed file will see
SECONDS, FEWEST = 1.5, 20  # of timing; calls at least


class Pictures:
    """Some of train, decoded as a model wants them; the same whenever they are asked for."""

    def __init__(self, train: Split, augments: Sequence[AugmentConfig]) -> None:
        self._train, self._augments = train, augments
        self._rows = train.take(uniform(0, train.index).argsort(kind="stable")[:PICTURES])
        self._decoded: dict[int | None, tuple[list[Image], float]] = {}
        widths, heights = zip(*(self._rows.read(row).size for row in range(len(self._rows))), strict=True)
        self.size = int(statistics.median(widths)), int(statistics.median(heights))
        self.side = int(statistics.median(map(min, widths, heights)))  # the shorter one

    def preprocess(self, config: PreprocessConfig) -> PreprocessConfig:
        """As a model that was trained on these photographs preprocesses them."""
        train, side = self._train, side_needed(self._augments, config)
        return replace(config, reducing_gap=FAR_MORE) if of_files(train) and pays_to_shrink(train, side) else config

    def decoded(self, config: PreprocessConfig) -> list[Image]:
        """The photographs as they come to a model's preprocessing."""
        return self._read(config)[0]

    def seconds(self, config: PreprocessConfig) -> float:
        """Of reading and decoding one, median: not part of a model's latency."""
        return self._read(config)[1]

    def preparing(self, size: int) -> float:
        """Seconds from a decoded photograph to the pixels of a model of this size, median."""
        config = self.preprocess(default_preprocess(size))
        return median_seconds(Preprocess(config).square, self.decoded(config))

    def _read(self, config: PreprocessConfig) -> tuple[list[Image], float]:
        least = Preprocess(config).at_least
        if least not in self._decoded:
            rows, images, times = decoded_at(self._rows, least), [], []
            for row in range(len(rows)):
                began = time.perf_counter()
                images.append(rows.read(row))
                times.append(time.perf_counter() - began)
            self._decoded[least] = images, statistics.median(times)
        return self._decoded[least]


def median_seconds(call: Callable[[Image], object], pictures: Sequence[Image]) -> float:
    """Of a call with one picture, after a few that warm up."""
    for picture in pictures[:5]:
        call(picture)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < FEWEST or time.perf_counter() < end:
        began = time.perf_counter()
        call(pictures[len(times) % len(pictures)])
        times.append(time.perf_counter() - began)
    return statistics.median(times)
