"""Corpus BLEU (Papineni and others 2002) of texts as people write them, each with one or more references.

Figures are those of sacrebleu's defaults over 100: words are cut as NIST's mteval-v13a does, up to four in a row are
counted, the reference nearest in length counts for brevity, and where no n-gram of a length is right, half of one is
counted, a quarter for the next length, and so on (its smoothing `exp`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

ORDER = 4
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
CUTS = (
    (re.compile(r"([{-~\[-` -&(-+:-@/])"), r" \1 "),  # punctuation and symbols, except in numbers and contractions
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),  # a full stop or comma that no digit precedes
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),  # or follows
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def words_of(text: str) -> list[str]:
    """Words and punctuation marks.

    >>> words_of("It costs 3.50, not 4.")
    ['It', 'costs', '3.50', ',', 'not', '4', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, sign in ENTITIES:
        text = text.replace(entity, sign)
    text = f" {text} "
    for pattern, way in CUTS:
        text = pattern.sub(way, text)
    return text.split()


def corpus_bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU in 0..1 of all texts together; `references[i]` are the right answers to `written[i]`.

    Raises `ValueError` where a text has none.
    """
    right, all_ = [0] * ORDER, [0] * ORDER
    length = wanted = 0
    for text, answers in zip(written, references, strict=True):
        if not answers:
            raise ValueError("BLEU compares with references, and a text has none")
        words, known = words_of(text), [words_of(answer) for answer in answers]
        length += len(words)
        wanted += min((abs(len(answer) - len(words)), len(answer)) for answer in known)[1]
        for n in range(1, ORDER + 1):
            most: Counter[tuple[str, ...]] = Counter()
            for answer in known:
                most |= _grams(answer, n)
            found = _grams(words, n)
            right[n - 1] += (found & most).total()
            all_[n - 1] += found.total()
    if not right[0] or not all(all_):
        return 0.0
    half, logs = 1.0, 0.0
    for hits, count in zip(right, all_, strict=True):
        half = half if hits else half / 2
        logs += math.log((hits or half) / count)
    return min(1.0, math.exp(1 - wanted / length)) * math.exp(logs / ORDER)


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
