"""Weights to and from timm, and from the authors of PatchConvNet (facebookresearch/deit).

Rename tables are short because attributes inside our trunks follow timm's names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.model.assemble import Parts
from vitrail.model.classifier import Classifier
from vitrail.model.config import ConvStem, TrunkConfig
from vitrail.model.heads.config import ClassAttention
from vitrail.model.mixers.config import Softmax, Xca
from vitrail.model.mixers.patches import LinearPatchesMixer
from vitrail.model.parts.modules import without_adapters
from vitrail.model.parts.stems import resize_mixing, resize_positions
from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk, port_name
from vitrail.model.trunks.timm_trunk import OwnHead, TimmTrunk, classifier_names
from vitrail.model.trunks.vit import Trunk
from vitrail.schema import build

Renames = tuple[tuple[str, str], ...]  # pattern of their name -> ours, the first that matches; all else is the trunk's
DECODER: Renames = ((r"head\.", "head.fc."), (r"norm\.", "head.norm."), (r"cls_token", "head.cls_token"))
PATCHCONVNET: Renames = (  # of the authors' code
    *DECODER,
    (r"blocks_token_only\.(\d+)\.gamma_(\d)", r"head.blocks.\1.ls\2.gamma"),
    (r"blocks_token_only\.", "head.blocks."),
    (r"blocks\.(\d+)\.gamma_1", r"trunk.blocks.\1.ls1.gamma"),
    *(
        (rf"blocks\.(\d+)\.attn\.qkv_pos\.{place}\.", rf"trunk.blocks.\1.attn.{ours}.")
        for place, ours in (
            ("0", "fc1"),
            ("2", "depthwise"),
            (r"4\.conv_reduce", "squeeze"),
            (r"4\.conv_expand", "excite"),
            ("5", "fc2"),
        )
    ),
    # Convolutions stand at the even places of a sequence, activations between them.
    *((rf"patch_embed\.proj\.{2 * i}\.0\.", f"trunk.patch_embed.convs.{i}.") for i in range(4)),
)


def with_one_classifier(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with the classifiers of one map for each class, `head.0` to `head.999`, put together as `head`."""
    count = sum(name.startswith("head.") and name.endswith(".weight") for name in state)
    if "head.0.weight" not in state:
        return dict(state)
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    return kept | {f"head.{p}": torch.cat([state[f"head.{i}.{p}"] for i in range(count)]) for p in ("weight", "bias")}


VIT: Renames = ((r"head\.", "head.fc."), (r"head_dist\.", "head.fc_dist."), (r"fc_norm\.", "head.norm."))
CAIT: Renames = (
    *DECODER,
    (r"blocks_token_only\.(\d+)\.gamma_(\d)", r"head.blocks.\1.ls\2.gamma"),
    (r"blocks_token_only\.", "head.blocks."),
    (r"blocks\.(\d+)\.gamma_(\d)", r"trunk.blocks.\1.ls\2.gamma"),
)
RESMLP: Renames = (
    (r"head\.", "head.fc."),
    (r"stem\.", "trunk.patch_embed."),
    (r"blocks\.(\d+)\.ls(\d)", r"trunk.blocks.\1.ls\2.gamma"),
    (r"blocks\.(\d+)\.linear_tokens\.", r"trunk.blocks.\1.attn.tokens."),
    (r"blocks\.(\d+)\.mlp_channels\.", r"trunk.blocks.\1.mlp."),
)
XCIT: Renames = (
    *DECODER,
    (r"cls_attn_blocks\.(\d+)\.gamma(\d)", r"head.blocks.\1.ls\2.gamma"),
    (r"cls_attn_blocks\.", "head.blocks."),
    (r"blocks\.(\d+)\.gamma(\d)", r"trunk.blocks.\1.ls\2.gamma"),
    # Convolutions stand at the even places of a sequence, each with its norm.
    *((rf"patch_embed\.proj\.{2 * i}\.0\.", f"trunk.patch_embed.convs.{i}.") for i in range(4)),
    *((rf"patch_embed\.proj\.{2 * i}\.1\.", f"trunk.patch_embed.norms.{i}.") for i in range(4)),
)


def family(state: Collection[str]) -> Renames:
    """Which table a state dict of timm's or of PatchConvNet's authors wants, by its names."""
    marks = {
        ".attn.qkv_pos.": PATCHCONVNET,
        "cls_attn_blocks.": XCIT,
        "blocks_token_only.": CAIT,
        "linear_tokens": RESMLP,
    }
    return next((table for mark, table in marks.items() if any(mark in name for name in state)), VIT)


def from_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm model's state dict, or one of PatchConvNet's authors, under our names."""
    table, state = family(state), with_one_classifier(state)
    renamed = {our_name(name, table): tensor for name, tensor in state.items()}
    if "trunk.dist_token" in renamed:  # ours hold all prefix tokens in one parameter
        renamed["trunk.cls_token"] = torch.cat([renamed["trunk.cls_token"], renamed.pop("trunk.dist_token")], 1)
    return renamed


def our_name(name: str, table: Renames) -> str:
    """timm's name of a tensor as ours."""
    for pattern, ours in table:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", ours, name)
    return f"trunk.{name}"


