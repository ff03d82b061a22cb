"""A training run on one page: open the data, build model and objective, run the loop, finish."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.config import RunConfig, dump, from_mapping, load_yaml
from vitrail.data.check.scan import Bad
from vitrail.data.dataset import DataSet
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.stack import channel_moments, form_in
from vitrail.engine import checkpoint
from vitrail.engine.device import ProcessGroup, choose_device, choose_precision, join, prepare, training_precision
from vitrail.engine.loop import Loop, TooLarge, resumable
from vitrail.engine.optimizer import choose_tuned, make_schedule
from vitrail.engine.run_folder import RunFolder, free_name
from vitrail.engine.shard import can_be_partial, can_shard, is_partial, keeping_rows
from vitrail.files import reject_unwritable, write_text
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.supervised import class_counts
from vitrail.measure.config import CLASS_COUNTS
from vitrail.measure.evaluator import Loaders, needs_of
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import ModelConfig
from vitrail.model.store import earlier_layout
from vitrail.model.zoo import ZOO
from vitrail.quantities import shorten
from vitrail.recipes import recipe
from vitrail.recipes.row import flat
from vitrail.registry import part
from vitrail.run.data_module import Batches, make_data_module, reject_other_kind, reject_other_task
from vitrail.run.finish import Run, finish
from vitrail.run.preflight import (
    check_machine,
    check_output,
    check_settings,
    missing_parts,
    warnings_before,
    without_unfit,
)
from vitrail.run.run_data import check_contents, fingerprint, learned_before, own_data_of, read_data
from vitrail.schema import ConfigError, plain

MOVABLE = ("out", "engine.device", "data.workers")  # settings that a resumed run may change


def train(config: RunConfig | str, *, quiet: bool = False, continued: bool = False, estimate: bool = False) -> Run:
    """Train from a configuration or a recipe's name; returns the finished run.

    `continued`: where `config.out` holds a run of the same settings, resume it. Every problem of the configuration is
    raised at once, as `ConfigError`, before any data is read. `estimate`: print first how much memory a step takes.
    Raises `vitrail.engine.loop.Stopped` when interrupted, after saving.
    """
    config = recipe(config) if isinstance(config, str) else config
    check_settings(config)
    config, adapted = without_unfit(config)
    group = join()
    group.say(quiet, *adapted)
    continued = any(group.gather(continued))  # restarts of torchrun are counted by node
    if continued and config.out is None:
        raise ConfigError(["--resume auto continues the run of --out FOLDER; name one"])
    if continued and group.gather((Path(config.out or "") / "config.yaml").is_file())[0]:
        stored = from_mapping(load_yaml(Path(config.out or "")))
        check_unchanged(plain(stored), plain(config), f"{config.out} was begun with other settings")
        machine = {"engine": {"device": config.engine.device}, "data": {"workers": config.data.workers}}
        return resume(config.out or "", machine, quiet=quiet, estimate=estimate)
    check_machine(config, group)
    check_output(config, group)
    data, bad = read_data(config, group, quiet)
    group.say(quiet, *data.notes)
    path = Path(group.gather(str(free_run(config)))[0])
    with ExitStack() as stack:  # the folder is locked until the run ends, however it ends: this process may outlive it
        stack.enter_context(resumable(path))
        folder: RunFolder | None = None
        for pieces in _pieces(config, group):
            chosen = replace(config, engine=replace(config.engine, accumulate=pieces))
            trainer = Trainer(chosen, data, bad, group, quiet, folder or RunFolder(path))  # rejects misfits
            if group.main and folder is None:
                folder = trainer.folder = stack.enter_context(RunFolder.create(path, dump(trainer.config)))
            elif group.main:
                write_text(trainer.folder.config, dump(trainer.config))
            if estimate:
                trainer.print_estimate()
            try:
                return trainer.run(None)
            except TooLarge as error:
                if config.engine.accumulate is not None:
                    raise
                group.say(quiet, str(error).partition(";")[0])
            del trainer
            gc.collect()
            torch.cuda.empty_cache()
    raise TooLarge(
        f"no piece of a batch fits into memory, not even {config.data.batch // pieces} {data.things}; choose a "
        "smaller model or --model.image_size"
    )


def _pieces(config: RunConfig, group: ProcessGroup) -> list[int]:
    """In how many pieces a batch is computed, or is tried to be."""
    if config.engine.accumulate is not None:
        return [config.engine.accumulate]
    if group.world > 1:
        raise ConfigError(["engine.accumulate: auto is for a single process; name a number"])
    least = 2 if config.data.augment.mixup or config.data.augment.cutmix else 1  # they mix pairs
    batch = config.data.batch
    return [n for n in range(1, batch + 1) if batch % (least * n) == 0] or [1]


def resume(
    path: str | Path, changes: Mapping[str, Any] | None = None, *, quiet: bool = False, estimate: bool = False
) -> Run:
    """Continue a run from its newest whole checkpoint. `changes` may only move it to another machine."""
    group = join()
    if group.main and Path(path).is_dir():
        reject_unwritable(path, "a resumed run is written to where it is")
    opened = RunFolder.open(Path(path)) if group.main else RunFolder(Path(path))
    with resumable(Path(path)), opened as folder:
        config = from_mapping(load_yaml(folder.config))
        allowed = {"engine": {"device"}, "data": {"workers"}}
        for section, values in (changes or {}).items():
            for name in values if isinstance(values, Mapping) else [section]:
                if name not in allowed.get(section, ()):
                    setting = f"{section}.{name}" if isinstance(values, Mapping) else section
                    raise ConfigError(
                        [f"--{setting}: a resumed run keeps its configuration; begin a new one with --config {path}"]
                    )
        config = from_mapping(changes or {}, config)
        if problems := missing_parts(config):
            raise ConfigError(problems)
        check_machine(config, group)
        with own_data_of(folder.path, ""):
            data, bad = read_data(config, group, quiet)
        state, damaged = checkpoint.newest(folder.checkpoints)
        if state is not None:
            checkpoint.prune(folder.checkpoints, state.step, config.engine.keep)
            begun = state.facts.get("config", plain(config))  # earlier versions did not keep it
            check_unchanged(begun, plain(config), f"{folder.config} was changed since the run began")
            if state.facts.get("data") == fingerprint(data):  # else the loop reports what differs
                check_contents(state.facts.get("contents", data.contents), data, folder.path)  # earlier versions: none
            config = replace(config, model=earlier_layout(config.model, state.tensors))
            if "decode" not in begun["data"]:  # of an earlier version
                config = replace(config, data=replace(config.data, decode="always"))
        trainer = Trainer(config, data, bad, group, quiet, folder)
        group.say(quiet, *damaged)
        if state is None and damaged:
            raise ValueError(f"every checkpoint of {path} is damaged; begin again with: vitrail train --config {path}")
        group.say(quiet, f"resuming {path} after step {0 if state is None else state.step}")
        if estimate:
            trainer.print_estimate()
        return trainer.run(state)


def _without_machine(config: RunConfig) -> RunConfig:
    """The settings that a checkpoint keeps: those that must not change."""
    engine, data = replace(config.engine, device="auto"), replace(config.data, workers=None)
    return replace(config, engine=engine, data=data, out=None)


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], problem: str) -> None:
    """Raises `ConfigError` that lists every setting of a run that differs, but for those that may."""
    stored = flat(json.loads(json.dumps(before)))
    wanted = flat(json.loads(json.dumps(now)))
    chosen = {"data.loader": "auto", "data.decode": "auto"}  # values in place of which the run wrote what it chose
    changes = [
        f"{problem}: {name} was {shorten(str(stored.get(name)), 60)}, now it is {shorten(str(wanted.get(name)), 60)}"
        for name in stored  # a setting that came later than the run has its default
        if name not in MOVABLE and stored.get(name) != wanted.get(name) and wanted.get(name) != chosen.get(name, ...)
    ]
    if changes:
        kept = f"a resumed run keeps its settings ({', '.join(MOVABLE[1:])} may change)"
        raise ConfigError([*changes, f"{kept}; set them back, or begin another run with --config and --out"])


class Trainer:
    """The parts of one run, built and run."""

    def __init__(
        self, config: RunConfig, data: DataSet, bad: Sequence[Bad], group: ProcessGroup, quiet: bool, folder: RunFolder
    ) -> None:
        if data.unlabelled:  # no metric without labels
            config = replace(config, evaluators=())
        self.data, self.bad, self.group, self.quiet, self.folder = data, bad, group, quiet, folder
        self.device = choose_device(config.engine.device, group)
        self.precision = choose_precision(config.engine.precision, self.device)  # of evaluation
        compiles = prepare(config.engine, config.seed, self.device, group)
        sharded = config.engine.shard == "full"
        if sharded:
            join(alone=True)
        self.model, shard_notes = initial_model(config, data, group)
        self.base_hash = ""
        if config.model.adapter is not None:
            from vitrail.model.adapters.adapter_file import base_hash

            self.base_hash = base_hash(self.model)
        if config.engine.activation_checkpointing == "blocks":
            self.model.trunk.checkpoint_blocks()
        self.step_precision = training_precision(config.engine.precision, self.device, self.model)
        tuned, parameters = choose_tuned(self.model, config.optim.tune)
        train = data["train"]
        if template := getattr(train.reader, "template", ""):  # how instructions were made prompts
            self.model.stated["template"] = template
        if data.classes and not data.multilabel and not data.numeric:  # real images tell which classes are rare
            real = train.labels if train.generated is None else train.labels[~train.generated]
            self.model.stated[CLASS_COUNTS] = class_counts(real, len(data.classes)).tolist()
        self.schedule = make_schedule(config.optim, config.data.batch, len(train))
        self.module = make_data_module(config, data, self.model, self.device, group)
        facts = TrainingFacts(
            train.targets,
            train.index,
            self.schedule.steps,
            config.data.augment,
            self.module.training_once,
            train.generated,
        )
        self.objective = build_objective(config.objective, self.model, facts)
        groups = self.objective.groups
        drawn = (config.data.sampling, train.labels) if groups is None else ("balanced", groups)
        self.sampler = BatchSampler(len(train), config.data.batch, config.seed, *drawn, config.data.repeats)
        self.module.quiet = quiet
        self.module.prepare(self.objective.views, self.sampler)
        self.module.complete = any(getattr(m, "complete_batches", False) for m in self.objective.modules())
        self.config = self.module.config  # with the loader that was chosen
        shard_notes += ["engine.shard full: steps are not compiled"] if compiles and sharded else []
        compiles = compiles and not sharded
        self.compile = compiles and (self.module.compiles or bool(config.engine.compile))
        self.reference: Batches | None = None  # training examples as evaluation sees them
        self.module.batches(0, 0).close()  # rejects batches that cannot be cut, before anything is written
        loaded = self.model.stated.get("weights", {}).get("loaded")
        group.say(quiet, *filter(None, [loaded]))
        notes = warnings_before(config, data, parameters, tuned, self.schedule.peak) + learned_before(config, data)
        if self.step_precision is not self.precision:
            notes.append("training steps use bf16, in which this CPU is faster; --engine.precision float32 to avoid it")
        self.reading = "" if data.unlabelled else self.objective.reading
        group.say(quiet, *notes, *shard_notes, *self.module.notes, *self.objective.notes, *filter(None, [self.reading]))

    def print_estimate(self) -> None:
        """Print how much memory a step takes, on the main process."""
        if self.group.main and not self.quiet:
            from vitrail.run.estimate import lines_before

            self.group.say(self.quiet, *lines_before(self))

    def run(self, state: checkpoint.State | None) -> Run:
        """Train from `state` (none: from the start) to the end of the schedule, then evaluate, save and report."""
        config, group, train = self.config, self.group, self.data["train"]
        val = self.module.evaluation("val") if "val" in self.data.splits else None
        loaders: list[Batches] = []

        def batches(start: int, stop: int) -> Batches:
            loaders.append(self.module.batches(start, stop))
            return loaders[-1]

        graph = config.engine.graph
        loop = Loop(
            objective=self.objective,
            batches=batches,
            schedule=self.schedule,
            optim=config.optim,
            engine=config.engine,
            batch=config.data.batch,
            images=len(train),
            things=self.data.things,
            folder=self.folder,
            device=self.device,
            autocast=self.step_precision,
            compile=self.compile,
            graph=self.device.type == "cuda" and self.module.compiles if graph is None else graph,
            group=group,
            evaluate=None if val is None else lambda model: self.evaluate(model, val, "val", config.evaluators),
            indices=lambda step: [int(train.index[d.row]) for d in self.sampler.draws(step)],
            facts={
                "data": fingerprint(self.data),
                "world": group.world,
                "config": plain(_without_machine(config)),
                **({"contents": list(self.data.contents)} if self.data.contents else {}),
                **({"base": self.base_hash} if self.base_hash else {}),  # of an adapter
                **self.module.facts(),
            },
            quiet=self.quiet,
        )
        try:
            if state is not None:
                loop.restore(state)
            if group.main:
                for note in self.data.notes:
                    self.folder.log(note)
                self.folder.cut_metrics(loop.step)
                if config.engine.track != "none":
                    from vitrail.engine.trackers import TRACKERS

                    self.folder.tracker = TRACKERS[config.engine.track](self.folder.path, loop.step)
                self.folder.write_environment({"device": str(self.device), "precision": str(self.step_precision)})
            result = loop.run()
        finally:
            if val is not None:
                val.close()
            for loader in loaders:
                loader.close()
        skipped = [*self.bad, *(row for loader in loaders for row in loader.skipped)]
        return finish(self, loop, result.seconds, skipped)

    def evaluate(self, model: Classifier, loader: Batches, split: str, evaluators: Sequence[str]) -> dict[str, float]:
        """Metrics of the named evaluators on a split."""
        loaders: dict[str, Any] = {split: loader}
        if "train" in needs_of(evaluators):
            self.reference = loaders["train"] = self.reference or self.module.evaluation("train")
        data = Loaders(self.data.classes, loaders, split, [level.name for level in self.data.levels])
        metrics: dict[str, float] = {}
        for name in evaluators:
            metrics |= part("evaluator", name)(model, data, device=self.device, autocast=self.precision)["numbers"]
        return metrics


def initial_model(config: RunConfig, data: DataSet, group: ProcessGroup) -> tuple[Classifier, list[str]]:
    """The model that every process begins with, and notes; with `engine.shard full` its rows of the blocks where it can
    be."""

    def build(rows: bool) -> Classifier:
        with torch.random.fork_rng(devices=[]), keeping_rows(group) if rows else nullcontext():
            torch.default_generator.manual_seed(config.seed)
            return build_model(config.model, config, data)

    if config.engine.shard == "none":
        return build(rows=False), []
    if not can_shard():
        note = "warning: engine.shard full divides a model among processes, and this is one; use torchrun"
        return build(rows=False), [note]
    if is_partial(model := build(rows=True)) and can_be_partial(model):
        return model, []
    note = "is built whole on every process (blocks of our own trunks with the default start are built in shards)"
    return build(rows=False), [f"engine.shard full: {config.model.name} {note}"]


def build_model(chosen: ModelConfig, config: RunConfig, data: DataSet) -> Classifier:
    """The model of a run, with the classes of its data and the preprocessing it will be evaluated with."""
    reject_other_kind(chosen.name.startswith("text:"), data)
    reject_other_task(getattr(chosen.head, "kind", "") == "next_token", data)
    overrides = dict(chosen.trunk)
    if chosen.drop_path is not None:
        overrides["drop_path_rate" if chosen.name.startswith("timm:") else "drop_path"] = chosen.drop_path
    form = form_in(data)
    if form is not None and form.channels != 3:
        if chosen.name in ZOO and not hasattr(ZOO[chosen.name].trunk, "channels"):
            raise ValueError(
                f"data.channels: {chosen.name} takes RGB images; choose another --model.name, such as vit_*"
            )
        overrides["in_chans" if chosen.name.startswith("timm:") else "channels"] = form.channels
    if data.holds_texts:
        from vitrail.data.sources.text import texts_of
        from vitrail.model.text_build import own_words

        overrides |= own_words(chosen.name, texts_of(data["train"]))
    model = create_model(
        chosen.name,
        classes=data.classes,
        image_size=chosen.image_size,
        head=chosen.head,
        weights=chosen.weights,
        multilabel=data.multilabel,
        **overrides,
    )
    changes: dict[str, Any] = {}
    if form is not None:
        changes["mean"], changes["std"] = channel_moments(data["train"], form, config.seed)
        changes["maximum"] = form.maximum
    if config.data.crop_ratio is not None:
        changes["crop_ratio"] = config.data.crop_ratio
    if config.data.resize is not None:
        changes["resize"] = config.data.resize
        if config.data.resize != "crop":  # whoever asks for the whole image does not want its border cut off
            changes.setdefault("crop_ratio", 1.0)
    model.preprocess = replace(model.preprocess, **changes)
    if chosen.adapter is None:
        return model
    from vitrail.model.adapters.apply import apply

    return apply(model, chosen.adapter)


def free_run(config: RunConfig) -> Path:
    """The folder of a run: as it is set, or a new one named after recipe, model and data."""
    return Path(config.out) if config.out else free_name(Path("runs") / _run_name(config))


def _run_name(config: RunConfig) -> str:
    source = re.sub(r"[^A-Za-z0-9]+", "-", Path(config.data.uri.split("?")[0]).stem or "data").strip("-")
    model = re.sub(r"[^A-Za-z0-9_]+", "-", config.model.name)
    return f"{config.recipe}-{model}-{source}"
