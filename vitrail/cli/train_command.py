"""`vitrail train`, and its `--help`: a page of the settings used most, or every setting of a section."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.console import aligned, fail, settings_help, show
from vitrail.run.launch import Cluster, Launcher
from vitrail.schema import Positional, Unprefixed, near, settings

if TYPE_CHECKING:
    from vitrail.config import RunConfig

FIRST = ("demo", "finetune", "vit", "small-deit", "small-moco")  # recipes of the page
USED_MOST = {
    "data.uri": ("--data URI", "images: a folder, a table, ...; `vitrail list data`"),
    "data.batch": ("--data.batch N", "images per step"),
    "model.name": ("--model.name NAME", "`vitrail list models`, or timm:NAME"),
    "model.weights": ("--model.weights FROM", "what to start from: none, timm, a run or a file"),
    "model.image_size": ("--model.image_size PX", "side of the images (none: the model's own)"),
    "optim.epochs": ("--optim.epochs N", "how long"),
    "optim.steps": ("--optim.steps N", "how long, in place of epochs"),
    "optim.lr": ("--optim.lr RATE", "peak learning rate"),
    "optim.tune": ("--optim.tune WHAT", "full, head, last:N, norm, bias or attention"),
    "engine.device": ("--engine.device NAME", "auto, cpu, cuda"),
    "seed": ("--seed N", "of all randomness"),
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
    ("vitrail train photos/", "a recipe that suits them, with the reasons for it"),
    ("vitrail train finetune --data photos/", "from published weights"),
    ("vitrail train vit --data photos/ --model.name deit_tiny --optim.epochs 50", "from scratch"),
    ("vitrail train demo --help optim", "the settings of a section, with the values of a recipe"),
)


@dataclass(frozen=True)
class TrainCommand:
    """`vitrail train [RECIPE | DATA] [--config FILE] [--resume RUN] [--section.name value ...]`."""

    recipes: Annotated[tuple[str, ...], Positional("RECIPE")]
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    resume: str | None = None
    json: bool = False
    launch: Launcher | None = None
    cluster: Annotated[Cluster, Unprefixed] = field(default_factory=Cluster)

    def __call__(self) -> int:
        from vitrail.config import from_mapping, load_yaml
        from vitrail.recipes import configured

        if len(self.recipes) > 1:
            return fail(f"train takes one recipe, got {', '.join(self.recipes)}; settings are --section.name value")
        resumed = self.resume not in (None, "auto")
        if (self.config is not None) + resumed + len(self.recipes) > 1:
            return fail("give one of: a recipe, --config FILE, --resume RUN")
        if resumed and self.launch is not None:
            return self._launch(["--resume", str(self.resume)], Path(str(self.resume)))
        if resumed:
            return self._run(lambda api: api.resume(self.resume, self.settings, estimate=not self.json))
        if self.config is not None:
            config = from_mapping(self.settings, from_mapping({**load_yaml(self.config), "out": None}))
        else:
            config = self._chosen() or configured(self.recipes[0] if self.recipes else "vit", self.settings)
        if self.launch is not None:
            return self._submit(config)
        # torchrun counts its restarts: with --max-restarts a run goes on from its last checkpoint.
        restarts = {
            name: int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS")
        }
        if restarts["MAX_RESTARTS"] and config.out is None:
            return fail("torchrun --max-restarts continues the run of --out FOLDER after a failure; name one")
        continued = self.resume == "auto" or restarts["RESTART_COUNT"] > 0
        return self._run(lambda api: api.train(config, continued=continued, estimate=not self.json))

    def _chosen(self) -> RunConfig | None:
        """Where data are named and no recipe: the configuration that suits them, which is printed. None elsewhere."""
        from vitrail.recipes import RECIPES

        given = self.settings.get("data")  # `--data URI` alone, or with settings next to it
        named = str(given.get("uri") or given.get("kind") or "") if isinstance(given, Mapping) else str(given or "")
        name = self.recipes[0] if self.recipes else ""
        if name and not (name not in RECIPES and (":" in name or Path(name.partition("?")[0]).exists())):
            return None
        if not (uri := name or named):
            return None
        if name and named:
            raise ValueError(f"data are named twice: {name} and --data {named}; leave one out")
        from vitrail.run.choose import choose_run

        config, lines = choose_run(uri, self.settings)
        if os.environ.get("RANK", "0") == "0":
            print(*lines, sep="\n", file=sys.stderr)
        return config

    def _submit(self, config: RunConfig) -> int:
        """Check the settings here, write them down, and submit a job that begins or continues the run."""
        from vitrail.config import dump
        from vitrail.engine.device import ProcessGroup
        from vitrail.files import write_text
        from vitrail.run.preflight import check_output, check_settings
        from vitrail.run.train import free_run

        check_settings(config)
        if self.resume != "auto":
            check_output(config, ProcessGroup())
        out = free_run(config).absolute()
        settings_file = out.with_name(f"{out.name}.jobs") / "config.yaml"
        write_text(settings_file, dump(config))
        return self._launch(["--config", str(settings_file), "--out", str(out), "--resume", "auto"], out)

    def _launch(self, arguments: Sequence[str], out: Path) -> int:
        from vitrail.run.launch import launch_training

        assert self.launch is not None
        return launch_training(arguments, out, self.launch, self.cluster)

    def _run(self, work: Callable[[Any], Any]) -> int:
        import vitrail as api
        from vitrail.engine.device import join, leave, lost_peer
        from vitrail.engine.loop import Stopped

        try:
            finished = work(api)
            patch = None
            if finished.objective == "attack":
                from vitrail.run.attack_run import resume_attack

                patch = resume_attack(finished.path, quiet=self.json)
            if join().main:
                self._print(finished, patch)
        except Stopped as stopped:
            print(str(stopped), file=sys.stderr)
            return 130
        except RuntimeError as error:
            if lost_peer(error):
                return fail(
                    "another process of this run ended, so this one cannot go on; start all of them again with "
                    "--resume auto, or with --resume RUN"
                )
            what, found, _ = str(error).partition("does not have a deterministic implementation")
            if found:
                return fail(f"engine.deterministic: {what}{found} on this device; change the model or leave it out")
            raise
        finally:
            leave()
        return 0

    def _print(self, finished: Any, patch: Any) -> None:
        """Final metrics, how to read them, the adapter, the attack, the report."""
        from vitrail.report.tables import headline

        adapter = finished.adapter
        if self.json:
            more = {} if adapter is None else {"adapter": adapter}
            more |= {} if patch is None else {"attack": patch.to_json()}
            metrics = {**finished.figures.scalars(), **finished.others}
            print(json.dumps({"run": str(finished.path), "split": finished.split, **metrics, **more}))
            return
        show(headline(finished.figures, f"{finished.split}, {finished.path}"))
        if note := finished.figures.absent_note():
            print(note)
        if finished.reading:  # again, next to the metrics
            print(finished.reading)
        if finished.others:
            print("  ".join(f"{name} {value:.4g}" for name, value in finished.others.items()))
        if adapter is not None:
            print(f"{adapter['kind']}: {adapter['trained']:,} parameters, a file of {adapter['bytes']:,} bytes")
        if patch is not None:
            from vitrail.run.attack_run import attack_table

            show(attack_table(patch.rows, patch.most, "under attack"))
        print(f"report: {finished.report}")

    @staticmethod
    def help(words: Sequence[str]) -> int:
        """`words` are what was typed: perhaps a recipe in front, perhaps sections behind `--help`."""
        from vitrail.config import RunConfig
        from vitrail.recipes import RECIPES, recipe

        asked = next(i for i, word in enumerate(words) if word in ("-h", "--help"))
        behind = [
            takewhile(lambda word: not word.startswith("-"), part) for part in (words[:asked], words[asked + 1 :])
        ]
        names = [name for part in behind for name in part]
        sections = [name for name in names if name in SECTIONS]
        for name in names:
            if name not in SECTIONS and name not in RECIPES:
                return fail(f"no recipe and no section of settings {name!r}{near(name, [*SECTIONS, *RECIPES])}")
        chosen = next((name for name in names if name in RECIPES), "vit")
        if not sections:
            print(_page(chosen))
            return 0
        fields = settings(RunConfig, recipe(chosen))
        fields = (s for s in fields if "all" in sections or s.name.partition(".")[0] in sections)
        print(f"Settings with the values of recipe {chosen}.\n\n{settings_help(fields)}")
        return 0


def _page(chosen: str) -> str:
    from vitrail.config import RunConfig
    from vitrail.recipes import RECIPES, about, recipe

    values = {setting.name: setting.default for setting in settings(RunConfig, recipe(chosen))}
    used = [
        (flag, text if values[name] in (None, "") else f"{text} ({values[name]})")
        for name, (flag, text) in USED_MOST.items()
    ]
    used += [
        ("--resume RUN", "go on after an interruption"),
        ("--resume auto", "go on with the run of --out where there is one, else begin it"),
        ("--json", "print one JSON object"),
        ("--launch slurm", "as a job: with --nodes N --gpus N --hours H --partition P --account A --slurm KEY=VALUE"),
    ]
    recipes = {name: about(name).splitlines()[0] for name in dict.fromkeys((*FIRST, chosen))}
    return "\n".join(
        (
            "usage: vitrail train DATA [--section.name value ...]      (recipe chosen by data, weights and machine)",
            "       vitrail train [RECIPE] [--section.name value ...]",
            "       vitrail train --config RUN/config.yaml [--section.name value ...]",
            "       vitrail train --resume RUN",
            "       vitrail train [RECIPE] ... --out RUN --resume auto",
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