AUTOENCODER = ("trunk.decoder_", "trunk.mask_token")  # in files of masked autoencoders, beside the encoder


def load_weights(model: Classifier, state: Mapping[str, Tensor]) -> list[str]:
    """Copy weights, named as ours, as timm's or as ports of CIFAR ResNets, into `model`; returns what was adapted.

    Positions and matrices over patches are resized to the model's grid, and a first convolution of RGB images is
    adapted to the model's channels. A head that the weights do not have, or of another number of classes, keeps its
    new weights, and so do an adaptive policy and prompts. Any other difference raises `ValueError` that lists all
    of them.
    """
    if any(k.startswith("trunk.") for k in state):
        named = dict(state)
    elif isinstance(model.trunk, CifarResNetTrunk):
        named = {port_name(name): tensor for name, tensor in state.items()}
    elif isinstance(model.trunk, TimmTrunk):
        named = _of_backbone(model.trunk.backbone, state)
    else:
        named = from_timm_names(state)
    own, notes, wrong = model.state_dict(), [], []
    old, new = state.get("pos_embed"), named.get("trunk.backbone.pos_embed")  # which timm resizes
    if old is not None and new is not None and old.ndim == new.ndim == 3 and old.shape != new.shape:
        sides = [round((len(tensor[0]) - cast("Any", model.trunk).prefix) ** 0.5) for tensor in (old, new)]
        notes.append("positions resized {0}x{0} -> {1}x{1}".format(*sides))
    if decoder := [name for name in named if name.startswith(AUTOENCODER)]:
        notes.append("the decoder of a masked autoencoder is left out")
        named = {name: tensor for name, tensor in named.items() if name not in decoder}
    if isinstance(model.trunk, Trunk):
        notes += _fit_to_grid(model.trunk, named)
    notes += _fit_to_channels(model, named)
    ready: dict[str, Tensor] = {}
    anew = []
    free = ("head.", "trunk.policy.", "trunk.prompts.")
    head = {name for name in own if name.startswith(free)} | model.head_parameters()
    for name, target in own.items():
        value = named.pop(name, None)
        if value is not None and value.shape != target.shape and value.squeeze().shape == target.squeeze().shape:
            value = value.reshape(target.shape)
        if value is not None and value.shape == target.shape:
            ready[name] = value
        elif value is None and name.endswith("num_batches_tracked"):  # a counter that many files leave out
            ready[name] = target
        elif name in head:
            anew.append(name if value is None else f"{name} ({tuple(value.shape)} in the weights)")
            ready[name] = target
        else:
            wrong.append(
                f"{name}: {'missing' if value is None else tuple(value.shape)}, expected {tuple(target.shape)}"
            )
    if (prompts := named.pop("trunk.prompts.values", None)) is not None:
        deep = " --model.trunk.deep_prompts true" if len(prompts) > 1 else ""
        wrong.append(f"they have prompts; build a model that has: --model.trunk.prompts {prompts.shape[1]}{deep}")
    wrong += [f"{name}: not a part of this model" for name in named if not name.startswith(("head.", "trunk.head"))]
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise ValueError(f"these weights do not fit the model: {shown}")
    model.load_state_dict(ready, strict=True)
    return notes + [f"{name} starts anew" for name in anew]


