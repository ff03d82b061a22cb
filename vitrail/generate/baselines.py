"""GeNIe and its baselines, behind one call and with one budget (Abbasi Koohpayegani et al., 2023, arXiv 2312.02548).

Every method makes exactly one image for each row of a `Request`, so all of them give a class the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from vitrail.data.config import AugmentConfig
from vitrail.data.counter import seed_of
from vitrail.data.mixing import draw_mix
from vitrail.generate.diffuser import Diffuser
from vitrail.generate.genie import CANDIDATES, USUAL_R, Embed, ada_evaluations, genie, genie_ada

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
