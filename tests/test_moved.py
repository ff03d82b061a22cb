"""Modules are found under the names they had before they were moved, with a warning."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from vitrail.moved import moved


def test_every_earlier_module_leads_to_one_that_exists() -> None:
    for earlier, (now, _) in moved().items():
        assert find_spec(now) is not None, f"{earlier} leads to {now}"


def test_names_of_an_earlier_module_are_those_of_the_new_one() -> None:
    sys.modules.pop("vitrail.data.order", None)
    with pytest.warns(DeprecationWarning, match=r"vitrail.data.order is vitrail.data.loading.sampler now"):
        earlier = import_module("vitrail.data.order")
    assert earlier.Order is import_module("vitrail.data.loading.sampler").BatchSampler
    with pytest.raises(AttributeError):
        _ = earlier.nothing


def test_a_folder_that_is_gone_still_leads_to_its_modules() -> None:
    for name in ("vitrail.api", "vitrail.api.training"):
        sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=r"vitrail.run.train"):
        from vitrail.api.training import train  # type: ignore[import-not-found]
    assert train is import_module("vitrail.run.train").train


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("vitrail.nothing_of_the_kind")
