"""Typed, frozen dataclasses from plain mappings and from the command line, with every problem reported at once.

One reader serves command-line flags, YAML files and stored configurations, so that all of them accept the same
keys, the same values and give the same sentences when something is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from vitrail.registry import config_type, kinds

T = TypeVar("T")
Flags = list[tuple[str, list[str]]]  # names, and the words behind them


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


class Positional(str):
    """Marks a field of a command as an argument without a flag, called by this name in `--help`.

    Any other string in the `Annotated` of a command's field is the name of the flag's value.
    """


class Unprefixed:
    """Marks a nested dataclass whose fields are flags by their own names (`--way`, not `--few_shot.way`)."""


class Setting(NamedTuple):
    """A field of a dataclass, or of one nested in it, as the command line names it."""

    name: str  # `optim.lr`
    kinds: tuple[Any, ...]  # types that it takes, besides None
    metavar: str  # empty: named by its types
    default: Any  # `dataclasses.MISSING` where there is none
    text: str  # its documentation
    group: tuple[str, type]  # prefix of its flag, and the dataclass that has it

    @property
    def several(self) -> bool:
        return get_origin(bare(self.kinds[0])) is tuple


Fraction = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Pixels = Annotated[int, Range(1, 16_384)]  # a side of an image
Width = Annotated[int, Range(1, 65_536)]
Depth = Annotated[int, Range(1, 1000)]
LARGEST = 1e18  # of any number in a configuration


class ConfigError(ValueError):
    """A configuration cannot be used; lists every problem that was found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def brief(value: Any) -> str:
    """A value as messages quote it, however large it is."""
    return reprlib.repr(value)


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
    config = _dataclass(cls, values, base, "", problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, config)


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


def bare(hint: Any) -> Any:
    """A type without its `Annotated`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def members(hint: Any) -> tuple[Any, ...]:
    """The types of which a value may be one: the members of a union, and of a family of parts all that there are."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in members(part))
    family = next((m.family for m in get_args(hint)[1:] if isinstance(m, OneOf)), None)
    return (hint,) if family is None else tuple(config_type(family, kind) for kind in kinds(family))


def settings(cls: type, base: Any = None, prefix: str = "") -> Iterator[Setting]:
    """Every field of a dataclass and of those nested in it, with the values of `base` (or its own defaults).

    A field that chooses among dataclasses is followed by the fields of the one that is chosen.
    """
    for field in dataclasses.fields(cls):
        if prefix and field.name == "kind":  # named by the choice itself
            continue
        hint = hints(cls)[field.name]
        kind, marks = bare(hint), get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        choices = members(hint if any(isinstance(m, OneOf) for m in marks) else kind)
        union = len(choices) > 1
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if base is None else getattr(base, field.name)
        inner = prefix if Unprefixed in marks else f"{prefix}{field.name}."
        overridden = next((m.of for m in marks if isinstance(m, Overrides)), None)
        if overridden is not None:
            values = {**dict.fromkeys(hints(overridden)), **typing.cast(Mapping[str, Any], default)}
            yield from settings(overridden, types.SimpleNamespace(**values), inner)
            continue
        nested = dataclasses.is_dataclass(default)
        if union or not nested:
            taken = tuple(k for k in choices if k is not type(None)) if union else (hint,)
            metavar = next((m for m in marks if isinstance(m, str)), "")
            group = (inner, type(default)) if nested else (prefix, cls)
            yield Setting(prefix + field.name, taken, metavar, default, _texts(cls).get(field.name, ""), group)
        if nested:
            yield from settings(type(default), default, inner)


@cache
def _texts(cls: type) -> dict[str, str]:
    """Documentation of the fields of a dataclass: a comment in the same line, or the string that follows."""
    texts: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        source = inspect.getsource(base)
        for field, text in re.findall(r'''^    (\w+): [^\n]*\n    """(\S.*?)"""$''', source, re.MULTILINE | re.DOTALL):
            texts[field] = " ".join(text.split())
        texts.update(re.findall(r"^    (\w+): .*  # (?!noqa|type:)(.*)$", source, re.MULTILINE))
    return texts


