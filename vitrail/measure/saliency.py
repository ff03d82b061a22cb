"""Where the evidence for a class is, by several maps of one form: [batch, rows, columns], more is more.

    attention             last layer, what the class token sees, mean over heads
    rollout               all layers multiplied (Abnar and Zuidema 2020)
    head                  the head's own map: class attention, attention pooling; of the class where it has one for each
    gradient_attention    maps times their gradients, layer upon layer (Chefer et al. 2021)
    grad_cam              features weighted by their mean gradient (Selvaraju et al. 2017), for any trunk
    sima                  norms of the normalised keys of the last SimA layer (Koohpayegani and Pirsiavash 2022)

No layer names are needed: every trunk here knows its grid. `grad_cam` reads the last tokens from
which the class logit can be changed at all: after the last block where the head reads patches, before it where the head
reads the class token alone. Without a class token, rows are weighed by the head's own map, else all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.measure.attention_maps import Seen, map_layers, sima_layer
from vitrail.measure.evaluator import evaluation_mode
from vitrail.model.classifier import Classifier, Outputs
from vitrail.model.heads.head import Head
from vitrail.model.heads.second_order import SecondOrderHead

KINDS = ("attention", "rollout", "head", "gradient_attention", "grad_cam", "sima")


def kinds_of(model: Classifier) -> dict[str, str]:
    """Every kind of map, and why this model has none of it: nothing where it has."""
    if model.policy is not None:
        why = "tokens leave an adaptive model on the way; see what it keeps"
        return {kind: "" if kind == "sima" and sima_layer(model) is not None else why for kind in KINDS}
    maps = "" if map_layers(model) else "it has no attention maps over patches"
    own = "" if type(model.head).maps is not Head.maps else "its head has no map of its own"
    sima = "" if sima_layer(model) is not None else "it has no SimA layer"
    return {
        "attention": maps,
        "rollout": maps,
        "head": own,
        "gradient_attention": maps,
        "grad_cam": "",
        "sima": sima,
    }


def explain(model: Classifier, images: Tensor, kind: str, classes: Tensor | None = None) -> Tensor:
    """One map per image for `classes` [batch] (none: what the model says), [batch, rows, columns], float32.

    `images` are as the model takes them, [batch, 3, height, width]. Raises `ValueError` for a kind that it has not.
    """
    known = kinds_of(model)
    if kind not in known:
        raise ValueError(f"no map {kind!r}; there are {', '.join(KINDS)}")
    if known[kind]:
        raise ValueError(f"no {kind} of this model: {known[kind]}")
    if kind == "sima":
        seen = Seen(model, images, ("saliency",))
        found = seen.saliency()
        assert found is not None
        return found[1].float().unflatten(1, seen.grid)
    make: Callable[..., Tensor] = {
        "attention": _attention,
        "rollout": _rollout,
        "head": _head,
        "gradient_attention": _gradient_attention,
        "grad_cam": _grad_cam,
    }[kind]
    with evaluation_mode(model), torch.enable_grad():
        made = make(model, model._images(images).detach().requires_grad_(), classes)
    return made.detach().float()


def _score(model: Classifier, out: Outputs, classes: Tensor | None) -> Tensor:
    """The sum over images of the logit of each one's class: images do not mix, so its gradient is that of each."""
    logits = model.fused(out.stack)
    chosen = logits.argmax(1) if classes is None else classes.to(logits.device)
    return logits.gather(1, chosen[:, None]).sum()


Score = Callable[[Classifier, Outputs, Tensor | None], Tensor]


