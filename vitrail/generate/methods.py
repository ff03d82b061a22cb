"""Prompts of classes for text-to-image models (as in GeNIe, arXiv 2312.02548).

GeNIe and GeNIe-Ada: hard negatives by diffusion, and the choice of the noise level per image (Abbasi Koohpayegani et
al., 2023, arXiv 2312.02548).

An image of one class is noised part of the way and denoised under another: it keeps its surroundings and shows the
other class, whose label it gets. Somewhere along r the class switches; GeNIe-Ada looks for the place.

GeNIe and its baselines, behind one call and with one budget (Abbasi Koohpayegani et al., 2023, arXiv 2312.02548).

Every method makes exactly one image for each row of a `Request`, so all of them give a class the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.augment.mixing import draw_mix
from vitrail.data.config import AugmentConfig
from vitrail.data.counter import seed_of
from vitrail.generate.diffusion_model import Diffuser
from vitrail.measure.hard_negatives import axis_position, largest_jump

TEMPLATE = "a photo of a {class}."
WITH_SUPERCLASS = "a photo of a {class}, a type of {superclass}."
_NO_WORD = re.compile(r"(class|label|n)?[\s_-]*\d+", re.IGNORECASE)  # 7, class_7, n01440764


def prompts_for(
    classes: Sequence[str],
    *,
    template: str | None = None,
    superclass: str | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The prompt of every class, in lower case: the class's name, or the one that `names` gives it, in a template.

    Raises `ValueError` with every class whose name says nothing (a number, say) and which `names` does not name, and
    for a template without a place for the class.

    >>> prompts_for(["Red_Fox", "0"], names={"0": "tench"})
    ('a photo of a red fox.', 'a photo of a tench.')
    >>> prompts_for(["ramen"], superclass="food")
    ('a photo of a ramen, a type of food.',)
    """
    chosen = template or (WITH_SUPERCLASS if superclass else TEMPLATE)
    if "{class}" not in chosen:
        raise ValueError(f"the prompt {chosen!r} has no place for the class; write {{class}} there")
    if "{superclass}" in chosen and not superclass:
        raise ValueError(f"the prompt {chosen!r} has a place for a superclass, and none is given")
    if superclass and "{superclass}" not in chosen:
        raise ValueError(f"the prompt {chosen!r} has no place for the superclass; write {{superclass}} there")
    given = names or {}
    unknown = [name for name in given if name not in classes]
    if unknown:
        raise ValueError(f"names are given for classes that are not there: {_some(unknown)}")
    words = [" ".join(given.get(name, name).replace("_", " ").split()) for name in classes]
    silent = [name for name, word in zip(classes, words, strict=True) if not word or _NO_WORD.fullmatch(word)]
    if silent:
        raise ValueError(f"no prompt can be made of the class names {_some(silent)}; say what they show (names)")
    filled = (chosen.replace("{class}", word).replace("{superclass}", superclass or "") for word in words)
    return tuple(prompt.lower() for prompt in filled)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


USUAL_R = 0.8
CANDIDATES = (0.5, 0.6, 0.7, 0.8, 0.9)
Embed = Callable[[Tensor], Tensor]  # images [batch, 3, height, width] -> [batch, features]
Formula = Literal["text", "box"]


def genie(diffuser: Diffuser, images: Tensor, target: Tensor, seeds: Tensor, *, r: float = USUAL_R) -> Tensor:
    """Images of other classes changed to show `target`."""
    return diffuser(images, target, r, seeds)


@dataclass(frozen=True)
class Chosen:
    """What GeNIe-Ada made, and why."""

    images: Tensor  # [batch, 3, height, width], the candidates that were chosen
    r: Tensor  # [batch] their noise
    place: Tensor  # [batch] their place among the candidates
    curve: Tensor  # [batch, candidates] how far along the way from source to target each candidate lies
    candidates: Tensor  # [candidates, batch, 3, height, width]


def genie_ada(
    diffuser: Diffuser,
    images: Tensor,
    target: Tensor,
    seeds: Tensor,
    *,
    embed: Embed,
    prototypes: Tensor,
    candidates: Sequence[float] = CANDIDATES,
    formula: Formula = "text",
    unit: bool = True,
) -> Chosen:
    """Every candidate r for every image, once, with the same noise; the one just after the largest jump is kept.

    `prototypes` [classes, features] says where each class lies (see `prototypes_of`). `unit` brings embeddings to unit
    length first, as the authors' code does. Raises `ValueError` unless there are two candidates or more, in order.
    """
    levels = list(candidates)
    if len(levels) < 2 or levels != sorted(set(levels)):
        raise ValueError(f"candidates must be at least two, from small to large, not {', '.join(map(str, levels))}")

    def seen(pictures: Tensor) -> Tensor:
        found = embed(pictures).float()
        return F.normalize(found, dim=-1) if unit else found

    target = torch.as_tensor(target).to(torch.int64)
    made = torch.stack([diffuser(images, target, r, seeds) for r in levels])
    source = seen(images)
    edited = torch.stack([seen(one) for one in made], 1)  # [batch, candidates, features]
    aim = prototypes.to(source)[target.to(source.device)]
    curve = axis_position(edited, source[:, None], aim[:, None], printed=formula == "box")
    place = largest_jump(curve).to(images.device)
    return Chosen(
        made[place.to(made.device), torch.arange(len(images), device=made.device)],
        torch.tensor(levels, device=place.device)[place],
        place,
        curve,
        made,
    )


