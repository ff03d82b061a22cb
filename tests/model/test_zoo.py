"""Counts agree with the papers' tables to the digit, and the generated table with the models."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from small import quick_of

from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import ConvStem, Patchify, SotStem, TrunkConfig
from vitrail.model.cost import Cost, cost
from vitrail.model.heads.config import AttentionPool, ClassAttention, ClassToken, Mean, SecondOrder
from vitrail.model.heads.head import Head
from vitrail.model.mixers.config import LinearPatches, NoMixing, PatchConv, PatchMlp, TalkingHeads
from vitrail.model.zoo import ZOO, list_models

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from count_models import count

TABLE = json.loads((Path(__file__).parents[2] / "vitrail" / "model" / "counts.json").read_text())


def counted(name: str, size: int | None = None, **options: object) -> Cost:
    """The generated table where it has the answer (a test below recomputes all of it), else a fresh count."""
    native = ZOO[name].trunk.image_size
    attention = options.pop("attention_products", True)
    if attention and not options and size in (None, native) and native is not None:
        row = TABLE[name]
        return Cost(row["parameters"], row["macs"], native, row["parameters"])
    return cost(create_model(name, device="meta", **options), size, attention_products=attention)


# Parameters by closed forms, which reproduce the papers' rounded counts: DeiT (arXiv 2012.12877), CaiT (2103.17239),
# ResMLP (2105.03404), PatchConvNet (2112.13692), DeiT III (2204.07118), SoT (2104.10935), Gramian heads (2310.16483).
EXACT = {
    "deit_tiny": 5_717_416,
    "deit_small": 22_050_664,
    "deit_base": 86_567_656,
    "deit_base_384": 86_859_496,
    "deit_tiny_distilled": 5_910_800,
    "deit_small_distilled": 22_436_432,
    "deit_base_distilled": 87_338_192,
    "deit_base_distilled_384": 87_630_032,
    "deit3_tiny": 5_722_024,
    "deit3_small": 22_059_880,
    "deit3_base": 86_586_088,
    "deit3_large": 304_375_784,
    "deit3_huge": 632_127_720,
    "deit3_huge52": 1_025_727_720,
    "deit3_huge26x2": 1_025_727_720,
    "cait_xxs24": 11_956_264,
    "cait_xxs36": 17_299_720,
    "cait_xs24": 26_560_648,
    "cait_xs36": 38_557_432,
    "cait_s24": 46_916_200,
    "cait_s36": 68_220_712,
    "cait_s48": 89_525_224,
    "cait_m24": 185_850_088,
    "cait_m36": 270_929_512,
    "cait_m48": 356_008_936,
    "cait_b12": 100_770_664,
    "resmlp_s12": 15_350_872,
    "resmlp_s24": 30_020_680,
    "resmlp_s36": 44_690_488,
    "resmlp_b24": 115_736_776,
    "resmlp_s12_p14": 15_607_912,
    "resmlp_s12_p8": 22_051_624,
    "resmlp_b24_p8": 129_138_280,
    "resmlp_s12_layernorm": 15_350_872,
    "resmlp_s12_class_mlp": 17_719_396,
    "resmlp_s12_none": 14_887_528,
    "resmlp_s12_mlp": 18_587_224,
    "resmlp_s12_conv": 30_817_384,
    "resmlp_s12_depthwise": 14_933_608,
    "resmlp_s12_separable": 16_707_688,
    "patchconvnet_s20": 10_235_896,
    "patchconvnet_s36": 16_233_976,
    "patchconvnet_s60": 25_231_096,
    "patchconvnet_s120": 47_723_896,
    "patchconvnet_b36": 63_699_976,
    "patchconvnet_b60": 99_388_936,
    "patchconvnet_b120": 188_611_336,
    "patchconvnet_l60": 176_009_576,
    "patchconvnet_l120": 334_294_376,
    "cifar_resnet29_bottleneck": 336_244,
    "cifar_resnet65_bottleneck": 707_188,
    "cifar_resnet110_bottleneck": 1_170_868,
}
# DeiT III follows timm: its class token has no position, so it counts one width less than the table.
ONE_WIDTH_LESS = {name for name in EXACT if name.startswith("deit3")}

MILLIONS = {  # as SoT and Gramian heads print them
    "sot_tiny": "7.9900",
    "sot_small": "27.0173",
    "sot_base": "76.7814",
    "sot_7": "5.4499",
    "deit_tiny_sot": "7.06",
    "deit_small_sot": "25.63",
    "deit_base_sot": "94.89",
    "ga_convnext_tiny": "47.82",
    "ga_convnext_small": "70.12",
    "ga_convnext_base": "123.69",
    "cifar_resnet32": "0.470",
    "cifar_resnet110": "1.734",
}

MACS = {  # 10^9 at a size, as the papers of DeiT, CaiT, ResMLP, PatchConvNet and DeiT III print them
    ("deit_tiny", 224): "1.254",
    ("deit_small", 224): "4.599",
    ("deit_base", 224): "17.564",
    ("deit_base_384", 384): "55.484",
    ("deit_tiny_distilled", 224): "1.261",
    ("deit_small_distilled", 224): "4.624",
    ("deit_base_distilled", 224): "17.657",
    ("deit_base_distilled_384", 384): "55.59",
    ("deit3_tiny", 224): "1.254",
    ("deit3_small", 224): "4.599",
    ("deit3_base", 224): "17.564",
    ("deit3_base", 384): "55.48",
    ("deit3_large", 224): "61.555",
    ("deit3_large", 384): "191.07",
    ("deit3_huge", 224): "167.295",
    ("deit3_huge", 126): "52.2",
    ("deit3_huge52", 224): "271.7",
    ("cait_xxs24", 224): "2.52",
    ("cait_xxs24", 384): "9.60",
    ("cait_xxs36", 224): "3.76",
    ("cait_xxs36", 384): "14.31",
    ("cait_xs24", 224): "5.39",
    ("cait_xs24", 384): "19.24",
    ("cait_xs36", 224): "8.03",
    ("cait_xs36", 384): "28.70",
    ("cait_s24", 224): "9.33",
    ("cait_s24", 384): "32.11",
    ("cait_s36", 224): "13.90",
    ("cait_s36", 384): "47.91",
    ("cait_s48", 224): "18.48",
    ("cait_s48", 384): "63.71",
    ("cait_m24", 224): "35.78",
    ("cait_m24", 384): "115.87",
    ("cait_m36", 224): "53.37",
    ("cait_m36", 384): "172.94",
    ("cait_m36", 448): "247.4",
    ("cait_m48", 224): "70.96",
    ("cait_m48", 448): "329.1",
    ("cait_b12", 224): "18.18",
    ("resmlp_s12", 224): "3.01",
    ("resmlp_s24", 224): "5.96",
    ("resmlp_s36", 224): "8.91",
    ("resmlp_b24", 224): "23.02",
    ("resmlp_s12_p14", 224): "3.98",
    ("resmlp_s12_p8", 224): "13.99",
    ("resmlp_b24_p8", 224): "100.23",
    ("resmlp_s12_class_mlp", 224): "3.01",
    ("resmlp_s12_none", 224): "2.83",
    ("resmlp_s12_mlp", 224): "4.25",
    ("resmlp_s12_conv", 224): "5.95",
    ("resmlp_s12_depthwise", 224): "2.84",
    ("resmlp_s12_separable", 224): "3.19",
    ("patchconvnet_s20", 224): "1.64",
    ("patchconvnet_s36", 224): "2.57",
    ("patchconvnet_s60", 224): "3.98",
    ("patchconvnet_s60", 288): "6.57",
    ("patchconvnet_s60", 320): "8.12",
    ("patchconvnet_s60", 384): "11.68",
    ("patchconvnet_s60", 512): "20.76",
    ("patchconvnet_s120", 224): "7.49",
    ("patchconvnet_b36", 224): "10.21",
    ("patchconvnet_b60", 224): "15.80",
    ("patchconvnet_b60", 288): "26.11",
    ("patchconvnet_b60", 384): "46.39",
    ("patchconvnet_b120", 224): "29.77",
    ("patchconvnet_b120", 320): "60.72",
    ("patchconvnet_b120", 384): "87.42",
    ("patchconvnet_l60", 224): "28.04",
    ("patchconvnet_l60", 384): "82.33",
    ("patchconvnet_l120", 224): "52.85",
    ("patchconvnet_l120", 384): "155.16",
    ("cifar_resnet29_bottleneck", 32): "0.047",
    ("cifar_resnet65_bottleneck", 32): "0.101",
    ("cifar_resnet110_bottleneck", 32): "0.167",
    ("cifar_resnet110", 32): "0.253",
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_equal_the_table(name: str) -> None:
    model = create_model(name, device="meta")
    expected = EXACT[name]
    if name in ONE_WIDTH_LESS:
        trunk = ZOO[name].trunk
        assert isinstance(trunk, TrunkConfig)
        expected -= trunk.width
    assert sum(p.numel() for p in model.parameters()) == expected


def rounding(printed: str) -> float:
    """Half a unit of the last printed digit, and a little for the binary fraction."""
    return 0.501 * 10 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters_equal_the_table_to_its_digits(name: str) -> None:
    parameters = sum(p.numel() for p in create_model(name, device="meta").parameters())
    assert parameters / 1e6 == pytest.approx(float(MILLIONS[name]), abs=rounding(MILLIONS[name]))


@pytest.mark.parametrize("name", sorted(ONE_WIDTH_LESS))
def test_deit3_with_a_class_position_equals_the_table_itself(name: str) -> None:
    model = create_model(name, device="meta", class_position=True)
    assert sum(p.numel() for p in model.parameters()) == EXACT[name]


@pytest.mark.parametrize(("name", "size"), MACS)
def test_multiply_accumulates_equal_the_table(name: str, size: int) -> None:
    printed = MACS[name, size]
    # The table's PatchConvNets have a few D^2 more than the closed form, which a test below holds to the last one.
    allowed = (2 if name.startswith("patchconvnet") else 1) * rounding(printed)
    assert counted(name, size).macs / 1e9 == pytest.approx(float(printed), abs=allowed)


@pytest.mark.parametrize(
    ("name", "without", "with_products"),
    [("sot_tiny", 2.529, 2.753), ("sot_small", 5.797, 6.215), ("sot_base", 14.540, 15.524), ("sot_7", 1.062, 1.201)],
)
def test_sot_counts_with_and_without_attention_products(name: str, without: float, with_products: float) -> None:
    assert counted(name).macs / 1e9 == pytest.approx(with_products, abs=0.0005)
    assert counted(name, attention_products=False).macs / 1e9 == pytest.approx(without, abs=0.0005)


@pytest.mark.parametrize(
    ("options", "parameters", "macs"),
    [  # SoT's 7-layer model at 112 pixels, one class token
        ({"head": ClassToken()}, 4.2298, 1.052),
        ({"head": ClassToken(), "stem": Patchify()}, 3.9915, 0.733),
        ({"head": ClassToken(), "stem": SotStem(block="resnet")}, 4.2916, 0.875),
        ({"head": ClassToken(), "stem": SotStem(block="inception")}, 4.0832, 0.801),
        ({"head": ClassToken(), "stem": SotStem(block="nonlocal")}, 4.1979, 0.832),
        ({"head": SecondOrder(fusion="aggregate_all")}, 5.1929, 1.061),
        ({"head": SecondOrder(fusion="concat")}, 5.4489, 1.062),
        ({"head": ClassToken(), "width": 240, "mlp_ratio": 2.5}, 4.1704, 1.043),
    ],
)
def test_variants_of_the_seven_layer_sot(options: dict[str, object], parameters: float, macs: float) -> None:
    found = counted("sot_7", attention_products=False, **options)
    assert found.parameters / 1e6 == pytest.approx(parameters, abs=6e-5)
    assert found.macs / 1e9 == pytest.approx(macs, abs=0.0005)


@pytest.mark.parametrize(
    ("head", "parameters", "without", "with_products"),
    [(SecondOrder(fusion="words_only"), 7.7490, 2.529, 2.752), (ClassToken(), 6.7726, 2.520, 2.743)],
    ids=["words", "class token"],
)
def test_halves_of_the_tiny_sot(head: object, parameters: float, without: float, with_products: float) -> None:
    # SoT states 7.7 M for class and patch tokens together, which is the count of the patch tokens alone
    found = counted("sot_tiny", head=head)
    assert found.parameters / 1e6 == pytest.approx(parameters, abs=6e-5)
    assert found.macs / 1e9 == pytest.approx(with_products, abs=0.0005)
    assert counted("sot_tiny", head=head, attention_products=False).macs / 1e9 == pytest.approx(without, abs=0.0005)


@pytest.mark.parametrize(
    ("head", "stated"),
    [  # SoT, table 3b; what the table states of concat includes a class FC that it does not use
        (ClassToken(hidden=1280), 5.57),
        (SecondOrder(fusion="aggregate_all", pooling="mean"), 4.22),
        (SecondOrder(fusion="aggregate_all", pooling="covariance"), 5.15),
        (SecondOrder(fusion="concat", pooling="mean"), 4.73 - 0.257),
        (SecondOrder(fusion="concat", pooling="covariance"), 5.66 - 0.257),
        (SecondOrder(fusion="concat"), 5.71 - 0.257),
        (SecondOrder(fusion="sum", pooling="mean"), 4.47),
        (SecondOrder(fusion="sum", pooling="covariance"), 5.40),
        (SecondOrder(fusion="late", pooling="mean"), 4.47),
        (SecondOrder(fusion="late", pooling="covariance"), 5.40),
        (SecondOrder(fusion="late"), 5.46),
    ],
    ids=lambda value: "-".join((value.kind, *map(str, vars(value).values())))[:60] if hasattr(value, "kind") else None,
)
def test_stated_parameters_of_every_fusion_and_pooling(head: object, stated: float) -> None:
    # The paper's own roundings lie up to 0.02 M apart (its ClassT 4.23 plus 257 x 1000 is not its 4.47).
    assert counted("sot_7", head=head).parameters / 1e6 == pytest.approx(stated, abs=0.02)


def test_dropout_of_the_pooled_words_grows_with_the_model() -> None:
    # SoT, table S-1; all else of that table shows in the counts
    drops = {name: create_model(f"sot_{name}", device="meta").head.drop.p for name in ("tiny", "small", "base", "7")}
    assert drops == {"tiny": 0.0, "small": 0.5, "base": 0.7, "7": 0.0}


@pytest.mark.parametrize(
    ("depth", "layers", "parameters", "macs"),
    [
        *((9, 3, 22.05, 3.62), (10, 2, 22.05, 3.94), (11, 1, 22.05, 4.26)),
        *((12, 1, 23.82, 4.63), (12, 2, 25.60, 4.69), (12, 3, 27.37, 4.75)),
    ],
)
def test_class_attention_on_deit_small_counts_as_the_table(
    depth: int, layers: int, parameters: float, macs: float
) -> None:
    # CaiT's comparison of places of the class token
    found = counted("deit_small", depth=depth, head=ClassAttention(layers=layers))
    assert found.parameters / 1e6 == pytest.approx(parameters, abs=0.005)
    assert found.macs / 1e9 == pytest.approx(macs, abs=0.005)


def test_a_class_attention_block_has_as_many_parameters_as_a_block() -> None:
    model = create_model("deit_small", head=ClassAttention(layers=1), device="meta")
    sizes = [sum(p.numel() for p in block.parameters()) for block in (model.trunk.blocks[0], model.head.blocks[0])]
    assert sizes[0] == sizes[1]


def test_layerscale_costs_two_widths_a_block() -> None:
    # CaiT: 29,184 for S-36+2
    with_it = counted("cait_s36").parameters
    without = counted("cait_s36", layerscale=None).parameters
    assert with_it - without == 2 * 384 * (36 + 2) == 29_184


def test_a_deep_deit_small_counts_as_the_table() -> None:
    found = counted("deit_small", depth=36, layerscale=1e-6)
    assert found.parameters / 1e6 == pytest.approx(64.67, abs=0.005)
    assert found.macs / 1e9 == pytest.approx(13.68, abs=0.005)
    talking = counted("deit_small", depth=36, layerscale=1e-6, heads=8, mixer=TalkingHeads())
    assert talking.macs / 1e9 == pytest.approx(13.86, abs=0.005)


def test_heads_share_a_width_without_further_products() -> None:
    # CaiT: 4.6 G from 1 head to 24
    assert len({counted("deit_small", heads=heads, depth=2).macs for heads in (1, 6, 24)}) == 1


def test_averaged_patches_spare_a_token_in_every_block() -> None:
    # CaiT, 12 blocks and average pooling
    found = counted("deit_small", head=Mean())
    assert found.parameters / 1e6 == pytest.approx(22.05, abs=0.005)
    assert found.macs / 1e9 == pytest.approx(4.57, abs=0.005)


@pytest.mark.parametrize(("name", "millions"), [("small", 22.21), ("base", 86.878), ("large", 304.765)])
def test_deit3_at_384_has_more_positions(name: str, millions: float) -> None:
    # By closed form, with a class position
    found = counted(f"deit3_{name}", image_size=384, class_position=True)
    assert found.parameters / 1e6 == pytest.approx(millions, abs=0.005 if name == "small" else 0.0005)


@pytest.mark.parametrize(("name", "millions"), [("resmlp_b24", 115.774), ("resmlp_b24_p8", 129.175)])
def test_a_shift_behind_the_branches_of_resmlp_is_an_option_that_its_counts_do_not_have(
    name: str, millions: float
) -> None:
    # 115.737 and 129.138 without it; the paper prints 115.7 and 129.1
    assert counted(name, layerscale_shift=True).parameters / 1e6 == pytest.approx(millions, abs=0.0005)


def test_patches_of_eight_cost_as_self_supervised_vits_state() -> None:
    # DINO's ViT-S/8 (arXiv 2104.14294)
    assert counted("vit_small", patch=8).macs / 1e9 == pytest.approx(22.41, abs=0.005)


# What the source prints and a right count does not give, with the reason.
MISMATCHES = {
    "deit_tiny_distilled": "printed as 6 M: one digit",
    "deit_small_distilled": "printed as 22 M, counted 22.4: the source rounds down",
    "deit_base_distilled_384": "printed as 87 M, counted 87.6: the source rounds down",
    "cifar_resnet29_bottleneck": "printed as 0.34 M: two digits of 0.336",
    "sot_tiny": "7.7 M is the words-only model's count (heads §5 item 2)",
    "deit3_huge52": "printed as 1B: one digit",
    "deit3_huge26x2": "printed as 1B: one digit",
    "cait_b12": "printed as 100.0 M; d=768, 12+2, 16 heads gives 100.77 (§5.4)",
    "deit_tiny_sot": "printed as 7.0 M, counted 7.06: rounded down",
    "ga_convnext_tiny": "the released layout is within 2 % of the paper's (heads §4)",
    "ga_resnet50": "widths unpublished; ours were chosen near the stated count",
    "xcit_t12_p8": "printed as 7 M: one digit",
    "xcit_t12_p8_sima": "printed as 7 M: one digit",
    "xcit_t20_p16": "printed as 12 M; 20 blocks of width 192 have 10.3 (24 have 12.1), and MACs agree with 20",
    "xcit_t20_p16_sima": "as xcit_t20_p16",
    "xcit_t24_p16": "printed as 12 M: two digits",
    "xcit_t24_p16_sima": "printed as 12 M: two digits",
    "xcit_s12_p16": "printed as 26 M: two digits",
    "xcit_s12_p16_sima": "printed as 26 M: two digits",
}
FAR = {"xcit_t12_p8": 0.05, "xcit_t12_p8_sima": 0.05, "xcit_t20_p16": 0.15, "xcit_t20_p16_sima": 0.15}


@pytest.mark.parametrize("name", [n for n, spec in ZOO.items() if spec.stated.parameters])
def test_stated_parameters_agree_within_their_rounding(name: str) -> None:
    stated = ZOO[name].stated.parameters
    parameters = counted(name).parameters / 1e6
    if name in MISMATCHES:
        assert parameters == pytest.approx(stated, rel=FAR.get(name, 0.04))
        assert parameters != pytest.approx(stated, rel=0.0065), "no mismatch any more: take it off the list"
        return
    assert parameters == pytest.approx(stated, rel=0.0065)


MAC_MISMATCHES = {
    "ga_vit_small": "4.3 printed without attention products of the trunk",
    "ga_resnet50": "widths unpublished",
    "ga_convnext_tiny": "6.3 printed; the released layout has 5.2 (its README: numbers are from another version)",
    "ga_convnext_small": "10.5 printed; the released layout has 9.6",
    "ga_convnext_base": "19.0 printed; the released layout has 16.9",
    "cifar_resnet29_bottleneck": "printed with one digit",
    "ga_cifar_resnet110": "0.22 printed; a ResNet-110 of plain blocks has 0.253 without any head",
    "deit_small_sima": "4.6 printed, as for softmax; the cheaper order of products leaves 4.36",
}


@pytest.mark.parametrize("name", [n for n, spec in ZOO.items() if spec.stated.macs])
def test_stated_macs_agree_or_are_listed(name: str) -> None:
    stated = ZOO[name].stated
    found = counted(name, attention_products=stated.attention_products).macs / 1e9
    agrees = found == pytest.approx(stated.macs, rel=0.04 if stated.macs < 2.6 else 0.02)
    assert agrees is (name not in MAC_MISMATCHES)
    assert found == pytest.approx(stated.macs, rel=0.2)


@pytest.mark.parametrize(("depth", "millions"), [(29, 0.36), (65, 0.76), (110, 1.26)])
def test_one_kept_gramian_head_leaves_the_parameters_of_table_c(depth: int, millions: float) -> None:
    model = create_model(f"ga_cifar_r{depth}_bottleneck")
    for k in (0, 4):
        kept = Classifier(
            model.trunk,
            model.head.keep([k]),
            spec=model.spec,
            classes=model.classes,
            preprocess=model.preprocess,
            multilabel=False,
        )
        assert cost(kept).parameters / 1e6 == pytest.approx(millions, abs=0.005)  # half of the last digit


def test_memory_formula_of_table_e() -> None:
    """Gramian heads, table E: input tensor and parameters, in MiB; its parameter column belongs to other models."""
    for name, figures in (("vit_small", (157.6, 231.1, 378.1)), ("ga_vit_small", (179.2, 252.7, 399.7))):
        parameters = counted(name).parameters
        for batch, stated in zip((128, 256, 512), figures, strict=True):
            assert (batch * 3 * 224 * 224 * 4 + 4 * parameters) / 2**20 == pytest.approx(stated, abs=0.1)


def closed_form(width: int, depth: int, patch: int, size: int, classes: int, tokens: int) -> tuple[int, int]:
    """Parameters and MACs of a ViT, written out independently."""
    n, r = (size // patch) ** 2, 4
    block = 4 * width**2 + 4 * width + 2 * r * width**2 + r * width + width + 4 * width
    parameters = 3 * patch**2 * width + width + tokens * width + (n + tokens) * width + depth * block
    parameters += 2 * width + width * classes + classes
    macs = 3 * patch**2 * width * n + width * classes
    macs += depth * ((n + tokens) * (4 + 2 * r) * width**2 + 2 * (n + tokens) ** 2 * width)
    return parameters, macs


@pytest.mark.parametrize(("width", "depth", "patch", "size"), [(64, 2, 4, 32), (192, 12, 16, 160), (384, 3, 14, 126)])
def test_counts_follow_the_closed_form(width: int, depth: int, patch: int, size: int) -> None:
    options = {"width": width, "depth": depth, "patch": patch, "image_size": size, "heads": 1, "classes": 7}
    found = counted("vit_tiny", size, **options)
    assert (found.parameters, found.macs) == closed_form(width, depth, patch, size, 7, 1)
    norms = cost(create_model("vit_tiny", device="meta", **options), size, norms=True).macs - found.macs
    assert norms == 5 * (2 * depth + 1) * ((size // patch) ** 2 + 1) * width


def cait_closed_form(width: int, depth: int, heads: int, n: int, patch: int, classes: int) -> tuple[int, int]:
    """Parameters and MACs of a CaiT of n patches, written out independently."""
    own = 12 * width**2 + 15 * width
    parameters = 3 * patch**2 * width + 2 * width + n * width + depth * (own + 2 * (heads**2 + heads)) + 2 * own
    macs = 3 * patch**2 * width * n + depth * (12 * n * width**2 + 2 * n**2 * width + 2 * n**2 * heads**2)
    macs += 2 * (10 * width**2 + 2 * (n + 1) * width**2 + 2 * (n + 1) * width)
    return parameters + 2 * width + width * classes + classes, macs + width * classes


def patchconvnet_closed_form(width: int, depth: int, size: int, classes: int, published: bool) -> tuple[int, int]:
    """Each part's parameters, each product once. `published`: the authors' layout, whose stem has no BatchNorm and
    whose pooling has biases of q, k and v and the class token among its keys; else the one of earlier versions."""
    n, stages = (size // 16) ** 2, (3, width // 8, width // 4, width // 2, width)
    stem = sum(9 * a * b for a, b in pairwise(stages)) + (0 if published else 2 * sum(stages[1:]))
    block = 2 * (width**2 + width) + 10 * width + (2 * width * (width // 4) + width // 4 + width) + 3 * width
    pool = 4 * width**2 + width + 6 * width**2 + 4 * width + 4 * width + 2 * width + 2 * width + width
    pool += 3 * width if published else 0
    keys = n + published
    macs = sum(9 * stages[i] * stages[i + 1] * (size // 2 ** (i + 1)) ** 2 for i in range(4))
    macs += depth * (n * (2 * width**2 + 9 * width) + 2 * width * (width // 4))
    macs += 2 * keys * width**2 + 2 * keys * width + 8 * width**2 + width * classes
    return stem + depth * block + pool + width * classes + classes, macs


RESMLP = {  # parameters and MACs of what mixes n patches of d channels, norm and gain aside
    "linear": (LinearPatches(), lambda n, d: n**2 + n, lambda n, d: n**2 * d),
    "none": (NoMixing(), lambda n, d: 0, lambda n, d: 0),  # that branch keeps its norm and gain
    "mlp": (PatchMlp(), lambda n, d: 8 * n**2 + 5 * n, lambda n, d: 8 * n**2 * d),
    "conv": (PatchConv(style="full"), lambda n, d: 9 * d**2 + d, lambda n, d: 9 * n * d**2),
    "depthwise": (PatchConv(style="depthwise"), lambda n, d: 10 * d, lambda n, d: 9 * n * d),
    "separable": (PatchConv(style="separable"), lambda n, d: 11 * d + d**2, lambda n, d: 9 * n * d + n * d**2),
}


@pytest.mark.parametrize("mixer", RESMLP)
def test_counts_of_resmlp_follow_the_closed_form(mixer: str) -> None:
    kind, own, products = RESMLP[mixer]
    d, depth, n, classes = 48, 3, 16, 7
    found = counted(
        "resmlp_s12", 32, mixer=kind, width=d, depth=depth, patch=8, image_size=32, classes=classes, heads=1
    )
    parameters = 3 * 64 * d + d + depth * (own(n, d) + 8 * d**2 + 5 * d + 6 * d) + 2 * d + d * classes + classes
    macs = 3 * 64 * d * n + depth * (products(n, d) + 8 * n * d**2) + d * classes
    assert (found.parameters, found.macs) == (parameters, macs)


def test_counts_of_cait_follow_the_closed_form() -> None:
    options = {"width": 96, "depth": 3, "heads": 2, "patch": 8, "image_size": 48, "classes": 7}
    found = counted("cait_xxs24", 48, **options)
    assert (found.parameters, found.macs) == cait_closed_form(96, 3, 2, 36, 8, 7)


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("size", [64, 96])
def test_counts_of_patchconvnet_follow_the_closed_form(size: int, published: bool) -> None:
    layout = {} if published else {"stem": ConvStem(norm=True), "head": AttentionPool()}
    found = counted("patchconvnet_s20", size, width=64, depth=3, image_size=64, classes=7, **layout)
    assert (found.parameters, found.macs) == patchconvnet_closed_form(64, 3, size, 7, published)


@pytest.mark.parametrize(("name", "millions"), [("s60", 25.231), ("s120", 47.724), ("b60", 99.389), ("b120", 188.611)])
def test_the_authors_layout_of_patchconvnet_has_the_printed_parameters(name: str, millions: float) -> None:
    assert TABLE[f"patchconvnet_{name}"]["parameters"] / 1e6 == pytest.approx(millions, abs=5e-4)


def test_counting_leaves_the_model_alone_and_does_not_depend_on_its_device() -> None:
    model = create_model("vit_micro_28", classes=10)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert cost(model).macs == counted("vit_micro_28", classes=10).macs
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", quick_of(ZOO, list(ZOO)[::4]))
def test_the_generated_table_is_up_to_date(name: str) -> None:
    assert count(name) == TABLE[name], "run: python tools/count_models.py"


def test_the_generated_table_has_every_model() -> None:
    assert list(TABLE) == list(ZOO)


def test_names_are_found_by_pattern() -> None:
    assert list_models("deit_tin?") == ["deit_tiny"]
    assert list_models("deit_tiny_s*") == ["deit_tiny_sot"]
    assert list_models("nothing*") == []
    with pytest.raises(ValueError, match="did you mean 'deit_small'"):
        create_model("deit_smal")
    with pytest.raises(ValueError, match="no part 'dept'; did you mean 'depth'"):
        create_model("deit_tiny", dept=3)


def test_every_family_has_a_small_version() -> None:
    small = [name for name in ZOO if name.endswith("_32")]
    for family in ("vit", "deit_tiny_distilled", "deit3", "cait", "resmlp", "patchconvnet", "xcit", "sot", "ga"):
        assert any(name.startswith(family) for name in small), family
    assert issubclass(type(create_model(small[0], device="meta").head), Head)
