"""Any timm model as a trunk, with its own classifier or a head of ours.

A plain ViT is run block by block, so that its maps and tokens can be captured like those of our trunks; features of
several stages can be gathered into one map (GA, Ryu et al. 2023, arXiv 2310.16483).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.config import PreprocessConfig
from vitrail.model.config import TimmBackbone
from vitrail.model.heads.head import Head
from vitrail.model.hub import WEIGHT_FILES, cached_weights, unreachable
from vitrail.model.parts.tokens import Given, Probe, Tokens
from vitrail.model.trunks.base import BaseTrunk
from vitrail.schema import near


def is_plain_vit(backbone: nn.Module) -> bool:
    """Whether timm runs it as `VisionTransformer` does: embedding, blocks one after the other, norm."""
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(backbone, VisionTransformer) and (
        type(backbone).forward_features is VisionTransformer.forward_features
    )


@contextmanager
def _captured_map(attention: Any, probe: Probe, name: str) -> Iterator[None]:
    """Where the map is wanted: timm's own unfused path, whose map passes through `attn_drop`."""
    if name not in probe.want:
        yield
        return
    fused = attention.fused_attn
    hook = attention.attn_drop.register_forward_hook(lambda module, given, out: probe(name, out))
    attention.fused_attn = False
    try:
        yield
    finally:
        attention.fused_attn = fused
        hook.remove()


NARROWING = 4
"""Width of the map over that of the bottleneck: 4 gives the released 2.23 M parameters (tiny, 688 channels)."""


def stage_taps(depth: int, taps: int) -> list[int]:
    """Blocks (from 0) of a stage whose outputs are tapped: every floor(depth / (taps + 1)), its last not counted.

    >>> stage_taps(9, 2), stage_taps(27, 4)
    ([2, 5], [4, 9, 14, 19])
    """
    if taps < 0 or taps >= depth:
        raise ValueError(f"a stage of {depth} blocks has at most {depth - 1} taps before its output, not {taps}")
    step = depth // (taps + 1)
    return [step * (i + 1) - 1 for i in range(taps)]


