"""Reading typed, frozen dataclasses from plain mappings, with every problem reported at once.

One reader serves command-line flags, YAML files and stored configurations, so that all of them accept the same
keys, the same values and give the same sentences when something is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from vitrail.registry import config_type, kinds

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number: `low <= value <= high`, with `low` itself left out where `above` is set."""

    low: float = float("-inf")
    high: float = float("inf")
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        least = f"more than {self.low:g}" if self.above else f"at least {self.low:g}"
        if self.low == float("-inf"):
            return f"at most {self.high:g}"
        return least if self.high == float("inf") else f"{least} and at most {self.high:g}"


@dataclass(frozen=True)
class Overrides:
    """Marks a mapping field as a set of overrides for the fields of a dataclass (`--model.trunk.depth 2`)."""

    of: type


@dataclass(frozen=True)
class OneOf:
    """Marks a field whose type is that of a registered part of this family, chosen by its `kind`."""

    family: str

    def types(self) -> tuple[Any, ...]:
        """Configuration types of all parts of the family."""
        return tuple(config_type(self.family, kind) for kind in kinds(self.family))


Fraction = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]


class ConfigError(ValueError):
    """A configuration cannot be used; lists every problem that was found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'deit_small'?` where a known name is close, otherwise nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


@cache
def hints(cls: type) -> dict[str, Any]:
    """Resolved type of every field of a dataclass, `Annotated` kept."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def build(cls: type[T], values: Mapping[str, Any], base: T | None = None) -> T:
    """A `cls` with `values` over `base` (or over its defaults). Raises `ConfigError` with all problems.

    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: Count = 1
    >>> build(Point, {"x": "3"})
    Point(x=3)
    """
    problems: list[str] = []
    made = _dataclass(cls, values, base, "", problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, made)


def plain(value: Any) -> Any:
    """The mapping (numbers, strings, lists, dicts) from which `build` makes an equal object again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value


def check(instance: Any) -> list[str]:
    """Every value of a configuration made in Python that has the wrong type or lies outside its range."""
    problems: list[str] = []
    _dataclass(type(instance), plain(instance), None, "", problems)
    return problems


def parse_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `["vit", "--optim.lr", "0.1"]` into positional words and a nested mapping of flag values.

    `--flag` alone means true, `--no-flag` false; several words after a flag make a list; `--a-b` is `--a_b`.
    """
    positional: list[str] = []
    nested: dict[str, Any] = {}
    current: list[str] | None = None
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            current = [text] if equals else []
            flags.append((name.replace("-", "_"), current))
        elif current is None:
            positional.append(word)
        else:
            current.append(word)
    problems = []
    for name, given in flags:
        *path, last = name.split(".")
        value: Any = True if not given else given[0] if len(given) == 1 else given
        if not given and last.startswith("no_"):
            last, value = last[3:], False
        place: dict[str, Any] = nested
        for part in path:
            inner: Any = place.setdefault(part, {})
            if not isinstance(inner, dict):  # `--model.head mean --model.head.copies 2`
                inner = place[part] = {"kind": inner}
            place = inner
        if isinstance(place.get(last), dict):
            place[last]["kind"] = value
        elif last in place:
            problems.append(f"--{name} is given twice")
        else:
            place[last] = value
    if problems:
        raise ConfigError(problems)
    return positional, nested


def _dataclass(cls: type, values: Any, base: Any, where: str, problems: list[str]) -> Any:
    if dataclasses.is_dataclass(values) and isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        fields = ", ".join(hints(cls))
        problems.append(f"{where or cls.__name__}: expected a group of settings ({fields}), got {values!r}")
        return base
    known = hints(cls)
    given: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            problems.append(f"{path}: no such setting{near(str(key), known)}")
            continue
        given[key] = _value(known[key], value, getattr(base, key, None), path, problems)
    if problems:  # a partly wrong object is never made; its other fields were still checked above
        return base
    if base is not None:
        return dataclasses.replace(base, **given)
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        problems.append(f"{where or cls.__name__}: missing {', '.join(missing)}")
        return None
    return cls(**given)


