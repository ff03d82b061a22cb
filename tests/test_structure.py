"""Size and shape of the package (`make stats`): limits that a commit may raise only with its reason."""

from __future__ import annotations

import pytest

from tools.stats import LONG, SHARED_NAMES, classes, modules, modules_of_a_run

MOST_LINES, MOST_FILES, MOST_MODULES_OF_A_RUN = 60_069, 300, 126


def test_the_package_does_not_outgrow_its_limits() -> None:
    known = modules()
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    assert sum(lines.values()) <= MOST_LINES
    assert len(known) <= MOST_FILES
    assert not [name for name, count in lines.items() if count > LONG]


def test_names_of_files_and_classes_are_unique() -> None:
    known = modules()
    files = [path.name for path in known.values() if path.name not in SHARED_NAMES]
    assert sorted(files) == sorted(set(files))
    assert not [name for name, count in classes(known).items() if count > 1]


@pytest.mark.slow
def test_a_supervised_run_imports_few_modules() -> None:
    assert modules_of_a_run() <= MOST_MODULES_OF_A_RUN
