"""Commands and code of the documentation: how pages are read, and how each is made small enough to be run in a test.

No flag of a command is removed. Flags are added to it, or get another value, and may change lengths, models and amounts
of data only (`SIZES`). Where a command cannot run on every machine, a reason is stated and the
command is only parsed: its flags, recipe and settings must exist.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from vitrail.cli import COMMANDS
from vitrail.cli.list_command import ShowCommand
from vitrail.cli.train_command import TrainCommand
from vitrail.recipes import RECIPES, configured
from vitrail.schema import ConfigError, read_command

ROOT = Path(__file__).parents[1]
PROGRAMS = ("vitrail", "python", "torchrun", "pip", "make", "hf", "head")
SIZES = (  # settings that the table of pages may add to a command: lengths, models, amounts of data
    *("optim.epochs", "optim.steps", "optim.warmup", "data.limit", "data.batch", "data.workers", "batch", "workers"),
    *("model.name", "model.image_size", "model.trunk.depth", "model.trunk.width", "model.trunk.heads"),
    *("model.trunk.multipliers", "model.trunk.patch", "model.trunk.draws", "objective.bank", "objective.layers"),
    *("objective.decoder_width", "objective.decoder_depth", "objective.decoder_heads"),
    *(
        "minutes",
        "seconds",
        "rounds",
        "limit",
        "images",
        "epochs",
        "image_size",
        "each",
        "up_to",
        "episodes",
        "queries",
    ),
)


class Step(NamedTuple):
    """A piece of a page that is run: one command (`sh`), a block of code (`python`), or a file (`yaml`)."""

    language: str
    text: str


def pages() -> list[str]:
    """README and all pages of the documentation, by their paths."""
    return ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def steps(page: str) -> list[Step]:
    """What a page tells its reader to run, in its order.

    Commands are the lines of `sh` blocks, lines behind `$` in plain blocks, and indented lines that begin with a
    program.
    """
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found: list[Step] = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$|((?:^    \S[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL):
        language, block, indented = match.groups()
        if language in ("python", "yaml"):
            found.append(Step(language, block))
            continue
        lines = (block or indented).splitlines()
        if indented is not None:
            lines = [line.strip() for line in lines if line.split()[0] in PROGRAMS]
        elif language != "sh":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += [Step("sh", line) for line in lines if shlex.split(line, comments=True)]
    return found


def spans(page: str) -> list[str]:
    """Commands with a flag or a recipe in the sentences of a page: `vitrail train demo`."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`(vitrail\s[^`]+)`", text)]


UNFINISHED = (  # problems of a command that stands for others (`vitrail export`, `--bits N`), or names a later file
    r" is missing$| needs a value$|, got '[A-Z]+'$|^model.weights: .* is neither none, timm nor an existing"
)


def unknown(words: list[str]) -> list[str]:
    """What does not exist of a `vitrail` command: flags, recipes, settings, choices. Files need not be there."""
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    if words[0] != "vitrail":
        return []
    if words[1] not in COMMANDS:
        return [f"no command {words[1]!r}"]
    module, _, name = COMMANDS[words[1]][0].partition(":")
    try:
        command = read_command(getattr(import_module(f"vitrail.{module}"), name), words[2:])
        if isinstance(command, TrainCommand) and command.config is None and command.resume in (None, "auto"):
            recipe = command.recipes[0] if command.recipes else "vit"
            configured("finetune" if recipe.endswith("/") else recipe, command.settings)  # photos/: one is chosen
        if isinstance(command, ShowCommand) and command.names[0] in RECIPES:
            configured(command.names[0], command.settings)
    except ConfigError as error:
        return [problem for problem in error.problems if not re.search(UNFINISHED, problem)]
    except ValueError as error:
        return [] if re.search(UNFINISHED, str(error)) else [str(error)]
    return []


def shortened(words: list[str], added: str) -> list[str]:
    """A command with further flags; one that it has already gets their value.

    >>> shortened(["train", "demo", "--optim.epochs", "9", "--seed", "1"], "--optim.epochs 1 --data.limit 60")
    ['train', 'demo', '--seed', '1', '--optim.epochs', '1', '--data.limit', '60']
    """
    for flag in [word for word in added.split() if word.startswith("--") and word in words]:
        place = words.index(flag)
        words = words[:place] + words[place + 2 :]
    return [*words, *added.split()]


@dataclass(frozen=True)
class Page:
    """How a page is run: what must be there before, what makes it small, and what is only parsed."""

    before: tuple[str, ...] = ()  # commands whose results the page takes for granted
    smaller: Mapping[str, str] = field(default_factory=dict)  # part of a command: flags that it gets
    texts: Mapping[str, str] = field(default_factory=dict)  # part of code or a file: what replaces it
    parsed: Mapping[str, str] = field(default_factory=dict)  # part of a command: why it is not run


