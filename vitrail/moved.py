"""Imports from where modules were before 0.1.0's restructuring: they work until 0.2, with a warning."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any


@cache
def moved() -> dict[str, list[Any]]:
    """Earlier module -> [module, {earlier name: name}]."""
    rows: dict[str, list[Any]] = json.loads((Path(__file__).parent / "moved.json").read_text(encoding="utf-8"))
    return rows


class EarlierModules(MetaPathFinder, Loader):
    """Asked last: only for modules that are not there any more."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("vitrail."):
            return None
        package = any(name.startswith(f"{fullname}.") for name in moved())
        return spec_from_loader(fullname, self, is_package=package) if package or fullname in moved() else None

    def exec_module(self, module: ModuleType) -> None:
        earlier = module.__name__
        if earlier not in moved():  # a folder that is gone
            return
        now, renamed = moved()[earlier]

        def forward(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(import_module(now), renamed.get(name, name))

        warnings.warn(f"{earlier} is {now} now; the earlier name works until 0.2", DeprecationWarning, stacklevel=2)
        module.__dict__["__getattr__"] = forward


def install() -> None:
    """Let earlier names be found."""
    if not any(isinstance(finder, EarlierModules) for finder in sys.meta_path):
        sys.meta_path.append(EarlierModules())