def _slopes(score: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of the score by each of the values; none where it does not depend on one, or that was given."""
    own = [value for value in values if value.requires_grad]
    found = iter(torch.autograd.grad(score, own, allow_unused=True) if own else ())
    return [next(found) if value.requires_grad else None for value in values]


def _attention(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    last = map_layers(model)[-1]
    with torch.no_grad():
        out = model.outputs(images, {f"attention.{last}"})
        return _read(model, out, out.captured[f"attention.{last}"].float().abs().mean(1))


def _rollout(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    with torch.no_grad():
        out = model.outputs(images, {f"attention.{i}" for i in map_layers(model)})
        return _read(model, out, rollout([out.captured[f"attention.{i}"] for i in map_layers(model)]))


def rollout(maps: Sequence[Tensor]) -> Tensor:
    """How much of each token reaches each: maps [..., heads, tokens, tokens] of all layers -> [..., tokens, tokens].

    Each layer's heads are averaged, half of the residual path is mixed in, and layers are multiplied; rows sum to one.
    Class tokens that enter on the way come first (CaiT-like trunks).
    """
    if not maps:
        raise ValueError("rollout needs the attention maps of at least one layer")
    through: Tensor | None = None
    for layer in maps:
        mean = layer.float().abs().mean(-3)
        mean = mean / mean.sum(-1, keepdim=True)
        through = _grown(through, mean)
        through = 0.5 * (through + mean @ through)
    assert through is not None
    return through


def _gradient_attention(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    names = [f"attention.{i}" for i in map_layers(model)]
    out = model.outputs(images, set(names))
    maps = [out.captured[name] for name in names]
    slopes = _slopes(_score(model, out, classes), maps)
    through: Tensor | None = None
    for weights, slope in zip(maps, slopes, strict=True):
        through = _grown(through, weights)
        if slope is not None:
            through = through + (weights * slope).detach().float().clamp(min=0).mean(1) @ through
    assert through is not None
    tokens = torch.eye(through.shape[-1], device=through.device)
    gathered = (through - tokens).expand(len(images), -1, -1)  # what a patch has of itself says nothing
    return _read(model, out, gathered)


def _grown(through: Tensor | None, like: Tensor) -> Tensor:
    """What has reached each token so far, on the tokens of a layer: nothing yet, or class tokens have come in front."""
    tokens = like.shape[-1]
    start = torch.eye(tokens, device=like.device)
    if through is None:
        return start
    more = tokens - through.shape[-1]
    if not more:
        return through
    wide = start.expand(*through.shape[:-2], tokens, tokens).clone()
    wide[..., more:, more:] = through
    return wide


def _read(model: Classifier, out: Outputs, through: Tensor) -> Tensor:
    """[batch, tokens, tokens] as seen from the class token, on the grid."""
    patches = out.tokens.grid[0] * out.tokens.grid[1]
    prefix = through.shape[-1] - patches
    whole = through[..., prefix:]
    if prefix:
        seen = whole[:, 0]
    else:
        own = out.maps
        weights = own.float().mean(1) if own is not None and own.shape[-1] == patches else None
        seen = whole.mean(1) if weights is None else torch.einsum("bp,bpq->bq", weights, whole)
    return seen.unflatten(1, out.tokens.grid)


def _head(model: Classifier, images: Tensor, classes: Tensor | None) -> Tensor:
    with torch.no_grad():
        out = model.outputs(images)
        if out.maps is None:
            raise ValueError("no head of this model: its head mixes without a map")
        maps = out.maps.float()
        if getattr(model.head, "per_class", False):  # [batch, heads * classes, patches]
            chosen = model.fused(out.stack).argmax(1) if classes is None else classes.to(maps.device)
            maps = maps.unflatten(1, (-1, len(model.classes)))[torch.arange(len(maps)), :, chosen]
        return maps.mean(1).unflatten(1, out.tokens.grid)


def _grad_cam(model: Classifier, images: Tensor, classes: Tensor | None, score: Score = _score) -> Tensor:
    known = [name for name in getattr(model.trunk, "intermediates", ()) if name.startswith("tokens.")]
    names = sorted(known, key=lambda name: int(name.partition(".")[2]))[-2:]
    out = model.outputs(images, set(names))
    candidates = [out.captured[name] for name in names] or [out.tokens.sequence]
    slopes = _slopes(score(model, out, classes), candidates)
    patches = out.tokens.grid[0] * out.tokens.grid[1]
    found: Tensor | None = None
    for values, slope in zip(candidates, slopes, strict=True):
        if slope is None:
            continue
        own, rise = (t[:, t.shape[1] - patches :].detach().float() for t in (values, slope))
        if found is None or bool((rise != 0).any()):
            found = (own * rise.mean(1, keepdim=True)).sum(-1).clamp(min=0)
    assert found is not None
    return found.unflatten(1, out.tokens.grid)


def all_kinds(model: Classifier) -> list[str]:
    """The kinds of map that a model has."""
    return [kind for kind, why in kinds_of(model).items() if not why]


@dataclass(frozen=True)
class Voice:
    """What one part of a head says on its own, and where its evidence is."""

    name: str
    maps: Tensor  # Grad-CAM for the class that the whole model says, [batch, rows, columns], float32
    probabilities: Tensor  # [batch, classes], of this part alone


def voices(model: Classifier, images: Tensor, classes: Tensor) -> list[Voice]:
    """Class token, patch tokens, and both (SoT, supplement E), where a head adds logits of the two; else nothing.

    `classes` [batch] are the classes that maps explain.
    """
    head = model.head
    if not isinstance(head, SecondOrderHead) or head.fc is None or head.fc_words is None or model.policy is not None:
        return []
    said: dict[str, Tensor] = {}
    made = []
    for name, layer in (("class token", head.fc), ("words", head.fc_words), ("both", None)):

        def keep(module: nn.Module, given: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            said[name] = out

        def score(model: Classifier, out: Outputs, chosen: Tensor | None, name: str = name) -> Tensor:
            said.setdefault(name, model.fused(out.stack))
            assert chosen is not None
            return said[name].gather(1, chosen.to(said[name].device)[:, None]).sum()

        hook = layer.register_forward_hook(keep) if layer is not None else None
        try:
            with evaluation_mode(model), torch.enable_grad():
                maps = _grad_cam(model, model._images(images).detach().requires_grad_(), classes, score)
        finally:
            if hook is not None:
                hook.remove()
        made.append(Voice(name, maps.detach().float(), model.probabilities(said[name].detach().float())))
    return made