MICRO = "--data.limit 240 --data.workers 0 --model.trunk.depth 2 --optim.epochs 1"  # of `demo`
TOUR = f"vitrail train demo --out runs/tour {MICRO}"
PHOTOS = "--model.name vit_micro_28 --model.image_size 28 --model.trunk.depth 1 --optim.epochs 1 --data.workers 0"
RUN = f"vitrail train vit --data photos/ --out RUN {PHOTOS}"
CONVOLUTIONS = "--model.name timm:test_resnet --model.image_size 64 --data.batch 16 --optim.epochs 1 --data.workers 0"
INSTALLS = "installs packages"
REPEATED = "docs/fit.md has the same command, and is run"
COMPARED = "hours on an accelerator; tests/fit has small ones"
WEIGHTS = "needs published weights"
ACCELERATORS = "needs eight accelerators"
DIFFUSION = "minutes on an accelerator; tests/generate has small ones"
BUCKET = "needs a bucket or a server"
IMAGENET = "needs ImageNet"
EVIDENCE = "hours on an accelerator; a result, with its command"

PAGES = {
    "README.md": Page(
        smaller={"vitrail train photos/": PHOTOS},
        parsed={"make": INSTALLS, "pip": INSTALLS, "vitrail fit": REPEATED},
    ),
    "docs/start.md": Page(
        smaller={"vitrail train demo": MICRO},
        texts={"replace(config, optim": "replace(config, data=replace(config.data, limit=240), optim"},
        parsed={
            "pip": INSTALLS,
            "deit_smal ": "shows a mistake",
            "knn,linear,corruptions": "75 passes over the test images; tests/measure has them",
        },
    ),
    "docs/fit.md": Page(smaller={"vitrail fit": "--minutes 0.05"}, parsed={"benchmarks/fit_": COMPARED}),
    "docs/export.md": Page(before=(f"vitrail train demo --out runs/demo {MICRO}",)),
    "docs/inspect.md": Page(
        smaller={
            "vitrail train demo": MICRO,
            "vitrail attack": "--optim.steps 2",
            "small-compres": MICRO,
        },
        parsed={"vitrail app": "starts a server, and needs gradio"},
    ),
    "docs/trust.md": Page(smaller={"vitrail train small-deit": "--data.limit 600 --optim.epochs 1 --data.workers 0"}),
    "docs/label-errors.md": Page(
        before=(
            "vitrail train vit --data cifar10 --out resnet20 --model.name cifar_resnet20 --model.trunk.depth 8 "
            "--optim.epochs 1 --data.workers 0",
        ),
        smaller={"vitrail train vit": "--model.name vit_tiny_32 --model.trunk.depth 1 --optim.epochs 1"},
    ),
    "docs/robustness.md": Page(
        before=(
            "vitrail train vit --data cifar10.npz --out RUN --model.name vit_tiny_32 --model.trunk.depth 1 "
            "--optim.epochs 1",
        ),
        smaller={"make_cifar_c.py": "--images 10"},
    ),
    "docs/streams.md": Page(
        smaller={"--data shards/": PHOTOS + " --data.batch 8"},
        parsed={"pip": INSTALLS, "s3://": BUCKET, "https://": BUCKET},
    ),
    "docs/scale.md": Page(
        smaller={
            "show scratch": CONVOLUTIONS,
            "--engine.shard": "--model.name vit_micro_28 --model.trunk.depth 2 --data.batch 12 --optim.steps 2",
            "--engine.activation": "--model.trunk.depth 2 --model.trunk.width 64 --model.trunk.heads 2 --data.batch 4 "
            "--optim.steps 2",
        },
        parsed={
            "--nproc_per_node 8": ACCELERATORS,
            "slurm": "needs a cluster",
        },
    ),
    "docs/verification.md": Page(parsed={"imagenet": IMAGENET}),
    "docs/results/self-supervised.md": Page(parsed={"small-msf": EVIDENCE, "evaluate RUN": EVIDENCE}),
    "docs/guides/adapters.md": Page(
        before=(TOUR,),
        smaller={
            "small-transfer": "--data.limit 240 --model.trunk.depth 2",
            "small-gpt2": "--data.limit 64 --model.trunk.width 32 --model.trunk.depth 1 --optim.epochs 1",
            "small-nola-gpt2": "--data.limit 64 --model.trunk.width 32 --model.trunk.depth 1 --optim.epochs 1",
        },
    ),
    "docs/guides/adaptive.md": Page(
        before=(TOUR,), smaller={"vitrail train demo": MICRO, "vitrail attack": "--optim.steps 2"}
    ),
    "docs/guides/compare.md": Page(
        texts={
            "{recipe: demo, optim": "{recipe: demo, data: {limit: 60}, model: {trunk: {depth: 1}}, optim",
            "seeds: 3": "seeds: 2",
        }
    ),
    "docs/guides/distil.md": Page(
        smaller={"--model.name timm:resnet50": CONVOLUTIONS, "--model.name timm:mobilenetv4_conv_small": CONVOLUTIONS}
    ),
    "docs/guides/few-labels.md": Page(
        before=(RUN,),
        smaller={
            "small-moco": "--model.trunk.depth 8 --data.batch 10 --objective.bank 20 --optim.epochs 1",
            "small-transfer": "--model.trunk.depth 8 --data.batch 10 --optim.epochs 1",
        },
    ),
    "docs/guides/more-images.md": Page(
        before=(
            "vitrail train vit --data cifar10.npz --out runs/vit --model.name vit_tiny_32 --model.trunk.depth 1 "
            "--optim.epochs 1",
        ),
        smaller={"--protocol episodes": "--queries 1 --episodes 4"},
        parsed={"small-diffusion": DIFFUSION, "genie_ada": DIFFUSION},
    ),
    "docs/guides/other-images.md": Page(),
    "docs/guides/photographs.md": Page(
        before=(RUN,),
        smaller={
            "vitrail train scratch": CONVOLUTIONS,
            "--model.weights deit_small": "--model.name timm:test_vit --optim.epochs 1",
        },
        parsed={"finetune --data photos/  ": WEIGHTS, "vitrail fit": REPEATED, "hf download": "needs a network"},
    ),
    "docs/guides/rare-classes.md": Page(smaller={"vitrail train scratch": CONVOLUTIONS}),
    "docs/guides/speed.md": Page(
        before=(TOUR,),
        smaller={
            "vitrail bench deit_small --against": "--batch 1 --rounds 1 --seconds 0.1 --image_size 32",
            "vitrail bench deit_tiny": "--batch 1 --rounds 1 --seconds 0.1",
            "--batch search": "--rounds 1 --seconds 0.1 --image_size 32",
            "runs/half": PHOTOS,
        },
        parsed={"--checks": "takes an hour on a CPU"},
    ),
    "docs/guides/without-labels.md": Page(
        smaller={
            "small-moco": "--model.trunk.depth 8 --objective.bank 60 --data.batch 20 --optim.epochs 1",
            "small-compres": "--model.trunk.depth 8 --objective.bank 60 --data.batch 20 --optim.epochs 1",
            "small-mae": "--model.trunk.depth 2 --model.trunk.width 48 --model.trunk.heads 3 --data.batch 20 "
            "--objective.decoder_width 48 --objective.decoder_depth 1 --objective.decoder_heads 3 --optim.epochs 1",
            "small-attention-distill": "--model.trunk.depth 2 --model.trunk.width 48 --model.trunk.heads 3 "
            "--objective.layers first:2 --data.batch 4 --optim.epochs 1",
        }
    ),
}


