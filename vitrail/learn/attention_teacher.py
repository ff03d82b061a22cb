"""Attention transfer: teachers by name, and which of their layers and heads a student takes (Li et al., 2024, arXiv
2411.09702)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.config import PreprocessConfig
from vitrail.learn.config import AttentionTransferConfig
from vitrail.learn.objective import weights_hash
from vitrail.learn.teacher import load_teacher
from vitrail.model.assemble import from_spec
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import GuideConfig, TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.store import read_tensors
from vitrail.model.timm_weights import load_weights
from vitrail.model.trunks.guided import PARTS, Guide, GuidedTrunk, StoredTensors
from vitrail.model.trunks.timm_trunk import published_backbone, timm_preprocess
from vitrail.model.trunks.vit import Trunk
from vitrail.model.zoo import ZOO
from vitrail.schema import near

Source = Classifier | Mapping[str, Tensor]
"""A teacher: a model, or tensors by name."""

FEEDING = ("stem", "mixer", "activation", "norm", "norm_eps", "layerscale", "gate", "positions", "class_position")
"""Components that shape attention maps: a student without the teacher's may not be able to use them."""


def load_source(name: str, student: Classifier) -> Source:
    """A teacher by name: a run or model folder, timm:NAME, random, a weights file of the student's own architecture (a
    published autoencoder, say), or a file of stored maps.

    Raises one sentence where there is none.
    """
    if not name:
        raise ValueError(
            "objective.teacher: name one: a run folder, timm:NAME of a plain ViT, random, or a file of stored maps"
        )
    if name == "random":
        with torch.random.fork_rng(devices=[]):  # the same in every process and when a run is resumed
            torch.default_generator.manual_seed(int(weights_hash(student)[:8], 16))
            return _like(student)
    if name.startswith("timm:"):
        return _published(name)
    if Path(name).is_file():
        tensors = read_tensors(Path(name))
        if not any("blocks." in key for key in tensors):
            return tensors
        teacher = _like(student)
        try:
            load_weights(teacher, tensors)
        except ValueError as error:
            raise ValueError(
                f"objective.teacher: {name} is assumed to be a model like the student; {error}; a run or model "
                "folder says what it is"
            ) from None
        return teacher
    return load_teacher(name, student)


def _like(student: Classifier) -> Classifier:
    """A new model of the student's architecture."""
    options: dict[str, Any] = {name: getattr(student, name) for name in ("classes", "multilabel", "preprocess")}
    return from_spec(student.spec, **options, device=None)


def _published(name: str) -> Classifier:
    """A plain ViT with published weights, built of our parts, so that its attention can be read."""
    bare = name.removeprefix("timm:")
    rows = {spec.timm: row for row, spec in ZOO.items() if spec.timm}
    row = rows.get(bare.partition(".")[0])
    if row is None:
        raise ValueError(
            f"objective.teacher: the attention of {name} cannot be read{near(bare, rows)}; these can: {', '.join(rows)}"
        )
    try:
        published = published_backbone(bare)
    except ValueError as error:
        raise ValueError(f"objective.teacher: {error}") from None
    model = create_model(row, classes=max(1, int(getattr(published, "num_classes", 1))))
    load_weights(model, published.state_dict())
    model.preprocess = replace(timm_preprocess(published), size=model.preprocess.size)
    return model


def chosen(text: str, count: int, what: str) -> list[int]:
    """The layers or heads that `all`, `first:K`, `last:K` or `0,2,5` name, of `count`.

    >>> chosen("last:2", 5, "layers"), chosen("0,4", 5, "layers")
    ([3, 4], [0, 4])
    """
    kind, _, number = text.partition(":")
    if text == "all":
        return list(range(count))
    if kind in ("first", "last") and number.isdigit():
        k = int(number)
        if k > count:
            available = f"the student has {count} {what}"
            raise ValueError(f"objective.{what}: {text}, but {available}; use {kind}:{count} or fewer")
        return list(range(k)) if kind == "first" else list(range(count - k, count))
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(f"objective.{what}: {text!r} is not all, first:K, last:K or a list such as 0,1,5")
    numbers = [int(word) for word in words]
    if max(numbers) >= count or len(set(numbers)) < len(numbers):
        raise ValueError(f"objective.{what}: {text}, but the student has {what} 0 to {count - 1}, each once")
    return numbers


