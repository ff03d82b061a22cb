"""Every named model, as a table of parts.

A row lists its parts, the source of its numbers, and the counts that the source states. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from vitrail.model.config import (
    AnyTrunkConfig,
    CifarResNet,
    ConvStem,
    DenoiserConfig,
    SotStem,
    TimmBackbone,
    TrunkConfig,
)
from vitrail.model.heads import config as heads
from vitrail.model.mixers import config as mixers


@dataclass(frozen=True)
class Stated:
    """What the source prints at the native size: parameters in millions, multiply-accumulates in units of 10^9."""

    parameters: float | None = None
    macs: float | None = None
    attention_products: bool = True
    """Whether the source's count includes the products of queries with keys and of maps with values."""


@dataclass(frozen=True)
class Spec:
    """One named model."""

    trunk: AnyTrunkConfig
    head: heads.HeadConfig
    source: str
    stated: Stated = Stated()
    timm: str | None = None
    """Name under which timm publishes the same architecture."""
    classes: int = 1000
    """Classes for which the source counts."""


Rows = dict[str, Spec]

SIZES = {  # width, depth, heads, patch (DeiT, arXiv 2012.12877; DeiT III, arXiv 2204.07118)
    "tiny": (192, 12, 3, 16),
    "small": (384, 12, 6, 16),
    "base": (768, 12, 12, 16),
    "large": (1024, 24, 16, 16),
    "huge": (1280, 32, 16, 14),
}
UNIFORM: dict[str, Any] = {"drop_path_rule": "uniform"}
DEIT3: dict[str, Any] = {"layerscale": 1e-4, "class_position": False, "drop_path_rule": "uniform"}


def plain_vit(size: str, **changes: Any) -> TrunkConfig:
    """The trunk of a plain ViT of a named size."""
    width, depth, count, patch = SIZES[size]
    return replace(TrunkConfig(width=width, depth=depth, heads=count, patch=patch), **changes)


def vits() -> Rows:
    rows: Rows = {}
    for size, (_, _, _, patch) in SIZES.items():
        published = f"vit_{size}_patch{patch}_224"
        rows[f"vit_{size}"] = Spec(plain_vit(size), heads.ClassToken(), "ViT, arXiv 2010.11929", timm=published)
    for size, parameters, macs in (("tiny", 5.7, 1.3), ("small", 22.0, 4.6), ("base", 86.6, 17.5)):
        stated = Stated(parameters, macs)
        published = f"deit_{size}_patch16_224"
        rows[f"deit_{size}"] = Spec(plain_vit(size), heads.ClassToken(), "DeiT, arXiv 2012.12877", stated, published)
    larger = plain_vit("base", image_size=384)
    deit, stated = "DeiT, arXiv 2012.12877", Stated(86.9, 55.4)
    rows["deit_base_384"] = Spec(larger, heads.ClassToken(), deit, stated, "deit_base_patch16_384")
    for size, parameters in (("tiny", 6.0), ("small", 22.0), ("base", 87.0)):
        published = f"deit_{size}_distilled_patch16_224"
        rows[f"deit_{size}_distilled"] = Spec(
            plain_vit(size), heads.Distilled(), "DeiT distilled, arXiv 2012.12877", Stated(parameters), published
        )
    distilled, stated = "DeiT distilled, arXiv 2012.12877", Stated(87.0, 55.5)
    rows["deit_base_distilled_384"] = Spec(
        larger, heads.Distilled(), distilled, stated, "deit_base_distilled_patch16_384"
    )
    for size, parameters, macs in (
        *(("tiny", 5.7, 1.3), ("small", 22.0, 4.6), ("base", 86.6, 17.5)),
        *(("large", 304.4, 61.6), ("huge", 632.1, 167.4)),
    ):
        known = None if size == "tiny" else f"deit3_{size}_patch{SIZES[size][3]}_224"
        stated = Stated(parameters, macs)
        source = "DeiT III, tables 6.7 and 6.14"
        rows[f"deit3_{size}"] = Spec(plain_vit(size, **DEIT3), heads.ClassToken(), source, stated, known)
    for name, changes in (("huge52", {"depth": 52}), ("huge26x2", {"depth": 26, "parallel": 2})):
        trunk = plain_vit("huge", **DEIT3, **changes)
        rows[f"deit3_{name}"] = Spec(trunk, heads.ClassToken(), "DeiT III, arXiv 2204.07118", Stated(1000.0))
    return rows


