"""Multiply-accumulates of an adaptive forward pass from its trace, and setting a model to a compute budget."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.kernels.sampling import MOST_PRODUCT, check_points
from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.reduction import ReducingPolicy
from vitrail.model.cost import NORM_COST, cost
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import BlockUse, Probe, Tokens, Trace

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier
    from vitrail.model.trunks.vit import Trunk


Scores = Literal["all", "kept"]
M = TypeVar("M", bound=nn.Module)


def trace_macs(
    model: Classifier,
    trace: Trace,
    *,
    image_size: int | None = None,
    scores: Scores = "all",
    norms: bool = False,
    fixed: int | None = None,
) -> Tensor:
    """Multiply-accumulates that each image took, [batch], float64 on the CPU (whole numbers are exact).

    A block in which tokens are sampled counts scores of all tokens, as the paper does; `scores="kept"` counts what is
    computed here, the class token's row once more (not for uniform sampling) and those of the tokens that stay. ToMe's
    similarities are added, and with `scores="kept"` EViT's row. Heads and branches that are off count nothing, and the
    decisions of AdaViT are added. `norms` adds five operations for each element of a LayerNorm, as `cost` does. Where
    everything was kept, the sum is `cost(...)` of the same model without a policy.

    `image_size` is that of the traced images (none: the model's own); `fixed` is `fixed_macs` of it, for whoever calls
    this for many batches. The head is counted with all tokens, also where fewer reach it. Raises `ValueError` where
    blocks are not plain ones with softmax attention.
    """
    trunk, size = cast("Trunk", model.trunk), image_size or model.preprocess.size
    blocks = cast("list[Block]", list(trunk.blocks))
    if len(trace.blocks) != len(blocks):
        raise ValueError(f"a trace of {len(trace.blocks)} blocks is not of a whole pass through {len(blocks)}")
    used = [_exact(use) for use in trace.blocks]
    total = torch.full_like(used[0].entering, fixed_macs(model, size, norms=norms) if fixed is None else fixed)
    policy = model.policy
    for i, (block, use) in enumerate(zip(blocks, used, strict=True)):
        more, queries = torch.zeros_like(total), use.leaving
        if isinstance(policy, ReducingPolicy):
            queries = use.entering
            own = policy.own_macs(use.entering, trunk.config, trunk.prefix, scores=scores == "kept")
            total = total + torch.where(use.leaving < use.entering, own, 0)
        if isinstance(policy, AtsPolicy) and i in policy.at:
            asked = use.entering if policy.config.score == "column" else torch.ones_like(total)
            asked = torch.zeros_like(total) if policy.config.sampling == "uniform" else asked
            more = use.leaving + asked - use.entering if scores == "kept" else more
        total = total + _block_macs(block, use, use.entering + more, queries, norms)
    if isinstance(policy, AtsPolicy | ReducingPolicy) and norms and isinstance(trunk.norm, nn.LayerNorm):
        total = total - NORM_COST * trunk.width * (used[0].entering - used[-1].leaving)
    return total


def macs_of_mean(
    model: Classifier, trace: Trace, *, image_size: int | None = None, scores: Scores = "all", norms: bool = False
) -> float:
    """Multiply-accumulates of an image that has the mean counts of the batch in every block, as published tables have.

    Attention grows with the square of the tokens, so the mean over images of what each took is at least that much
    (Jensen) where as many leave a block as enter it and nothing else varies: A-ViT. Elsewhere it mostly is.
    """
    means = [
        BlockUse(*(getattr(u, f.name).mean(0, keepdim=True) for f in fields(u))) for u in map(_exact, trace.blocks)
    ]
    return float(trace_macs(model, Trace(tuple(means)), image_size=image_size, scores=scores, norms=norms))


def fixed_macs(model: Classifier, image_size: int | None = None, *, norms: bool = False) -> int:
    """Multiply-accumulates that no policy can save: stem, final norm, head, and the policy's own layers."""
    trunk, size = cast("Trunk", model.trunk), image_size or model.preprocess.size
    bare, bare_trunk = _shallow(model), _shallow(trunk)
    bare_trunk.blocks, bare_trunk.policy = nn.ModuleList([_Nothing()]), None
    bare.trunk = bare_trunk
    total = cost(bare, size, norms=norms).macs
    if isinstance(model.policy, AdavitPolicy):
        rows, columns = trunk.patch_embed.grid(size, size)
        logits = rows * columns + trunk.config.heads + 2
        total += len(model.policy.decisions) * logits * trunk.width
    return total


def _block_macs(block: Block, use: BlockUse, rows: Tensor, queries: Tensor, norms: bool) -> Tensor:
    """Of one block, [batch]; `rows` are the queries whose scores count, `queries` those that get an answer."""
    mixer = block.attn if isinstance(block, Block) else None
    if not (isinstance(mixer, SoftmaxMixer) and mixer.fused) or block.local_mp is not None:
        raise ValueError("multiply-accumulates of a trace are known for plain blocks with softmax attention only")
    n_in, n_out, width = use.entering, use.leaving, mixer.proj.in_features
    mixed = width * use.heads / mixer.heads
    mixing = 3 * n_in * width * mixed + rows * n_in * mixed + queries * n_in * mixed + queries * mixed * width
    hidden = 0 if block.mlp is None else block.mlp.fc1.out_features
    channels = 2 * n_out * width * hidden
    if norms and isinstance(block.norm1, nn.LayerNorm):
        mixing = mixing + NORM_COST * n_in * width
    if norms and isinstance(block.norm2, nn.LayerNorm):
        channels = channels + NORM_COST * n_out * width
    return use.mixing * mixing + use.channels * channels


def _exact(use: BlockUse) -> BlockUse:
    """Counts in which sums of 10^15 are exact, on the CPU."""
    return BlockUse(*(getattr(use, f.name).detach().to("cpu", torch.float64) for f in fields(use)))


class _Nothing(nn.Module):
    """In the place of all blocks."""

    def forward(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        return tokens


def _shallow(module: M) -> M:
    """The same module with a list of parts of its own, so that parts can be exchanged; weights are shared."""
    shallow = copy.copy(module)
    shallow._modules = dict(module._modules)
    return shallow


STEPS = 12  # halvings of the share, or of the number of points: finer than one sampling point of 197
CLOSE = 0.003  # of the wanted cost: near enough


def set_budget(
    model: Classifier,
    *,
    tokens: int | None = None,
    ratio: float | None = None,
    gmacs: float | None = None,
    share: float | None = None,
    images: Iterable[Tensor] | Tensor | None = None,
) -> float | None:
    """Let a model with ATS, ToMe or EViT spend less or more from now on, in place and without training.

    One of: `tokens`, the sampling points of every layer, 2 or more; `ratio`, their share of the patches that enter, at
    most 1; `gmacs`, a mean cost in 10^9 multiply-accumulates per image; `share`, the same as a share of the cost of the
    model without a policy. ToMe and EViT cost the same on every image and take the last two only, which set `r` and
    `keep`. ATS needs `images` for them (batches as the model takes them, or one) to find the share of points, or the
    number of points where a share of 1 costs less than that.

    Several points may fall on one patch, so that even `ratio=1` saves. More points than patches keep more of them:
    `tokens` may be any number with which points times patches stays countable (`check_points`), and the cost goes up to
    that of the model without sampling, or close to it where scores are very uneven. A share never means fewer points
    than the policy's `least` (8). Returns the mean cost on `images` where they are given, and that of ToMe and EViT.
    Raises `ValueError` for a model without such a budget, and for a cost out of reach, with the range that can be had.
    Metrics stored with the model are dropped: they belong to another budget.
    """
    if sum(x is not None for x in (tokens, ratio, gmacs, share)) != 1:
        raise ValueError("set_budget takes one of tokens, ratio, gmacs and share")
    policy = model.policy if isinstance(model.policy, ReducingPolicy) else _policy(model)
    if share is not None:
        if not 0 < share <= 1:
            raise ValueError(f"share: {share:g} is no share of the dense model's cost, above 0 and at most 1")
        gmacs = share * float(trace_macs(model, whole_trace(model))) / 1e9
    if isinstance(policy, ReducingPolicy):
        return _set_level(model, policy, gmacs)
    if tokens is not None and tokens < 2:
        raise ValueError(f"tokens: {tokens} is too few sampling points; use 2 or more")
    if tokens is not None:
        check_points(tokens, _patches(model))
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"ratio: {ratio:g} is no share of the patches, above 0 and at most 1; tokens= takes a number")
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
        raise ValueError(
            "only models with token sampling have a budget to set: create them with adaptive='ats' (tome and evit have "
            "one of share= or gmacs=, and no room to calibrate)"
        )
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
    mean = most
    for _ in range(STEPS):
        if abs(mean - wanted) <= CLOSE * wanted:
            break
        # Costs level off: numbers of points are halved on a logarithmic scale.
        middle = (low + high) / 2 if high <= 1 else float(round(math.sqrt(low * high)))
        mean = at(middle)
        low, high = (middle, high) if mean < wanted else (low, middle)
    _remember(model, policy)
    return mean


def _set_level(model: Classifier, policy: ReducingPolicy, wanted: float | None) -> float:
    """The level that comes closest to a cost, which is the same for every image."""
    if wanted is None:
        raise ValueError(
            f"{policy.config.kind} keeps equally many tokens of every image; set what an image costs, by share= or "
            f"gmacs=, or {policy.setting} itself: make_adaptive(model, {{'kind': '{policy.config.kind}', ...}})"
        )
    fixed, before, levels = fixed_macs(model), policy.level, policy.levels(_patches(model))

    def at(level: float) -> float:
        policy.level = level
        return float(trace_macs(model, whole_trace(model, reduced=True), fixed=fixed)) / 1e9

    least, most = at(levels[0]), at(levels[-1])
    if not least <= wanted <= most:
        policy.level = before
        raise ValueError(f"gmacs: {wanted:g} is out of reach; {policy.setting} gives {least:.4g} to {most:.4g}")
    place = bisect_left(levels, wanted, key=at)
    gmacs = at(min(levels[max(0, place - 1) : place + 1], key=lambda level: abs(at(level) - wanted)))
    _remember(model, policy)
    return gmacs


def whole_trace(model: Classifier, image_size: int | None = None, *, reduced: bool = False) -> Trace:
    """The trace of an image that is given everything; `reduced`: but for what ToMe or EViT take from every image."""
    trunk = cast("Trunk", model.trunk)
    count, heads, one = _patches(model, image_size), float(trunk.config.heads), torch.ones(1, dtype=torch.float64)
    uses = []
    for i in range(len(trunk.blocks)):
        entering = one * (trunk.prefix + count)
        if reduced and isinstance(model.policy, ReducingPolicy):
            count = model.policy.left(i, count)
        uses.append(BlockUse(entering, one * (trunk.prefix + count), one * heads, one, one))
    return Trace(tuple(uses))


def _patches(model: Classifier, image_size: int | None = None) -> int:
    """Patches of an image (none: of the model's own size)."""
    size = image_size or model.preprocess.size
    rows, columns = cast("Trunk", model.trunk).patch_embed.grid(size, size)
    return rows * columns


def _remember(model: Classifier, policy: AtsPolicy | ReducingPolicy) -> None:
    """What is saved with the weights is how the model is set."""
    if isinstance(policy, ReducingPolicy):
        setting: dict[str, object] = {policy.setting: policy.level}
    else:
        setting = {"cap": list(policy.cap.values()), "capacity": list(policy.capacity)}
    adaptive = {**model.spec["trunk"]["adaptive"], **setting}
    model.spec = {**model.spec, "trunk": {**model.spec["trunk"], "adaptive": adaptive}}
    model.stated.pop("figures", None)
