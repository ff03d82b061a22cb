"""Random numbers as a function of integers: the same (seed, counters) give the same bits on any machine, in any order.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), applied once a counter. It is for
choosing and placing, where a draw must not depend on how many others were made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def bits(seed: int, *counters: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for every element of the counters, which are broadcast together."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in counters))
    state = np.full(shape or (1,), seed % (1 << 64), np.uint64)
    for counter in (0, *counters):  # the leading 0 mixes the seed itself
        state = state + _GOLDEN + np.asarray(counter).astype(np.uint64)  # arrays wrap around silently
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return state.reshape(shape)


def uniform(seed: int, *counters: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) for every element of the counters, which are broadcast together."""
    return (bits(seed, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
