"""`synthetic:meals`: places to eat as tables, and what is said of them (a small relative of the E2E data).

    name[The Old Mill], type[pub], food[Italian], price[cheap], area[riverside]
    The Old Mill is a cheap pub by the riverside . It serves Italian food .

Every table has two right texts, in rows of their own. `?style=curt` says the same in other ways ("pub The Old Mill ,
Italian , cheap , riverside"), by words that are all among those of the first: another task for a model that knows that
one. A row is a function of (seed, number) alone; of every ten tables eight are train, one val and one test, and no
table is in two of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vitrail.data.completions import make_completions
from vitrail.data.counter import seed_of
from vitrail.data.source import DataSet
from vitrail.schema import near

OPTIONS = {"n": "2000", "seed": "0", "style": "full"}
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
    values = {**OPTIONS, **options}
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