def _value(kind: Any, value: Any, base: Any, where: str, problems: list[str]) -> Any:
    origin = get_origin(kind)
    if len(members(kind)) > 1:
        return _union(members(kind), value, base, where, problems)
    if origin is Annotated:
        inner, *marks = get_args(kind)
        if any(isinstance(m, Overrides) for m in marks):
            given = _overrides(next(m.of for m in marks if isinstance(m, Overrides)), value, where, problems)
            return {**(base if isinstance(base, Mapping) else {}), **given}  # those that are not named stay
        before = len(problems)
        made = _value(inner, value, base, where, problems)
        for mark in marks:
            if isinstance(mark, Range) and len(problems) == before and made is not None and made not in mark:
                problems.append(f"{where}: {made!r} is out of range, must be {mark}")
        return made
    if origin is Literal:
        choices = get_args(kind)
        for choice in choices:
            if value == choice or (isinstance(choice, str) and str(value) == choice):
                return choice
        names = [str(c) for c in choices]
        problems.append(f"{where}: {value!r} is not one of {', '.join(names)}{near(str(value), names)}")
        return base
    if dataclasses.is_dataclass(kind):
        if isinstance(value, str) and "kind" in hints(typing.cast(type, kind)):
            value = {"kind": value}
        same = base if isinstance(base, typing.cast(type, kind)) else None
        return _dataclass(typing.cast(type, kind), value, same, where, problems)
    if origin is Mapping:
        if isinstance(value, Mapping):
            return dict(value)
        problems.append(f"{where}: expected a group of settings, got {value!r}")
        return base
    if origin in (tuple, list):
        return _sequence(kind, value, where, problems)
    return _scalar(kind, value, base, where, problems)


def _overrides(cls: type, value: Any, where: str, problems: list[str]) -> dict[str, Any]:
    known = hints(cls)
    if not isinstance(value, Mapping):
        problems.append(f"{where}: expected settings of {cls.__name__} ({', '.join(known)}), got {value!r}")
        return {}
    made: dict[str, Any] = {}
    for key, inner in value.items():
        if key not in known:
            problems.append(f"{where}.{key}: no such setting{near(str(key), known)}")
        else:
            made[key] = _value(known[key], inner, None, f"{where}.{key}", problems)
    return made


def _union(choices: tuple[Any, ...], value: Any, base: Any, where: str, problems: list[str]) -> Any:
    if type(None) in choices and (
        value is None or (isinstance(value, str) and value.lower() in ("none", "null", "auto"))
    ):
        return None
    choices = tuple(inner for k in choices if k is not type(None) for inner in members(k))
    components = {_kind_of(k): k for k in choices if dataclasses.is_dataclass(k)}
    if components:
        if dataclasses.is_dataclass(value) and isinstance(value, choices):
            return value
        if isinstance(value, str) and str not in choices:
            value = {"kind": value}
        if isinstance(value, Mapping):
            name = str(value.get("kind", _kind_of(type(base)) if base is not None else next(iter(components))))
            if name not in components:
                names = ", ".join(components)
                problems.append(f"{where}.kind: {name!r} is not one of {names}{near(name, components)}")
                return base
            cls = typing.cast(type, components[name])
            return _dataclass(cls, value, base if isinstance(base, cls) else None, where, problems)
        choices = tuple(k for k in choices if not dataclasses.is_dataclass(k))
    tries: list[list[str]] = []
    for kind in choices:
        attempt: list[str] = []
        made = _value(kind, value, base, where, attempt)
        if not attempt:
            return made
        tries.append(attempt)
    problems.extend(tries[0] if tries else [f"{where}: {value!r} does not fit"])
    return base


def members(kind: Any) -> tuple[Any, ...]:
    """The types of which a value may be one: of a family of parts all, of a union its members."""
    if get_origin(kind) is Annotated and isinstance(get_args(kind)[1], OneOf):
        return get_args(kind)[1].types()
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _kind_of(cls: Any) -> str:
    if not dataclasses.is_dataclass(cls):
        return ""
    for field in dataclasses.fields(cls):
        if field.name == "kind":
            return str(field.default)
    return cls.__name__ if isinstance(cls, type) else ""


def _sequence(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    inner = get_args(kind)
    if isinstance(value, str):
        value = [v for v in value.split(",") if v]
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if get_origin(kind) is list or (len(inner) == 2 and inner[1] is Ellipsis):
        return tuple(_value(inner[0], v, None, f"{where}[{i}]", problems) for i, v in enumerate(items))
    if len(items) != len(inner):
        problems.append(f"{where}: expected {len(inner)} values, got {len(items)}")
        return None
    return tuple(
        _value(k, v, None, f"{where}[{i}]", problems) for i, (k, v) in enumerate(zip(inner, items, strict=True))
    )


def _scalar(kind: Any, value: Any, base: Any, where: str, problems: list[str]) -> Any:
    if kind is Any:
        return value
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
            if kind is float:
                return number
            if number == int(number):
                return int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, kind):
        return value
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))
    problems.append(f"{where}: expected {name}, got {value!r}")
    return base
