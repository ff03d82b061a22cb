"""Any timm model as a trunk, with its own classifier or a head of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.config import PreprocessConfig
from vitrail.model import timm_vit
from vitrail.model.aggregate import StageAggregation, stage_taps
from vitrail.model.config import TimmBackbone
from vitrail.model.heads.head import Head
from vitrail.model.tokens import Tokens
from vitrail.schema import near


class TimmTrunk(nn.Module):
    """A timm model's final tokens or feature map, or the features of all its stages gathered, as `Tokens`."""

    def __init__(self, backbone: nn.Module, config: TimmBackbone, own_head: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self.width = int(cast("Any", backbone).num_features)
        self.prefix = int(getattr(backbone, "num_prefix_tokens", 0))
        self.own_head = own_head  # where its classifier lives, for `tune="head"`
        self.edge_layers = own_head
        self.fused_layers = {
            name: 3 for name, _ in self.named_modules() if name.rpartition(".")[2] == "qkv"
        }  # timm's name
        self.gather: StageAggregation | None = None
        self.taps: list[int] = []
        if config.stages:
            self._gather_stages(config)
        self.plain = self.gather is None and timm_vit.is_plain_vit(backbone)  # can be run block by block
        self._layer_of = _layers(backbone)
        own = tuple(f"{place}." for place in own_head)  # the head, which is one deeper than the deepest block
        depths = (depth for name, depth in self._layer_of.items() if not f"backbone.{name}".startswith(own))
        self.layers = max(depths, default=0)

    def _gather_stages(self, config: TimmBackbone) -> None:
        widths = [int(info["num_chs"]) for info in cast("Any", self.backbone).feature_info][-4:]
        if self.prefix or len(widths) < 4:
            raise ValueError(f"timm:{config.name} has no four stages to gather; use stages=false")
        if config.taps:
            stages = getattr(self.backbone, "stages", None)
            if stages is None or not hasattr(stages[2], "downsample"):
                raise ValueError(f"timm:{config.name} cannot be tapped inside a stage; use taps=0")
            self.taps = stage_taps(len(stages[2].blocks), config.taps)
        self.width = config.width or widths[-1]
        self.gather = StageAggregation(
            [*widths[:2], *[widths[2]] * len(self.taps), widths[2], widths[3]], config.width or widths[-1]
        )

    @property
    def intermediates(self) -> list[str]:
        """Every name that `want` knows: maps and tokens of a plain ViT."""
        return timm_vit.intermediates(self.backbone) if self.plain else []

    def layer_of(self, name: str) -> int:
        return self._layer_of.get(name.removeprefix("backbone."), self.layers if name.startswith("gather.") else 0)

    def _stages(self, images: Tensor) -> list[Tensor]:
        """Outputs of the four stages, and of blocks inside the third, finest first."""
        if not self.taps:
            found: list[Tensor] = cast("Any", self.backbone).forward_intermediates(images, intermediates_only=True)
            return found[-4:]
        x, maps = cast("Any", self.backbone).stem(images), []
        for i, stage in enumerate(cast("Any", self.backbone).stages):
            x = stage.downsample(x)
            for j, block in enumerate(stage.blocks):
                x = block(x)
                if i == 2 and j in self.taps:
                    maps.append(x)
            maps.append(x)
        return maps

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Outputs of the stages, `[batch, channels, rows, columns]`, finest first; of every block where there is none.

        Raises `ValueError` for a timm model that does not show them.
        """
        try:
            return list(cast("Any", self.backbone).forward_intermediates(images, intermediates_only=True))
        except (AttributeError, NotImplementedError):
            raise ValueError(f"timm:{self.config.name} does not give its intermediate maps") from None

    def embed(self, images: Tensor) -> Tokens:
        """The final features; only a plain ViT is cut into stem and blocks here."""
        if self.gather is not None:
            side = self.config.grid
            gathered = self.gather(self._stages(images), (side, side))
            return Tokens(gathered.flatten(2).transpose(1, 2), 0, (side, side))
        begin = cast("Any", self.backbone).forward_features
        features = timm_vit.begin(self.backbone, images) if self.plain else begin(images)
        if not isinstance(features, Tensor):
            raise ValueError(f"timm:{self.config.name} gives several feature maps side by side and cannot be a trunk")
        if features.ndim == 4:
            last = features.shape[1] != self.width and features.shape[-1] == self.width
            self._note_form("rows" if last else "maps")
            if last:
                features = features.permute(0, 3, 1, 2)  # Swin and its kin keep channels last
            grid = (int(features.shape[2]), int(features.shape[3]))
            return Tokens(features.flatten(2).transpose(1, 2), 0, grid)
        self._note_form("tokens")
        count = int(features.shape[1]) - self.prefix
        side = round(count**0.5)
        return Tokens(features, self.prefix, (side, side) if side * side == count else (1, count))

    def _note_form(self, form: str) -> None:
        """What the backbone gives, for its own classifier, where that is not what its parts promise."""
        if form != _form(self.backbone):
            cast("Any", self.backbone).form_of_features = form

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Tensor] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        if given or ((want or until is not None) and not self.plain):
            raise ValueError(
                "a timm model used as a trunk gives no such intermediates (plain ViTs: maps and tokens); build the "
                "architecture by its vitrail name with weights='timm' where the zoo has it"
            )
        if not self.plain:
            return tokens, {}
        out, captured = timm_vit.run(self.backbone, tokens.sequence, want, until)
        return tokens.but(out), captured


class OwnHead(Head):
    """The classifier that the timm model brings with it."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        # In a tuple: the parameters belong to the trunk and must not be registered twice.
        self._backbone = (backbone,)
        self.features = int(cast("Any", backbone).num_features)
        # timm may start biases anywhere: who finds them changed knows that weights were loaded.
        published = getattr(backbone, "classifier_is_published", False)
        self._start = [] if published else [part.detach().clone() for parts in self.biases() for part in parts]

    def biases(self) -> list[list[Tensor]]:
        names = [name.removeprefix("backbone.") for name in classifier_names(self._backbone[0])]
        layer = self._backbone[0].get_submodule(names[0]) if len(names) == 1 else None
        return [[layer.bias]] if isinstance(layer, nn.Linear) and layer.bias is not None else []

    def _fresh(self, parts: list[Tensor]) -> bool:
        known = any(torch.equal(parts[0].detach().cpu(), start.cpu()) for start in self._start if not start.is_meta)
        return known and parts[0].requires_grad

    def _features(self, tokens: Tokens) -> Tensor:
        form, x = _form(self._backbone[0]), tokens.sequence
        if form == "tokens":
            return x
        if form == "rows":
            return x.reshape(len(x), *tokens.grid, -1)
        return x.transpose(1, 2).reshape(len(x), -1, *tokens.grid)

    def embed(self, tokens: Tokens) -> Tensor:
        return cast("Tensor", cast("Any", self._backbone[0]).forward_head(self._features(tokens), pre_logits=True))

    def forward(self, tokens: Tokens) -> Tensor:
        return cast("Tensor", cast("Any", self._backbone[0]).forward_head(self._features(tokens)))[:, None]


def _form(backbone: nn.Module) -> str:
    """How a backbone hands its features on: tokens [batch, tokens, width], rows [batch, rows, columns, width] or maps
    [batch, width, rows, columns]; by what its parts promise, until it was seen to do otherwise."""
    promised = "maps"
    if hasattr(backbone, "patch_embed"):
        promised = "rows" if getattr(backbone, "output_fmt", "NLC") == "NHWC" else "tokens"
    return str(getattr(backbone, "form_of_features", promised))


def known_to_timm(name: str) -> bool:
    """Whether timm has a model of this name, the one that we add included."""
    import timm

    from vitrail.model import small_resnet  # noqa: F401, registers resnet18_32

    return bool(timm.is_model(name))


def unknown_name(name: str) -> str:
    """What to say of a name that timm does not know."""
    import timm

    longer = timm.list_models(f"{name}*")[:3]  # near matches of part of a name are seldom what was meant
    hint = f"; did you mean {' or '.join(map(repr, longer))}?" if longer else near(name, timm.list_models())
    return f"timm {timm.__version__} has no model {name!r}{hint}"


def build_backbone(
    config: TimmBackbone, classes: int, pretrained: bool, device: str | torch.device | None
) -> tuple[nn.Module, TimmBackbone]:
    """The timm model, and its configuration less what it does not take. `classes` is 0 for a head of ours."""
    import timm

    if not known_to_timm(config.name):
        raise ValueError(unknown_name(config.name))
    options = dict(config.options)
    if config.narrow and config.width is not None:
        widths = [int(info["num_chs"]) for info in _feature_info(config.name)]
        options["dims"] = (*widths[:-1], config.width)
    if config.image_size is not None:
        options["img_size"] = config.image_size
    try:
        with torch.device("cpu" if pretrained else device or "cpu"):
            made: Any = timm.create_model(config.name, pretrained=pretrained, num_classes=classes, **options)
        made.classifier_is_published = pretrained and made.pretrained_cfg.get("num_classes") == classes
        return made, config
    except TypeError as error:
        if "img_size" in options and "img_size" in str(error):  # convolutional models take any size without being told
            from dataclasses import replace

            return build_backbone(replace(config, image_size=None), classes, pretrained, device)
        raise ValueError(f"timm:{config.name} does not take {', '.join(options)}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise ValueError(no_weights(config.name, error)) from None


def _feature_info(name: str) -> Sequence[Mapping[str, Any]]:
    import timm

    with torch.device("meta"):
        return cast("Any", timm.create_model(name)).feature_info


def no_weights(name: str, error: Exception) -> str:
    """One sentence for the person who is offline or asked for weights that do not exist."""
    reason = " ".join(str(error).split()).partition(". ")[0][:160]  # its first sentence; more would be advice of others
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


def classifier_names(backbone: nn.Module) -> tuple[str, ...]:
    """Where a timm model keeps its classifier, as prefixes inside a `TimmTrunk`."""
    settings: Mapping[str, Any] = getattr(backbone, "pretrained_cfg", None) or {}
    names = settings.get("classifier") or ()
    return tuple(f"backbone.{n}" for n in ([names] if isinstance(names, str) else names))


def _layers(backbone: nn.Module) -> dict[str, int]:
    from timm.models import group_parameters

    if not hasattr(backbone, "group_matcher"):
        return {name: 0 for name, _ in backbone.named_parameters()}
    groups = cast("Any", backbone).group_matcher(coarse=False)
    by_depth = group_parameters(backbone, groups, reverse=False)
    return {name: int(depth) for depth, names in by_depth.items() for name in names}