def read_command(cls: type[T], words: Sequence[str]) -> T:
    """A command with its fields filled from the words of a command line.

    Flags that no field names go to the field that is a mapping, nested as `parse_flags` does. `--a-b` is `--a_b`; of a
    repeated flag the last counts; nothing behind `--` is a flag. Raises `ValueError` with the problem, or `ConfigError`
    with all of them.
    """
    known = {setting.name: setting for setting in settings(cls)}
    arguments = [setting for setting in known.values() if isinstance(setting.metavar, Positional)]
    mapping = next((name for name, s in known.items() if get_origin(bare(s.kinds[0])) is Mapping), None)
    flags = {name: s for name, s in known.items() if s not in arguments and name != mapping}
    end = list(words).index("--") if "--" in words else len(words)
    positional, given = _split(words[:end])
    values: dict[str, Any] = {}
    problems: list[str] = []
    others: Flags = []
    for name, inputs in given:
        positive = flags.get(name.removeprefix("no_"))
        negated = name not in flags and positive is not None and isinstance(positive.default, bool)
        setting = positive if negated else flags.get(name)
        if setting is None and mapping is not None:
            others.append((name, inputs))
        elif setting is None:
            problems.append(f"--{name}: no such flag{near(name, flags) or '; --help lists all'}")
        elif isinstance(setting.default, bool):
            stated = inputs.pop(0) if inputs[:1] in (["true"], ["false"]) else "true"
            values[setting.name] = (stated == "true") != negated
            positional += inputs
        elif setting.several:
            values[name] = _read(setting, inputs, f"--{name}", problems)
        elif inputs:
            values[name] = _read(setting, inputs[0], f"--{name}", problems)
            positional += inputs[1:]
        else:
            problems.append(f"--{name} needs a value")
    problems += [f"{word}: no such flag; --help lists all" for word in positional if re.match(r"-[a-zA-Z]\S*$", word)]
    positional += words[end + 1 :]
    for argument in arguments:
        if argument.several:
            values[argument.name], positional = _read(argument, positional, argument.name, problems), []
        elif positional:
            values[argument.name] = _read(argument, positional.pop(0), argument.name, problems)
        elif argument.default is dataclasses.MISSING:
            problems.append(f"{argument.metavar} is missing")
    problems += [f"{word!r} is one argument too many" for word in positional]
    if problems:
        raise ConfigError(problems) if len(problems) > 1 else ValueError(problems[0])
    if mapping is not None:
        values[mapping] = _nest(others)
    return typing.cast(T, _filled(cls, values, ""))


def _read(setting: Setting, value: Any, where: str, problems: list[str]) -> Any:
    """A value of a command; none by the word `None` alone, since `none` may be a file, a class or a variant."""
    if setting.default is None and value in ("None", ["None"]):
        return None
    return _union(setting.kinds, value, None, where, problems)


