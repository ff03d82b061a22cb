"""Every named model, as a table of parts.

A row says what it is made of, where its figures come from, and what the source states. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import ClassToken, HeadConfig


@dataclass(frozen=True)
class Stated:
    """What the source prints: parameters in millions and multiply-accumulates in units of 10^9, at the native size."""

    parameters: float | None = None
    macs: float | None = None


@dataclass(frozen=True)
class Spec:
    """One named model."""

    trunk: TrunkConfig
    head: HeadConfig
    source: str
    stated: Stated = Stated()
    timm: str | None = None
    """Name under which timm publishes the same architecture."""


_SIZES = {  # width, depth, heads, patch (architectures-and-training §4.1, §8.1)
    "tiny": (192, 12, 3, 16),
    "small": (384, 12, 6, 16),
    "base": (768, 12, 12, 16),
    "large": (1024, 24, 16, 16),
    "huge": (1280, 32, 16, 14),
}


def _plain(size: str, **changes: object) -> TrunkConfig:
    width, depth, heads, patch = _SIZES[size]
    return replace(TrunkConfig(width=width, depth=depth, heads=heads, patch=patch), **changes)  # type: ignore[arg-type]


def _vits() -> dict[str, Spec]:
    rows: dict[str, Spec] = {}
    timm_size = {"tiny": "tiny", "small": "small", "base": "base", "large": "large", "huge": "huge"}
    for size in _SIZES:
        patch = _SIZES[size][3]
        rows[f"vit_{size}"] = Spec(
            _plain(size), ClassToken(), "ViT, arXiv 2010.11929", timm=f"vit_{timm_size[size]}_patch{patch}_224"
        )
    deit = {"tiny": (5.7, 1.3), "small": (22.0, 4.6), "base": (86.6, 17.5)}
    for size, (parameters, macs) in deit.items():
        rows[f"deit_{size}"] = Spec(
            _plain(size),
            ClassToken(),
            "DeiT, table 3.1",
            Stated(parameters, macs),
            timm=f"deit_{size}_patch16_224",
        )
    rows["deit_base_384"] = Spec(
        _plain("base", image_size=384),
        ClassToken(),
        "DeiT, table 3.5",
        Stated(86.9, 55.4),
        timm="deit_base_patch16_384",
    )
    deit3 = {
        "tiny": (5.7, 1.3),
        "small": (22.0, 4.6),
        "base": (86.6, 17.5),
        "large": (304.4, 61.6),
        "huge": (632.1, 167.4),
    }
    for size, (parameters, macs) in deit3.items():
        rows[f"deit3_{size}"] = Spec(
            _plain(size, layerscale=1e-4, class_position=False, drop_path_rule="uniform"),
            ClassToken(),
            "DeiT III, tables 6.7 and 6.14",
            Stated(parameters, macs),
            timm=None if size == "tiny" else f"deit3_{size}_patch{_SIZES[size][3]}_224",
        )
    rows["deit3_huge52"] = Spec(
        _plain("huge", depth=52, layerscale=1e-4, class_position=False, drop_path_rule="uniform"),
        ClassToken(),
        "DeiT III, table 6.6",
        Stated(1000.0, None),
    )
    return rows


def _small_images() -> dict[str, Spec]:
    """Versions for 32-pixel images: patches of 4, so that 64 tokens remain."""
    rows = {}
    for name, size in (("vit_tiny_32", "tiny"), ("vit_small_32", "small")):
        rows[name] = Spec(_plain(size, image_size=32, patch=4), ClassToken(), "small-image version of vit")
    for name, size in (("deit3_tiny_32", "tiny"), ("deit3_small_32", "small")):
        trunk = _plain(size, image_size=32, patch=4, layerscale=1e-4, class_position=False, drop_path_rule="uniform")
        rows[name] = Spec(trunk, ClassToken(), "small-image version of deit3")
    rows["vit_micro_28"] = Spec(
        TrunkConfig(image_size=28, patch=7, width=64, depth=3, heads=4, activation="relu"),
        ClassToken(),
        "the demonstration; ReLU, because GELU's backward is slow on a CPU",
    )
    return rows


ZOO: dict[str, Spec] = {**_vits(), **_small_images()}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, in the zoo's order.

    >>> list_models("deit_s*")
    ['deit_small']
    """
    return [name for name in ZOO if fnmatchcase(name, pattern)]
