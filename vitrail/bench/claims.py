"""Hardware-dependent claims of DeiT, CaiT, PatchConvNet and DeiT III as data, and their check on this machine.

Ratios are compared, never absolute values: the papers measured on other hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.bench.roofline import free_memory, out_of_memory
from vitrail.measure.speed import MemoryWatch, Ratio, Timing, Way, fresh_images, in_turns, ratio
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.tokens import Probe, Tokens

NEEDS_GPU = "needs a GPU: peak memory is not measured on a CPU"
INFINITY = float("inf")

Quantity = Literal["speed", "memory", "macs"]
Tell = Callable[[str], None]  # told what is measured


@dataclass(frozen=True)
class ClaimSubject:
    """A model as a claim speaks of it."""

    name: str
    image_size: int | None = None
    heads: int | None = None
    explicit: bool = False
    """Attention as two matrix products and a softmax, whose maps are stored; else the fused kernel."""


@dataclass(frozen=True)
class Claim:
    """`quantity` of one subject over that of another; it holds here where the ratio lies between `above` and `below`.

    The bounds are those of the claim's words (more, less, flat, no faster than the area), not of its figure.
    """

    text: str
    quantity: Quantity  # images a second, peak bytes, or multiply-accumulates
    subject: ClaimSubject
    to: ClaimSubject
    says: float | None
    """The document's ratio (none: it names no figure)."""
    above: float = 0.0
    below: float = INFINITY


@dataclass(frozen=True)
class Checked:
    """A claim and what came out."""

    claim: Claim
    measured: Ratio | None  # none where it could not be measured
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.measured is None:
            return None
        return self.claim.above < self.measured.median < self.claim.below

    @property
    def sure(self) -> bool:
        """Whether the quartiles of the rounds agree with their median."""
        found = self.measured
        return found is not None and all(
            (self.claim.above < value < self.claim.below) == self.holds for value in (found.low, found.high)
        )

    def to_json(self) -> dict[str, Any]:
        found = self.measured
        return {
            "claim": self.claim.text,
            "quantity": self.claim.quantity,
            "says": self.claim.says,
            "measured": None if found is None else found.median,
            "quartiles": None if found is None else [found.low, found.high],
            "holds": self.holds,
            "sure": self.sure,
            "note": self.note,
        }


def area(size: int, native: int = 224) -> float:
    """How many times as many pixels as at the native size."""
    return (size / native) ** 2


TINY, SMALL, BASE = ClaimSubject("deit_tiny"), ClaimSubject("deit_small"), ClaimSubject("deit_base")
BASE_384, BASE_DISTILLED = ClaimSubject("deit_base_384"), ClaimSubject("deit_base_distilled")
S60 = ClaimSubject("patchconvnet_s60")
EXPLICIT_BASE, EXPLICIT_BASE_384 = (
    ClaimSubject("deit_base", explicit=True),
    ClaimSubject("deit_base_384", explicit=True),
)


def head_claims(explicit: bool) -> tuple[Claim, ...]:
    """More heads at DeiT-S's width (CaiT, arXiv 2103.17239): the same MACs, fewer images/s."""
    one = ClaimSubject("deit_small", heads=1, explicit=explicit)
    how = "explicit" if explicit else "fused"
    return tuple(
        Claim(f"{heads} heads / 1 head, DeiT-S width, {how}", "speed", several, one, speed / 1079, below=1.0)
        for heads, speed in ((6, 989), (8, 971), (24, 763))
        for several in (ClaimSubject("deit_small", heads=heads, explicit=explicit),)
    )


def area_claims() -> tuple[Claim, ...]:
    """PatchConvNet's memory grows no faster than the area (arXiv 2112.13692); 5 % tolerance for noise."""
    return tuple(
        Claim(
            f"PatchConvNet S60 at {size} / 224, area x{area(size):.2f}: linear",
            "memory",
            ClaimSubject("patchconvnet_s60", image_size=size),
            S60,
            megabytes / 1322,
            above=1.0,
            below=1.05 * area(size),
        )
        for size, megabytes in ((288, 2091), (384, 3604), (512, 6296))
    )


CLAIMS: tuple[Claim, ...] = (
    Claim("DeiT-Ti / DeiT-B", "speed", TINY, BASE, 8.7, above=1.0),
    Claim("DeiT-S / DeiT-B", "speed", SMALL, BASE, 3.2, above=1.0),
    Claim("DeiT-Ti / DeiT-S", "speed", TINY, SMALL, 8.7 / 3.2, above=1.0),
    Claim("DeiT-B with / without distillation token: < 1 %", "speed", BASE_DISTILLED, BASE, 290.9 / 292.3, above=0.99),
    Claim("DeiT-B at 224 / 384", "speed", BASE, BASE_384, 292.3 / 85.9, above=1.0),
    *head_claims(explicit=False),
    *head_claims(explicit=True),
    Claim("ViT-L / DeiT-B", "memory", ClaimSubject("vit_large"), BASE, 3789 / 2078, above=1.0),
    Claim("DeiT-B / PatchConvNet S60", "memory", BASE, S60, 2078 / 1321, above=1.0),
    Claim("PatchConvNet B60 / S60", "memory", ClaimSubject("patchconvnet_b60"), S60, 2790 / 1321, above=1.0),
    # Flat: nearer to 1 than to 2, the ratio of the depths.
    Claim("PatchConvNet S120 / S60: flat", "memory", ClaimSubject("patchconvnet_s120"), S60, 1450 / 1321, below=2**0.5),
    *area_claims(),
    Claim(
        f"ViT-B at 384 / 224, explicit, area x{area(384):.2f}: faster",
        "memory",
        EXPLICIT_BASE_384,
        EXPLICIT_BASE,
        8956 / 2078,
        above=area(384),
    ),
    Claim(f"ViT-B at 384 / 224, fused, area x{area(384):.2f}: faster", "memory", BASE_384, BASE, None, above=area(384)),
    Claim(
        "ViT-H at 224 / 126",
        "macs",
        ClaimSubject("deit3_huge"),
        ClaimSubject("deit3_huge", image_size=126),
        167.3 / 52.2,
        above=1.0,
    ),
)


