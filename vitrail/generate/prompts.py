"""Prompts of classes for text-to-image models (as in GeNIe, arXiv 2312.02548)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

TEMPLATE = "a photo of a {class}."
WITH_SUPERCLASS = "a photo of a {class}, a type of {superclass}."
_NO_WORD = re.compile(r"(class|label|n)?[\s_-]*\d+", re.IGNORECASE)  # 7, class_7, n01440764


def prompts_for(
    classes: Sequence[str],
    *,
    template: str | None = None,
    superclass: str | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The prompt of every class, in lower case: the class's name, or the one that `names` gives it, in a template.

    Raises `ValueError` with every class whose name says nothing (a number, say) and which `names` does not name, and
    for a template without a place for the class.

    >>> prompts_for(["Red_Fox", "0"], names={"0": "tench"})
    ('a photo of a red fox.', 'a photo of a tench.')
    >>> prompts_for(["ramen"], superclass="food")
    ('a photo of a ramen, a type of food.',)
    """
    chosen = template or (WITH_SUPERCLASS if superclass else TEMPLATE)
    if "{class}" not in chosen:
        raise ValueError(f"the prompt {chosen!r} has no place for the class; write {{class}} there")
    if "{superclass}" in chosen and not superclass:
        raise ValueError(f"the prompt {chosen!r} has a place for a superclass, and none is given")
    if superclass and "{superclass}" not in chosen:
        raise ValueError(f"the prompt {chosen!r} has no place for the superclass; write {{superclass}} there")
    given = names or {}
    unknown = [name for name in given if name not in classes]
    if unknown:
        raise ValueError(f"names are given for classes that are not there: {_some(unknown)}")
    words = [" ".join(given.get(name, name).replace("_", " ").split()) for name in classes]
    silent = [name for name, word in zip(classes, words, strict=True) if not word or _NO_WORD.fullmatch(word)]
    if silent:
        raise ValueError(f"no prompt can be made of the class names {_some(silent)}; say what they show (names)")
    filled = (chosen.replace("{class}", word).replace("{superclass}", superclass or "") for word in words)
    return tuple(prompt.lower() for prompt in filled)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
