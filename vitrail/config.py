"""The configuration of a run: what it nests, how it is read, and what must hold before any data is touched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from vitrail.data.config import AugmentConfig, DataConfig, conflicts
from vitrail.engine.config import EngineConfig, OptimConfig
from vitrail.files import reject_later
from vitrail.learn.config import (
    AttentionTransferConfig,
    DiffusionConfig,
    DistillationConfig,
    GrafitConfig,
    MaeConfig,
    ObjectiveConfig,
    SupervisedConfig,
)
from vitrail.model.config import OWN_TEXT, ModelConfig, TrunkConfig
from vitrail.schema import ConfigError, Whole, build, check, near, plain

__all__ = [
    "AttentionTransferConfig",
    "AugmentConfig",
    "ConfigError",
    "DataConfig",
    "DiffusionConfig",
    "DistillationConfig",
    "EngineConfig",
    "GrafitConfig",
    "MaeConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "SupervisedConfig",
    "dump",
    "from_mapping",
    "load_yaml",
    "validate",
]


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on."""

    recipe: str = "vit"
    """Name of the recipe it began from."""
    out: str | None = None
    """Run folder (none: runs/RECIPE-MODEL-DATA, numbered)."""
    seed: Whole = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=SupervisedConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluators: tuple[str, ...] = ("classification",)
    """What is measured on val while training and on test at the end."""
    calibrate: bool = True
    """Fit at the end, on val: calibrated probabilities, prediction sets, and a score of images of no class."""


