"""GeNIe, GeNIe-Ada and their baselines, behind one call (Abbasi Koohpayegani et al., 2023, arXiv 2312.02548).

An image of one class is noised part of the way and denoised under another: it keeps its surroundings and shows the
other class, whose label it gets, as a hard negative. Somewhere along the noise level r the class switches; GeNIe-Ada
searches for that level per image. Every method generates exactly one image for each row of a `Request`, so all of them
give a class the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.augment.mixing import draw_mix
from vitrail.data.config import AugmentConfig
from vitrail.generate.diffusion_model import Diffuser
from vitrail.measure.hard_negatives import axis_position, largest_jump
from vitrail.schema import near

TEMPLATE = "a photo of a {class}."
WITH_SUPERCLASS = "a photo of a {class}, a type of {superclass}."
_NO_WORD = re.compile(r"(class|label|n)?[\s_-]*\d+", re.IGNORECASE)  # 7, class_7, n01440764
USUAL_R = 0.8
CANDIDATES = (0.5, 0.6, 0.7, 0.8, 0.9)
LOW, HIGH = 0.3, 0.7  # r of Img2Img^L and Img2Img^H
WEAK_SCALE = (0.2, 1.0)
BLUR_PIXELS = 9  # a kernel that holds two deviations of the widest blur on either side

Embed = Callable[[Tensor], Tensor]  # images [batch, 3, height, width] -> [batch, features]
Formula = Literal["text", "box"]


def prompts_for(
    classes: Sequence[str],
    *,
    template: str | None = None,
    superclass: str | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The prompt of every class, in lower case: the class's name, or the one that `names` gives it, in a template.

    Raises `ValueError` with every class whose name is no word (a number, say) and which `names` does not name, and
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
    names = names or {}
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise ValueError(f"names are given for classes that are not there: {_first(unknown)}")
    words = [" ".join(names.get(name, name).replace("_", " ").split()) for name in classes]
    meaningless = [name for name, word in zip(classes, words, strict=True) if not word or _NO_WORD.fullmatch(word)]
    if meaningless:
        raise ValueError(f"no prompt can be made of the class names {_first(meaningless)}; say what they show (names)")
    filled = (chosen.replace("{class}", word).replace("{superclass}", superclass or "") for word in words)
    return tuple(prompt.lower() for prompt in filled)


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def genie(diffuser: Diffuser, images: Tensor, target: Tensor, seeds: Tensor, *, r: float = USUAL_R) -> Tensor:
    """Images of other classes changed to show `target`."""
    return diffuser(images, target, r, seeds)


@dataclass(frozen=True)
class Chosen:
    """Samples of GeNIe-Ada, and how they were chosen."""

    images: Tensor  # [batch, 3, height, width], the candidates that were chosen
    r: Tensor  # [batch] their noise level
    index: Tensor  # [batch] their index among the candidates
    curve: Tensor  # [batch, candidates] position of each candidate between source and target
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

    `prototypes` [classes, features] are mean embeddings of classes (see `prototypes_of`). `unit` normalises embeddings
    first, as the authors' code does. Raises `ValueError` unless there are two candidates or more, in order.
    """
    levels = list(candidates)
    if len(levels) < 2 or levels != sorted(set(levels)):
        raise ValueError(f"candidates must be at least two, from small to large, not {', '.join(map(str, levels))}")

    target = torch.as_tensor(target).to(torch.int64)
    samples = torch.stack([diffuser(images, target, r, seeds) for r in levels])
    source = _embedded(embed, images, unit)
    edited = torch.stack(
        [_embedded(embed, candidate, unit) for candidate in samples], 1
    )  # [batch, candidates, features]
    prototype = prototypes.to(source)[target.to(source.device)]
    curve = axis_position(edited, source[:, None], prototype[:, None], printed=formula == "box")
    index = largest_jump(curve).to(images.device)
    chosen = samples[index.to(samples.device), torch.arange(len(images), device=samples.device)]
    return Chosen(chosen, torch.tensor(levels, device=index.device)[index], index, curve, samples)


def prototypes_of(embed: Embed, images: Tensor, labels: Tensor, classes: int, *, unit: bool = True) -> Tensor:
    """The mean embedding of each class's images, [classes, features]; raises `ValueError` for a class without any."""
    embeddings = _embedded(embed, images, unit)
    labels = labels.to(embeddings.device)
    counts = torch.bincount(labels, minlength=classes)
    if int((counts == 0).sum()):
        empty = (counts == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"classes {', '.join(map(str, empty[:5]))} have no image to make a prototype of")
    sums = embeddings.new_zeros(classes, embeddings.shape[1]).index_add(0, labels, embeddings)
    return sums / counts[:, None]


def _embedded(embed: Embed, images: Tensor, unit: bool) -> Tensor:
    embeddings = embed(images).float()
    return F.normalize(embeddings, dim=-1) if unit else embeddings


def ada_evaluations(diffuser: Diffuser, candidates: Sequence[float] = CANDIDATES) -> int:
    """Network evaluations per image of GeNIe-Ada: the sum over its candidates."""
    return sum(diffuser.evaluations(r) for r in candidates)


@dataclass(frozen=True)
class Request:
    """Images to be generated, one per row, and a pool of images to generate them from."""

    images: Tensor  # [pool, 3, height, width] bytes
    labels: Tensor  # [pool] classes
    source: Tensor  # [rows] index in the pool of an image of another class
    own: Tensor  # [rows] index in the pool of an image of the target class
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
    """Models and settings that a method may need."""

    diffuser: Diffuser | None = None
    embed: Embed | None = None  # of GeNIe-Ada
    prototypes: Tensor | None = None  # [classes, features]
    r: float = USUAL_R
    candidates: tuple[float, ...] = CANDIDATES


