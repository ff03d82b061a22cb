"""`synthetic:grammar`: sentences of a small grammar, half of them broken by one error (a toy of CoLA).

    determiner (adjective) noun (preposition determiner noun) verb (determiner (adjective) noun) (adverb)

An error is one of two kinds, `?errors=agreement`, `order` or `both` (drawn for each broken sentence):

- agreement: the verb has the number of the wrong kind ("the dogs near a barn sleeps"). The noun that stands next to the
  verb is often another than its subject, of any number, so two places that may be far apart must be related: what a
  class token is for.
- order: a determiner and the word behind it are exchanged ("dog the sleeps"). The bag of words stays the same, but two
  neighbours stand as they never do in the language: a local clue, which word tokens carry.

How hard it is: after 8 epochs on 1,600 sentences an encoder from scratch (2 blocks of width 64, one seed) is right for
96 to 100 % of 200 test sentences with order errors, and near chance (47 to 61 %) with agreement errors: they need more.

No single word tells the class. A sentence is a function of (seed, index) alone; classes alternate; of every ten indices
eight are train, one val and one test.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitrail.data.counter import seed_of
from vitrail.data.source import DataSet
from vitrail.data.texts import Text, make_data
from vitrail.schema import near

OPTIONS = {"n": "2000", "seed": "0", "errors": "both"}
CLASSES = ("broken", "grammatical")
ERRORS = ("agreement", "order")
NOUNS = (
    *("dog", "cat", "bird", "king", "farmer", "teacher", "child", "river", "barn", "tree", "horse", "pilot"),
    *("singer", "doctor", "stone", "garden", "lamp", "ship", "baker", "robot", "lawyer", "wolf", "painter", "cloud"),
)
PLURALS = {"child": "children", "wolf": "wolves"}
INTRANSITIVE = ("sleep", "laugh", "wait", "fall", "sing", "dream", "run", "smile", "vanish", "return")
TRANSITIVE = ("see", "hear", "like", "follow", "paint", "help", "watch", "find", "know", "remember")
ENDINGS = {"vanish": "es", "watch": "es"}
ADJECTIVES = ("old", "young", "tall", "red", "quiet", "clever", "brave", "small", "lost", "bright", "strange", "tired")
PREPOSITIONS = ("near", "behind", "with", "above", "beside", "under")
ADVERBS = ("today", "slowly", "again", "often", "there", "quietly")
DETERMINERS = (("the", "a", "this", "every"), ("the", "some", "these", "many"))  # singular, plural


def open_grammar(uri: str, options: Mapping[str, str]) -> DataSet:
    """`n` sentences in all, half of them broken."""
    values = {**OPTIONS, **options}
    for name in ("n", "seed"):
        if not values[name].isdecimal():
            raise ValueError(f"{uri}: {name} must be a whole number, not {values[name]!r}")
    n, seed, errors = int(values["n"]), int(values["seed"]), values["errors"]
    if n < 20:
        raise ValueError(f"{uri}: n must be at least 20, not {n}")
    if errors not in (*ERRORS, "both"):
        raise ValueError(f"{uri}: errors is agreement, order or both, not {errors!r}{near(errors, (*ERRORS, 'both'))}")
    index = np.arange(n)
    place = index % 10
    labels = (index // 10 + place) % 2
    kinds = ERRORS if errors == "both" else (errors,)
    texts = [Text(sentence(seed, i, None if label else kinds)) for i, label in enumerate(labels.tolist())]
    splits = {"train": place < 8, "val": place == 8, "test": place == 9}
    return make_data(uri, texts, CLASSES, labels, {name: np.flatnonzero(rows) for name, rows in splits.items()})


def sentence(seed: int, index: int, errors: tuple[str, ...] | None = None) -> str:
    """Sentence number `index`, with one error of these kinds (none: as the grammar makes it).

    >>> sentence(0, 3)
    'some clouds near this doctor dream often'
    >>> sentence(0, 3, ("agreement",))
    'some clouds near this doctor dreams often'
    >>> sentence(0, 3, ("order",))
    'clouds some near this doctor dream often'
    """
    random = np.random.Generator(np.random.PCG64(seed_of("grammar", seed, index)))

    def one(words: tuple[str, ...]) -> str:
        return words[int(random.integers(len(words)))]

    words: list[str] = []
    starts: list[int] = []  # of determiners

    def phrase(plural: int) -> None:
        starts.append(len(words))
        words.append(one(DETERMINERS[plural]))
        if random.random() < 0.4:
            words.append(one(ADJECTIVES))
        noun = one(NOUNS)
        words.append(PLURALS.get(noun, noun + "s") if plural else noun)

    subject = int(random.integers(2))
    phrase(subject)
    if random.random() < 0.6:
        words.append(one(PREPOSITIONS))
        phrase(int(random.integers(2)))
    verb_at, has_object = len(words), random.random() < 0.5
    verb = one(TRANSITIVE if has_object else INTRANSITIVE)
    words.append("")
    if has_object:
        phrase(int(random.integers(2)))
    if random.random() < 0.5:
        words.append(one(ADVERBS))
    kind = None if errors is None else one(errors)
    number = subject if kind != "agreement" else 1 - subject
    words[verb_at] = verb if number else verb + ENDINGS.get(verb, "s")
    if kind == "order":
        at = starts[int(random.integers(len(starts)))]
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)
