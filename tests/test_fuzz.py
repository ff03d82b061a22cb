"""Mutated files and random settings: whatever is read from outside is used, or rejected in a sentence.

Every case runs in a process with limits on memory and time (`limited.py`): no traceback, no hang, no memory without
bound. A share of the cases must be accepted and used, so that a property never becomes one of rejections alone.
`make test-slow` tries thousands, always the same ones; with VITRAIL_FUZZ=N in the environment those of another seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from corpus import CORPUS, use_known
from fuzzed import PROPERTIES
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from limited import Limited

NAMES = sorted(set(PROPERTIES) - (set() if find_spec("pyarrow") else {"parquet"}))
OTHER = os.environ.get("VITRAIL_FUZZ", "")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    child = Limited(tmp_path_factory.mktemp("fuzz"))
    yield child
    child.close()


def try_cases(name: str, count: int, limited: Limited, other: str = "") -> None:
    """Draw so many cases of a property; each is used or rejected, and enough of them are used."""
    tried = PROPERTIES[name]
    ends: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not other,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=st.fixed_dictionaries(tried.case))
    def each(case: dict[str, Any]) -> None:
        end = limited(tried.use, case)
        ends[end.kind] += 1
        assert end.good, f"{name} with {case!r}: {end.kind}\n{end.text}"

    (seed(int(other))(each) if other else each)()
    assert ends["accepted"] >= tried.accepted * ends.total(), f"{name}: {dict(ends)}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_from_outside_is_used_or_rejected(name: str, limited: Limited) -> None:
    try_cases(name, PROPERTIES[name].quick, limited)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_more(name: str, limited: Limited) -> None:
    try_cases(name, PROPERTIES[name].thorough, limited, OTHER)


@pytest.mark.parametrize(("kind", "name"), CORPUS, ids=lambda text: text[:20])
def test_known_cases_are_rejected_in_a_sentence(kind: str, name: str, limited: Limited) -> None:
    end = limited(use_known, {"kind": kind, "name": name})
    assert end.kind == "rejected", end.text


def test_unreadable_images_and_pipes_do_not_end_a_scan(limited: Limited) -> None:
    end = limited(use_known, {"kind": "images", "name": "hostile"})
    assert end.kind == "accepted", end.text