@dataclass(frozen=True)
class Measures:
    """How each quantity is measured; a sentence in place of a number says why it was not."""

    speed: Callable[[Sequence[ClaimSubject]], Callable[[ClaimSubject, ClaimSubject], Ratio | str]]
    """Times all subjects in turns; gives the ratio of any two."""
    memory: Callable[[ClaimSubject], int | str]
    macs: Callable[[ClaimSubject], int | str]


def check_claims(claims: Sequence[Claim], measures: Measures) -> tuple[Checked, ...]:
    """Every claim with its ratio here; each subject is measured once for all claims that name it."""
    timed = subjects(claims, "speed")
    compared = measures.speed(timed) if timed else None
    memory = {subject: measures.memory(subject) for subject in subjects(claims, "memory")}
    macs = {subject: measures.macs(subject) for subject in subjects(claims, "macs")}
    found = []
    for claim in claims:
        if claim.quantity == "speed":
            assert compared is not None
            result = compared(claim.subject, claim.to)
        else:
            result = _quotient(
                *((memory if claim.quantity == "memory" else macs)[s] for s in (claim.subject, claim.to))
            )
        found.append(Checked(claim, None, result) if isinstance(result, str) else Checked(claim, result))
    return tuple(found)


def subjects(claims: Sequence[Claim], quantity: Quantity) -> list[ClaimSubject]:
    """Whom claims of a quantity speak of, each once, in order."""
    return list(dict.fromkeys(s for c in claims if c.quantity == quantity for s in (c.subject, c.to)))


def on_device(
    device: torch.device, autocast: torch.dtype | None, *, batch: int, rounds: int, seconds: float, tell: Tell
) -> Measures:
    """Measures of eager inference on a device; `tell` is called before each subject and each round."""

    def run(model: Classifier, images: Sequence[Tensor], i: int) -> Tensor:
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            return model(images[i % len(images)])

    def speed(asked: Sequence[ClaimSubject]) -> Callable[[ClaimSubject, ClaimSubject], Ratio | str]:
        try:
            timings = timed(asked)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return lambda one, to: f"speeds at batch {batch} do not fit into memory; use a smaller batch"
        return lambda one, to: ratio(timings[_called(one)], timings[_called(to)])

    def timed(asked: Sequence[ClaimSubject]) -> dict[str, Timing]:
        ways: dict[str, Way] = {}
        images: dict[int, list[Tensor]] = {}
        for subject in asked:
            tell(f"{_called(subject)}: speed")
            model = make(subject, device)
            size = model.preprocess.size
            images[size] = images.get(size) or fresh_images(batch, size, device)
            ways[_called(subject)] = Way(partial(run, model, images[size]), batch)
        return in_turns(
            ways, device, rounds=rounds, seconds=seconds, warm_up=1, turn=lambda done, _: tell(f"speed, round {done}")
        )

    def peak(subject: ClaimSubject) -> int | str:
        watch = MemoryWatch(device)
        model = make(subject, device)
        images = fresh_images(batch, model.preprocess.size, device, sets=1)
        run(model, images, 0)
        watch.again()  # the first call also chose kernels
        run(model, images, 0)
        return watch.peak() or NEEDS_GPU

    def memory(subject: ClaimSubject) -> int | str:
        tell(f"{_called(subject)}: memory")
        if device.type != "cuda":
            return NEEDS_GPU
        try:
            found = peak(subject)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            found = f"{_called(subject)} does not fit into memory at batch {batch}"
        free_memory()
        return found

    def macs(subject: ClaimSubject) -> int:
        tell(f"{_called(subject)}: MACs")
        model = make(subject, torch.device("meta"))
        return cost(model, model.preprocess.size).macs

    return Measures(speed, memory, macs)


def make(subject: ClaimSubject, device: torch.device) -> Classifier:
    """The model of a subject, with random weights, ready for inference."""
    changes: dict[str, Any] = {} if subject.heads is None else {"heads": subject.heads}
    model = create_model(subject.name, image_size=subject.image_size, device=device, **changes).eval()
    if subject.explicit:
        for module in model.modules():
            if isinstance(module, SoftmaxMixer):
                module.forward = partial(_explicit, module)  # type: ignore[method-assign]
    return model


def _explicit(mixer: SoftmaxMixer, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
    """Attention whose map is stored, as it was computed before there were fused kernels."""
    q, k, v = mixer.project(x, tokens)
    return mixer.mix((q, k, v), tokens, mixer.attention(q, k, tokens))


def _quotient(over: int | str, under: int | str) -> Ratio | str:
    if isinstance(over, str) or isinstance(under, str):
        return over if isinstance(over, str) else str(under)
    return Ratio(over / under, over / under, over / under)


def _called(subject: ClaimSubject) -> str:
    parts = [subject.name]
    parts += [f"{subject.heads} heads"] if subject.heads else []
    parts += [f"{subject.image_size} px"] if subject.image_size else []
    return ", ".join(parts + (["explicit"] if subject.explicit else []))
