"""How tests call the scripts of studies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from processes import run_script

STUDIES = Path(__file__).parents[1] / "studies"


def call(script: Path, *words: str) -> str:
    """What a script prints on a CPU with one thread; it must end well."""
    done = run_script(script, *words, environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0, done.err
    return done.out


def script_module(path: Path, name: str = "") -> ModuleType:
    """A script as a module."""
    specification = importlib.util.spec_from_file_location(name or path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module
