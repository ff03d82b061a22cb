"""`synthetic:numbers`: numbers in English words, and the same in digits: a small task of transduction.

    four hundred thousand two hundred seventeen
    4 0 0 2 1 7

Words do not stand in line with digits: a zero is no word, and what a word means depends on words that come after it.
Numbers have 1 to `?digits=6` digits, each length as often. A row is a function of (seed, number of the row) alone; of
every ten rows eight are train, one val and one test, and no number is in two of them: one that was drawn before stays
where it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitrail.data.completions import make_completions
from vitrail.data.counter import seed_of
from vitrail.data.source import DataSet

OPTIONS = {"n": "2000", "seed": "0", "digits": "6"}
MOST_DIGITS = 9
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
LARGE = ((10**6, "million"), (1000, "thousand"), (100, "hundred"))


def open_numbers(uri: str, options: Mapping[str, str]) -> DataSet:
    """`n` rows in all. Raises `ValueError` for options that are out of range."""
    values = {**OPTIONS, **options}
    for name, text in values.items():
        if not text.isdecimal():
            raise ValueError(f"{uri}: {name} must be a whole number, not {text!r}")
    n, seed, digits = (int(values[name]) for name in ("n", "seed", "digits"))
    if n < 20:
        raise ValueError(f"{uri}: n must be at least 20, not {n}")
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"{uri}: digits must be 1 to {MOST_DIGITS}, not {digits}")
    drawn = [number(seed, row, digits) for row in range(n)]
    place: dict[int, str] = {}
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for row, value in enumerate(drawn):
        splits[place.setdefault(value, ("train", "val", "test")[max(0, row % 10 - 7)])].append(row)
    pairs = [(spelled(value), " ".join(str(value))) for value in drawn]
    return make_completions(uri, pairs, {name: np.array(rows, np.int64) for name, rows in splits.items()})


def number(seed: int, row: int, digits: int) -> int:
    """The number of a row, of 1 to `digits` digits."""
    random = np.random.Generator(np.random.PCG64(seed_of("numbers", seed, row)))
    count = int(random.integers(1, digits + 1))
    return int(random.integers(10 ** (count - 1) if count > 1 else 0, 10**count))


def spelled(value: int) -> str:
    """A number below 10^9 in words, without "and" and hyphens.

    >>> spelled(400217)
    'four hundred thousand two hundred seventeen'
    >>> spelled(0), spelled(60), spelled(1000021)
    ('zero', 'sixty', 'one million twenty one')
    """
    if value < len(SMALL):
        return SMALL[value]
    for size, name in LARGE:
        if value >= size:
            rest = value % size
            return f"{spelled(value // size)} {name}" + (f" {spelled(rest)}" if rest else "")
    return TENS[value // 10] + (f" {SMALL[value % 10]}" if value % 10 else "")
