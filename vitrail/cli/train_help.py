"""`vitrail train --help`: a page of what is used most; with the name of a section, or `all`, every setting of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile

import tyro

from vitrail.cli.say import aligned, fail
from vitrail.config import RunConfig
from vitrail.recipes import RECIPES, about, recipe
from vitrail.schema import hints, near

FIRST = ("demo", "finetune", "vit", "small-deit", "small-moco")  # recipes of the page
USED_MOST = {
    "data.uri": ("--data URI", "images: a folder, a table, ...; `vitrail list data`"),
    "data.batch": ("--data.batch N", "images a step"),
    "model.name": ("--model.name NAME", "`vitrail list models`, or timm:NAME"),
    "model.weights": ("--model.weights FROM", "what to start from: none, timm, a run or a file"),
    "model.image_size": ("--model.image_size PX", "side of the images (none: the model's own)"),
    "optim.epochs": ("--optim.epochs N", "how long"),
    "optim.steps": ("--optim.steps N", "how long, in place of epochs"),
    "optim.lr": ("--optim.lr RATE", "peak learning rate"),
    "optim.tune": ("--optim.tune WHAT", "full, head, last:N, norm, bias or attention"),
    "engine.device": ("--engine.device NAME", "auto, cpu, cuda"),
    "seed": ("--seed N", "of everything that is drawn"),
    "out": ("--out FOLDER", "run folder (none: runs/RECIPE-MODEL-DATA, numbered)"),
}
SECTIONS = {
    "data": "where images come from, batches, splits, augmentation",
    "model": "architecture, head, adapter, weights",
    "objective": "what is learned: labels, a teacher, without labels; of the recipe's kind",
    "optim": "optimiser, schedule, what is tuned",
    "engine": "machine, precision, how often things happen",
    "all": "every setting",
}
EXAMPLES = (
    ("vitrail train demo", "minutes on a CPU, with embedded images"),
    ("vitrail train finetune --data photos/", "from published weights"),
    ("vitrail train vit --data photos/ --model.name deit_tiny --optim.epochs 50", "from scratch"),
    ("vitrail train demo --help optim", "the settings of a section, with the values of a recipe"),
)


def train_help(words: Sequence[str]) -> int:
    """`words` are what was typed: perhaps a recipe in front, perhaps sections behind `--help`."""
    asked = next(i for i, word in enumerate(words) if word in ("-h", "--help"))
    names = [*takewhile(_plain, words[:asked]), *takewhile(_plain, words[asked + 1 :])]
    sections = [name for name in names if name in SECTIONS]
    chosen = next((name for name in names if name in RECIPES), "vit")
    for name in names:
        if name not in SECTIONS and name not in RECIPES:
            return fail(f"no recipe and no section of settings {name!r}{near(name, [*SECTIONS, *RECIPES])}")
    if sections:
        _settings(chosen, list(hints(RunConfig)) if "all" in sections else sections)
    else:
        print(_page(chosen))
    return 0


def _plain(word: str) -> bool:
    return not word.startswith("-")


def _page(chosen: str) -> str:
    base = recipe(chosen)
    used = []
    for path, (flag, words) in USED_MOST.items():
        value: object = base
        for part in path.split("."):
            value = getattr(value, part)
        used.append((flag, words if value in (None, "") else f"{words} ({value})"))
    used += [("--resume RUN", "go on after an interruption"), ("--json", "print one JSON object")]
    recipes = {name: about(name).splitlines()[0] for name in dict.fromkeys((*FIRST, chosen))}
    return "\n".join(
        (
            "usage: vitrail train [RECIPE] [--section.name value ...]",
            "       vitrail train --config RUN/config.yaml [--section.name value ...]",
            "       vitrail train --resume RUN",
            f"\nrecipes to begin with, of {len(RECIPES)} (vitrail list recipes; vitrail show RECIPE):",
            aligned(recipes.items()),
            f"\nsettings used most, with the values of recipe {chosen}:",
            aligned(used),
            "\nall settings of a section (vitrail train --help SECTION):",
            aligned(SECTIONS.items()),
            "\nexamples:",
            aligned(EXAMPLES),
        )
    )


def _settings(chosen: str, sections: Sequence[str]) -> None:
    """Every setting of some sections, drawn by tyro."""
    base, types = recipe(chosen), hints(RunConfig)
    part = dataclasses.make_dataclass(
        "Settings", [(name, types[name], dataclasses.field(default=getattr(base, name))) for name in sections]
    )
    tyro.cli(
        part,
        args=["--help"],
        prog=f"vitrail train {chosen}",
        description=f"Settings with the values of recipe {chosen}.",
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )
