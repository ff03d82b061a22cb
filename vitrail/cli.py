"""The command line: parse, call, print. Nothing is computed here.

Exit codes: 0 done; 1 found problems (check, predict); 2 the request cannot be carried out; 130 stopped, resumable.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.schema import ConfigError, near, parse_flags
from vitrail.version import __version__

VERBS: dict[str, str] = {
    "train": "images in, a run folder with model, figures and report out",
    "evaluate": "figures of a trained model on any data",
    "predict": "what a trained model says of some images",
    "check": "look for trouble in a data set before training on it",
    "pack": "decode a data set once, so that no epoch decodes it again",
    "list": "names of models, heads, mixers, recipes, data sources",
    "show": "one model, recipe, head or mixer in full",
}

EXAMPLES = """\
  vitrail train demo                                    the whole path in minutes, on embedded data
  vitrail train finetune --data photos/                 your photographs, from published weights
  vitrail train vit --data photos/ --model.name deit_tiny --optim.epochs 50
  vitrail train --resume runs/vit-deit_tiny-photos      go on after an interruption
  vitrail evaluate runs/demo --data embedded:fashion    figures as a table (or --json)
  vitrail predict runs/demo cat.jpg dog.jpg --json
  vitrail check photos/
  vitrail pack photos/ packed/                          decoded once; then --data packed/
  vitrail list models
