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

from vitrail.bench.roofline import fitting, free_memory
from vitrail.measure.speed import MemoryWatch, Ratio, Timing, Way, fresh_images, in_turns, ratio
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.tokens import Probe, Tokens

NEEDS_GPU = "needs a GPU: peak memory is not measured on a CPU"

Quantity = Literal["speed", "memory", "macs"]  # images/s, peak bytes, or multiply-accumulates


@dataclass(frozen=True)
class ClaimSubject:
    """A model that a claim is about."""

    name: str
    image_size: int | None = None
    heads: int | None = None
    explicit: bool = False
    """Attention as two matrix products and a softmax, whose maps are stored; else the fused kernel."""

    def __str__(self) -> str:
        parts = [self.name]
        parts += [f"{self.heads} heads"] if self.heads else []
        parts += [f"{self.image_size} px"] if self.image_size else []
        return ", ".join(parts + (["explicit"] if self.explicit else []))


@dataclass(frozen=True)
class Claim:
    """`quantity` of one subject over that of another; it holds here where the ratio lies between `above` and `below`.

    The bounds are those of the claim's words (more, less, flat, no faster than the area), not of its number.
    """

    text: str
    quantity: Quantity
    subject: ClaimSubject
    to: ClaimSubject
    says: float | None
    """The paper's ratio (none: it names no number)."""
    above: float = 0.0
    below: float = float("inf")


@dataclass(frozen=True)
class Checked:
    """A claim and the ratio measured here."""

    claim: Claim
    measured: Ratio | None  # none where it could not be measured
    note: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else self._within(self.measured.median)

    @property
    def sure(self) -> bool:
        """Whether the quartiles of the rounds agree with their median."""
        measured = self.measured
        return measured is not None and all(self._within(v) == self.holds for v in (measured.low, measured.high))

    def _within(self, value: float) -> bool:
        return self.claim.above < value < self.claim.below

    def to_json(self) -> dict[str, Any]:
        measured = self.measured
        return {
            "claim": self.claim.text,
            "quantity": self.claim.quantity,
            "says": self.claim.says,
            "measured": None if measured is None else measured.median,
            "quartiles": None if measured is None else [measured.low, measured.high],
            "holds": self.holds,
            "sure": self.sure,
            "note": self.note,
        }


TINY, SMALL, BASE = ClaimSubject("deit_tiny"), ClaimSubject("deit_small"), ClaimSubject("deit_base")
BASE_384, DISTILLED = ClaimSubject("deit_base_384"), ClaimSubject("deit_base_distilled")
EXPLICIT, EXPLICIT_384 = ClaimSubject("deit_base", explicit=True), ClaimSubject("deit_base_384", explicit=True)
LARGE, HUGE, HUGE_126 = ClaimSubject("vit_large"), ClaimSubject("deit3_huge"), ClaimSubject("deit3_huge", 126)
S60, S120, B60 = (ClaimSubject(f"patchconvnet_{size}") for size in ("s60", "s120", "b60"))
HEADS = ((6, 989), (8, 971), (24, 763))  # images/s at DeiT-S's width; one head: 1079 (CaiT, arXiv 2103.17239)
MEGABYTES = ((288, 2091), (384, 3604), (512, 6296))  # of S60 by image size; 224: 1322 (PatchConvNet, arXiv 2112.13692)
AREA = {size: (size / 224) ** 2 for size in (288, 384, 512)}  # how many times as many pixels as at 224

CLAIMS: tuple[Claim, ...] = (
    Claim("DeiT-Ti / DeiT-B", "speed", TINY, BASE, 8.7, above=1.0),
    Claim("DeiT-S / DeiT-B", "speed", SMALL, BASE, 3.2, above=1.0),
    Claim("DeiT-Ti / DeiT-S", "speed", TINY, SMALL, 8.7 / 3.2, above=1.0),
    Claim("DeiT-B with / without distillation token: < 1 %", "speed", DISTILLED, BASE, 290.9 / 292.3, above=0.99),
    Claim("DeiT-B at 224 / 384", "speed", BASE, BASE_384, 292.3 / 85.9, above=1.0),
    *(  # the same MACs, fewer images/s
        Claim(
            f"{heads} heads / 1 head, DeiT-S width, {'explicit' if explicit else 'fused'}",
            "speed",
            ClaimSubject("deit_small", heads=heads, explicit=explicit),
            ClaimSubject("deit_small", heads=1, explicit=explicit),
            speed / 1079,
            below=1.0,
        )
        for explicit in (False, True)
        for heads, speed in HEADS
    ),
    Claim("ViT-L / DeiT-B", "memory", LARGE, BASE, 3789 / 2078, above=1.0),
    Claim("DeiT-B / PatchConvNet S60", "memory", BASE, S60, 2078 / 1321, above=1.0),
    Claim("PatchConvNet B60 / S60", "memory", B60, S60, 2790 / 1321, above=1.0),
    # Flat: nearer to 1 than to 2, the ratio of the depths.
    Claim("PatchConvNet S120 / S60: flat", "memory", S120, S60, 1450 / 1321, below=2**0.5),
    *(  # no faster than the area; 5 % tolerance for noise
        Claim(
            f"PatchConvNet S60 at {size} / 224, area x{AREA[size]:.2f}: linear",
            "memory",
            ClaimSubject("patchconvnet_s60", size),
            S60,
            megabytes / 1322,
            above=1.0,
            below=1.05 * AREA[size],
        )
        for size, megabytes in MEGABYTES
    ),
    *(
        Claim(
            f"ViT-B at 384 / 224, {how}, area x{AREA[384]:.2f}: faster", "memory", large, small, says, above=AREA[384]
        )
        for how, large, small, says in (
            ("explicit", EXPLICIT_384, EXPLICIT, 8956 / 2078),
            ("fused", BASE_384, BASE, None),
        )
    ),
    Claim("ViT-H at 224 / 126", "macs", HUGE, HUGE_126, 167.3 / 52.2, above=1.0),
)


