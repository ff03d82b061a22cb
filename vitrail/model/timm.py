"""timm: weights in and out, and any timm model as a trunk.

A family's rename table is short because attributes inside our trunks follow timm's names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.config import PreprocessConfig
from vitrail.model.classifier import Classifier
from vitrail.model.heads.build import build_head
from vitrail.model.heads.config import HeadConfig, Own
from vitrail.model.heads.head import Head
from vitrail.model.positions import resize_positions
from vitrail.model.tokens import Tokens
from vitrail.model.trunk import Trunk
from vitrail.model.zoo import ZOO
from vitrail.schema import near, plain

RENAMES = (("head.", "head.fc."), ("fc_norm.", "head.norm."))  # timm's prefix -> ours; everything else is the trunk's


def from_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm ViT's state dict under our names."""
    renamed = {}
    for name, tensor in state.items():
        for theirs, ours in RENAMES:
            if name.startswith(theirs):
                renamed[ours + name.removeprefix(theirs)] = tensor
                break
        else:
            renamed["trunk." + name] = tensor
    return renamed


def to_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under timm's names."""
    renamed = {}
    for name, tensor in state.items():
        for theirs, ours in RENAMES:
            if name.startswith(ours):
                renamed[theirs + name.removeprefix(ours)] = tensor
                break
        else:
            renamed[name.removeprefix("trunk.")] = tensor
    return renamed


def load_weights(model: Classifier, state: Mapping[str, Tensor]) -> list[str]:
    """Copy weights, named as ours or as timm's, into `model`; returns what was adapted or left new, in words.

    Positions are resized to the model's grid. A classifier of another number of classes keeps its new weights. Any
    other difference raises `ValueError` that lists all of them.
    """
    named = dict(state) if any(k.startswith("trunk.") for k in state) else from_timm_names(state)
    own, notes, wrong = model.state_dict(), [], []
    ready: dict[str, Tensor] = {}
    for name, target in own.items():
        value = named.pop(name, None)
        if value is not None and name == "trunk.pos_embed" and value.shape != target.shape:
            moved = _fit_positions(cast("Trunk", model.trunk), value)
            if moved is not None:
                notes.append(f"positions resized from {value.shape[1]} to {moved.shape[1]}")
                value = moved
        if value is not None and value.shape == target.shape:
            ready[name] = value
        elif name in model.head_parameters():
            shape = "nothing" if value is None else f"shape {tuple(value.shape)}"
            notes.append(f"{name} starts anew (the weights have {shape}, the model {tuple(target.shape)})")
            ready[name] = target
        else:
            wrong.append(
                f"{name}: {'missing' if value is None else tuple(value.shape)}, expected {tuple(target.shape)}"
            )
    foreign_head = [k for k in named if k.startswith(("head.", "trunk.head", "trunk.fc"))]
    wrong += [f"{name}: not a part of this model" for name in named if name not in foreign_head]
    if wrong:
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise ValueError(f"these weights do not fit the model: {shown}")
    model.load_state_dict(ready, strict=True)
    return notes


def _fit_positions(trunk: Trunk, value: Tensor) -> Tensor | None:
    side = round((value.shape[1] - trunk.placed_prefix) ** 0.5)
    prefix = value.shape[1] - side * side
    if prefix != trunk.placed_prefix or value.shape[-1] != trunk.width:
        return None
    return resize_positions(value, prefix, (side, side), trunk.grid)


def to_timm(model: Classifier) -> nn.Module:
    """The same classifier as a timm `VisionTransformer`, weights included."""
    import timm

    if isinstance(model.trunk, TimmTrunk) and isinstance(model.head, OwnHead):
        return model.trunk.backbone
    row = ZOO.get(str(model.spec.get("name")))
    if not isinstance(model.trunk, Trunk) or row is None:
        raise ValueError("only zoo models can be handed to timm")
    if model.head.prefix == 0 and not model.head.own_norm:
        raise ValueError("timm's average pooling normalises after the mean; use Mean(norm_after=True) to hand it over")
    config = model.trunk.config
    made = timm.models.vision_transformer.VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        num_classes=len(model.classes),
        init_values=config.layerscale,
        class_token=bool(model.head.prefix),
        global_pool="token" if model.head.prefix else "avg",
        no_embed_class=not config.class_position,
        act_layer={"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}.get(config.activation, nn.GELU),
        qkv_bias=config.mixer.qkv_bias,
    )
    first = next(model.parameters())
    made.to(device=first.device, dtype=first.dtype)
    made.load_state_dict(to_timm_names(model.state_dict()), strict=True)
    return cast("nn.Module", made).train(model.training)