@dataclass(frozen=True)
class Samples:
    """Images that a method generated for a request."""

    images: Tensor  # [rows, 3, height, width] bytes
    target: Tensor  # [rows] class that each was generated for
    weights: Tensor  # [rows, classes] soft label: the class, or a mixture; sums to 1
    evaluations: int  # network evaluations per image: 0 where no diffusion model is needed
    r: Tensor | None = None  # [rows] noise level, where it differs from row to row


def generate(method: str, request: Request, tools: Tools | None = None) -> Samples:
    """The images of a request by the named method; raises `ValueError` with near matches for an unknown one."""
    if method not in METHODS:
        raise ValueError(f"no method {method!r}{near(method, METHODS)}; there are {', '.join(METHODS)}")
    tools = tools or Tools()
    if method in NEEDS_DIFFUSION:
        if tools.diffuser is None:
            raise ValueError(f"the method {method} needs a diffusion model; none is given")
        samples = NEEDS_DIFFUSION[method](request, tools, tools.diffuser)
    else:
        samples = WITHOUT_DIFFUSION[method](request)
    assert len(samples.images) == len(samples.weights) == len(request)
    return samples


def equal_compute(evaluations: int, each: int) -> int:
    """How many images of a method with `each` network evaluations cost as much as one with `evaluations`."""
    return max(1, evaluations // each) if each else 1


def _samples(request: Request, images: Tensor, evaluations: int = 0, r: Tensor | None = None) -> Samples:
    return Samples(images, request.target, F.one_hot(request.target, request.classes).float(), evaluations, r)


def _transformed(request: Request, strong: bool) -> Samples:
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
    images = []
    # torchvision draws from the process's generator: it is seeded image by image, and restored.
    with torch.random.fork_rng(devices=[]):
        for index, seed in zip(request.own.tolist(), request.seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed)
            image = request.images[index]
            for operation in operations:
                image = operation(image)
            images.append(image)
    return _samples(request, torch.stack(images) if images else request.images[:0])


def _mixed(request: Request, config: AugmentConfig) -> Samples:
    """An image of the class and one of another, mixed; so are their labels. The class has the larger share.

    A file has one label, so the two change roles where the other class would have more.
    """
    height, width = request.images.shape[-2:]
    own, other = request.images[request.own].float(), request.images[request.source].float()
    shares, images = [], []
    for i, seed in enumerate(request.seeds.tolist()):
        mix = draw_mix(config, seed, 0, height, width)
        assert mix is not None
        below, above = (own[i], other[i]) if mix.share <= 0.5 else (other[i], own[i])
        if mix.box is None:
            images.append(below * (1 - mix.share) + above * mix.share)
        else:
            top, left, bottom, right = mix.box
            images.append(below.clone())
            images[-1][:, top:bottom, left:right] = above[:, top:bottom, left:right]
        shares.append(min(mix.share, 1 - mix.share))
    share = torch.tensor(shares, dtype=torch.float32)[:, None]
    target, foreign = (F.one_hot(c, request.classes).float() for c in (request.target, request.labels[request.source]))
    pixels = torch.stack(images).round().to(torch.uint8) if images else request.images[:0]
    return Samples(pixels, request.target, target * (1 - share) + foreign * share, 0)


def _img2img(request: Request, tools: Tools, diffuser: Diffuser, r: float) -> Samples:
    images = diffuser(request.images[request.own], request.target, r, request.seeds)
    return _samples(request, images, diffuser.evaluations(r))


def _txt2img(request: Request, tools: Tools, diffuser: Diffuser) -> Samples:
    return _samples(request, diffuser.txt2img(request.target, request.seeds), diffuser.evaluations(1.0))


def _genie(request: Request, tools: Tools, diffuser: Diffuser) -> Samples:
    images = genie(diffuser, request.images[request.source], request.target, request.seeds, r=tools.r)
    return _samples(request, images, diffuser.evaluations(tools.r))


def _genie_ada(request: Request, tools: Tools, diffuser: Diffuser) -> Samples:
    if tools.embed is None or tools.prototypes is None:
        raise ValueError("the method genie_ada needs embeddings and the prototypes of classes; none are given")
    chosen = genie_ada(
        diffuser,
        request.images[request.source],
        request.target,
        request.seeds,
        embed=tools.embed,
        prototypes=tools.prototypes,
        candidates=tools.candidates,
    )
    return _samples(request, chosen.images, ada_evaluations(diffuser, tools.candidates), chosen.r)


WITHOUT_DIFFUSION: dict[str, Callable[[Request], Samples]] = {
    "weak": partial(_transformed, strong=False),
    "strong": partial(_transformed, strong=True),
    "mixup": partial(_mixed, config=AugmentConfig(mixup=1.0)),
    "cutmix": partial(_mixed, config=AugmentConfig(cutmix=1.0)),
}
NEEDS_DIFFUSION: dict[str, Callable[[Request, Tools, Diffuser], Samples]] = {
    "img2img_low": partial(_img2img, r=LOW),
    "img2img_high": partial(_img2img, r=HIGH),
    "txt2img": _txt2img,
    "genie": _genie,
    "genie_ada": _genie_ada,
}
METHODS = (*WITHOUT_DIFFUSION, *NEEDS_DIFFUSION)
OF_ITS_OWN = ("weak", "strong", "img2img_low", "img2img_high")  # generated from an image of the target class itself
OF_NOTHING = ("txt2img",)
