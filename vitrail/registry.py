"""Parts by name: heads, mixers, objectives, evaluators and data sources.

A row names a part's configuration type (where it has one) and the part itself; both are imported when they are asked
for, and configuration types need no torch. To add a part to the package, write its file and its row here. A part from
another package registers itself:

    @register("objective", MarginConfig)  # its `kind` is the name
    class Margin(Objective): ...

when its module is imported. Modules that the environment variable VITRAIL_PARTS names (separated by commas), and entry
points of the group `vitrail.parts`, are imported before the first name is looked up, in worker processes too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

PARTS: dict[str, dict[str, str | tuple[Any, Any]]] = {
    "head": {
        "class_token": "model.heads.config:ClassToken model.heads.pooled:ClassTokenHead",
        "mean": "model.heads.config:Mean model.heads.pooled:MeanHead",
        "distilled": "model.heads.config:Distilled model.heads.pooled:DistilledHead",
        "class_attention": "model.heads.config:ClassAttention model.heads.class_attention:ClassAttentionHead",
        "class_mlp": "model.heads.config:ClassMlp model.heads.class_attention:ClassMlpHead",
        "attention_pool": "model.heads.config:AttentionPool model.heads.class_attention:AttentionPoolHead",
        "second_order": "model.heads.config:SecondOrder model.heads.second_order:SecondOrderHead",
        "gramian": "model.heads.config:Gramian model.heads.gramian:GramianHead",
        "branches": "model.heads.config:Branches model.heads.branches:BranchesHead",
        "projected": "model.heads.config:Projected model.heads.pooled:ProjectedHead",
        "next_token": "model.heads.config:NextToken model.heads.next_token:NextTokenHead",
        "own": "model.heads.config:Own model.trunks.timm_trunk:OwnHead",
    },
    "mixer": {
        "softmax": "model.mixers.config:Softmax model.mixers.softmax:SoftmaxMixer",
        "talking_heads": "model.mixers.config:TalkingHeads model.mixers.softmax:TalkingHeadsMixer",
        "linear_patches": "model.mixers.config:LinearPatches model.mixers.patches:LinearPatchesMixer",
        "patch_mlp": "model.mixers.config:PatchMlp model.mixers.patches:PatchMlpMixer",
        "patch_conv": "model.mixers.config:PatchConv model.mixers.patches:PatchConvMixer",
        "none": "model.mixers.config:NoMixing model.mixers.patches:NoMixer",
        "gated_conv": "model.mixers.config:GatedConv model.mixers.patches:GatedConvMixer",
        "sima": "model.mixers.config:Sima model.mixers.linear_attention:SimaMixer",
        "xca": "model.mixers.config:Xca model.mixers.linear_attention:XcaMixer",
        "elu_kernel": "model.mixers.config:EluKernel model.mixers.linear_attention:EluKernelMixer",
        "efficient": "model.mixers.config:Efficient model.mixers.linear_attention:EfficientMixer",
        "cosformer": "model.mixers.config:CosFormer model.mixers.linear_attention:CosFormerMixer",
    },
    "objective": {
        "supervised": "learn.config:SupervisedConfig learn.supervised:Supervised",
        "distillation": "learn.config:DistillationConfig learn.distillation:Distillation",
        "regression": "learn.config:RegressionConfig learn.regression:Regression",
        "grafit": "learn.config:GrafitConfig learn.grafit:Grafit",
        "one": "learn.config:OneConfig learn.distillation:One",
        "attention_transfer": "learn.config:AttentionTransferConfig learn.attention_transfer:AttentionTransfer",
        "mae": "learn.config:MaeConfig learn.mae:Mae",
        "diffusion": "learn.config:DiffusionConfig learn.diffusion:Diffusion",
        "language_model": "learn.config:LanguageModelConfig learn.language_model:LanguageModel",
        "byol": "learn.config:ByolConfig learn.byol:Byol",
        "moco": "learn.config:MocoConfig learn.moco:Moco",
        "isd": "learn.config:IsdConfig learn.isd:Isd",
        "msf": "learn.config:MsfConfig learn.msf:Msf",
        "cmsf": "learn.config:CmsfConfig learn.cmsf:Cmsf",
        "fixmatch": "learn.config:FixmatchConfig learn.fixmatch:FixMatch",
        "compres": "learn.config:CompresConfig learn.compres:Compres",
        "simreg": "learn.config:SimregConfig learn.simreg:Simreg",
        "clusters": "learn.config:ClustersConfig learn.compres:Clusters",
        "crd": "learn.config:CrdConfig learn.compres:Crd",
        "dino": "learn.config:DinoConfig learn.dino:Dino",
        "supcon": "learn.config:SupconConfig learn.supcon:Supcon",
        "protonw": "learn.config:ProtonwConfig learn.cmsf:Protonw",
        "attack": "learn.attack_config:AttackConfig learn.attack:Attack",
        "defence": "learn.attack_config:DefenceConfig learn.defence:PatchTraining",
    },
    "evaluator": {
        "classification": "measure.evaluator:classify",
        "regression": "measure.parity:evaluate_regression",
        "knn": "measure.retrieval:evaluate_neighbours",
        "retrieval": "measure.retrieval:evaluate_retrieval",
        "members": "measure.ensembles:evaluate_members",
        "linear": "measure.probe:evaluate_linear",
        "linear_published": "measure.probe:evaluate_published",
        "clusters": "measure.clustering:evaluate_clusters",
        "few": "measure.probe:evaluate_few",
        "purity": "measure.retrieval:evaluate_purity",
        "episodes": "measure.episodes:evaluate_episodes",
        "long_tail": "measure.long_tail:evaluate_long_tail",
        "long_tail_thirds": "measure.long_tail:evaluate_thirds",
        "corruptions": "measure.corruptions:evaluate_corruptions",
        "cifar_c": "measure.cifar_c:evaluate_cifar_c",
        "slices": "measure.evaluator:evaluate_slices",
        "denoising": "measure.denoising:evaluate_denoising",
        "perplexity": "measure.language:evaluate_perplexity",
        "bleu": "measure.language:evaluate_bleu",
    },
    "source": {  # by scheme; paths are offered to the last first
        "folder": "data.sources.folder:SOURCE",
        "table": "data.sources.table:SOURCE",
        "npz": "data.sources.npz:SOURCE",
        "webdataset": "data.sources.webdataset:SOURCE",
        "stream": "data.sources.stream:SOURCE",
        "packed": "data.sources.packed:SOURCE",
        "text": "data.sources.text:SOURCE",
        "hf": "data.sources.parquet:SOURCE",
        "torchvision": "data.sources.builtin:TORCHVISION_SOURCE",
        "embedded": "data.sources.builtin:EMBEDDED_SOURCE",
        "synthetic:shapes": "data.sources.shapes:SOURCE",
        "synthetic:grammar": "data.sources.synthetic_text:GRAMMAR",
        "synthetic:meals": "data.sources.synthetic_text:MEALS",
        "synthetic:numbers": "data.sources.synthetic_text:NUMBERS",
    },
}
SUFFIXES: dict[str, tuple[str, ...]] = {  # sources that open such files only; none: nothing but their scheme
    "table": (".csv", ".tsv", ".parquet"),
    "npz": (".npz",),
    **dict.fromkeys(("stream", "torchvision", "embedded", *(kind for kind in PARTS["source"] if ":" in kind)), ()),
}


def settings(config: Any) -> dict[str, Any]:
    """Settings of a part, by name, without its kind."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "kind"}


