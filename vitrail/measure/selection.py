"""Tokens that ATS (arXiv 2111.15667) keeps under other rules: top-K compared with inverse transform sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.looker import Looker, Looks
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.classifier import Classifier

Rule = Literal["inverse", "top"]
RULES = {"inverse": "inverse transform", "nearest": "inverse, nearest", "top": "top-K", "random": "at random"}


@dataclass(frozen=True)
class Selection:
    """The chosen images once more, by the other rule."""

    own: str  # the model's rule, in words
    other: str
    looks: Looks


@contextmanager
def drawing_by(policy: AtsPolicy, rule: Rule, cap: Sequence[float]) -> Iterator[None]:
    """The policy with another rule and other caps, one a layer or one for all; then as it was."""
    config, caps = policy.config, policy.cap
    policy.config = replace(config, sampling=rule, form="padded")  # packed batches know one rule only
    try:
        policy.set_cap(cap)
        yield
    finally:
        policy.config, policy.cap = config, caps


def other_selection(model: Classifier, pixels: Sequence[NDArray[np.uint8]], counts: Tensor) -> Selection | None:
    """The same weights on `pixels` ([side, side, 3] each), top-K in place of what the model does; none unless ATS.

    K of each stage is what the model keeps there of an image on average, by `counts` [images, blocks]: both spend the
    same. A model that takes the top K by itself is shown with inverse transform sampling and its own cap, which keeps
    at most as many.
    """
    policy = model.policy
    if not isinstance(policy, AtsPolicy) or not len(pixels):
        return None
    rule: Rule = "inverse" if policy.config.sampling == "top" else "top"
    cap = list(policy.cap.values())
    if rule == "top":  # a cap of 1 would be all patches
        cap = [float(max(2, round(float(counts[:, i].double().mean())))) for i in policy.at]
    looker = Looker(model, len(pixels), ())
    device = next(model.parameters()).device
    with drawing_by(policy, rule, cap):
        looker.add(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().to(device))
    return Selection(RULES[policy.config.sampling], RULES[rule], looker.result())