def prototypes_of(embed: Embed, images: Tensor, labels: Tensor, classes: int, *, unit: bool = True) -> Tensor:
    """The mean embedding of each class's images, [classes, features]; raises `ValueError` for a class without any."""
    found = embed(images).float()
    found = F.normalize(found, dim=-1) if unit else found
    labels = labels.to(found.device)
    counts = torch.bincount(labels, minlength=classes)
    if int((counts == 0).sum()):
        empty = (counts == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"classes {', '.join(map(str, empty[:5]))} have no image to make a prototype of")
    return found.new_zeros(classes, found.shape[1]).index_add(0, labels, found) / counts[:, None]


def ada_evaluations(diffuser: Diffuser, candidates: Sequence[float] = CANDIDATES) -> int:
    """What an image of GeNIe-Ada costs in rows that the network sees: the sum of its candidates."""
    return sum(diffuser.evaluations(r) for r in candidates)


LOW, HIGH = 0.3, 0.7  # r of Img2Img^L and Img2Img^H
WEAK_SCALE = (0.2, 1.0)
BLUR_PIXELS = 9  # a kernel that holds two deviations of the widest blur on either side


@dataclass(frozen=True)
class Request:
    """Images to be made, one a row, and what they may be made of."""

    images: Tensor  # [pool, 3, height, width] bytes
    labels: Tensor  # [pool] classes
    source: Tensor  # [rows] place in the pool of an image of another class
    own: Tensor  # [rows] place in the pool of an image of the target class
    target: Tensor  # [rows] class
    seeds: Tensor  # [rows]
    classes: int

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8:
            raise ValueError(f"images to make others of must be bytes (uint8), not {self.images.dtype}")

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class Tools:
    """What a method may need besides."""

    diffuser: Diffuser | None = None
    embed: Embed | None = None  # of GeNIe-Ada
    prototypes: Tensor | None = None  # [classes, features]
    r: float = USUAL_R
    candidates: tuple[float, ...] = CANDIDATES


@dataclass(frozen=True)
class Made:
    """What a method made of a request."""

    images: Tensor  # [rows, 3, height, width] bytes
    target: Tensor  # [rows] class that each was made for
    weights: Tensor  # [rows, classes] what each is of: its class, or a mixture; sums to 1
    evaluations: int  # network evaluations an image: 0 where no diffusion model is needed
    r: Tensor | None = None  # [rows] noise, where it differs from row to row


def all_others(images: Tensor, labels: Tensor, classes: int, *, seed: int = 0) -> Request:
    """Every image of every other class, once for each class: K (N - 1) new images per class, N-way K-shot.

    Raises `ValueError` for a class without images: nothing of its own can be changed.
    """
    labels = labels.to(torch.int64)
    places = [(labels == c).nonzero()[:, 0] for c in range(classes)]
    empty = [str(c) for c, own in enumerate(places) if not len(own)]
    if empty:
        raise ValueError(f"classes {', '.join(empty[:5])} have no image; every class needs one")
    source = [(labels != c).nonzero()[:, 0] for c in range(classes)]
    own = [places[c][torch.arange(len(source[c])) % len(places[c])] for c in range(classes)]
    target = torch.repeat_interleave(torch.arange(classes), torch.tensor([len(rows) for rows in source]))
    rows = torch.cat(source)
    # Seeds follow from what is made of what, not from the place in the list: part of a request is made as the whole.
    seeds = [seed_of("genie", seed, int(s), int(t)) >> 1 for s, t in zip(rows, target, strict=True)]
    return Request(images, labels, rows, torch.cat(own), target, torch.tensor(seeds, dtype=torch.int64), classes)


def make(method: str, request: Request, tools: Tools | None = None) -> Made:
    """The images of a request by the named method; raises `ValueError` with near matches for an unknown one."""
    from vitrail.schema import near

    if method not in METHODS:
        raise ValueError(f"no method {method!r}{near(method, METHODS)}; there are {', '.join(METHODS)}")
    made = METHODS[method](request, tools or Tools())
    assert len(made.images) == len(made.weights) == len(request)
    return made


def check_budgets(made: Mapping[str, Made]) -> Tensor:
    """Images that were made for each class, [classes]; raises `ValueError` where methods differ."""
    counts = {name: torch.bincount(one.target, minlength=one.weights.shape[1]) for name, one in made.items()}
    first, expected = next(iter(counts.items()))
    for name, found in counts.items():
        if not torch.equal(found, expected) or len(made[name].images) != int(found.sum()):
            raise ValueError(
                f"budgets differ: {name} made {found.tolist()} images of the classes, {first} {expected.tolist()}"
            )
    return expected


