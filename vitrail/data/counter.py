"""Random numbers as a function of integers: the same (seed, counters) give the same bits on any machine, in any order.

Everything random in the data path is a function of what it belongs to (seed, epoch, image, step) and of nothing else,
so that workers, ranks, the order of work and a resumed run change no draw. The mixing function is SplitMix64 (Steele,
Lea and Flood, 2014), applied once a counter. Python's `hash` will not do: it is salted for text and nearly the identity
for small numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_STREAM_BYTES = 8


def seed_of(stream: str, *key: int) -> int:
    """Seed in [0, 2^64) of a named stream of draws and its key. Scalar: many times quicker than `bits` for one key.

    `stream` (at most 8 bytes) keeps draws of different purpose apart that happen to have the same key.

    >>> seed_of("order", 0, 1) == seed_of("order", 0, 1) != seed_of("order", 1, 0)
    True
    """
    name = stream.encode()
    assert len(name) <= _STREAM_BYTES, stream
    state = int.from_bytes(name, "little")
    for part in key:
        word = ((state ^ (part & _MASK)) + _GOLDEN) & _MASK
        word = ((word ^ (word >> 30)) * _FIRST) & _MASK
        word = ((word ^ (word >> 27)) * _SECOND) & _MASK
        state = word ^ (word >> 31)
    return state


def bits(seed: int, *counters: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for every element of the counters, which are broadcast together."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in counters))
    state = np.full(shape or (1,), seed % (1 << 64), np.uint64)
    for counter in (0, *counters):  # the leading 0 mixes the seed itself
        state = state + np.uint64(_GOLDEN) + np.asarray(counter).astype(np.uint64)  # arrays wrap around silently
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
        state = state ^ (state >> np.uint64(31))
    return state.reshape(shape)


def uniform(seed: int, *counters: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) for every element of the counters, which are broadcast together."""
    return (bits(seed, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