def paired(
    selected: list[int], given: tuple[int, ...], count: int, teacher_count: int, what: str
) -> tuple[tuple[int, int], ...]:
    """Every chosen layer or head with the teacher's: the same, or as the map says."""
    setting = f"objective.{what[:-1]}_map"
    if not given and count != teacher_count and selected:
        spread = ",".join(str(round(i * (teacher_count - 1) / max(1, count - 1))) for i in selected)
        raise ValueError(
            f"objective.teacher: it has {teacher_count} {what}, the student {count}; say which goes where, such as "
            f"--{setting} {spread}, or use a student with {teacher_count} {what}"
        )
    if given and len(given) != len(selected):
        raise ValueError(f"{setting}: {len(given)} {what} for the {len(selected)} that take; name one for each")
    if given and max(given) >= teacher_count:
        raise ValueError(f"{setting}: {max(given)}, but the teacher has {what} 0 to {teacher_count - 1}")
    return tuple(zip(selected, given or selected, strict=True))


def make_guide(student: Classifier, source: Source, config: AttentionTransferConfig) -> tuple[Guide, list[str]]:
    """The guide of a student, and notes for the user.

    The guide holds the teacher's own modules, up to the last layer that is taken. Raises `ValueError`, with the remedy,
    where the two do not fit.
    """
    _reject_combinations(config)
    trunk = readable(student, "the student")
    layers = chosen(config.layers, trunk.config.depth, "layers")
    heads = chosen(config.heads, trunk.config.heads, "heads")
    tokens = trunk.prefix + trunk.grid[0] * trunk.grid[1]
    if not isinstance(source, Classifier):
        return _stored(source, config, trunk, layers, heads, tokens), []
    teacher = readable(source, "the teacher")
    theirs = teacher.config
    pairs = paired(layers, config.layer_map, trunk.config.depth, theirs.depth, "layers")
    head_pairs = paired(heads, config.head_map, trunk.config.heads, theirs.heads, "heads")
    size = _size(student, trunk, teacher, config.teacher_size)
    _reject_widths(config, trunk.config, theirs)
    if config.drop_path == "shared" and any(s != t for s, t in pairs):
        raise ValueError("objective.drop_path: masks are shared layer by layer; use off with a layer_map")
    depth = max((t for _, t in pairs), default=0) + 1
    scale, shift = _normalisation(student.preprocess, source.preprocess)
    widths_differ = theirs.width // theirs.heads != trunk.config.width // trunk.config.heads
    copied = config.mode == "copy" and config.target == "map" and len(heads) < trunk.config.heads and widths_differ
    guide = GuideConfig(
        teacher=replace(theirs, depth=depth),
        prefix=teacher.prefix,
        target=config.target,
        layers=pairs,
        heads=head_pairs,
        tokens=tokens,
        aggregate=config.aggregate,
        maps=config.aggregate != "none" or copied,
        share_drop_path=config.drop_path == "shared",
        size=size,
        scale=scale,
        shift=shift,
    )
    notes = _lacking(trunk.config, theirs)
    teacher.blocks, teacher.norm, teacher.config = teacher.blocks[:depth], nn.Identity(), replace(theirs, depth=depth)
    return Guide(guide, teacher), notes


def readable(model: Classifier, who: str) -> Trunk:
    """The trunk of a plain ViT. Raises `ValueError` where its attention cannot be read or replaced."""
    trunk = model.trunk
    if isinstance(trunk, GuidedTrunk):
        raise ValueError(f"{who} takes its own attention from a teacher; name that one")
    sequential = isinstance(trunk, Trunk) and trunk.config.parallel == 1
    trunk = cast("Trunk", trunk)
    if not sequential or not all(type(block.attn) is SoftmaxMixer for block in trunk.blocks):
        raise ValueError(
            f"attention transfer: {who} has no softmax attention in every block, one after the other; use a plain ViT "
            "(vit_*, deit_*, deit3_*)"
        )
    if trunk.policy is not None:
        raise ValueError(
            f"attention transfer: {who} is adaptive and leaves out tokens, heads or blocks, which then have none; "
            "use a plain ViT"
        )
    if trunk.prompts is not None:
        raise ValueError(f"attention transfer: {who} has prompts, and its attention places for them; use one without")
    if trunk.prefix and trunk.config.class_token_at:
        remedy = "use --model.trunk.class_token_at 0"
        raise ValueError(f"attention transfer: the class token of {who} enters late; {remedy}")
    return trunk


def _reject_combinations(config: AttentionTransferConfig) -> None:
    if config.mode == "copy" and config.target == "features":
        raise ValueError("objective.target: features can be distilled, not copied; use mode distill, or target map")
    if config.target == "features" and config.heads != "all":
        raise ValueError("objective.heads: features have no heads; leave heads at all")
    if config.aggregate != "none" and config.target != "map":
        raise ValueError(f"objective.aggregate: maps are averaged, not {config.target}; use target map")


