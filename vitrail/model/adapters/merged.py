"""A model with adapters as one without: for everything that reads weights where they lie."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from vitrail.model.adapters.apply import add_changes, bank_of
from vitrail.model.adapters.dress import undress
from vitrail.model.adapters.vpt import adopt

M = TypeVar("M", bound=nn.Module)


def merged_copy(model: M) -> M:
    """A copy without adapters whose weights have the changes of the one in use; the model itself stays as it is.

    Prompts become a part of its trunk. Equal to the model to rounding. Raises `ValueError` where nothing can be added
    to the weights (a quantised base).
    """
    made = copy.deepcopy(model)
    bank = bank_of(made)
    if bank is None:
        return made
    if bank.active is not None and bank.merged is None:
        add_changes(made, bank, bank.active)
    undress(made, bank)
    del made.adapters
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in bank.trainable)
    if bank.active is not None and (prompts := bank.adapter(bank.active).prompts) is not None:
        adopt(made, prompts)
    return made


def without_adapters(model: M) -> M:
    """The model itself where it has no adapters, otherwise such a copy."""
    return model if bank_of(model) is None else merged_copy(model)