CAIT = {  # depth, width, parameters, MACs at 224, drop path, LayerScale (CaiT, arXiv 2103.17239)
    "xxs24": (24, 192, 12.0, 2.5, 0.05, 1e-5),
    "xxs36": (36, 192, 17.3, 3.8, 0.1, 1e-6),
    "xs24": (24, 288, 26.6, 5.4, 0.05, 1e-5),
    "xs36": (36, 288, 38.6, 8.1, 0.1, 1e-6),
    "s24": (24, 384, 46.9, 9.4, 0.1, 1e-5),
    "s36": (36, 384, 68.2, 13.9, 0.2, 1e-6),
    "s48": (48, 384, 89.5, 18.6, 0.3, 1e-6),
    "m24": (24, 768, 185.9, 36.0, 0.2, 1e-5),
    "m36": (36, 768, 270.9, 53.7, 0.3, 1e-6),
    "m48": (48, 768, 356.0, None, 0.4, 1e-6),
    "b12": (12, 768, 100.0, 18.2, 0.0, 0.1),
}
CAIT_TIMM = {"xxs24": 224, "xxs36": 224, "s24": 224, "xs24": 384, "s36": 384, "m36": 384, "m48": 448}


def cait_trunk(depth: int, width: int, drop_path: float, layerscale: float, **changes: Any) -> TrunkConfig:
    options = {"width": width, "depth": depth, "heads": width // 48, "mixer": mixers.TalkingHeads()}
    return TrunkConfig(**UNIFORM | options | {"layerscale": layerscale, "drop_path": drop_path} | changes)


def caits() -> Rows:
    rows: Rows = {}
    for name, (depth, width, parameters, macs, drop_path, layerscale) in CAIT.items():
        trunk = cait_trunk(depth, width, drop_path, layerscale)
        source = "CaiT, arXiv 2103.17239" if name != "b12" else "CaiT-B12, arXiv 2204.07118"
        size = CAIT_TIMM.get(name)
        published = None if size is None else f"cait_{name}_{size}"
        rows[f"cait_{name}"] = Spec(trunk, heads.ClassAttention(), source, Stated(parameters, macs), published)
    return rows


def resmlp_trunk(width: int, depth: int, **changes: Any) -> TrunkConfig:
    start = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
    options = {"width": width, "depth": depth, "heads": 1, "mixer": mixers.LinearPatches(), "layerscale": start}
    return TrunkConfig(**UNIFORM | options | {"norm": "affine", "positions": "none"} | changes)


def resmlps() -> Rows:
    """ResMLP and its ablations (arXiv 2105.03404): fourteen rows."""
    rows: Rows = {}
    for name, width, depth, patch, parameters, macs, published in (
        ("s12", 384, 12, 16, 15.4, 3.0, "resmlp_12_224"),
        ("s24", 384, 24, 16, 30.0, 6.0, "resmlp_24_224"),
        ("s36", 384, 36, 16, None, None, "resmlp_36_224"),
        ("b24", 768, 24, 16, 115.7, 23.0, None),
        ("s12_p14", 384, 12, 14, 15.6, 4.0, None),
        ("s12_p8", 384, 12, 8, 22.1, 14.0, None),
        ("b24_p8", 768, 24, 8, 129.1, 100.2, "resmlp_big_24_224"),
    ):
        trunk, stated = resmlp_trunk(width, depth, patch=patch), Stated(parameters, macs)
        rows[f"resmlp_{name}"] = Spec(trunk, heads.Mean(), "ResMLP, tables 4.1 and 4.3", stated, published)
    ablations: tuple[tuple[str, dict[str, Any], heads.HeadConfig, float, float], ...] = (
        ("layernorm", {"norm": "layernorm"}, heads.Mean(), 15.4, 3.0),
        ("class_mlp", {}, heads.ClassMlp(), 17.7, 3.0),
        ("none", {"mixer": mixers.NoMixing()}, heads.Mean(), 14.9, 2.8),
        ("mlp", {"mixer": mixers.PatchMlp()}, heads.Mean(), 18.6, 4.3),
        ("conv", {"mixer": mixers.PatchConv(style="full")}, heads.Mean(), 30.8, 6.0),
        ("depthwise", {"mixer": mixers.PatchConv(style="depthwise")}, heads.Mean(), 14.9, 2.8),
        ("separable", {"mixer": mixers.PatchConv(style="separable")}, heads.Mean(), 16.7, 3.2),
    )
    for name, changes, head, parameters, macs in ablations:
        trunk = resmlp_trunk(384, 12, **changes)
        rows[f"resmlp_s12_{name}"] = Spec(trunk, head, "ResMLP, arXiv 2105.03404", Stated(parameters, macs))
    return rows


PATCHCONVNET = {  # width, depth, parameters, MACs, drop path, LayerScale (of S20, S36 and B36: as the next larger)
    "s20": (384, 20, None, None, 0.0, 1e-4),
    "s36": (384, 36, None, None, 0.05, 1e-4),
    "s60": (384, 60, 25.2, 4.0, 0.15, 1e-4),
    "s120": (384, 120, 47.7, 7.5, 0.2, 1e-6),
    "b36": (768, 36, None, None, 0.2, 1e-6),
    "b60": (768, 60, 99.4, 15.8, 0.3, 1e-6),
    "b120": (768, 120, 188.6, 29.9, 0.4, 1e-6),
    "l60": (1024, 60, None, 28.1, 0.3, 1e-6),  # drop path of L is not printed: that of B
    "l120": (1024, 120, None, 53.0, 0.4, 1e-6),
}
PATCHCONVNET_HEAD = heads.AttentionPool(token_in_keys=True, qkv_bias=True)


def patchconvnet_trunk(width: int, depth: int, drop_path: float, layerscale: float, **changes: Any) -> TrunkConfig:
    """PatchConvNet as its published weights have it: a stem without BatchNorm, LayerScale of the authors' code."""
    parts = {"stem": ConvStem(norm=False), "mixer": mixers.GatedConv(), "mlp_ratio": 0.0, "positions": "none"}
    sizes = {"width": width, "depth": depth, "heads": 1, "layerscale": layerscale, "drop_path": drop_path}
    return TrunkConfig(**UNIFORM | parts | sizes | changes)


def patchconvnets() -> Rows:
    rows: Rows = {}
    for name, (width, depth, parameters, macs, drop_path, layerscale) in PATCHCONVNET.items():
        trunk = patchconvnet_trunk(width, depth, drop_path, layerscale)
        source = "PatchConvNet, tables 5.1, 5.2 and 5.8"
        rows[f"patchconvnet_{name}"] = Spec(trunk, PATCHCONVNET_HEAD, source, Stated(parameters, macs))
    return rows


XCIT = {  # width, depth, heads, patch, parameters, MACs, timm's name (XCiT, arXiv 2106.09681)
    "t12_p8": (192, 12, 4, 8, 7.0, 4.8, "xcit_tiny_12_p8_224"),
    "t20_p16": (192, 20, 4, 16, 12.0, 1.9, None),
    "t24_p16": (192, 24, 4, 16, 12.0, 2.3, "xcit_tiny_24_p16_224"),
    "s12_p16": (384, 12, 8, 16, 26.0, 4.8, "xcit_small_12_p16_224"),
}


def xcit_trunk(width: int, depth: int, count: int, **changes: Any) -> TrunkConfig:
    parts = {"stem": ConvStem(), "mixer": mixers.Xca(), "local": True, "positions": "fourier", "drop_path": 0.05}
    start = 1.0 if depth <= 12 else 1e-5  # 20 blocks are not published: as 24
    sizes = {"width": width, "depth": depth, "heads": count, "layerscale": start}
    return TrunkConfig(**UNIFORM | parts | sizes | changes)


def xcits() -> Rows:
    """XCiT, and the same with SimA in the place of XCA and of softmax in the class-attention layers."""
    rows: Rows = {}
    for name, (width, depth, count, patch, parameters, macs, published) in XCIT.items():
        trunk, stated = xcit_trunk(width, depth, count, patch=patch), Stated(parameters, macs)
        source = "XCiT, arXiv 2106.09681; SimA, tables 2.4 and 2.5"
        rows[f"xcit_{name}"] = Spec(trunk, heads.ClassAttention(style="xcit"), source, stated, published)
        head = heads.ClassAttention(style="xcit", attention="sima")
        rows[f"xcit_{name}_sima"] = Spec(replace(trunk, mixer=mixers.Sima()), head, "SimA, tables 2.4 and 2.5", stated)
    trunk = plain_vit("small", mixer=mixers.Sima(), drop_path=0.05, drop_path_rule="uniform")
    rows["deit_small_sima"] = Spec(trunk, heads.ClassToken(), "SimA, arXiv 2206.08898", Stated(22.0, 4.6))
    return rows


def sot_trunk(width: int, depth: int, count: int, ratio: float, **changes: Any) -> TrunkConfig:
    parts: dict[str, Any] = {
        "stem": SotStem(),
        "mixer": mixers.Softmax(qkv_bias=False),
        "positions": "sinusoid",
        "drop_path": 0.1,
    }
    return TrunkConfig(**parts | {"width": width, "depth": depth, "heads": count, "mlp_ratio": ratio} | changes)


def second_order(size: int, drop: float = 0.0) -> heads.SecondOrder:
    return heads.SecondOrder(rows=size, columns=size, drop=drop)


def sots() -> Rows:
    rows: Rows = {}
    for name, trunk, head, parameters, macs in (
        ("tiny", sot_trunk(240, 12, 4, 2.5), second_order(14), 7.7, 2.5),
        ("small", sot_trunk(384, 14, 6, 3.5), second_order(24, 0.5), 26.9, 5.8),
        ("base", sot_trunk(528, 24, 8, 3.0), second_order(38, 0.7), 76.8, 14.5),
        ("7", sot_trunk(256, 7, 4, 2.0, image_size=112, patch=8), second_order(14), 5.44, None),
    ):
        stated = Stated(parameters, macs, attention_products=False)
        rows[f"sot_{name}"] = Spec(trunk, head, "SoT, tables S-1 and 3b", stated)
    for size, width, parameters, macs in (("tiny", 14, 7.0, 2.3), ("small", 24, 25.6, 5.5), ("base", 37, 94.9, 18.2)):
        trunk, stated = plain_vit(size, stem=SotStem()), Stated(parameters, macs, attention_products=False)
        rows[f"deit_{size}_sot"] = Spec(trunk, second_order(width), "SoT, table 5 (stem and head)", stated)
    return rows


def gramians() -> Rows:
    """Gramian heads (arXiv 2310.16483). Widths of ResNet, ViT and CIFAR heads are unpublished: ours are small ones."""
    rows: Rows = {}
    vit = heads.Gramian(gram_width=112, attention_width=112)
    rows["ga_vit_small"] = Spec(plain_vit("small"), vit, "GA-ViT-S; head widths are ours", Stated(27.7, 4.3))
    resnet = TimmBackbone(name="resnet50", image_size=224, stages=True, width=640)
    rows["ga_resnet50"] = Spec(resnet, heads.Gramian(gram_width=144), "GA-ResNet50; widths are ours", Stated(41.3, 5.2))
    for size, parameters, macs, width, inner, taps in (
        ("tiny", 48.7, 6.3, 688, 168, 2),
        ("small", 70.4, 10.5, 688, 168, 4),
        ("base", 124.3, 19.0, 976, 240, 4),
    ):
        backbone = TimmBackbone(
            name=f"convnext_{size}", image_size=224, stages=True, taps=taps, width=width, narrow=True
        )
        head = heads.Gramian(gram_layer=True, attention_width=inner)
        rows[f"ga_convnext_{size}"] = Spec(backbone, head, "GA-ConvNeXt, table 3", Stated(parameters, macs))
    return rows


def cifar_resnets() -> Rows:
    rows: Rows = {}
    for depth in (20, 32, 44, 56, 110):
        source, stated = "ResNet on CIFAR, He et al. 2016, section 4.2", Stated({32: 0.470, 110: 1.734}.get(depth))
        rows[f"cifar_resnet{depth}"] = Spec(CifarResNet(depth=depth), heads.Mean(), source, stated, classes=100)
    for depth, parameters, macs in ((29, 0.34, 0.05), (65, 0.71, 0.10), (110, 1.17, 0.17)):
        rows[f"cifar_resnet{depth}_bottleneck"] = Spec(
            CifarResNet(depth=depth, block="bottleneck"),
            heads.Mean(),
            "GA, table C",
            Stated(parameters, macs),
            classes=100,
        )
    rows["resnet18_32"] = Spec(
        TimmBackbone(name="resnet18_32", image_size=32),
        heads.Mean(),
        "ResNet-18 (arXiv 1512.03385) with a 3x3 stem and no pooling, as usual for CIFAR",
        Stated(11.17, 0.56),
        classes=10,
    )
    for depth, inner, printed in ((32, 32, Stated(0.75)), (110, 64, Stated(2.04, 0.22))):
        head = heads.Gramian(heads=3, gram_width=64, attention_width=inner, embed_groups=2)
        source = f"GA-R{depth}, table D; head widths are ours"
        rows[f"ga_cifar_resnet{depth}"] = Spec(CifarResNet(depth=depth), head, source, printed, classes=100)
    # Table C prints what one kept head leaves: 0.36, 0.76 and 1.26 M. How many were trained is not stated.
    for depth, gram, inner, groups in ((29, 8, 8, 64), (65, 16, 16, 32), (110, 32, 24, 32)):
        head = heads.Gramian(gram_width=gram, attention_width=inner, embed_groups=4, mlp_groups=groups)
        source = f"GA-R{depth}, table C; number and widths of heads are ours"
        trunk = CifarResNet(depth=depth, block="bottleneck")
        rows[f"ga_cifar_r{depth}_bottleneck"] = Spec(trunk, head, source, classes=100)
    return rows


def small_images() -> Rows:
    """Versions for 32-pixel images: patches of 4, so that 64 tokens remain."""
    tiny: dict[str, Any] = {"image_size": 32, "patch": 4}
    about = "small-image version"
    return {
        "vit_tiny_32": Spec(plain_vit("tiny", **tiny), heads.ClassToken(), about, classes=100),
        "vit_small_32": Spec(plain_vit("small", **tiny), heads.ClassToken(), about, classes=100),
        "deit_tiny_distilled_32": Spec(plain_vit("tiny", **tiny), heads.Distilled(), about, classes=100),
        "deit3_tiny_32": Spec(plain_vit("tiny", **tiny, **DEIT3), heads.ClassToken(), about, classes=100),
        "deit3_small_32": Spec(plain_vit("small", **tiny, **DEIT3), heads.ClassToken(), about, classes=100),
        "cait_xxs12_32": Spec(cait_trunk(12, 192, 0.0, 0.1, **tiny), heads.ClassAttention(), about, classes=100),
        "resmlp_t12_32": Spec(resmlp_trunk(192, 12, **tiny), heads.Mean(), about, classes=100),
        "patchconvnet_t20_32": Spec(
            patchconvnet_trunk(192, 20, 0.0, 1e-5, **tiny), PATCHCONVNET_HEAD, about, classes=100
        ),
        "xcit_t12_32": Spec(xcit_trunk(192, 12, 4, **tiny), heads.ClassAttention(style="xcit"), about, classes=100),
        "sot_7_32": Spec(sot_trunk(192, 7, 4, 2.0, **tiny), second_order(14), about, classes=100),
        "ga_vit_tiny_32": Spec(
            plain_vit("tiny", **tiny),
            heads.Gramian(gram_width=48, attention_width=48, embed_groups=8),
            about,
            classes=100,
        ),
        "vit_micro_28": Spec(
            TrunkConfig(image_size=28, patch=7, width=64, depth=3, heads=4, activation="relu", start="xavier"),
            heads.ClassToken(),
            "the demonstration; ReLU, because GELU's backward is slow on a CPU",
            classes=10,
        ),
    }


def denoisers() -> Rows:
    """Diffusion models; as classifiers they try every class, so their cost counts every call."""
    about = "DDPM's U-Net, made small; widths are ours"
    larger = DenoiserConfig(image_size=64, multipliers=(1, 2, 2, 2))
    return {
        "denoiser_32": Spec(DenoiserConfig(), heads.Own(), about, classes=10),
        "denoiser_64": Spec(larger, heads.Own(), about, classes=10),
    }


ZOO: Rows = vits() | caits() | resmlps() | patchconvnets() | xcits() | sots() | gramians()
ZOO |= cifar_resnets() | small_images() | denoisers()


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern, in the zoo's order.

    >>> list_models("deit_s*")
    ['deit_small', 'deit_small_distilled', 'deit_small_sima', 'deit_small_sot']
    """
    return [name for name in ZOO if fnmatchcase(name, pattern)]
