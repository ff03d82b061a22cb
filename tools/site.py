"""Pages of the documentation site that are made as it is built (`make docs`): README, commands, settings, Python.

A hook of MkDocs; nothing is written into docs/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("data", "model", "objective", "optim", "engine")


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with all files that it found."""
    from mkdocs.structure.files import File

    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def pages() -> dict[str, str]:
    """Path of each page below docs/, and its text."""
    return {
        "index.md": _from_root("README.md"),
        "contributing.md": _from_root("CONTRIBUTING.md"),
        "reference/commands.md": _commands(),
        "reference/settings.md": _settings(),
        "reference/python.md": _python(),
    }


def _from_root(name: str) -> str:
    """A page of the repository's root, its links seen from docs/."""
    return re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))


def _help(*words: str) -> str:
    command = [sys.executable, "-m", "vitrail", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _commands() -> str:
    from vitrail.cli import COMMANDS

    parts = [f"## vitrail {name}\n\n```text\n{_help(name, '--help').strip()}\n```\n" for name in COMMANDS]
    return "# Commands\n\n" + "\n".join(parts)


def _settings() -> str:
    about = "Settings of `vitrail train`, of recipes and of study files, with the values of the recipe `vit`.\n"
    parts = [f"## {name}\n\n```text\n{_help('train', '--help', name).strip()}\n```\n" for name in SECTIONS]
    return f"# Settings\n\n{about}\n" + "\n".join(parts)


def _python() -> str:
    from vitrail import PUBLIC

    about = "Names of `vitrail`, imported when they are first used: `vitrail.train(...)`.\n"
    return f"# Python\n\n{about}\n" + "\n".join(f"::: vitrail.{module}.{name}\n" for name, module in PUBLIC.items())