def from_mapping(values: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
    """A validated configuration from nested values over `base`; raises `ConfigError` with every problem at once."""
    problems: list[str] = []
    values = dict(values)
    if isinstance(values.get("data"), str):  # `--data photos/` is short for `--data.uri photos/`
        values["data"] = {"uri": values["data"]}
    elif isinstance(values.get("data"), Mapping) and "kind" in values["data"]:
        data = dict(values["data"])
        values["data"] = {**data, "uri": data.pop("kind")} | {k: v for k, v in data.items() if k != "kind"}
        values["data"].pop("kind", None)
    base = base or RunConfig()
    config = base
    try:
        config = build(RunConfig, values, base)
    except ConfigError as error:
        problems += error.problems
        config = _salvage(values, base)
    problems += validate(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _salvage(values: Mapping[str, Any], base: RunConfig) -> RunConfig:
    """The configuration with those top-level groups that can be read, so that their names are still checked."""
    for key, value in values.items():
        group = value if isinstance(value, Mapping) else {None: value}
        for name, inner in group.items():
            try:
                base = build(RunConfig, {key: inner if name is None else {name: inner}}, base)
            except ConfigError:
                continue
    return base


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The nested values of a YAML file."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"no configuration at {path}")
    if path.name == "config.yaml" and (beside := path.with_name("environment.json")).is_file():
        with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            reject_later(path.parent, json.loads(beside.read_text(encoding="utf-8")))
    try:
        text = path.read_text(encoding="utf-8")
        if _nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MOST_VALUES:
            raise ConfigError([f"{path} holds more than {MOST_VALUES:,} values, its references written out"])
        values = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"]) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, RecursionError, OverflowError, ValueError) as error:  # the last two: absurd escapes, dates
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError([f"{path} is not valid YAML: {reason}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path} must hold settings, one `name: value` a line"])
    return values


RUN_OF = "run:"  # begins a setting that stands for a run of a study (`vitrail.compare.study`)
MOST_VALUES = 100_000  # of a YAML file


def _nodes(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML document has with all references written out; a cycle raises `RecursionError`."""
    if id(node) not in known:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(_nodes(part, known) for part in parts)
    return known[id(node)]


def dump(config: RunConfig) -> str:
    """The YAML text from which `load_yaml` and `from_mapping` make the same configuration again."""
    return str(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))


def validate(config: RunConfig) -> list[str]:
    """Every problem that can be seen without reading data or building a model."""
    from vitrail.model.zoo import ZOO

    problems = check(config)
    name = config.model.name
    if not name.startswith(("timm:", "text:")) and name not in ZOO:
        problems.append(f"model.name: no model {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    if not re.fullmatch(r"full|head|norm|bias|attention|last:\d+", config.optim.tune):
        problems.append(f"optim.tune: {config.optim.tune!r} is not full, head, last:N, norm, bias or attention")
    pieces = config.engine.accumulate or 1
    mixes = bool(config.data.augment.mixup or config.data.augment.cutmix)
    if pieces > config.data.batch // (1 + mixes):
        things = "pairs, which mixup and CutMix mix," if mixes else "images"
        count = config.data.batch // (1 + mixes)
        problems.append(f"data.batch: {count} {things} cannot be cut into {pieces} pieces (engine.accumulate)")
    problems += conflicts(config.data.augment) + conflicts(config.data.weak, "data.weak")
    if config.data.weak.mixup or config.data.weak.cutmix:
        problems.append("data.weak: all views are mixed alike; set mixup and cutmix of data.augment")
    if config.data.repeats > config.data.batch:
        problems.append(
            f"data.repeats: {config.data.repeats} copies of an image do not fit a batch of {config.data.batch}; "
            "use fewer, or a larger --data.batch"
        )
    if sum((config.data.shots is not None, config.data.fraction < 1, config.data.long_tail is not None)) > 1:
        problems.append(
            "data.shots: it excludes data.fraction and data.long_tail, and they one another; set one of them"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", config.engine.device):
        problems.append(f"engine.device: {config.engine.device!r} is not auto, cpu, cuda, cuda:N or mps")
    weights, text = config.model.weights, name.startswith("text:")
    if text and weights == "timm":
        problems.append("model.weights: timm has no text models; use hub, a folder or none")
    elif weights in ("hub", "hub:fetch") and (not text or name in OWN_TEXT):
        problems.append(f"model.weights: {weights} is for text:FOLDER or a transformers name, not for {name}")
    elif weights not in ("none", "timm", "hub", "hub:fetch") and not (
        weights.startswith(RUN_OF) or Path(weights).exists()
    ):
        problems.append(f"model.weights: {weights!r} is neither none, timm nor an existing run folder or file")
    if config.optim.tune != "full" and weights == "none":
        problems.append(
            f"optim.tune: {config.optim.tune} freezes random weights; give --model.weights (timm, a run, a file) "
            "or tune full"
        )
    problems += _adapter(config) + _writing(config) + _selection(config) + _sharding(config) + _channels(config)
    problems += config.objective.problems(config)
    problems += _sizes(config)
    return problems


OF_ANY_CHANNELS = ("supervised", "regression")  # the others have teachers, decoders or colour views for RGB


def _channels(config: RunConfig) -> list[str]:
    if config.objective.kind in OF_ANY_CHANNELS or (config.data.channels == 3 and config.data.maximum is None):
        return []
    allowed = " and ".join(OF_ANY_CHANNELS)
    return [f"data.channels: {config.objective.kind} takes RGB of eight bits; objectives for others are {allowed}"]


def _adapter(config: RunConfig) -> list[str]:
    """What cannot be together with an adapter."""
    adapter, optim = config.model.adapter, config.optim
    if adapter is None:
        return []
    problems = []
    if optim.tune != "full":
        problems.append(
            f"optim.tune: {optim.tune} chooses among weights that model.adapter freezes; leave it at full (the adapter"
            " has train_head and train_norms)"
        )
    if optim.layer_decay < 1:
        problems.append(
            "optim.layer_decay: numbers of all layers lie in one tensor of an adapter and share one rate; leave it at 1"
        )
    if optim.name == "muon":
        problems.append(
            "optim.name: muon is for hidden weight matrices, which model.adapter freezes; use adamw or adam"
        )
    if adapter.kind == "vpt":
        problems += _prompts(config)
    if getattr(adapter, "head_coefficients", None) is not None and adapter.train_head:
        problems.append("model.adapter.head_coefficients: train_head trains the classifier as a whole; set one of them")
    return problems


def _prompts(config: RunConfig) -> list[str]:
    """What takes no prompts, as far as names tell."""
    from vitrail.model.zoo import ZOO

    name, known = config.model.name, ZOO.get(config.model.name)
    if name.startswith(("timm:", "text:")) or (known is not None and not isinstance(known.trunk, TrunkConfig)):
        return [
            f"model.adapter: vpt puts prompts before our own blocks, and {name} has other ones; use lora, or a model"
            " such as vit_*, deit_*, deit3_* or cait_* (with --model.weights timm for published weights)"
        ]
    return []


def _writing(config: RunConfig) -> list[str]:
    """What a language model must have, and nothing else may."""
    writes = config.model.head is not None and config.model.head.kind == "next_token"
    if writes != (config.objective.kind == "language_model"):
        return ["objective: language_model and --model.head next_token belong together; set both or neither"]
    odd = set(config.evaluators) & ({"classification"} if writes else {"perplexity", "bleu"})
    if odd:
        does, better = ("writes", "perplexity or bleu") if writes else ("classifies", "classification")
        return [f"evaluators: {', '.join(sorted(odd))} does not evaluate a model that {does}; use {better}"]
    return []


SHARDED_OBJECTIVES = ("supervised", "byol")  # whose forward calls every block, and whose teachers are part of it
SHARDED_OPTIMIZERS = ("adamw", "adam", "lamb", "muon")  # torch shards no fused step of the others


def _sharding(config: RunConfig) -> list[str]:
    """A sentence for every setting that does not go with sharding."""
    if config.engine.shard == "none":
        return []
    kind, name, objectives = config.objective.kind, config.optim.name, ", ".join(SHARDED_OBJECTIVES)
    rules = [
        (kind in SHARDED_OBJECTIVES, f"objective.kind {kind}", objectives),
        (name in SHARDED_OPTIMIZERS, f"optim.name {name}", ", ".join(SHARDED_OPTIMIZERS)),
        (config.model.adapter is None, "an adapter", "a model without one"),
        (config.model.name.startswith("text:") is False, "a text model", "a model of images"),
        (not config.model.trunk.get("adaptive"), "model.trunk.adaptive", "a model that keeps its tokens"),
        (config.engine.precision != "fp8", "engine.precision fp8", "auto, bf16 or float32"),
        (not config.engine.compile, "engine.compile true", "false"),
    ]
    return [f"engine.shard: full does not go with {what}; use {use}, or none" for fits, what, use in rules if not fits]


def _selection(config: RunConfig) -> list[str]:
    """Why weights cannot be selected, or a run be stopped, by its evaluations on val."""
    setting = config.engine.selects_by
    if setting and config.objective.kind == "attack":
        return [f"{setting}, but an attack trains a patch and no weights that val could tell apart; leave it out"]
    if setting and not (config.engine.evaluate_every and config.evaluators):
        return [
            f"{setting}, which needs evaluations on val during training; set --engine.evaluate_every above 0 and name "
            "evaluators, or leave it out"
        ]
    return []


def _sizes(config: RunConfig) -> list[str]:
    from vitrail.model.zoo import ZOO

    if config.model.name not in ZOO:
        return []
    native = ZOO[config.model.name].trunk
    known = {field.name for field in fields(native)}
    if unknown := [name for name in config.model.trunk if name not in known]:
        return [f"model.trunk.{name}: {config.model.name} has no such setting{near(name, known)}" for name in unknown]
    if not isinstance(native, TrunkConfig):
        return []
    trunk = replace(native, **config.model.trunk)
    size = config.model.image_size or trunk.image_size
    if size % trunk.patch:
        low = size // trunk.patch * trunk.patch
        near_sizes = f"{low} or {low + trunk.patch}" if low else str(trunk.patch)
        return [f"model.image_size: {size} is not a multiple of the patch size {trunk.patch}; use {near_sizes}"]
    if (size // trunk.patch) ** 2 < 9:
        better = max(1, size // 8)
        return [
            f"model.image_size: {size} pixels with patches of {trunk.patch} leave {(size // trunk.patch) ** 2} tokens, "
            f"too few to learn from; use --model.trunk.patch {better} or a larger image_size"
        ]
    if trunk.width % trunk.heads:
        return [f"model.trunk.heads: width {trunk.width} cannot be cut into {trunk.heads} heads"]
    return []
