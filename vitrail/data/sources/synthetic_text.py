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

`synthetic:meals`: places to eat as tables, and what is said of them (a small relative of the E2E data).

    name[The Old Mill], type[pub], food[Italian], price[cheap], area[riverside]
    The Old Mill is a cheap pub by the riverside . It serves Italian food .

Every table has two right texts, in rows of their own. `?style=curt` says the same in other ways ("pub The Old Mill ,
Italian , cheap , riverside"), by words that are all among those of the first: another task for a model that knows that
one. A row is a function of (seed, number) alone; of every ten tables eight are train, one val and one test, and no
table is in two of them.

`synthetic:numbers`: numbers in English words, and the same in digits: a small task of transduction.

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

from vitrail.data.counter import seed_of
from vitrail.data.dataset import DataSet
from vitrail.data.sources.completions import make_completions
from vitrail.data.sources.text_files import Text, make_data
from vitrail.schema import near

GRAMMAR_OPTIONS = {"n": "2000", "seed": "0", "errors": "both"}
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
    values = {**GRAMMAR_OPTIONS, **options}
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


MEAL_OPTIONS = {"n": "2000", "seed": "0", "style": "full"}
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
PLACES = {"riverside": "by the riverside", "city centre": "in the city centre", "old town": "in the old town"}


def open_meals(uri: str, options: Mapping[str, str]) -> DataSet:
    """`n` rows in all, two of each table."""
    values = {**MEAL_OPTIONS, **options}
    for name in ("n", "seed"):
        if not values[name].isdecimal():
            raise ValueError(f"{uri}: {name} must be a whole number, not {values[name]!r}")
    n, seed, style = int(values["n"]), int(values["seed"]), values["style"]
    if n < 10 * EACH:
        raise ValueError(f"{uri}: n must be at least {10 * EACH}, not {n}")
    if style not in STYLES:
        raise ValueError(f"{uri}: style is {' or '.join(STYLES)}, not {style!r}{near(style, STYLES)}")
    pairs: list[tuple[str, str]] = []
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    place: dict[str, str] = {}
    for number in range(-(-n // EACH)):
        facts = table(seed, number)
        prompt = ", ".join(f"{name}[{value}]" for name, value in facts.items())
        drawn = ("train", "val", "test")[max(0, number % 10 - 7)]
        split = place.setdefault(prompt, drawn)  # one that was drawn before stays where it is
        for way in range(min(EACH, n - len(pairs))):
            splits[split].append(len(pairs))
            pairs.append((prompt, curt(facts, way) if style == "curt" else full(facts, way)))
    return make_completions(uri, pairs, {name: np.array(rows, np.int64) for name, rows in splits.items()})


def table(seed: int, number: int) -> dict[str, str]:
    """Table number `number`.

    >>> table(0, 1)["name"] == table(0, 1)["name"]
    True
    """
    random = np.random.Generator(np.random.PCG64(seed_of("meals", seed, number)))

    def one(words: tuple[str, ...]) -> str:
        return words[int(random.integers(len(words)))]

    facts = {"name": f"{one(FIRST)} {one(SECOND)}"}
    for name, known in VALUES.items():
        value, kept = one(known), random.random() < 0.7
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
        said = [f"{facts['name']} is {article} {price}{facts['type']}{area} .", f"It serves {facts['food']} food ."]
    else:
        said = [f"For {facts['food']} food go to {facts['name']} , {article} {price}{facts['type']}{area} ."]
    if "rating" in facts:
        said.append(f"Its rating is {facts['rating']} ." if way == 0 else f"Guests call it {facts['rating']} .")
    if "children" in facts:
        welcome = facts["children"] == "yes"
        said.append(
            ("It is for children , too ." if welcome else "It is not for children .")
            if way == 0
            else ("Children are welcome ." if welcome else "Leave the children at home .")
        )
    return " ".join(said)


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


NUMBER_OPTIONS = {"n": "2000", "seed": "0", "digits": "6"}
MOST_DIGITS = 9
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
LARGE = ((10**6, "million"), (1000, "thousand"), (100, "hundred"))


def open_numbers(uri: str, options: Mapping[str, str]) -> DataSet:
    """`n` rows in all. Raises `ValueError` for options that are out of range."""
    values = {**NUMBER_OPTIONS, **options}
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
