"""The command line: parse, call, print. Nothing is computed here; a command with a folder has its flags there.

A command is a frozen dataclass: its docstring and fields are what `--help` prints and the flags are read into, calling
it carries it out. Exit codes: 0 done; 1 problems in data (check, predict); 2 the request cannot be carried out; 130
stopped, resumable.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile

import vitrail.files  # noqa: F401, names of any bytes can be printed
from vitrail.console import aligned, command_help, fail, out_of_memory
from vitrail.schema import ConfigError, near, read_command
from vitrail.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {  # name: its class, what it does
    "fit": ("fit:FitCommand", "photographs and a latency in, the best file within it out"),
    "train": ("cli.train_command:TrainCommand", "images in, a run folder with model, metrics and report out"),
    "evaluate": ("cli.evaluate_command:EvaluateCommand", "metrics of a trained model on any data"),
    "predict": ("cli.evaluate_command:PredictCommand", "predictions of a trained model for images or texts"),
    "compare": ("compare:CompareCommand", "a study or finished runs: one table, one report"),
    "inspect": ("inspect:InspectCommand", "attention maps, kept tokens, embeddings and weights, as pictures"),
    "app": ("app:AppCommand", "a local page to drop a picture on: prediction, map, tokens kept, cost"),
    "attack": (
        "cli.attack_command:AttackCommand",
        "make an adaptive model spend its full compute, with one patch for all images",
    ),
    "augment": ("generate:AugmentCommand", "make images where classes are rare or confused, by diffusion or mixing"),
    "bench": ("bench:BenchCommand", "how fast models are on this machine"),
    "export": ("cli.export_command:ExportCommand", "a trained model as a torch or ONNX file, or its adapter alone"),
    "check": ("cli.data_commands:CheckCommand", "look for trouble in a data set before training on it"),
    "pack": ("cli.data_commands:PackCommand", "decode a data set once, so that no epoch decodes it again"),
    "list": ("cli.list_command:ListCommand", "names of models, heads, mixers, adapters, recipes, data sources"),
    "show": ("cli.list_command:ShowCommand", "one model, recipe, head, mixer or adapter in full; the adapter of a run"),
}

EXAMPLES = (
    ("vitrail train demo", "the whole path in minutes, on embedded data"),
    ("vitrail fit photos/ --latency 5ms --out classifier", "the best file that takes 5 ms on this CPU"),
    ("vitrail train finetune --data photos/", "your photographs, from published weights"),
    ("vitrail train vit --data photos/ --model.name deit_tiny --optim.epochs 50", ""),
    ("vitrail train --resume runs/vit-deit_tiny-photos", "go on after an interruption"),
    ("vitrail evaluate runs/demo --data embedded:fashion", "metrics as a table (or --json)"),
    ("vitrail predict runs/demo cat.jpg dog.jpg --json", ""),
    ("vitrail compare study.yaml --jobs 2", "variants x seeds, with what is significant"),
    ("vitrail inspect runs/ats runs/vit --images cat.jpg", "attention maps, kept tokens, similarity"),
    ("vitrail app runs/demo", "drop a picture on a local page"),
    ("vitrail attack runs/ats --size 8", "how much of an adaptive model's saving holds"),
    ("vitrail augment photos/ more/ --method mixup --up_to 50", "fill up rare classes"),
    ("vitrail bench deit_small --against timm", "img/s, latency, memory compared with timm's"),
    ("vitrail export runs/demo model.onnx", "checked at batch 1, 2 and 7"),
    ("vitrail check photos/", ""),
    ("vitrail pack photos/ packed/", "decoded once; then --data packed/"),
    ("vitrail list models", ""),
)


def run(words: Sequence[str]) -> int:
    """Carry out one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="readable")
    try:
        return _call(*words)
    except ConfigError as error:
        lines = [f"{len(error.problems)} problems:" if len(error.problems) > 1 else "1 problem:", *error.problems]
        return fail("\n  ".join(lines))
    except BrokenPipeError:  # `vitrail list models | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, KeyError) as error:
        return fail(str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return fail("memory was out; end other programs, or take smaller batches, smaller images or a smaller model")
    except KeyboardInterrupt as interrupt:
        return fail(str(interrupt) or "interrupted", 130)


def _call(name: str = "--help", *words: str) -> int:
    if name in ("-h", "--help", "help", "-V", "--version"):
        print(f"vitrail {__version__}" if name in ("-V", "--version") else _help())
        return 0
    if name not in COMMANDS:
        return fail(f"no command {name!r}{near(name, COMMANDS)}; vitrail --help lists all")
    module, _, cls = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"vitrail.{module}"), cls)
    if {"-h", "--help"} & set(takewhile(lambda word: word != "--", words)):
        if name == "train":  # its flags are a whole configuration, too many for one page
            return int(command.help(words))
        print(command_help(name, command))
        return 0
    return int(read_command(command, words)())


def _help() -> str:
    return (
        "vitrail turns images into classifiers that are accurate for their cost.\n\n"
        "usage: vitrail COMMAND ...      (vitrail COMMAND --help tells more)\n\n"
        f"{aligned((name, text) for name, (_, text) in COMMANDS.items())}\n\nexamples:\n{aligned(EXAMPLES)}\n"
    )