def _of_backbone(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm model's state dict for that model as a trunk: renamed and resized by timm, less a classifier it lacks."""
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    converted = dict(state) if convert is None else convert(dict(state), backbone)
    own, lacks = backbone.state_dict(), tuple(f"{name}." for name in classifier_names(backbone))
    named = {f"backbone.{name}": tensor for name, tensor in converted.items()}
    kept = {name: t for name, t in named.items() if name[9:] in own or not name.startswith(lacks)}
    return {f"trunk.{name}": tensor for name, tensor in kept.items()}


def adapted_note(channels: int) -> str:
    """What is told of weights for RGB in a model of other channels."""
    how = "its sum over RGB" if channels == 1 else f"repeated and scaled by 3/{channels}"
    return f"the first convolution adapted from 3 to {channels} channels ({how})"


def _fit_to_channels(model: Classifier, named: dict[str, Tensor]) -> list[str]:
    """A convolution of RGB images for the model's channels, by timm's rule: what a grey image gives stays the same."""
    from timm.models import adapt_input_conv

    channels = model.channels
    for name, own in model.state_dict().items() if channels != 3 else ():
        value = named.get(name)
        if value is not None and value.ndim == 4 and value.shape[1] == 3 and own.shape[1:2] == (channels,):
            named[name] = adapt_input_conv(channels, value)
            return [adapted_note(channels)]
    return []


def _fit_to_grid(trunk: Trunk, named: dict[str, Tensor]) -> list[str]:
    notes = []
    value, own = named.get("trunk.pos_embed"), trunk.pos_embed
    if value is not None and isinstance(own, nn.Parameter) and value.shape != own.shape:
        side = round((value.shape[1] - trunk.placed_prefix) ** 0.5)
        if value.shape[1] - side * side == trunk.placed_prefix and value.shape[-1] == trunk.width:
            named["trunk.pos_embed"] = resize_positions(value, trunk.placed_prefix, (side, side), trunk.grid)
            rows, columns = trunk.grid
            notes.append(f"positions resized {side}x{side} -> {rows}x{columns}")
    for name, module in trunk.named_modules():
        weight = named.get(f"trunk.{name}.tokens.weight")
        if isinstance(module, LinearPatchesMixer) and weight is not None and weight.shape != module.tokens.weight.shape:
            side = round(weight.shape[0] ** 0.5)
            bias = named[f"trunk.{name}.tokens.bias"]
            moved = resize_mixing(weight, bias, (side, side), trunk.grid)
            named[f"trunk.{name}.tokens.weight"], named[f"trunk.{name}.tokens.bias"] = moved
            if not any("patch mixing" in note for note in notes):
                notes.append(f"patch mixing interpolated from {side}x{side} patches; fine-tune before you use it")
    return notes


def to_timm(model: Classifier) -> nn.Module:
    """The same classifier as a timm model, weights included; for plain ViTs, XCiTs and timm trunks with their own head.

    An adapter in use is merged in a copy. Raises `ValueError` for anything else.
    """
    import timm

    model = without_adapters(model)
    if isinstance(model.trunk, TimmTrunk) and isinstance(model.head, OwnHead):
        return model.trunk.backbone
    trunk = model.trunk
    if isinstance(trunk, Trunk) and trunk.prompts is not None:
        raise ValueError("timm's models have no prompts; save this one, or export it to torch or onnx")
    if isinstance(trunk, Trunk) and isinstance(trunk.config.mixer, Xca):
        return _to_timm_xcit(model, trunk.config)
    plain = isinstance(trunk, Trunk) and isinstance(trunk.config.mixer, Softmax) and trunk.config.norm == "layernorm"
    if not isinstance(trunk, Trunk) or not plain or model.head.classifiers > 1 or trunk.config.parallel > 1:
        raise ValueError("only plain ViTs with one classifier, and XCiTs with XCA, can be handed to timm")
    if trunk.policy is not None:
        raise ValueError("timm has no adaptive models; load these weights into the plain model and hand that over")
    if model.head.prefix == 0 and not model.head.own_norm:
        raise ValueError("timm's average pooling normalises after the mean; use Mean(norm_after=True) to hand it over")
    config = trunk.config
    vit = timm.models.vision_transformer.VisionTransformer(
        **_sizes(model, config),
        init_values=config.layerscale,
        class_token=bool(model.head.prefix),
        global_pool="token" if model.head.prefix else "avg",
        no_embed_class=not config.class_position,
        act_layer={"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}.get(config.activation, nn.GELU),
    ).to(next(model.parameters()))
    vit.load_state_dict(to_timm_names(model.state_dict()), strict=True)
    return cast("nn.Module", vit).train(model.training)


def _sizes(model: Classifier, config: TrunkConfig) -> dict[str, Any]:
    """Options that timm's ViT and XCiT share."""
    return {
        "img_size": config.image_size,
        "patch_size": config.patch,
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "num_classes": len(model.classes),
        "qkv_bias": cast("Softmax | Xca", config.mixer).qkv_bias,
    }


def _to_timm_xcit(model: Classifier, config: TrunkConfig) -> nn.Module:
    from timm.models.xcit import Xcit

    head = build(Parts, model.spec).head
    alike = (
        isinstance(head, ClassAttention)
        and (head.style, head.attention, head.token_in_keys, head.scaled) == ("xcit", "softmax", True, True)
        and head.heads in (None, config.heads)
        and head.layerscale in (None, config.layerscale)
        and head.mlp_ratio == config.mlp_ratio
    )
    alike = alike and config.stem == ConvStem(norm=True) and config.patch in (8, 16) and config.local
    alike = alike and (config.norm, config.positions, config.activation) == ("layernorm", "fourier", "gelu")
    if not alike or config.layerscale is None or config.gate is not None or config.layerscale_shift:
        raise ValueError("timm's XCiT has all parts of xcit_*; one with other parts cannot be handed over")
    assert isinstance(head, ClassAttention)
    options: dict[str, Any] = {"cls_attn_layers": head.layers, "eta": config.layerscale, "tokens_norm": True}
    xcit = Xcit(**_sizes(model, config), **options).to(next(model.parameters()))
    state, theirs = model.state_dict(), xcit.state_dict()
    xcit.load_state_dict({name: state[our_name(name, XCIT)].reshape(t.shape) for name, t in theirs.items()})
    return cast("nn.Module", xcit).train(model.training)


def to_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A plain ViT's state dict under timm's names."""
    back = {"head.fc.": "head.", "head.norm.": "fc_norm.", "trunk.": ""}
    renamed = {}
    for name, tensor in state.items():
        ours = next(prefix for prefix in back if name.startswith(prefix))
        renamed[back[ours] + name.removeprefix(ours)] = tensor
    return renamed
