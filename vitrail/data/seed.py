"""One well-mixed 64-bit seed from a few whole numbers.

Everything random in the data path is a function of what it belongs to (seed, epoch, image, step) and of nothing else,
so that workers, ranks, the order of work and a resumed run change no draw. Python's `hash` will not do: it is salted
for text and nearly the identity for small numbers.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
_STREAM_BYTES = 8


def seed_of(stream: str, *key: int) -> int:
    """Seed in [0, 2^64) of a named stream of draws and its key; a chain of SplitMix64 rounds.

    `stream` (at most 8 bytes) keeps draws of different purpose apart that happen to have the same key.

    >>> seed_of("order", 0, 1) == seed_of("order", 0, 1) != seed_of("order", 1, 0)
    True
    """
    name = stream.encode()
    assert len(name) <= _STREAM_BYTES, stream
    state = int.from_bytes(name, "little")
    for part in key:
        state = _scramble(state ^ (part & MASK))
    return state


def _scramble(word: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for the state `word`."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)