def furnish(folder: Path) -> None:
    """Write the images that pages name into a folder: few, small, and different by class."""
    noise = np.random.default_rng(0)

    def picture(colour: int, side: int) -> Image.Image:
        pixels = noise.integers(0, 120, (side, side + 8 * (side > 32), 3), dtype=np.uint8)
        pixels[..., colour] += 100
        return Image.fromarray(pixels)

    for c, name in enumerate(("cat", "dog", "lynx")):
        for i in range(20):
            for place in (f"photos/{name}", f"imagenet/{name}", f"cifar10/{name}", "unsorted"):
                (folder / place).mkdir(parents=True, exist_ok=True)
                side = 32 if place.startswith("cifar10") else 56  # above 64 workers decode; their start takes seconds
                picture(c, side).save(folder / place / f"{name if place == 'unsorted' else ''}{i:02d}.png")
    picture(0, 56).save(folder / "cat.jpg")
    picture(1, 56).save(folder / "dog.png")
    labels = np.arange(120) % 10
    pixels = noise.integers(0, 255, (120, 32, 32, 3), dtype=np.uint8)
    parts = {"x_train": pixels[:100], "y_train": labels[:100], "x_test": pixels[100:], "y_test": labels[100:]}
    names = np.array(["cat", "dog", "lynx", *(f"class{i}" for i in range(3, 10))])
    for name in ("cifar10", "cifar100"):
        np.savez(folder / f"{name}.npz", **parts, classes=names)
    rows = [
        f"photos/{name}/{i:02d}.png,{name},{'home' if i % 2 else 'wild'}" for name in ("cat", "dog") for i in range(20)
    ]
    (folder / "labels.csv").write_text("\n".join(["path,label,kind", *rows]), encoding="utf-8")
    (folder / "shards").mkdir()
    for split, numbers in (("train-000", range(8)), ("train-001", range(8, 16)), ("val-00", range(16, 20))):
        with tarfile.open(folder / "shards" / f"{split}.tar", "w") as tar:
            for name in ("cat", "dog"):
                for i in numbers:
                    tar.add(folder / "photos" / name / f"{i:02d}.png", f"{name}/{i:02d}.png")
    (folder / "docs").mkdir()
    for name in ("boot.png", "bag.png"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    (folder / "studies").symlink_to(ROOT / "studies")
    from timm import create_model

    (folder / "deit_small").mkdir()
    save_file(create_model("test_vit").state_dict(), folder / "deit_small" / "model.safetensors")