class StageAggregation(nn.Module):
    """Feature maps `[batch, widths[i], rows_i, columns_i]` to one `[batch, width, *grid]`.

    Each map is brought to `grid` (averaged down, interpolated up), all are concatenated, and one residual bottleneck
    with squeeze-and-excitation (`squeeze`: its inner share) makes `width` channels of them. With s = sum(widths),
    m = width / 4 and r = m * squeeze there are

        s m + 9 m^2 + m width + s width   (convolutions)   + 2 m r + r + m   (squeeze)   + 4 m + 4 width   (norms)

    parameters: 2,233,119 for (96, 192, 3 x 384, 688) -> 688.
    """

    def __init__(self, widths: Sequence[int], width: int, squeeze: float = 0.25) -> None:
        super().__init__()
        inner = width // NARROWING
        squeezed = int(inner * squeeze)
        if not widths or squeezed < 1:
            raise ValueError(
                f"{len(widths)} maps cannot be aggregated to width {width} with squeeze {squeeze:g}: "
                f"at least one map is needed, and width / {NARROWING} * squeeze must be 1 or more"
            )
        self.widths, self.width = tuple(widths), width
        total = sum(widths)
        self.conv1 = nn.Conv2d(total, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.squeeze = nn.Linear(inner, squeezed)
        self.excite = nn.Linear(squeezed, inner)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(total, width, 1, bias=False)
        self.shortcut_bn = nn.BatchNorm2d(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for conv in (self.conv1, self.conv2, self.conv3, self.shortcut):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, maps: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        widths = tuple(int(m.shape[1]) for m in maps)
        if widths != self.widths:
            raise ValueError(f"the maps have {widths} channels, the aggregation was built for {self.widths}")
        x = torch.cat([to_grid(m, grid) for m in maps], dim=1)
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        gain = self.excite(F.relu(self.squeeze(inner.mean((2, 3))))).sigmoid()
        out = self.bn3(self.conv3(inner * gain[..., None, None]))
        return F.relu(out + self.shortcut_bn(self.shortcut(x)))


def to_grid(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """A map `[batch, channels, rows, columns]` at another grid: averaged where finer, interpolated where coarser."""
    rows, columns = features.shape[-2:]
    if (rows, columns) == tuple(grid):
        return features
    features = F.adaptive_avg_pool2d(features, (min(rows, grid[0]), min(columns, grid[1])))
    if features.shape[-2:] == tuple(grid):
        return features
    return F.interpolate(features, grid, mode="bilinear", align_corners=False)


class TimmTrunk(BaseTrunk):
    """A timm model's final tokens or feature map, or the features of all its stages gathered, as `Tokens`."""

    def __init__(self, backbone: nn.Module, config: TimmBackbone, own_head: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.backbone, self.config = backbone, config
        self.width = int(cast("Any", backbone).num_features)
        self.prefix = int(getattr(backbone, "num_prefix_tokens", 0))
        given = getattr(backbone, "reg_token", None)
        registers = int(given.shape[1]) if isinstance(given, Tensor) else int(getattr(backbone, "num_reg_tokens", 0))
        self.class_tokens = self.prefix - registers  # they come first
        self.own_head = self.edge_layers = own_head  # where its classifier lives, for `tune="head"`
        names = [name for name, _ in self.named_modules()]
        self.fused_layers = {name: 3 for name in names if name.rpartition(".")[2] == "qkv"}  # timm's name
        self.gather: StageAggregation | None = None
        self.taps: list[int] = []
        if config.stages:
            self._gather_stages(config)
        self.plain = self.gather is None and is_plain_vit(backbone)  # can be run block by block
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
        names = []
        for i, block in enumerate(cast("Any", self.backbone).blocks if self.plain else ()):
            shown = hasattr(block, "attn") and hasattr(block.attn, "fused_attn") and hasattr(block.attn, "attn_drop")
            names += [f"attention.{i}"] * shown + [f"tokens.{i}"]
        return names

    def layer_of(self, name: str) -> int:
        return self._layer_of.get(name.removeprefix("backbone."), self.layers if name.startswith("gather.") else 0)

    def _stages(self, images: Tensor) -> list[Tensor]:
        """Outputs of the four stages, and of blocks inside the third, finest first."""
        if not self.taps:
            return list(cast("Any", self.backbone).forward_intermediates(images, intermediates_only=True))[-4:]
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
        vit = cast("Any", self.backbone)
        if self.plain:  # tokens with positions; blocks and norm follow in `encode`
            features = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
        else:
            features = vit.forward_features(images)
        if not isinstance(features, Tensor):
            raise ValueError(f"timm:{self.config.name} gives several feature maps side by side and cannot be a trunk")
        if features.ndim == 4:
            last = features.shape[1] != self.width and features.shape[-1] == self.width
            self._note_form("rows" if last else "maps")
            if last:
                features = features.permute(0, 3, 1, 2)  # Swin and similar ones keep channels last
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

    def checkpoint_blocks(self) -> None:
        switch = getattr(self.backbone, "set_grad_checkpointing", None)
        if switch is None or self.gather is not None:
            super().checkpoint_blocks()
        self.allow_checkpointing(self.backbone)
        try:
            cast("Any", switch)(True)
        except (AssertionError, NotImplementedError):  # how timm says that a model has none
            super().checkpoint_blocks()

    def encode(
        self,
        tokens: Tokens,
        want: Collection[str] = (),
        given: Mapping[str, Given] | None = None,
        until: int | None = None,
    ) -> tuple[Tokens, dict[str, Tensor]]:
        if given or ((want or until is not None) and not self.plain):
            raise ValueError(
                "a timm model used as a trunk gives no such intermediates (plain ViTs: maps and tokens); build the "
                "architecture by its vitrail name with weights='timm' where the zoo has it"
            )
        if not self.plain:
            return tokens, {}
        vit, x, probe = cast("Any", self.backbone), tokens.sequence, Probe(want, {}, self.intermediates)
        if not want and until is None and vit.grad_checkpointing and vit.training:
            from timm.models import checkpoint_seq

            return tokens.but(vit.norm(checkpoint_seq(vit.blocks, x))), {}
        for i, block in enumerate(list(vit.blocks)[:until]):
            with _captured_map(getattr(block, "attn", None), probe, f"attention.{i}"):
                x = block(x)
            x = probe(f"tokens.{i}", x)
        return tokens.but(x if until is not None and until < len(vit.blocks) else vit.norm(x)), probe.captured


class OwnHead(Head):
    """The classifier that the timm model brings with it."""

    @classmethod
    def build(cls, config: Any, width: int, classes: int, trunk: Any = None) -> Head:
        raise ValueError(f"the head {config.kind!r} belongs to timm models; choose class_token or mean")

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

    def _classified(self, tokens: Tokens, pre_logits: bool) -> Tensor:
        form, x = _form(self._backbone[0]), tokens.sequence
        if form == "rows":
            x = x.reshape(len(x), *tokens.grid, -1)
        elif form == "maps":
            x = x.transpose(1, 2).reshape(len(x), -1, *tokens.grid)
        return cast("Tensor", cast("Any", self._backbone[0]).forward_head(x, pre_logits=pre_logits))

    def embed(self, tokens: Tokens) -> Tensor:
        return self._classified(tokens, pre_logits=True)

    def forward(self, tokens: Tokens) -> Tensor:
        return self._classified(tokens, pre_logits=False)[:, None]


def _form(backbone: nn.Module) -> str:
    """How a backbone hands its features on: tokens [batch, tokens, width], rows [batch, rows, columns, width] or maps
    [batch, width, rows, columns]; by what its parts promise, until it was seen to do otherwise."""
    promised = "maps"
    if hasattr(backbone, "patch_embed"):
        promised = "rows" if getattr(backbone, "output_fmt", "NLC") == "NHWC" else "tokens"
    return str(getattr(backbone, "form_of_features", promised))


SMALL = {
    "input_size": (3, 32, 32),
    "test_input_size": None,
    "pool_size": (4, 4),
    "crop_pct": 1.0,
    "test_crop_pct": None,
}


def resnet18_32(pretrained: bool = False, **options: Any) -> nn.Module:
    """ResNet-18 for 32-pixel images, registered with timm under this name.

    timm's own begins with a 7x7 convolution of stride 2 and a pooling of stride 2, which leave one pixel of 32 at its
    end. As usual for CIFAR, the first convolution here is 3x3 of stride 1 and the pooling is left out: 11.17 M
    parameters with 10 classes, 0.56 GMACs, a last map of 4x4. All else, initial weights included, is timm's ResNet.
    Raises `ValueError` where published weights are asked for: there are none.
    """
    import timm

    if pretrained:
        raise ValueError("resnet18_32 has no published weights; train it")
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    model: Any = timm.create_model("resnet18", **options)
    model.conv1 = nn.Conv2d(model.conv1.in_channels, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **SMALL}
    return model


def known_to_timm(name: str) -> bool:
    """Whether timm has a model of this name, `resnet18_32` included."""
    import timm

    if not timm.is_model("resnet18_32"):
        timm.models.register_model(resnet18_32)
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
        with torch.device("meta"):
            stages: Sequence[Mapping[str, Any]] = cast("Any", timm.create_model(config.name)).feature_info
        options["dims"] = (*(int(info["num_chs"]) for info in stages[:-1]), config.width)
    if config.image_size is not None:
        options["img_size"] = config.image_size
    try:
        with torch.device("cpu" if pretrained else device or "cpu"):
            create = published_backbone if pretrained else timm.create_model
            backbone: Any = create(config.name, num_classes=classes, **options)
        backbone.classifier_is_published = pretrained and backbone.pretrained_cfg.get("num_classes") == classes
        if not backbone.classifier_is_published:
            tame_classifier(backbone.get_classifier())
        return backbone, config
    except TypeError as error:
        if "img_size" in options and "img_size" in str(error):  # convolutional models take any size without being told
            return build_backbone(replace(config, image_size=None), classes, pretrained, device)
        raise ValueError(f"timm:{config.name} does not take {', '.join(options)}: {error}") from None


def tame_classifier(layer: nn.Module) -> None:
    """Draw a linear classifier again, as torch does, where its logits would be larger than its features.

    EfficientNets and MobileNets of timm draw it by the number of classes alone: with 10 of them, a loss of 6 to 9 at
    the start and not log(10).
    """
    if not isinstance(layer, nn.Linear) or layer.weight.is_meta:
        return
    if float(layer.weight.detach().std()) * layer.in_features**0.5 > 1:
        layer.reset_parameters()
        nn.init.zeros_(layer.bias)


TRAINING = "vitrail train ... --model.weights FOLDER, or train from scratch (--model.weights none)"


def published_backbone(name: str, remedy: str = TRAINING, **options: Any) -> nn.Module:
    """A timm model with its published weights, from the local cache where they are there.

    Raises `ValueError`, with the commands that help, where they are not and the hub cannot be reached.
    """
    import timm

    file, problem = local_weights(name, remedy)
    if problem:
        raise ValueError(problem)
    overlay: dict[str, Any] = {} if file is None else {"pretrained_cfg_overlay": {"file": str(file)}}
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its retries; the error says all
    try:
        return timm.create_model(name, pretrained=True, **overlay, **options)
    except TypeError:  # an option that the model does not take
        raise
    except Exception as error:
        raise ValueError(_not_fetched(name, str(error), remedy)) from None
    finally:
        logger.setLevel(level)


def local_weights(name: str, remedy: str = TRAINING) -> tuple[Path | None, str]:
    """The cached file of a timm model's published weights; where there is none, why they cannot be fetched, either."""
    import timm

    settings = timm.get_pretrained_cfg(name) if timm.models.is_model_pretrained(name) else None
    if settings is None or not settings.hf_hub_id:  # an address of its own, or none
        return None, ""
    names = (settings.hf_hub_filename,) if settings.hf_hub_filename else WEIGHT_FILES[:2]
    file = None if settings.custom_load else cached_weights(settings.hf_hub_id, names)
    reason = "" if file is not None else unreachable()
    return file, reason and _not_fetched(name, reason, remedy)


def _not_fetched(name: str, reason: str, remedy: str) -> str:
    """One sentence for the person who is offline or asked for weights that do not exist."""
    import timm

    reason = " ".join(reason.split()).partition(". ")[0][:160]  # its first sentence; more would be advice of others
    settings = timm.get_pretrained_cfg(name) if timm.models.is_model_pretrained(name) else None
    where = (
        ""
        if settings is None or not settings.hf_hub_id
        else (f"hf download {settings.hf_hub_id} {settings.hf_hub_filename or WEIGHT_FILES[0]} --local-dir FOLDER; ")
    )
    return (
        f"the published weights of timm:{name} are not in the local cache and could not be fetched ({reason}); "
        f"where there is a network: {where}then copy FOLDER here: {remedy}"
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
