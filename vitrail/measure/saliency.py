"""Saliency maps of one form, [batch, rows, columns], larger where the evidence for a class is stronger.

    attention             last layer, row of the class token, mean over heads
    rollout               all layers multiplied (Abnar and Zuidema 2020)
    head                  the head's own map: class attention, attention pooling; of the class where it has one for each
    gradient_attention    maps times their gradients, layer upon layer (Chefer et al. 2021)
    grad_cam              features weighted by their mean gradient (Selvaraju et al. 2017), for any trunk
    sima                  norms of the normalised keys of the last SimA layer (Koohpayegani and Pirsiavash 2022)

No layer names are needed: every trunk here knows its grid. `grad_cam` reads the last tokens on which the class logit
depends: after the last block where the head reads patches, before it where the head reads the class token alone.
Without a class token, rows are weighed by the head's own map, else all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.measure.attention_maps import CapturedBatch, map_layers, sima_layer
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.head import Head
from vitrail.model.heads.second_order import SecondOrderHead
from vitrail.model.parts.tokens import Tokens

KINDS = ("attention", "rollout", "head", "gradient_attention", "grad_cam", "sima")


def kinds_of(model: Classifier) -> dict[str, str]:
    """Every kind of map, and why this model has none of it; empty where it has."""
    if model.policy is not None:
        why = "tokens leave an adaptive model on the way; see what it keeps"
        return {kind: "" if kind == "sima" and sima_layer(model) is not None else why for kind in KINDS}
    reasons = dict.fromkeys(KINDS, "" if map_layers(model) else "it has no attention maps over patches")
    reasons["head"] = "" if type(model.head).maps is not Head.maps else "its head has no map of its own"
    reasons["sima"] = "" if sima_layer(model) is not None else "it has no SimA layer"
    return reasons | {"grad_cam": ""}


def all_kinds(model: Classifier) -> list[str]:
    """The kinds of map that a model has."""
    return [kind for kind, why in kinds_of(model).items() if not why]


def explain(model: Classifier, images: Tensor, kind: str, classes: Tensor | None = None) -> Tensor:
    """One map per image for `classes` [batch] (none: the predicted ones), [batch, rows, columns], float32.

    `images` are as the model takes them, [batch, 3, height, width]. Raises `ValueError` for a kind that it has not.
    """
    known = kinds_of(model)
    if kind not in known:
        raise ValueError(f"no map {kind!r}; there are {', '.join(KINDS)}")
    if known[kind]:
        raise ValueError(f"no {kind} of this model: {known[kind]}")
    if kind == "sima":
        batch = CapturedBatch(model, images, ("saliency",))
        norms = batch.saliency()
        assert norms is not None
        return norms[1].float().unflatten(1, batch.grid)
    with_gradient = {"gradient_attention": _gradient_attention, "grad_cam": _grad_cam}
    without: dict[str, Callable[..., Tensor]] = {"attention": _attention, "rollout": _rollout, "head": _head}
    compute = (with_gradient | without)[kind]
    with evaluation_mode(model), torch.set_grad_enabled(kind in with_gradient):
        maps = compute(model, model._images(images).detach().requires_grad_(), classes)
    return maps.detach().float()


def _score(model: Classifier, out: Outputs, classes: Tensor | None) -> Tensor:
    """The sum over images of the logit of each one's class: images do not mix, so its gradient is that of each."""
    logits = model.fused(out.stack)
    chosen = logits.argmax(1) if classes is None else classes.to(logits.device)
    return logits.gather(1, chosen[:, None]).sum()


