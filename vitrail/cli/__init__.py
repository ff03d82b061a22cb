"""The command line: parse, call, print. Nothing is computed here; one file a group of commands.

Exit codes: 0 done; 1 found problems (check, predict); 2 the request cannot be carried out; 130 stopped, resumable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vitrail.cli.say import aligned, fail
from vitrail.cli.verb_help import description, quiet_defaults
from vitrail.schema import ConfigError, near
from vitrail.version import __version__

VERBS: dict[str, tuple[str, str]] = {  # name: where it is, what it does
    "train": ("train:train", "images in, a run folder with model, figures and report out"),
    "evaluate": ("evaluate:evaluate", "figures of a trained model on any data"),
    "predict": ("evaluate:predict", "what a trained model says of some images"),
    "compare": ("compare:compare", "a study or finished runs: one table, one report"),
    "inspect": ("inspect:inspect", "where models look, what they keep and what they learned, as pictures"),
    "app": ("app:app", "a local page to drop a picture on: prediction, map, tokens kept, cost"),
    "attack": ("attack:attack", "make an adaptive model spend its full compute, with one patch for all images"),
    "augment": ("augment:augment", "make images where classes are rare or confused, by diffusion or mixing"),
    "bench": ("bench:bench", "how fast models are on this machine"),
    "export": ("export:export", "a trained model as a torch or ONNX file, or its adapter alone"),
    "check": ("data:check", "look for trouble in a data set before training on it"),
    "pack": ("data:pack", "decode a data set once, so that no epoch decodes it again"),
    "list": ("catalogue:list_", "names of models, heads, mixers, adapters, recipes, data sources"),
    "show": ("catalogue:show", "one model, recipe, head, mixer or adapter in full; the adapter of a run"),
}

EXAMPLES = (
    ("vitrail train demo", "the whole path in minutes, on embedded data"),
    ("vitrail train finetune --data photos/", "your photographs, from published weights"),
    ("vitrail train vit --data photos/ --model.name deit_tiny --optim.epochs 50", ""),
    ("vitrail train --resume runs/vit-deit_tiny-photos", "go on after an interruption"),
    ("vitrail evaluate runs/demo --data embedded:fashion", "figures as a table (or --json)"),
    ("vitrail predict runs/demo cat.jpg dog.jpg --json", ""),
    ("vitrail compare study.yaml --jobs 2", "variants x seeds, with what is significant"),
    ("vitrail inspect runs/ats runs/vit --images cat.jpg", "attention maps, kept tokens, likeness"),
    ("vitrail app runs/demo", "drop a picture on a local page"),
    ("vitrail attack runs/ats --size 8", "how much of an adaptive model's saving holds"),
    ("vitrail augment photos/ more/ --method mixup --up_to 50", "fill up rare classes"),
    ("vitrail bench deit_small --against timm", "img/s, latency, memory beside timm's"),
    ("vitrail export runs/demo model.onnx", "checked at batch 1, 2 and 7"),
    ("vitrail check photos/", ""),
    ("vitrail pack photos/ packed/", "decoded once; then --data packed/"),
    ("vitrail list models", ""),
)


def run(words: Sequence[str]) -> int:
    """Carry out one command; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"vitrail {__version__}")
        return 0
    verb, rest = words[0], list(words[1:])
    if verb not in VERBS:
        return fail(f"no command {verb!r}{near(verb, VERBS)}; vitrail --help lists all")
    try:
        return _call(verb, rest) or 0
    except ConfigError as error:
        lines = [f"{len(error.problems)} problems:" if len(error.problems) > 1 else "1 problem:", *error.problems]
        return fail("\n  ".join(lines))
    except BrokenPipeError:  # `vitrail list models | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, KeyError) as error:
        return fail(str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error))
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def _call(verb: str, words: list[str]) -> int | None:
    module, _, name = VERBS[verb][0].partition(":")
    function = getattr(import_module(f"vitrail.cli.{module}"), name)
    if verb in ("train", "show"):  # their flags are the configuration, read as YAML is
        code: int | None = function(words)
        return code
    import tyro

    if "-h" in words or "--help" in words:
        print(description(function), end="\n\n")
    return tyro.cli(
        quiet_defaults(function),
        args=words,
        prog=f"vitrail {verb}",
        description="",  # tyro would join its lines
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _help() -> str:
    return (
        "vitrail turns images into classifiers that are accurate for their cost.\n\n"
        "usage: vitrail COMMAND ...      (vitrail COMMAND --help tells more)\n\n"
        f"{aligned((name, about) for name, (_, about) in VERBS.items())}\n\nexamples:\n{aligned(EXAMPLES)}\n"
    )