"""


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
        return _fail(f"no command {verb!r}{near(verb, VERBS)}; vitrail --help lists all")
    command: dict[str, Callable[[], int | None]] = {
        "train": lambda: train(rest),
        "evaluate": lambda: _call(evaluate, rest),
        "predict": lambda: _call(predict, rest),
        "check": lambda: _call(check, rest),
        "pack": lambda: _call(pack, rest),
        "list": lambda: _call(list_, rest),
        "show": lambda: _call(show, rest),
    }
    try:
        return command[verb]() or 0
    except ConfigError as error:
        lines = [f"{len(error.problems)} problems:" if len(error.problems) > 1 else "1 problem:", *error.problems]
        return _fail("\n  ".join(lines))
    except BrokenPipeError:  # `vitrail list models | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, KeyError) as error:
        return _fail(str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _call(function: Callable[..., int | None], words: list[str]) -> int | None:
    name = function.__name__.rstrip("_")
    return tyro.cli(function, args=words, prog=f"vitrail {name}", config=(tyro.conf.FlagCreatePairsOff,))


def _fail(text: str, code: int = 2) -> int:
    print(f"vitrail: {text}", file=sys.stderr)
    return code


def _help() -> str:
    verbs = "\n".join(f"  {name:<10} {about}" for name, about in VERBS.items())
    return (
        "vitrail turns images into classifiers that are accurate for their cost.\n\n"
        f"usage: vitrail COMMAND ...      (vitrail COMMAND --help tells more)\n\n{verbs}\n\nexamples:\n{EXAMPLES}"
    )


def train(words: list[str]) -> int:
    """`vitrail train [RECIPE] [--config FILE] [--resume RUN] [--section.name value ...]`."""
    from vitrail.config import RunConfig, from_mapping, load_yaml
    from vitrail.recipes import recipe

    if "-h" in words or "--help" in words:
        return _train_help([w for w in words if w not in ("-h", "--help")])
    as_json = "--json" in words
    positional, values = parse_flags([w for w in words if w != "--json"])
    if len(positional) > 1:
        return _fail(f"train takes one recipe, got {', '.join(positional)}; settings are --section.name value")
    config_file, resumed = values.pop("config", None), values.pop("resume", None)
    if sum(x is not None for x in (config_file, resumed)) + bool(positional) > 1:
        return _fail("give one of: a recipe, --config FILE, --resume RUN")
    if isinstance(config_file, bool) or isinstance(resumed, bool):
        return _fail("--config needs a file and --resume a run folder")
    if resumed is not None:
        return _run(lambda api: api.resume(resumed, values), as_json)
    base: RunConfig | None = None
    if config_file is not None:
        stored = {**load_yaml(config_file), "out": None}
        base = from_mapping(stored)
    else:
        base = recipe(positional[0] if positional else "vit")
    config = from_mapping(values, base)
    return _run(lambda api: api.train(config), as_json)


def _run(work: Callable[[Any], Any], as_json: bool) -> int:
    from vitrail import api
    from vitrail.engine.distributed import join, leave
    from vitrail.engine.fit import Stopped
    from vitrail.show.tables import headline

    try:
        done = work(api)
        if join().main:
            if as_json:
                print(json.dumps({"run": str(done.path), "split": done.split, **done.figures.scalars()}))
            else:
                _print(headline(done.figures, f"{done.split}, {done.path}"))
                print(f"report: {done.report}")
    except Stopped as stopped:
        print(str(stopped), file=sys.stderr)
        return 130
    finally:
        leave()
    return 0


def _train_help(words: list[str]) -> int:
    from vitrail.config import RunConfig
    from vitrail.recipes import RECIPES, about, recipe

    names = [w for w in words if not w.startswith("-")]
    chosen = names[0] if names else "vit"
    base = recipe(chosen)
    summaries = "\n".join(f"  {name:<12} {about(name).splitlines()[0]}" for name in RECIPES)
    print(
        "usage: vitrail train [RECIPE] [--section.name value ...]\n"
        "       vitrail train --config RUN/config.yaml [--section.name value ...]\n"
        "       vitrail train --resume RUN\n\n"
        f"recipes:\n{summaries}\n\nsettings, with the values of recipe {chosen} (--data X is short for --data.uri X):\n"
    )
    tyro.cli(RunConfig, args=["--help"], default=base, prog="vitrail train", config=(tyro.conf.FlagConversionOff,))
    return 0


def evaluate(
    run: tyro.conf.Positional[Path],
    /,
    data: Annotated[str, tyro.conf.arg(metavar="URI")],
    split: str | None = None,
    batch: int = 256,
    workers: int | None = None,
    device: str = "auto",
    json: bool = False,
    per_class: bool = False,
) -> int:
    """Figures of a trained model on any data with its classes.

    Example: vitrail evaluate runs/demo --data embedded:fashion --json

    Args:
        run: run folder or model folder
        data: folder, .csv, .parquet, .npz, torchvision:NAME, embedded:fashion, synthetic:shapes
        split: train, val or test (default: test, or val where there is none)
        batch: images at a time
        workers: processes that decode
        device: auto, cpu, cuda
        json: print one JSON object
        per_class: print every class, too
    """
    from vitrail import api
    from vitrail.measure.classification import SingleLabelFigures
    from vitrail.show import tables

    figures, _, used = api.evaluate(run, data, split=split, batch=batch, workers=workers, device=device, quiet=json)
    if json:
        _print_json({"run": str(run), "data": data, "split": used, **figures.scalars(), **figures.to_json()})
        return 0
    _print(tables.headline(figures, f"{used} of {data}"))
    if per_class or len(figures.classes) <= 20:
        _print(tables.per_class(figures))
    if isinstance(figures, SingleLabelFigures):
        _print(tables.confused(figures))
    return 0


def predict(
    run: tyro.conf.Positional[Path],
    images: tyro.conf.Positional[tuple[Path, ...]],
    /,
    top: int = 3,
    device: str = "auto",
    json: bool = False,
) -> int:
    """What a trained model says of some images; folders are searched for images.

    Example: vitrail predict runs/demo cat.jpg photos/ --json

    Args:
        run: run folder or model folder
        images: image files or folders
        top: how many classes to name
        device: auto, cpu, cuda
        json: print one JSON object a line
    """
    from vitrail import api
    from vitrail.data.folder import image_files
    from vitrail.engine.device import choose_device

    if not images:
        return _fail("name at least one image or folder")
    paths = [found for path in images for found in (image_files(path) if path.is_dir() else [path])]
    if not paths:
        return _fail(f"no images in {', '.join(map(str, images))}")
    model = api.load(run, choose_device(device))
    bad = 0
    for start in range(0, len(paths), 256):
        chunk = paths[start : start + 256]
        for path, said in zip(chunk, model.predict(chunk, top=top, errors="return"), strict=True):
            bad += said.error is not None
            if json:
                _print_json({"path": str(path), **said.to_json()})
            elif said.error is not None:
                print(f"{path}  cannot be read: {said.error}")
            else:
                print(f"{path}  " + "  ".join(f"{name} {p:.1%}" for name, p in said.top))
    return 1 if bad else 0


def check(
    data: tyro.conf.Positional[str],
    /,
    out: Path | None = None,
    strict: bool = False,
    json: bool = False,
) -> int:
    """Look for trouble in a data set: unreadable and odd images, duplicates, leaks between splits, rare classes.

    Exit code: 0 nothing serious, 1 warnings with --strict, 2 errors. Example: vitrail check photos/ --out sheet.png

    Args:
        data: folder, .csv, .parquet, .npz, torchvision:NAME, embedded:fashion, synthetic:shapes
        out: write a sheet of pictures to this PNG
        strict: warnings count, too
        json: print one JSON object
    """
    from rich.table import Table

    from vitrail.data.check import check_data, picture_sheet
    from vitrail.data.open import open_data
    from vitrail.engine.progress import Progress

    opened = open_data(data)
    total = sum(len(split) for split in opened.splits.values())
    with Progress("check", total, quiet=json) as bar:
        report = check_data(opened, progress=lambda done, _: bar.advance(done - bar.done, f"{done} images"))
    if out is not None:
        picture_sheet(opened, out, report)
    if json:
        _print_json(report.to_json())
    else:
        table = Table(title=data, box=None, title_justify="left", header_style="bold")
        for column in ("", "finding", "images", "where"):
            table.add_column(column, overflow="fold")
        for row in report.rows():
            table.add_row(*row)
        _print(table)
        if out is not None:
            print(f"pictures: {out}")
    return report.exit_code(strict)


def pack(
    data: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="URI")] = None,
    out: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FOLDER")] = None,
    /,
    size: int = 256,
    workers: int | None = None,
    verify: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json: bool = False,
) -> int:
    """Decode a data set once into raw pixels, which every epoch then reads without decoding.

    Interrupted, the same command goes on where it was. Exit code: 1 where --verify finds damage.
    Example: vitrail pack photos/ packed/ --size 256, then vitrail train vit --data packed/

    Args:
        data: folder, .csv, .parquet, .npz, torchvision:NAME, embedded:fashion, synthetic:shapes
        out: folder to write
        size: longest shorter side, larger images are shrunk to it (0: keep as they are)
        workers: threads that decode (default: one a core, at most 16)
        verify: compare every byte of this packed folder with its checksum, and pack nothing
        json: print one JSON object
    """
    if verify is not None:
        from vitrail.data.packed import verify as find_damage

        with _rate("verify", "MB/s", 1e6, quiet=json) as told:
            faults = find_damage(verify, told)
        if json:
            _print_json({"path": str(verify), "faults": faults})
        else:
            print("\n".join(faults) or f"{verify}: every byte is as it was written")
        return 1 if faults else 0
    if data is None or out is None:
        return _fail("name a data set and a folder to pack it into, or a packed folder with --verify")
    from vitrail.data.open import open_source
    from vitrail.data.pack import pack as write_pack

    with _rate("pack", "img/s", quiet=json) as told:
        made = write_pack(open_source(data), out, size, workers, told)
    if json:
        _print_json(made.to_json())
        return 0
    for split, key, reason in made.skipped:
        print(f"left out of {split}: {key}: {reason}", file=sys.stderr)
    done = "already packed" if made.already else "packed"
    left_out = f", {len(made.skipped)} left out" if made.skipped else ""
    print(f"{done}: {made.images} images, {made.bytes / 1e6:.1f} MB in {out}{left_out}")
    return 0


def list_(
    what: tyro.conf.Positional[Literal["models", "heads", "mixers", "recipes", "data"]] = "models",
    pattern: tyro.conf.Positional[str] = "*",
    /,
    json: bool = False,
) -> int:
    """Names of what there is.

    Example: vitrail list models "deit*" --json

    Args:
        what: models, heads, mixers, recipes or data
        pattern: only names that match this shell pattern
        json: print one JSON list
    """
    from vitrail.show import catalogue

    rows = catalogue.rows(what, pattern)
    if json:
        _print_json(rows)
    elif rows:
        _print(catalogue.table(what, rows))
    else:
        return _fail(f"no {what} match {pattern!r}{near(pattern, catalogue.names(what))}")
    return 0


def show(name: tyro.conf.Positional[str], /, json: bool = False) -> int:
    """One model, recipe, head or mixer in full.

    Example: vitrail show deit_small

    Args:
        name: a name that `vitrail list` gives
        json: print one JSON object
    """
    from vitrail.show import catalogue

    found = catalogue.describe(name)
    if json:
        _print_json(found)
    else:
        print(catalogue.text(found))
    return 0


@contextmanager
def _rate(what: str, unit: str, scale: float = 1.0, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """For work that tells `(done, total)`: a bar from the first time it does, with the rate since then."""
    from vitrail.engine.progress import Progress

    with ExitStack() as stack:
        bars: list[tuple[Progress, float]] = []

        def told(done: int, total: int) -> None:
            if not bars:
                bars.append((stack.enter_context(Progress(what, total, quiet=quiet)), time.monotonic()))
            bar, began = bars[0]
            bar.advance(done - bar.done, f"{done / scale / max(time.monotonic() - began, 1e-3):.0f} {unit}")

        yield told


def _print(thing: Any) -> None:
    from rich.console import Console

    Console().print(thing)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))