def register(family: str, config: type | str) -> Callable[[T], T]:
    """Class or function decorator: the part of `family` that a configuration of type `config` describes.

    The default of the configuration's field `kind` is the part's name; evaluators and sources have no configuration
    and give their names instead. Raises `ValueError` where the name is taken.
    """
    kind = config if isinstance(config, str) else str(getattr(config, "kind", ""))

    def add(part: T) -> T:
        if not kind:
            raise ValueError(f"{config} has no field `kind` with a default, which is the name of the part")
        if kind in PARTS[family]:
            raise ValueError(f"there is a {family} {kind!r} already; choose another name")
        PARTS[family][kind] = (config, part)
        return part

    return add


def kinds(family: str) -> list[str]:
    """Names of all parts of a family."""
    _import_outside_parts()
    return list(PARTS[family])


def config_type(family: str, kind: str) -> Any:
    """The configuration type of a part."""
    return _row(family, kind, 0)


def part(family: str, kind: str) -> Any:
    """The class of a part, the function of an evaluator, or a `Source`."""
    return _row(family, kind, -1)


def _row(family: str, kind: str, column: int) -> Any:
    _import_outside_parts()
    row = PARTS[family][kind]
    if not isinstance(row, str):
        return row[column]
    module, _, name = row.split()[column].partition(":")
    return getattr(import_module(f"vitrail.{module}"), name)


@cache
def _import_outside_parts() -> None:
    from importlib.metadata import entry_points  # a quarter of the time of `vitrail --help`

    for entry in entry_points(group="vitrail.parts"):
        entry.load()
    for module in filter(None, os.environ.get("VITRAIL_PARTS", "").split(",")):
        import_module(module.strip())
