"""A row of the tables of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A named run configuration. Settings are named as on the command line; `{"optim": {"lr": 0.1}}` is `optim.lr`."""

    about: str
    """A sentence."""
    base: str | None = None
    """Recipe whose settings it starts from (none: the defaults)."""
    source: str = ""
    command: str = ""
    """Arguments of `vitrail train NAME` (none: those of the base)."""
    hardware: str = ""
    expect: str = "not measured yet"
    stated_in: str = ""
    """Publication whose settings are `stated` (none: that of the base)."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Settings as published."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were not published, or that no publication has."""
    by_model: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that depend on the model, by its name."""

    def header(self, command: str) -> str:
        """Description with source, command, hardware and expected result."""
        facts = {"Source": self.source, "Command": command, "Hardware": self.hardware, "Expect": self.expect}
        lines = (
            fill(text, 116, initial_indent=f"{title + ':':11}", subsequent_indent=" " * 11, break_on_hyphens=False)
            for title, text in facts.items()
            if text
        )
        return "\n".join((self.about, "", *lines))


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted path.

    >>> flat({"data": {"batch": 64}, "optim.lr": 0.1})
    {'data.batch': 64, 'optim.lr': 0.1}
    """
    paths: dict[str, Any] = {}
    for key, value in settings.items():
        paths |= {f"{key}.{k}": v for k, v in flat(value).items()} if isinstance(value, Mapping) else {key: value}
    return paths