def _gradients(score: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of the score by each of the values; none where it does not depend on one, or that was given."""
    leaves = [value for value in values if value.requires_grad]
    gradients = iter(torch.autograd.grad(score, leaves, allow_unused=True) if leaves else ())
    return [next(gradients) if value.requires_grad else None for value in values]


def _attention(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    name = f"attention.{map_layers(model)[-1]}"
    out = model.outputs(images, {name})
    return _class_row(out, out.captured[name].float().abs().mean(1))


def _rollout(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    names = [f"attention.{i}" for i in map_layers(model)]
    out = model.outputs(images, set(names))
    return _class_row(out, rollout([out.captured[name] for name in names]))


def rollout(maps: Sequence[Tensor]) -> Tensor:
    """How much of each token reaches each: maps [..., heads, tokens, tokens] of all layers -> [..., tokens, tokens].

    Each layer's heads are averaged, half of the residual path is mixed in, and layers are multiplied; rows sum to one.
    Class tokens that enter on the way come first (CaiT-like trunks).
    """
    if not maps:
        raise ValueError("rollout needs the attention maps of at least one layer")
    flow: Tensor | None = None
    for layer in maps:
        mean = layer.float().abs().mean(-3)
        mean = mean / mean.sum(-1, keepdim=True)
        flow = _grown(flow, mean)
        flow = 0.5 * (flow + mean @ flow)
    assert flow is not None
    return flow


def _gradient_attention(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    names = [f"attention.{i}" for i in map_layers(model)]
    out = model.outputs(images, set(names))
    maps = [out.captured[name] for name in names]
    flow: Tensor | None = None
    for weights, gradient in zip(maps, _gradients(_score(model, out, classes), maps), strict=True):
        flow = _grown(flow, weights)
        if gradient is not None:
            flow = flow + (weights * gradient).detach().float().clamp(min=0).mean(1) @ flow
    assert flow is not None
    flow = flow - torch.eye(flow.shape[-1], device=flow.device)  # a patch's share of itself says nothing
    return _class_row(out, flow.expand(len(images), -1, -1))


def _grown(flow: Tensor | None, like: Tensor) -> Tensor:
    """The flow so far on the tokens of a layer: the identity at first; class tokens that enter later come in front."""
    start = torch.eye(like.shape[-1], device=like.device)
    if flow is None:
        return start
    if flow.shape[-1] == len(start):
        return flow
    more = len(start) - flow.shape[-1]
    wide = start.expand(*flow.shape[:-2], *start.shape).clone()
    wide[..., more:, more:] = flow
    return wide


def _class_row(out: Outputs, flow: Tensor) -> Tensor:
    """The row of the class token of [batch, tokens, tokens], on the grid."""
    patches = out.tokens.grid[0] * out.tokens.grid[1]
    prefix = flow.shape[-1] - patches
    flow = flow[..., prefix:]
    if prefix:
        row = flow[:, 0]
    elif out.maps is not None and out.maps.shape[-1] == patches:
        row = torch.einsum("bp,bpq->bq", out.maps.float().mean(1), flow)
    else:
        row = flow.mean(1)
    return row.unflatten(1, out.tokens.grid)


def _head(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    out = model.outputs(images)
    if out.maps is None:
        raise ValueError("no head of this model: its head mixes without a map")
    maps = out.maps.float()
    if getattr(model.head, "per_class", False):  # [batch, heads * classes, patches]
        chosen = model.fused(out.stack).argmax(1) if classes is None else classes.to(maps.device)
        maps = maps.unflatten(1, (-1, len(model.classes)))[torch.arange(len(maps)), :, chosen]
    return maps.mean(1).unflatten(1, out.tokens.grid)


def _grad_cam(
    model: Classifier,
    images: Tensor,
    classes: Tensor | None,
    score: Callable[[Classifier, Outputs, Tensor | None], Tensor] = _score,
) -> Tensor:
    known = [name for name in getattr(model.trunk, "intermediates", ()) if name.startswith("tokens.")]
    names = sorted(known, key=lambda name: int(name.partition(".")[2]))[-2:]
    out = model.outputs(images, set(names))
    candidates = [out.captured[name] for name in names] or [out.tokens.sequence]
    patches = out.tokens.grid[0] * out.tokens.grid[1]
    cam: Tensor | None = None
    for values, gradient in zip(candidates, _gradients(score(model, out, classes), candidates), strict=True):
        if gradient is None:
            continue
        features, slope = (t[:, t.shape[1] - patches :].detach().float() for t in (values, gradient))
        if cam is None or bool((slope != 0).any()):
            cam = (features * slope.mean(1, keepdim=True)).sum(-1).clamp(min=0)
    assert cam is not None
    return cam.unflatten(1, out.tokens.grid)


@dataclass(frozen=True)
class HeadBranch:
    """Prediction and evidence of one branch of a head alone."""

    name: str
    maps: Tensor  # Grad-CAM for the class that the whole model predicts, [batch, rows, columns], float32
    probabilities: Tensor  # [batch, classes], of this branch alone


def head_branches(model: Classifier, images: Tensor, classes: Tensor) -> list[HeadBranch]:
    """Class token, patch tokens, and both (SoT, supplement E), where a head adds logits of the two; else nothing.

    `classes` [batch] are the classes that maps explain.
    """
    head = model.head
    if not isinstance(head, SecondOrderHead) or head.fc is None or head.fc_words is None or model.policy is not None:
        return []
    branches = []
    for name in ("class token", "patch tokens", "both"):
        logits: list[Tensor] = []

        def score(
            model: Classifier, out: Outputs, chosen: Tensor | None, name: str = name, logits: list[Tensor] = logits
        ) -> Tensor:
            logits.append(_branch_logits(model, out.tokens)[name])
            assert chosen is not None
            return logits[0].gather(1, chosen.to(logits[0].device)[:, None]).sum()

        with evaluation_mode(model), torch.enable_grad():
            maps = _grad_cam(model, model._images(images).detach().requires_grad_(), classes, score)
        branches.append(HeadBranch(name, maps.detach().float(), model.probabilities(logits[0].detach().float())))
    return branches


def _branch_logits(model: Classifier, tokens: Tokens) -> dict[str, Tensor]:
    """Logits of the class token, of the patch tokens and of both, of a second-order head with two classifiers."""
    head = cast("SecondOrderHead", model.head)
    parts = zip(("class token", "patch tokens"), (head.fc, head.fc_words), head._vectors(tokens), strict=True)
    logits = {name: layer(vector.to(layer.weight.dtype)) for name, layer, vector in cast("Any", parts)}
    return {**logits, "both": model.fused(head(tokens))}


def word_influence(model: Classifier, texts: Tensor, chosen: Tensor | None = None) -> dict[str, Tensor]:
    """[texts, length] influence of each token on the logit of `chosen` [texts] (none: of the predicted class).

    Gradient times input: the gradient of the logit with respect to the word embeddings, times those embeddings, summed
    over the width; a stand-in for the relevance methods of SoT (Xie et al. 2021, arXiv 2104.10935, supplement E).
    `texts` are [texts, 3, length], as a text model takes them. Of a second-order head that adds two classifiers: by the
    class token's alone, by the words' alone and by both, which is their sum; of any other head `both` alone.
    """
    embeddings: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        embeddings.append(out.detach().requires_grad_())
        return embeddings[-1]

    head = model.head
    handle = cast("Any", model.trunk).backbone.get_input_embeddings().register_forward_hook(keep)
    try:
        with evaluation_mode(model), torch.enable_grad():
            tokens = model.tokens(texts)
            logits = {"both": model.fused(head(tokens))}
            if isinstance(head, SecondOrderHead) and head.config.fusion == "sum":
                logits = {name.replace("patch tokens", "words"): v for name, v in _branch_logits(model, tokens).items()}
            chosen = logits["both"].argmax(1) if chosen is None else chosen
            influence = {}
            for name, values in logits.items():
                score = values.gather(1, chosen[:, None]).sum()
                (gradient,) = torch.autograd.grad(score, embeddings[0], retain_graph=True)
                influence[name] = (gradient * embeddings[0]).sum(-1).detach()
    finally:
        handle.remove()
    return influence