class TimmTrunk(nn.Module):
    """Any timm model: its feature map or its tokens as `Tokens`."""

    def __init__(self, backbone: nn.Module, own_head: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.width = int(cast("Any", backbone).num_features)
        self.prefix = int(getattr(backbone, "num_prefix_tokens", 0))
        self.own_head = own_head  # where its classifier lives, for `tune="head"`
        names = [name for name, _ in backbone.named_parameters()]
        groups = cast("Any", backbone).group_matcher(coarse=False) if hasattr(backbone, "group_matcher") else None
        self._layer_of = _timm_layers(backbone, groups) if groups else dict.fromkeys(names, 0)
        self.layers = max(self._layer_of.values(), default=0)

    def layer_of(self, name: str) -> int:
        return self._layer_of.get(name.removeprefix("backbone."), 0)

    def embed(self, images: Tensor) -> Tokens:
        """The final features; a timm model is not cut into stem and blocks here."""
        features = cast("Any", self.backbone).forward_features(images)
        if features.ndim == 4:
            if features.shape[1] != self.width and features.shape[-1] == self.width:
                features = features.permute(0, 3, 1, 2)  # Swin and its kin keep channels last
            grid = (int(features.shape[2]), int(features.shape[3]))
            return Tokens(features.flatten(2).transpose(1, 2), 0, grid)
        side = round((features.shape[1] - self.prefix) ** 0.5)
        count = int(features.shape[1]) - self.prefix
        return Tokens(features, self.prefix, (side, side) if side * side == count else (1, count))

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Tensor] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        if want or given or until is not None:
            raise ValueError(
                "a timm model used as a trunk gives no intermediates; build the architecture by its vitrail name "
                "with weights='timm' where the zoo has it"
            )
        return tokens, {}


