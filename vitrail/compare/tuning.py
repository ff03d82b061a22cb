"""Settings of a study that are chosen on validation images, one choice per variant, before its runs are trained.

    tune:
      by: knn                        # a metric, the larger the better (none: top1)
      evaluate: [knn]                # protocols that give it, where training does not
      over: {optim: {epochs: 10}}    # what the runs that choose change
      grid:
        moco: {optim.lr: [0.05, 0.2], model.head.last_norm: [false, true]}   # every combination
        moco-long-tail: moco         # takes the settings that were chosen for moco

The choice is a study of its own, NAME-tuning, with the first seed; what stands on a tuned run is tuned after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any

from vitrail.schema import near


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, those `above` before those `below`."""
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return both


@dataclass(frozen=True)
class SettingsGrid:
    """What is tried for which runs of a study."""

    by: str = "top1"
    evaluate: tuple[str, ...] = ()
    over: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)

    def candidates(self, name: str) -> dict[str, dict[str, Any]]:
        """Name of a candidate, as "moco-lr=0.2-last_norm=True" -> its nested settings."""
        named: dict[str, dict[str, Any]] = {name: {}}
        for path, values in dict(self.grid[name]).items():  # type: ignore[arg-type]
            names = str(path).split(".")
            nested = [reduce(lambda inner, key: {key: inner}, reversed(names), value) for value in values]
            texts = [re.sub(r"[^\w.+=-]", "_", f"-{names[-1]}={value}") for value in values]
            both = product(named.items(), zip(texts, nested, strict=True))
            named = {before + text: merged(settings, one) for (before, settings), (text, one) in both}
        return named

    def trials(self, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Name of a candidate -> all settings of its run, evaluated on val; of those of `runs` that are tuned."""
        over = merged(self.over, {"data": {"judge": "val"}})
        return {
            candidate: merged(merged(runs[name], over), settings)
            for name, grid in self.grid.items()
            if name in runs and not isinstance(grid, str)
            for candidate, settings in self.candidates(name).items()
        }

    def smaller(self) -> SettingsGrid:
        """Two values of each setting, for a smoke run."""
        few = {n: g if isinstance(g, str) else {k: list(v)[:2] for k, v in g.items()} for n, g in self.grid.items()}
        return replace(self, grid=few)

    def problems(self, known: Collection[str], protocols: Collection[str]) -> list[str]:
        """What is wrong, or does not fit to the runs of a study, by name."""
        if wrong := [key for key in ("over", "grid") if not isinstance(getattr(self, key), Mapping)]:
            return [f"tune.{key}: expected settings, got {getattr(self, key)!r}" for key in wrong]
        problems = [
            f"tune.evaluate: no protocol {n!r}{near(n, protocols)}" for n in self.evaluate if n not in protocols
        ]
        for name, grid in self.grid.items():
            if name not in known:
                problems.append(f"tune.grid.{name}: none of the runs ({', '.join(known)}){near(name, known)}")
            if isinstance(grid, str) and not isinstance(self.grid.get(grid), Mapping):
                problems.append(f"tune.grid.{name}: nothing is tried for {grid!r}{near(grid, self.grid)}")
            lists = isinstance(grid, Mapping) and grid and all(isinstance(v, list) and v for v in grid.values())
            if not isinstance(grid, str) and not lists:
                problems.append(f"tune.grid.{name}: expected settings with a list of values each, got {grid!r}")
        return problems


def read_grid(values: Any, problems: list[str]) -> SettingsGrid:
    """The grid that a study file asks for; names of no setting are added to `problems`."""
    given = values if isinstance(values, Mapping) else {"grid": values}
    known = SettingsGrid.__dataclass_fields__
    problems += [f"tune.{key}: no such setting{near(str(key), known)}" for key in given if key not in known]
    named = given.get("evaluate") or ()
    names = tuple(map(str, named)) if isinstance(named, list | tuple) else (str(named),)
    return SettingsGrid(str(given.get("by", "top1")), names, given.get("over") or {}, given.get("grid") or {})