def _filled(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass with values by the names of its settings."""
    given = {}
    for name, hint in hints(cls).items():
        if dataclasses.is_dataclass(bare(hint)):
            given[name] = _filled(bare(hint), values, prefix if Unprefixed in get_args(hint) else f"{prefix}{name}.")
        elif prefix + name in values:
            given[name] = values[prefix + name]
    return cls(**given)


def parse_flags(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `["vit", "--optim.lr", "0.1"]` into positional words and a nested mapping of flag values.

    `--flag` alone means true, `--no_flag` false; several words after a flag make a list; `--a-b` is `--a_b`.
    """
    positional, flags = _split(words)
    return positional, _nest(flags)


def _split(words: Sequence[str]) -> tuple[list[str], Flags]:
    """Words before the first flag, and every flag with the words behind it."""
    positional: list[str] = []
    flags: Flags = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            flags.append((name.replace("-", "_"), [text] if equals else []))
        else:
            (flags[-1][1] if flags else positional).append(word)
    return positional, flags


def _nest(flags: Flags) -> dict[str, Any]:
    """Settings by section, as a YAML file nests them."""
    nested: dict[str, Any] = {}
    problems = []
    for name, given in flags:
        *path, last = name.split(".")
        value: Any = True if not given else given[0] if len(given) == 1 else given
        if not given and last.startswith("no_"):
            last, value = last[3:], False
        section = nested
        for part in path:
            inner: Any = section.setdefault(part, {})
            if not isinstance(inner, dict):  # `--model.head mean --model.head.copies 2`
                inner = section[part] = {"kind": inner}
            section = inner
        if isinstance(section.get(last), dict):
            section[last]["kind"] = value
        elif last in section:
            problems.append(f"--{name} is given twice")
        else:
            section[last] = value
    if problems:
        raise ConfigError(problems)
    return nested


def _dataclass(cls: type, values: Any, base: Any, where: str, problems: list[str]) -> Any:
    if dataclasses.is_dataclass(values) and isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        fields = ", ".join(hints(cls))
        problems.append(f"{where or cls.__name__}: expected a group of settings ({fields}), got {brief(values)}")
        return base
    given = _fields(cls, values, base, where, problems)
    if problems:  # a partly wrong object is never made; its other fields were still checked above
        return base
    if base is not None:
        return dataclasses.replace(base, **given)
    optional = {f.name for f in dataclasses.fields(cls) if (f.default, f.default_factory) != (dataclasses.MISSING,) * 2}
    missing = [name for name in hints(cls) if name not in given and name not in optional]
    if missing:
        problems.append(f"{where or cls.__name__}: missing {', '.join(missing)}")
        return None
    return cls(**given)


def _value(kind: Any, value: Any, base: Any, where: str, problems: list[str]) -> Any:
    origin = get_origin(kind)
    if len(choices := members(kind)) > 1:
        return _union(choices, value, base, where, problems)
    if origin is Annotated:
        return _annotated(kind, value, base, where, problems)
    if origin is Literal:
        for choice in get_args(kind):
            if value == choice or (isinstance(choice, str) and str(value) == choice):
                return choice
        names = [str(c) for c in get_args(kind)]
        problems.append(f"{where}: {brief(value)} is not one of {', '.join(names)}{near(str(value), names)}")
        return base
    if dataclasses.is_dataclass(kind):
        if isinstance(value, str) and "kind" in hints(typing.cast(type, kind)):
            value = {"kind": value}
        same = base if isinstance(base, typing.cast(type, kind)) else None
        return _dataclass(typing.cast(type, kind), value, same, where, problems)
    if origin is Mapping:
        if isinstance(value, Mapping):
            return dict(value)
        problems.append(f"{where}: expected a group of settings, got {brief(value)}")
        return base
    if origin in (tuple, list):
        return _sequence(kind, value, where, problems)
    return _scalar(kind, value, base, where, problems)


def _annotated(hint: Any, value: Any, base: Any, where: str, problems: list[str]) -> Any:
    """A value with a range, or a group of overrides: those that are not named keep their values."""
    kind, *marks = get_args(hint)
    overridden = next((m.of for m in marks if isinstance(m, Overrides)), None)
    if overridden is not None:
        if isinstance(value, Mapping):
            return {**(base or {}), **_fields(overridden, value, None, where, problems)}
        fields = ", ".join(hints(overridden))
        problems.append(f"{where}: expected settings of {overridden.__name__} ({fields}), got {brief(value)}")
        return base or {}
    before = len(problems)
    read = _value(kind, value, base, where, problems)
    for mark in marks:
        if isinstance(mark, Range) and len(problems) == before and read is not None and read not in mark:
            problems.append(f"{where}: {brief(read)} is out of range, must be {mark}")
    return read


def _fields(cls: type, values: Mapping[str, Any], base: Any, where: str, problems: list[str]) -> dict[str, Any]:
    known, given = hints(cls), {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key in known:
            given[key] = _value(known[key], value, getattr(base, key, None), path, problems)
        else:
            problems.append(f"{path}: no such setting{near(str(key), known)}")
    return given


def _union(choices: tuple[Any, ...], value: Any, base: Any, where: str, problems: list[str]) -> Any:
    if type(None) in choices and (
        value is None or (isinstance(value, str) and value.lower() in ("none", "null", "auto"))
    ):
        return None
    choices = tuple(k for k in choices if k is not type(None))
    components = {kind_of(k): k for k in choices if dataclasses.is_dataclass(k)}
    if components:
        if dataclasses.is_dataclass(value) and isinstance(value, choices):
            return value
        if isinstance(value, str) and str not in choices:
            value = {"kind": value}
        if isinstance(value, Mapping):
            name = str(value.get("kind", kind_of(type(base)) if base is not None else next(iter(components))))
            if name not in components:
                names = ", ".join(components)
                problems.append(f"{where}.kind: {brief(name)} is not one of {names}{near(name, components)}")
                return base
            cls = typing.cast(type, components[name])
            return _dataclass(cls, value, base if isinstance(base, cls) else None, where, problems)
        choices = tuple(k for k in choices if not dataclasses.is_dataclass(k))
    tries: list[list[str]] = []
    for kind in choices:
        attempt: list[str] = []
        value_of_kind = _value(kind, value, base, where, attempt)
        if not attempt:
            return value_of_kind
        tries.append(attempt)
    problems.extend(tries[0] if tries else [f"{where}: {brief(value)} does not fit"])
    return base


def kind_of(cls: Any) -> str:
    """The name by which a choice among dataclasses knows this one."""
    return str(getattr(cls, "kind", getattr(cls, "__name__", ""))) if dataclasses.is_dataclass(cls) else ""


def _sequence(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    inner = get_args(kind)
    if isinstance(value, str):
        value = [v for v in value.split(",") if v]
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if get_origin(kind) is list or (len(inner) == 2 and inner[1] is Ellipsis):
        inner = inner[:1] * len(items)
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
            if not abs(number) < LARGEST:
                problems.append(f"{where}: {brief(value)} is no finite number below {LARGEST:.0e}")
                return base
            if kind is float:
                return number
            if number == int(number):  # and exactly so, where a float has too few digits
                return int(value) if str(value).lstrip("-").isdecimal() else int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):  # in Python true is a number, too
        return value
    elif kind is Path and isinstance(value, str):
        return Path(value)
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))
    problems.append(f"{where}: expected {name}, got {brief(value)}")
    return base
