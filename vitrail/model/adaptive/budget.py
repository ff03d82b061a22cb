"""The compute budget of an adaptive model, measured on images where it cannot be computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from vitrail.kernels.sampling import MOST_PRODUCT, check_points
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.macs import trace_macs
from vitrail.model.adaptive.trace import Trace

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier
    from vitrail.model.trunk import Trunk

STEPS = 12  # halvings of the share, or of the number of points: finer than one sampling point of 197
CLOSE = 0.003  # of the wanted cost: near enough


def set_budget(
    model: Classifier,
    *,
    tokens: int | None = None,
    ratio: float | None = None,
    gmacs: float | None = None,
    images: Iterable[Tensor] | Tensor | None = None,
) -> float | None:
    """Let an ATS model spend less or more from now on, in place and without training.

    One of: `tokens`, the sampling points of every layer, 2 or more; `ratio`, their share of the patches that enter, at
    most 1; `gmacs`, a mean cost in 10^9 multiply-accumulates per image, for which `images` (batches as the model takes
    them, or one) are needed to find the share, or the number of points where a share of 1 costs less than that.

    Several points may fall on one patch, so that even `ratio=1` saves. More points than patches keep more of them:
    `tokens` may be any number with which points times patches stays countable (`check_points`), and the cost goes up to
    that of the model without sampling, or close to it where scores are very uneven. A share never means fewer points
    than the policy's `least` (8). Returns the mean cost on `images` where they are given. Raises `ValueError` for a
    model without such a budget, and for a cost out of reach, with the range that can be had. Metrics stored with the
    model are dropped: they belong to another budget.
    """
    if sum(x is not None for x in (tokens, ratio, gmacs)) != 1:
        raise ValueError("set_budget takes one of tokens, ratio and gmacs")
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens: {tokens} is too few sampling points; use 2 or more")
    if tokens is not None:
        check_points(tokens, _patches(model))
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"ratio: {ratio:g} is no share of the patches, above 0 and at most 1; tokens= takes a number")
    policy = _policy(model)
    batches = None if images is None else [images] if isinstance(images, Tensor) else list(images)
    if gmacs is not None:
        if not batches:
            raise ValueError("what a budget costs depends on the images: give some, set_budget(gmacs=..., images=...)")
        return _search(model, policy, gmacs, batches)
    policy.set_cap((float(tokens) if tokens is not None else float(ratio or 0),))
    _remember(model, policy)
    return None if batches is None else mean_gmacs(model, batches)


@torch.no_grad()
def mean_gmacs(model: Classifier, images: Iterable[Tensor]) -> float:
    """Mean cost of an image in 10^9 multiply-accumulates, as the model is set now."""
    each = torch.cat([trace_macs(model, trace) for trace in _traces(model, images)])
    return float(each.double().mean()) / 1e9


@torch.no_grad()
def calibrate(model: Classifier, images: Iterable[Tensor], batch: int, margin: float = 4.0) -> tuple[float, ...]:
    """Fix the room that packed batches of this size get after each sampling layer in what `model.optimize()` gives, so
    that nothing waits for the host; the model itself keeps making room as it is needed.

    Rows per image: the mean over `images` plus `margin` standard errors of a batch's mean. A batch that needs more all
    the same is noticed (`trace.overflow`), computed again, warned about the first time and counted (`recomputed`).
    Returns the rows, one value per layer.
    """
    policy = _policy(model)
    counts = _leaving(model, policy, images)
    rows = counts.mean(1) + margin * counts.std(1) / batch**0.5
    policy.capacity = tuple(round(float(r), 3) for r in rows)
    _remember(model, policy)
    return policy.capacity


@torch.no_grad()
def matched_caps(model: Classifier, images: Iterable[Tensor]) -> tuple[float, ...]:
    """Patches that the model keeps on these images, mean, one whole number per sampling layer and at least 2.

    With them a control keeps as many tokens: `Ats(sampling="uniform", cap=matched_caps(model, images))`.
    """
    policy, prefix = _policy(model), cast("Trunk", model.trunk).prefix
    return tuple(max(2.0, float(round(count - prefix))) for count in _leaving(model, policy, images).mean(1).tolist())


def _leaving(model: Classifier, policy: AtsPolicy, images: Iterable[Tensor]) -> Tensor:
    """Tokens that go on after each sampling layer, prefix tokens among them: [layers, images], float64."""
    leaving = [torch.stack([b.leaving for b in trace.blocks]) for trace in _traces(model, images)]
    return torch.cat(leaving, 1)[list(policy.at)].double()


def _policy(model: Classifier) -> AtsPolicy:
    if not isinstance(model.policy, AtsPolicy):
        raise ValueError("only models with token sampling have a budget to set: create them with adaptive='ats'")
    return model.policy


def _traces(model: Classifier, images: Iterable[Tensor]) -> Iterator[Trace]:
    was_training = model.training
    model.eval()
    try:
        for batch in images:
            trace = model.outputs(batch).trace
            assert trace is not None
            yield trace
    finally:
        model.train(was_training)


def _search(model: Classifier, policy: AtsPolicy, wanted: float, batches: list[Tensor]) -> float:
    """The share of points that costs `wanted`; beyond a share of 1 the number of points."""
    before = dict(policy.cap)

    def at(cap: float) -> float:
        policy.set_cap((cap,))
        return mean_gmacs(model, batches)

    low, high = 1e-6, 1.0
    least, most = at(low), at(high)
    if most < wanted:
        low, high = float(_patches(model)), float(MOST_PRODUCT // _patches(model))
        most = at(high)
    if not least <= wanted <= most:
        policy.cap = before
        raise ValueError(
            f"gmacs: {wanted:g} is out of reach; sampling points give {least:.4g} to {most:.4g} on these images (a "
            f"share is at least {policy.config.least} points a layer: for less, use tokens=, or a smaller `least`)"
        )
    found = most
    for _ in range(STEPS):
        if abs(found - wanted) <= CLOSE * wanted:
            break
        # Costs level off: numbers of points are halved on a logarithmic scale.
        middle = (low + high) / 2 if high <= 1 else float(round(math.sqrt(low * high)))
        found = at(middle)
        low, high = (middle, high) if found < wanted else (low, middle)
    _remember(model, policy)
    return found


def _patches(model: Classifier) -> int:
    """Patches of an image of the model's own size."""
    rows, columns = cast("Trunk", model.trunk).patch_embed.grid(model.preprocess.size, model.preprocess.size)
    return rows * columns


def _remember(model: Classifier, policy: AtsPolicy) -> None:
    """What is saved with the weights is how the model is set."""
    adaptive = {**model.spec["trunk"]["adaptive"], "cap": list(policy.cap.values()), "capacity": list(policy.capacity)}
    model.spec = {**model.spec, "trunk": {**model.spec["trunk"], "adaptive": adaptive}}
    model.stated.pop("figures", None)