class OwnHead(Head):
    """The classifier that the timm model brings with it."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        # In a tuple: the parameters belong to the trunk and must not be registered twice.
        self._backbone = (backbone,)
        self.features = int(cast("Any", backbone).num_features)

    def _features(self, tokens: Tokens) -> Tensor:
        backbone = cast("Any", self._backbone[0])
        if (
            hasattr(backbone, "patch_embed")
            and tokens.prefix + tokens.grid[0] * tokens.grid[1] == tokens.sequence.shape[1]
        ):
            wanted = tokens.sequence
            if getattr(backbone, "output_fmt", "NLC") == "NHWC":
                wanted = wanted.reshape(len(wanted), *tokens.grid, -1)
            return wanted
        return tokens.sequence.transpose(1, 2).reshape(len(tokens.sequence), -1, *tokens.grid)

    def embed(self, tokens: Tokens) -> Tensor:
        return cast("Tensor", cast("Any", self._backbone[0]).forward_head(self._features(tokens), pre_logits=True))

    def forward(self, tokens: Tokens) -> Tensor:
        return cast("Tensor", cast("Any", self._backbone[0]).forward_head(self._features(tokens)))[:, None]


def create_timm(
    name: str,
    classes: Sequence[str],
    image_size: int | None,
    head: str | HeadConfig | None,
    pretrained: bool,
    device: str | torch.device | None,
    overrides: Mapping[str, Any],
) -> Classifier:
    """A timm model as a classifier, with its own head or one of ours."""
    import timm

    if not timm.is_model(name):
        known = timm.list_models()
        raise ValueError(f"timm {timm.__version__} has no model {name!r}{near(name, known)}")
    from vitrail.model.build import _head_config

    chosen = Own() if head is None else _head_config(head)
    options = dict(overrides)
    if image_size is not None:
        options["img_size"] = image_size
    spec = {"timm": name, "options": options, "head": plain(chosen)}
    try:
        model = from_timm_spec(spec, classes, False, None, device, pretrained)
    except TypeError as error:
        if image_size is None or "img_size" not in str(error):
            raise ValueError(f"timm:{name} does not take {', '.join(options)}: {error}") from None
        spec["options"] = dict(overrides)  # convolutional models take any size without being told
        model = from_timm_spec(spec, classes, False, None, device, pretrained)
    if image_size is not None:
        from dataclasses import replace

        model.preprocess = replace(model.preprocess, size=image_size)
    return model


def from_timm_spec(
    spec: dict[str, Any],
    classes: Sequence[str],
    multilabel: bool,
    preprocess: PreprocessConfig | None,
    device: str | torch.device | None,
    pretrained: bool = False,
) -> Classifier:
    """The timm architecture that `spec` describes."""
    import timm

    from vitrail.model.build import _head_config

    head_config = _head_config(spec["head"])
    count = len(classes) if isinstance(head_config, Own) else 0
    try:
        with torch.device("cpu" if pretrained else device or "cpu"):
            backbone = timm.create_model(spec["timm"], pretrained=pretrained, num_classes=count, **spec["options"])
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise ValueError(no_weights(spec["timm"], error)) from None
    own = tuple(f"backbone.{n}" for n in _classifier_names(backbone)) if isinstance(head_config, Own) else ()
    trunk = TimmTrunk(backbone, own)
    if isinstance(head_config, Own):
        head: Head = OwnHead(backbone)
    else:
        with torch.device(device or "cpu"):
            head = build_head(head_config, trunk.width, len(classes))
        if head.prefix > trunk.prefix:
            raise ValueError(
                f"timm:{spec['timm']} has {trunk.prefix} class tokens, the head {head_config.kind} needs "
                f"{head.prefix}; use --model.head mean"
            )
    model = Classifier(
        trunk,
        head,
        spec=spec,
        classes=classes,
        preprocess=preprocess or timm_preprocess(backbone),
        multilabel=multilabel,
    )
    return model.to(device) if device is not None and str(device) != "meta" else model


def no_weights(name: str, error: Exception) -> str:
    """One sentence for the person who is offline or asked for weights that do not exist."""
    reason = " ".join(str(error).split())[:160]
    return (
        f"the published weights of timm:{name} could not be fetched ({reason}); connect once so that they are cached, "
        "give a file or a run (model.weights=PATH), or train from scratch (model.weights=none)"
    )


def timm_preprocess(backbone: nn.Module) -> PreprocessConfig:
    """How timm evaluates this model."""
    settings: Mapping[str, Any] = getattr(backbone, "pretrained_cfg", None) or {}
    size = settings.get("test_input_size") or settings.get("input_size") or (3, 224, 224)
    interpolation = str(settings.get("interpolation", "bicubic"))
    known = ("nearest", "bilinear", "bicubic", "lanczos")
    return PreprocessConfig(
        size=int(size[-1]),
        crop_ratio=float(settings.get("test_crop_pct") or settings.get("crop_pct") or 0.875),
        interpolation=cast("Any", interpolation if interpolation in known else "bicubic"),
        mean=cast("Any", tuple(settings.get("mean", (0.485, 0.456, 0.406)))),
        std=cast("Any", tuple(settings.get("std", (0.229, 0.224, 0.225)))),
    )


def _classifier_names(backbone: nn.Module) -> list[str]:
    settings: Mapping[str, Any] = getattr(backbone, "pretrained_cfg", None) or {}
    names = settings.get("classifier") or ()
    return [names] if isinstance(names, str) else list(names)


def _timm_layers(backbone: nn.Module, groups: Any) -> dict[str, int]:
    from timm.models import group_parameters

    layers: dict[str, int] = {}
    for depth, names in group_parameters(backbone, groups, reverse=False).items():
        for name in names:
            layers[name] = int(depth)
    return layers
