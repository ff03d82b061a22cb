"""Studies in which one run stands on another: `vitrail compare` with something trained first.

    python studies/chained.py resolution cifar100.npz        E22: low resolution first, against the target throughout
    python studies/chained.py attention cifar100.npz cifar10.npz      E26: attention-only fine-tuning on few images
    python studies/chained.py teachers cifar10.npz           E7: a convolutional against a transformer teacher
    python studies/chained.py removed cifar100.npz           trunks without the heads they grew under
    ... --smoke                                              a minute on a CPU, on whatever data are named

Everything lands in runs/studies, finished runs are never repeated, and the report is that of `vitrail compare`. Where
weights differ by seed a seed is a study of its own: `studies/tables.py --together` makes one table of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from vitrail.compare.page import comparison_tables
from vitrail.compare.run import compare_study
from vitrail.compare.study import STUDIES, Study, plan, read_study, run_folder
from vitrail.config import RunConfig, dump
from vitrail.engine.run_folder import RunFolder
from vitrail.files import write_text
from vitrail.model.heads.config import Mean
from vitrail.recipes import recipe, with_values

SMOKE = {
    "data.batch": 20,
    "data.limit": 60,
    "data.workers": 0,
    "data.check": "off",
    "optim.steps": 3,
    "model.trunk": {"depth": 1, "width": 48, "heads": 3},
    "engine.device": "cpu",
}
SHORT: dict[str, Any] = {  # a small ViT in few epochs, with many steps of each
    **{"data.batch": 250, "model.trunk": {"depth": 6}, "optim.name": "muon", "optim.lr": 1e-3, "optim.momentum": 0.95},
    **{"optim.weight_decay": 0.1, "optim.epochs": 16.0, "optim.warmup": 2.0},
}


def changed(config: RunConfig, changes: Mapping[str, Any], smoke: bool) -> RunConfig:
    """The configuration with changes, and as small as possible for a smoke run."""
    small = dict(SMOKE) if smoke else {}
    if config.model.name.startswith("cifar_resnet"):
        small.pop("model.trunk", None)
    return with_values(config, {**changes, "engine.evaluate_every": 0.0, **small})


def made(config: RunConfig) -> Path:
    """The run of a configuration, trained now if it is not there."""
    path = run_folder(config, STUDIES)
    if not RunFolder(path).finished:
        text = STUDIES / "configs" / f"{path.name}.yaml"
        write_text(text, dump(config))
        words = (
            ["--resume", str(path)] if (path / "config.yaml").is_file() else ["--config", str(text), "--out", str(path)]
        )
        subprocess.run([sys.executable, "-m", "vitrail", "train", *words], check=True)
    return path


def resolution(data: str, smoke: bool) -> list[Study]:
    """Trained at 24 pixels and fine-tuned at 32, against 32 throughout; the same images, three quarters of the tokens.

    Expected (DeiT III, arXiv 2204.07118): at least as good, at lower cost.
    """
    base = changed(recipe("small-deit3"), {"data.uri": data, **SHORT}, smoke)
    studies = []
    for seed in range(1 if smoke else 3):
        low = made(with_values(base, {"model.image_size": 24, "seed": seed}))
        tune = {
            "model": {"weights": str(low)},
            "optim": {"epochs": 4.0, "lr": 3e-4, "warmup": 1.0},
        }
        studies.append(
            Study(f"resolution-seed{seed}", base, {"at-32": {}, "24-then-32": tune}, seeds=(seed,), budget="none")
        )
    return studies


def attention(source: str, target: str, smoke: bool) -> list[Study]:
    """A ViT from one data set fine-tuned on a tenth of another: all of it, its attention, its head.

    Expected (Touvron et al. 2022, arXiv 2203.09795): attention alone about as good as all.
    """
    base = made(changed(recipe("small-deit"), {"data.uri": source, **SHORT}, smoke))
    tuned = changed(
        recipe("small-transfer"),
        {
            **{"data.uri": target, "data.fraction": 1.0 if smoke else 0.1, "optim.epochs": 40.0},
            **{"model.weights": str(base), "model.trunk": SHORT["model.trunk"], "model.head": Mean()},
        },
        smoke,
    )
    ways: dict[str, dict[str, Any]] = {"full": {}, "attention": {"optim": {"tune": "attention"}}}
    ways |= {"head": {"optim": {"tune": "head"}}}
    return [Study("attention-only", tuned, ways, seeds=(0,) if smoke else (0, 1, 2))]


def teachers(data: str, smoke: bool) -> list[Study]:
    """A student of a ResNet and of a ViT, both trained here on the same images.

    Expected (DeiT, table 2): the convolutional teacher is the better one of two that are about as accurate.
    """
    plain = {"data.augment.mixup": 0.0, "data.augment.cutmix": 0.0}  # teachers of few epochs
    sgd = {"data.batch": 250, "optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 5e-4, "optim.epochs": 16.0}
    sgd |= {"objective.loss": "cross_entropy", "data.augment.rand_ops": 0, "optim.clip": 0.0}
    convolutional = made(changed(recipe("small-rsb"), {"data.uri": data, **plain, **sgd}, smoke))
    transformer = made(changed(recipe("small-deit"), {"data.uri": data, **plain, **SHORT}, smoke))
    base = changed(recipe("small-deit"), {"data.uri": data, **SHORT}, smoke)

    def of(teacher: Path) -> dict[str, Any]:
        return {"objective": {"kind": "distillation", "teacher": str(teacher), "labels": {"smoothing": 0.1}}}

    ways = {"alone": {}, "of-resnet": of(convolutional), "of-vit": of(transformer)}
    return [Study("teachers", base, ways, seeds=(0,) if smoke else (0, 1, 2))]


def removed(data: str, smoke: bool) -> list[Study]:
    """Trunks of studies/heads-resnet.yaml without the heads they were trained under: a linear classifier of their mean.

    Expected (Gramian heads, arXiv 2310.16483, table B): trunks that grew under Gramian heads are the better ones.
    """
    grown = read_study(Path(__file__).with_name("heads-resnet.yaml"))
    wanted = {name: grown.variants[name] for name in ("mean", "gramian-1", "gramian-5")}
    base = with_values(grown.base, {"data.uri": data})
    planned = plan(Study(grown.name, base, wanted, seeds=(0,) if smoke else grown.seeds), {}, STUDIES)
    fresh = {"model.head": Mean(), "optim.tune": "head", "optim.epochs": 4.0, "optim.warmup": 0.0, "evaluators": ()}
    studies = []
    for seed in sorted({one.seed for one in planned}):
        ways = {
            one.variant: {"model": {"weights": str(made(changed(one.config, {}, smoke)))}}
            for one in planned
            if one.seed == seed
        }
        studies.append(Study(f"removed-seed{seed}", changed(base, fresh, smoke), ways, seeds=(seed,)))
    return studies


WHAT = {"resolution": resolution, "attention": attention, "teachers": teachers, "removed": removed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("data", nargs="+")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if len(options.data) != (2 if options.what == "attention" else 1):
        parser.error("attention needs two data sets (where the ViT is trained, and where it is fine-tuned), others one")
    studies = WHAT[options.what](*options.data, options.smoke)
    for study in studies:
        found, folder = compare_study(study, jobs=options.jobs, seconds=0.0)
        Console().print(comparison_tables(found))
        print(f"report: {folder / 'report.html'}", flush=True)


if __name__ == "__main__":
    main()
