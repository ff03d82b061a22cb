"""Synthetic texts, each a function of (seed, number) alone: of every ten, eight are train, one val and one test.

`synthetic:grammar`: sentences of a small grammar, half of them broken by one error (a toy of CoLA).

    determiner (adjective) noun (preposition determiner noun) verb (determiner (adjective) noun) (adverb)

An error is one of two kinds, `?errors=agreement`, `order` or `both` (drawn for each broken sentence). Agreement: the
verb has the wrong number ("the dogs near a barn sleeps"); the noun next to the verb is often not its subject, so two
places that may be far apart must be related. Order: a determiner and the word behind it are exchanged ("dog the
sleeps"), a local clue; the bag of words stays the same. After 8 epochs on 1,600 sentences an encoder from scratch
(2 blocks of width 64, one seed) has 96 to 100 % accuracy on 200 test sentences with order errors, and is near chance
(47 to 61 %) with agreement errors. No single word tells the class; classes alternate.

`synthetic:meals`: tables of restaurants with descriptions (a small relative of the E2E data).

    name[The Old Mill], type[pub], food[Italian], price[cheap], area[riverside]
    The Old Mill is a cheap pub by the riverside . It serves Italian food .

Every table has two references, in rows of their own. `?style=curt` says the same in other ways ("pub The Old Mill ,
Italian , cheap , riverside"), by words that are all among those of the first: another task for a model that knows that
one. No table is in two splits.

`synthetic:numbers`: numbers in English words, and the same in digits: a small task of transduction.

    four hundred thousand two hundred seventeen
    4 0 0 2 1 7

Words are not aligned with digits: a zero is no word, and what a word means depends on words that come after it.
Numbers have 1 to `?digits=6` digits, each length equally often. No number is in two splits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitrail.data.counter import seed_of
from vitrail.data.dataset import DataSet, Location, Source
from vitrail.data.sources.text import Text, make_texts
from vitrail.schema import near

SIZE = {"n": 2000, "seed": 0}
DIGITS = {**SIZE, "digits": 6}
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


class _Words:
    """Draws of one text: a function of (stream, seed, number)."""

    def __init__(self, stream: str, seed: int, number: int) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed_of(stream, seed, number)))

    def one(self, words: tuple[str, ...]) -> str:
        return words[int(self.random.integers(len(words)))]


def _sizes(location: Location, defaults: Mapping[str, int] = SIZE) -> list[int]:
    """`n`, `seed` and further whole numbers. Raises `ValueError` for fewer rows than three splits need."""
    n, *others = location.whole_numbers(defaults).values()
    if n < 20:
        raise ValueError(f"{location.uri}: n must be at least 20, not {n}")
    return [n, *others]


def _split_of(number: int) -> str:
    return ("train", "val", "test")[max(0, number % 10 - 7)]


def open_grammar(location: Location) -> DataSet:
    """`n` sentences in all, half of them broken."""
    uri, errors = location.uri, location.options.get("errors", "both")
    n, seed = _sizes(location)
    if errors not in (*ERRORS, "both"):
        raise ValueError(f"{uri}: errors is agreement, order or both, not {errors!r}{near(errors, (*ERRORS, 'both'))}")
    index = np.arange(n)
    digit = index % 10
    labels = (index // 10 + digit) % 2
    kinds = ERRORS if errors == "both" else (errors,)
    texts = [Text(sentence(seed, i, None if label else kinds)) for i, label in enumerate(labels.tolist())]
    splits = {"train": digit < 8, "val": digit == 8, "test": digit == 9}
    return make_texts(uri, texts, {name: np.flatnonzero(rows) for name, rows in splits.items()}, CLASSES, labels)


def sentence(seed: int, index: int, errors: tuple[str, ...] | None = None) -> str:
    """Sentence number `index`, with one error of these kinds (none: as the grammar makes it).

    >>> sentence(0, 3)
    'some clouds near this doctor dream often'
    >>> sentence(0, 3, ("agreement",))
    'some clouds near this doctor dreams often'
    >>> sentence(0, 3, ("order",))
    'clouds some near this doctor dream often'
    """
    drawn = _Words("grammar", seed, index)
    random, one = drawn.random, drawn.one
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


STYLES = ("full", "curt")
EACH = 2  # texts of a table
FIRST = ("The Old", "The Green", "The Golden", "The Blue", "The Little", "The Quiet")
SECOND = ("Mill", "Anchor", "Fox", "Lantern", "Oak", "Swan", "Bridge", "Kettle")
VALUES = {
    "type": ("pub", "restaurant", "coffee shop"),
    "food": ("Italian", "French", "Indian", "Japanese", "English", "Chinese"),
    "price": ("cheap", "moderate", "expensive"),
    "area": ("riverside", "city centre", "old town"),
    "rating": ("low", "average", "high"),
    "children": ("yes", "no"),
}
ALWAYS = ("type", "food")  # the others may be missing
CHILDREN = (
    ("It is for children , too .", "It is not for children ."),
    ("Children are welcome .", "Leave the children at home ."),
)
PLACES = {"riverside": "by the riverside", "city centre": "in the city centre", "old town": "in the old town"}


def open_meals(location: Location) -> DataSet:
    """`n` rows in all, two of each table."""
    uri, style = location.uri, location.options.get("style", "full")
    n, seed = _sizes(location)
    if style not in STYLES:
        raise ValueError(f"{uri}: style is {' or '.join(STYLES)}, not {style!r}{near(style, STYLES)}")
    texts: list[Text] = []
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    split_of: dict[str, str] = {}
    for number in range(-(-n // EACH)):
        facts = table(seed, number)
        prompt = ", ".join(f"{name}[{value}]" for name, value in facts.items())
        split = split_of.setdefault(prompt, _split_of(number))  # one that was drawn before stays where it is
        for way in range(min(EACH, n - len(texts))):
            splits[split].append(len(texts))
            texts.append(Text(prompt, curt(facts, way) if style == "curt" else full(facts, way)))
    return make_texts(uri, texts, splits)


def table(seed: int, number: int) -> dict[str, str]:
    """Table number `number`.

    >>> table(0, 1)["name"] == table(0, 1)["name"]
    True
    """
    drawn = _Words("meals", seed, number)
    facts = {"name": f"{drawn.one(FIRST)} {drawn.one(SECOND)}"}
    for name, known in VALUES.items():
        value, kept = drawn.one(known), drawn.random.random() < 0.7
        if kept or name in ALWAYS:
            facts[name] = value
    return facts


def full(facts: Mapping[str, str], way: int) -> str:
    """Sentences; `way` 0 begins with the name, 1 with the food.

    >>> full({"name": "The Blue Fox", "type": "pub", "food": "French", "price": "cheap", "children": "no"}, 0)
    'The Blue Fox is a cheap pub . It serves French food . It is not for children .'
    """
    price = f"{facts['price']} " if "price" in facts else ""
    area = f" {PLACES[facts['area']]}" if "area" in facts else ""
    article = "an" if price.startswith("e") else "a"
    if way == 0:
        parts = [f"{facts['name']} is {article} {price}{facts['type']}{area} .", f"It serves {facts['food']} food ."]
    else:
        parts = [f"For {facts['food']} food go to {facts['name']} , {article} {price}{facts['type']}{area} ."]
    if "rating" in facts:
        parts.append(f"Its rating is {facts['rating']} ." if way == 0 else f"Guests call it {facts['rating']} .")
    if "children" in facts:
        parts.append(CHILDREN[way][facts["children"] == "no"])
    return " ".join(parts)


def curt(facts: Mapping[str, str], way: int) -> str:
    """A note of few words; `way` 0 begins with the type, 1 with the food.

    >>> curt({"name": "The Blue Fox", "type": "pub", "food": "French", "children": "no"}, 0)
    'pub The Blue Fox , French , no children'
    """
    rest = [facts[name] for name in ("price", "area") if name in facts]
    rest += [f"rating {facts['rating']}"] if "rating" in facts else []
    rest += [{"yes": "children welcome", "no": "no children"}[facts["children"]]] if "children" in facts else []
    if way == 0:
        return " , ".join([f"{facts['type']} {facts['name']}", facts["food"], *rest])
    return " , ".join([f"{facts['food']} at {facts['name']}", facts["type"], *rest])


MOST_DIGITS = 9
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
LARGE = ((10**6, "million"), (1000, "thousand"), (100, "hundred"))


def open_numbers(location: Location) -> DataSet:
    """`n` rows in all. Raises `ValueError` for options that are out of range."""
    uri = location.uri
    n, seed, digits = _sizes(location, DIGITS)
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"{uri}: digits must be 1 to {MOST_DIGITS}, not {digits}")
    drawn = [number(seed, row, digits) for row in range(n)]
    split_of: dict[int, str] = {}
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for row, value in enumerate(drawn):
        splits[split_of.setdefault(value, _split_of(row))].append(row)
    return make_texts(uri, [Text(spelled(value), " ".join(str(value))) for value in drawn], splits)


def number(seed: int, row: int, digits: int) -> int:
    """The number of a row, of 1 to `digits` digits."""
    random = _Words("numbers", seed, row).random
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


GRAMMAR = Source(
    {"synthetic:grammar": "texts: sentences, half of them broken; ?n=2000&seed=0&errors=both"},
    open_grammar,
    options=(*SIZE, "errors"),
)
MEALS = Source(
    {"synthetic:meals": "prompts and completions: restaurants and their descriptions; ?n=2000&seed=0&style=full"},
    open_meals,
    options=(*SIZE, "style"),
)
NUMBERS = Source(
    {"synthetic:numbers": "prompts and completions: numbers in words, and in digits; ?n=2000&seed=0&digits=6"},
    open_numbers,
    options=DIGITS,
)