def equal_compute(evaluations: int, each: int) -> int:
    """How many images of a method that costs `each` can be made for what one costs that takes `evaluations`."""
    return max(1, evaluations // each) if each else 1


def _whole(request: Request) -> Tensor:
    return F.one_hot(request.target, request.classes).float()


def _diffuser(tools: Tools, method: str) -> Diffuser:
    if tools.diffuser is None:
        raise ValueError(f"the method {method} needs a diffusion model; none is given")
    return tools.diffuser


def _weak(request: Request, tools: Tools) -> Made:
    return Made(_transformed(request, strong=False), request.target, _whole(request), 0)


def _strong(request: Request, tools: Tools) -> Made:
    return Made(_transformed(request, strong=True), request.target, _whole(request), 0)


def _transformed(request: Request, strong: bool) -> Tensor:
    """Crop and flip; with `strong` also the colours and blur of the authors' code."""
    side = request.images.shape[-1]
    operations: list[Callable[[Tensor], Tensor]] = [
        v2.RandomResizedCrop(side, scale=WEAK_SCALE, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if strong:
        operations += [
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(BLUR_PIXELS, (0.1, 2.0))], 0.5),
        ]
    made = []
    # torchvision draws from the process's generator: it is lent, image by image, and given back.
    with torch.random.fork_rng(devices=[]):
        for place, seed in zip(request.own.tolist(), request.seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed)
            image = request.images[place]
            for operation in operations:
                image = operation(image)
            made.append(image)
    return torch.stack(made) if made else request.images[:0]


def _mixed(request: Request, config: AugmentConfig) -> Made:
    """An image of the class and one of another, mixed; so are their labels. The class has the larger share.

    What is made has one label where it is kept as a file, so the two change parts where the other would have more.
    """
    height, width = request.images.shape[-2:]
    own, other = request.images[request.own].float(), request.images[request.source].float()
    foreign = F.one_hot(request.labels[request.source], request.classes).float()
    shares, made = [], []
    for i, seed in enumerate(request.seeds.tolist()):
        drawn = draw_mix(config, seed, 0, height, width)
        assert drawn is not None
        below, above = (own[i], other[i]) if drawn.share <= 0.5 else (other[i], own[i])
        if drawn.box is None:
            made.append(below * (1 - drawn.share) + above * drawn.share)
        else:
            top, left, bottom, right = drawn.box
            cut = below.clone()
            cut[:, top:bottom, left:right] = above[:, top:bottom, left:right]
            made.append(cut)
        shares.append(min(drawn.share, 1 - drawn.share))
    share = torch.tensor(shares, dtype=torch.float32)[:, None]
    images = torch.stack(made).round().to(torch.uint8) if made else request.images[:0]
    return Made(images, request.target, _whole(request) * (1 - share) + foreign * share, 0)


def _mixup(request: Request, tools: Tools) -> Made:
    return _mixed(request, AugmentConfig(mixup=1.0))


def _cutmix(request: Request, tools: Tools) -> Made:
    return _mixed(request, AugmentConfig(cutmix=1.0))


def _img2img(request: Request, tools: Tools, r: float, name: str) -> Made:
    diffuser = _diffuser(tools, name)
    images = diffuser(request.images[request.own], request.target, r, request.seeds)
    return Made(images, request.target, _whole(request), diffuser.evaluations(r))


def _img2img_low(request: Request, tools: Tools) -> Made:
    return _img2img(request, tools, LOW, "img2img_low")


def _img2img_high(request: Request, tools: Tools) -> Made:
    return _img2img(request, tools, HIGH, "img2img_high")


def _txt2img(request: Request, tools: Tools) -> Made:
    diffuser = _diffuser(tools, "txt2img")
    images = diffuser.txt2img(request.target, request.seeds)
    return Made(images, request.target, _whole(request), diffuser.evaluations(1.0))


def _genie(request: Request, tools: Tools) -> Made:
    diffuser = _diffuser(tools, "genie")
    images = genie(diffuser, request.images[request.source], request.target, request.seeds, r=tools.r)
    return Made(images, request.target, _whole(request), diffuser.evaluations(tools.r))


def _genie_ada(request: Request, tools: Tools) -> Made:
    diffuser = _diffuser(tools, "genie_ada")
    if tools.embed is None or tools.prototypes is None:
        raise ValueError("the method genie_ada needs embeddings and the prototypes of classes; none are given")
    found = genie_ada(
        diffuser,
        request.images[request.source],
        request.target,
        request.seeds,
        embed=tools.embed,
        prototypes=tools.prototypes,
        candidates=tools.candidates,
    )
    return Made(found.images, request.target, _whole(request), ada_evaluations(diffuser, tools.candidates), found.r)


OF_ITS_OWN = ("weak", "strong", "img2img_low", "img2img_high")  # made of an image of the target class itself
OF_NOTHING = ("txt2img",)

Method = Callable[[Request, Tools], Made]
METHODS: dict[str, Method] = {
    "weak": _weak,
    "strong": _strong,
    "mixup": _mixup,
    "cutmix": _cutmix,
    "img2img_low": _img2img_low,
    "img2img_high": _img2img_high,
    "txt2img": _txt2img,
    "genie": _genie,
    "genie_ada": _genie_ada,
}