def _size(student: Classifier, trunk: Trunk, teacher: Trunk, wanted: int | None) -> int | None:
    """The side of the teacher's images, where it is another than the student's. Raises where tokens differ."""
    side = wanted or student.preprocess.size
    patch, grid = teacher.config.patch, trunk.grid
    if side % patch or (side // patch, side // patch) != grid:
        raise ValueError(
            f"objective.teacher: with patches of {patch} it cuts images of {side} pixels into {side // patch}x"
            f"{side // patch}, the student into {grid[0]}x{grid[1]}; use --objective.teacher_size {grid[0] * patch} "
            f"or a student with patches of {patch}"
        )
    if teacher.prefix != trunk.prefix:
        raise ValueError(
            f"objective.teacher: it has {teacher.prefix} class tokens, the student {trunk.prefix}, so maps have other "
            "sizes; give the student the teacher's kind of head (--model.head.kind class_token or mean)"
        )
    return None if side == student.preprocess.size else side


def _reject_widths(config: AttentionTransferConfig, student: TrunkConfig, teacher: TrunkConfig) -> None:
    target = config.target
    if target == "features" and student.width != teacher.width:
        raise ValueError(
            f"objective.target: features of width {teacher.width} cannot be compared with {student.width}; use a "
            "student of the teacher's width, or target map"
        )
    free = target == "map" or (target == "qk" and config.mode == "copy" and config.heads == "all")
    if not free and student.width // student.heads != teacher.width // teacher.heads and target != "features":
        raise ValueError(
            f"objective.target: heads of the teacher have {teacher.width // teacher.heads} channels, of the student "
            f"{student.width // student.heads}, so {target} does not fit; use target map, which has no width"
        )


def _normalisation(
    student: PreprocessConfig, teacher: PreprocessConfig
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """(x std_s + mean_s - mean_t) / std_t as one gain and one shift."""
    scale = tuple(a / b for a, b in zip(student.std, teacher.std, strict=True))
    shift = tuple((a - b) / c for a, b, c in zip(student.mean, teacher.mean, teacher.std, strict=True))
    return cast("tuple[float, float, float]", scale), cast("tuple[float, float, float]", shift)


def _lacking(student: TrunkConfig, teacher: TrunkConfig) -> list[str]:
    differences = [
        f"{name} {_component(teacher, name)} (student: {_component(student, name)})"
        for name in FEEDING
        if getattr(student, name) != getattr(teacher, name)
    ]
    if not differences:
        return []
    return [
        f"warning: the teacher has parts that the student lacks or has otherwise: {', '.join(differences)}; attention "
        "from such teachers has been found to hurt unless the student gets them, too (--model.trunk....)"
    ]


def _component(config: TrunkConfig, name: str) -> object:
    component = getattr(config, name)
    return component.kind if name in ("stem", "mixer") else component


def _stored(
    tensors: Mapping[str, Tensor],
    config: AttentionTransferConfig,
    trunk: Trunk,
    layers: list[int],
    heads: list[int],
    tokens: int,
) -> Guide:
    parts = ("attention",) if config.target == "map" else PARTS[config.target]
    pairs = tuple(zip(layers, config.layer_map or layers, strict=True))
    names = [f"{what}.{t}" for what in parts for _, t in pairs]
    missing = [name for name in names if name not in tensors]
    if missing:
        held = ", ".join(sorted(tensors)[:4])
        raise ValueError(f"objective.teacher: the file lacks {', '.join(missing[:4])} (it has {held}, ...)")
    if config.drop_path == "shared":
        raise ValueError("objective.drop_path: stored tensors have no drop path to share; use off")
    shapes = {tuple(tensors[name].shape) for name in names}
    if len(shapes) != 1:
        raise ValueError("objective.teacher: stored tensors of one kind must have one shape")
    (shape,) = shapes
    rows = 3 if config.target == "features" else 4
    if config.mode == "copy" and len(shape) == rows:
        raise ValueError(
            "objective.mode: stored attention of single images is not there at inference; use distill, or store one "
            "map for all images"
        )
    head_pairs = tuple((h, h) for h in heads)
    if rows == 4 and len(shape) in (3, 4):
        head_pairs = paired(heads, config.head_map, trunk.config.heads, int(shape[-3]), "heads")
    last = {"map": tokens, "features": trunk.width}.get(config.target, trunk.width // trunk.config.heads)
    if shape[-2:] != (tokens, last) or len(shape) not in (rows - 1, rows):
        raise ValueError(
            f"objective.teacher: {names[0]} is {'x'.join(map(str, shape))}, but the student's ends in {tokens}x{last}; "
            "store it with a model of the same image size, patches and class tokens"
        )
    options: dict[str, Any] = {"target": config.target, "aggregate": config.aggregate, "maps": config.target == "map"}
    guide = GuideConfig(None, trunk.prefix, layers=pairs, heads=head_pairs, tokens=tokens, stored=shape, **options)
    return Guide(guide, StoredTensors({name: tensors[name].float() for name in names}))