def check_claims(claims: Sequence[Claim], meter: DeviceMeter) -> tuple[Checked, ...]:
    """Every claim with its ratio here; each subject is measured once for all claims that name it."""
    speed = meter.speed(timed) if (timed := claim_subjects(claims, "speed")) else None
    values: dict[str, dict[ClaimSubject, int | str]] = {
        "memory": {subject: meter.memory(subject) for subject in claim_subjects(claims, "memory")},
        "macs": {subject: meter.macs(subject) for subject in claim_subjects(claims, "macs")},
    }

    def measured(claim: Claim) -> Ratio | str:
        if claim.quantity == "speed":
            assert speed is not None
            return speed(claim.subject, claim.to)
        over, under = (values[claim.quantity][subject] for subject in (claim.subject, claim.to))
        if isinstance(over, str) or isinstance(under, str):
            return over if isinstance(over, str) else str(under)
        return Ratio(over / under, over / under, over / under)

    results = [(claim, measured(claim)) for claim in claims]
    return tuple(Checked(c, None, r) if isinstance(r, str) else Checked(c, r) for c, r in results)


def claim_subjects(claims: Sequence[Claim], quantity: Quantity) -> list[ClaimSubject]:
    """Subjects of the claims of a quantity, each once, in order."""
    return list(dict.fromkeys(s for c in claims if c.quantity == quantity for s in (c.subject, c.to)))


@dataclass(frozen=True)
class DeviceMeter:
    """Measures eager inference on a device; a sentence in place of a number says why it could not.

    `report` is called before each subject and each round.
    """

    device: torch.device
    autocast: torch.dtype | None
    batch: int
    rounds: int
    seconds: float
    report: Callable[[str], object]

    def speed(self, subjects: Sequence[ClaimSubject]) -> Callable[[ClaimSubject, ClaimSubject], Ratio | str]:
        """Times all subjects in turns; gives the ratio of any two."""
        timings = fitting(self._timings, subjects)
        if timings is None:
            return lambda *_: f"speeds at batch {self.batch} do not fit into memory; use a smaller batch"
        return lambda subject, to: ratio(timings[str(subject)], timings[str(to)])

    def memory(self, subject: ClaimSubject) -> int | str:
        self.report(f"{subject}: memory")
        if self.device.type != "cuda":
            return NEEDS_GPU
        peak = fitting(self._peak, subject)
        free_memory()
        return peak or f"{subject} does not fit into memory at batch {self.batch}"

    def macs(self, subject: ClaimSubject) -> int:
        self.report(f"{subject}: MACs")
        model = build_subject(subject, torch.device("meta"))
        return cost(model, model.preprocess.size).macs

    def _forward(self, model: Classifier, images: Sequence[Tensor], call: int) -> Tensor:
        enabled = self.autocast is not None
        with torch.inference_mode(), torch.autocast(self.device.type, self.autocast, enabled=enabled):
            return model(images[call % len(images)])

    def _timings(self, subjects: Sequence[ClaimSubject]) -> dict[str, Timing]:
        ways: dict[str, Way] = {}
        images: dict[int, list[Tensor]] = {}
        for subject in subjects:
            self.report(f"{subject}: speed")
            model = build_subject(subject, self.device)
            size = model.preprocess.size
            images[size] = images.get(size) or fresh_images(self.batch, size, self.device)
            ways[str(subject)] = Way(partial(self._forward, model, images[size]), self.batch)
        return in_turns(
            ways,
            self.device,
            rounds=self.rounds,
            seconds=self.seconds,
            warm_up=1,
            turn=lambda done, _: self.report(f"speed, round {done}"),
        )

    def _peak(self, subject: ClaimSubject) -> int | None:
        watch = MemoryWatch(self.device)
        model = build_subject(subject, self.device)
        images = fresh_images(self.batch, model.preprocess.size, self.device, sets=1)
        self._forward(model, images, 0)
        watch.again()  # the first call also chose kernels
        self._forward(model, images, 0)
        return watch.peak()


def build_subject(subject: ClaimSubject, device: torch.device) -> Classifier:
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
