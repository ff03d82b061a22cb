"""A training run from a `RunConfig`: data, model, objective and engine put together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.config import RunConfig, dump, from_mapping, load_yaml, validate
from vitrail.data.dataset import DataSet
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.sources.completions import template_of
from vitrail.data.sources.folder import Bad
from vitrail.data.sources.text_files import holds_texts, texts_of
from vitrail.engine import run_folder as checkpoint
from vitrail.engine.device import ProcessGroup, choose_device, choose_precision, join, prepare
from vitrail.engine.loop import Fit
from vitrail.engine.optimizer import choose_tuned, make_schedule
from vitrail.engine.run_folder import RunFolder, TensorBoard, free_name, refuse_untracked
from vitrail.files import refuse_unwritable
from vitrail.learn.build import TrainingFacts, build_objective
from vitrail.learn.supervised import class_counts
from vitrail.measure.classification import Figures
from vitrail.measure.evaluator import Loaders, UnlabelledFigures, write_predictions
from vitrail.measure.evaluators import EVALUATORS, WANT_TRAINING_IMAGES
from vitrail.measure.language import LanguageFigures
from vitrail.measure.long_tail import COUNTS
from vitrail.model.adapters.adapter_file import base_hash, save_adapted
from vitrail.model.adapters.apply import adapters_of, apply, without_adapters
from vitrail.model.adapters.config import ADAPTER, read_header, summary
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import ModelConfig
from vitrail.model.heads.next_token import writes_texts
from vitrail.model.store import earlier_layout
from vitrail.recipes import recipe
from vitrail.run.data_module import Batches, JudgedBatches, make_feed, refuse_other_kind, refuse_other_task
from vitrail.run.evaluate import figures_of
from vitrail.run.page import Told
from vitrail.run.preflight import before_training, missing_parts, one_answer
from vitrail.run.run_data import division, fingerprint, learned_before, own_data_of, read_data
from vitrail.schema import ConfigError, near


@dataclass(frozen=True)
class Run:
    """A finished run: where it is, how good it is, and its model."""

    path: Path
    figures: Figures
    split: str  # which images the figures speak of
    model: Classifier
    notes: tuple[str, ...] = ()
    adapter: Mapping[str, Any] | None = None
    """What the file of a trained adapter holds."""
    others: Mapping[str, float] = field(default_factory=dict)
    """What evaluators found besides the figures, such as `knn`."""
    reading: str = ""
    """How to read the figures, where the model was not trained to classify."""

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def train(config: RunConfig | str, *, quiet: bool = False) -> Run:
    """Train from a configuration or a recipe's name; returns the finished run.

    Every problem of the configuration is raised at once, as `ConfigError`, before any data is read. Raises
    `vitrail.engine.loop.Stopped` when interrupted, after saving.
    """
    if isinstance(config, str):
        config = recipe(config)
    problems = validate(config)
    problems += [
        f"evaluators: no evaluator {name!r}{near(name, EVALUATORS)}"
        for name in config.evaluators
        if name not in EVALUATORS
    ]
    if not config.data.uri:
        problems.append(
            "data: say where the images are, or the texts (--data FOLDER; `vitrail list data` names the forms)"
        )
    problems += missing_parts(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    group = join()
    _refuse_machine(config, group)
    _refuse_existing(config)
    if group.main:
        refuse_unwritable(config.out or "runs")
    data, bad = read_data(config, group, quiet)
    group.say(quiet, *data.notes)
    path = Path(config.out) if config.out else free_name(Path("runs") / _run_name(config))
    path = Path(group.gather(str(path))[0])
    folder = RunFolder(path)
    trainer = _Trainer(config, data, bad, group, quiet, folder)  # refuses what does not fit, before a folder is made
    if group.main:
        trainer.folder = RunFolder.create(path, dump(trainer.config))
    with trainer.folder:  # held until the run ends, however it ends: this process may outlive it
        return trainer.run(None)


def resume(path: str | Path, changes: Mapping[str, Any] | None = None, *, quiet: bool = False) -> Run:
    """Continue a run from its newest whole checkpoint. `changes` may only move it to another machine."""
    group = join()
    if group.main and Path(path).is_dir():
        refuse_unwritable(path, "a resumed run is written to where it is")
    with RunFolder.open(Path(path)) if group.main else RunFolder(Path(path)) as folder:
        return _go_on(folder, changes or {}, group, quiet)


def _go_on(folder: RunFolder, changes: Mapping[str, Any], group: ProcessGroup, quiet: bool) -> Run:
    path = folder.path
    config = from_mapping(load_yaml(folder.config))
    allowed = {"engine": {"device"}, "data": {"workers"}}
    for section, values in changes.items():
        for name in values if isinstance(values, Mapping) else [section]:
            if name not in allowed.get(section, ()):
                said = f"{section}.{name}" if isinstance(values, Mapping) else section
                raise ConfigError(
                    [f"--{said}: a resumed run keeps its configuration; begin a new one with --config {path}"]
                )
    config = from_mapping(changes, config)
    if problems := missing_parts(config):
        raise ConfigError(problems)
    _refuse_machine(config, group)
    with own_data_of(path, ""):
        data, bad = read_data(config, group, quiet)
    state, damaged = checkpoint.newest(folder.checkpoints)
    if state is not None:
        config = replace(config, model=earlier_layout(config.model, state.tensors))
    trainer = _Trainer(config, data, bad, group, quiet, folder)
    group.say(quiet, *damaged)
    if state is None and damaged:
        raise ValueError(f"every checkpoint of {path} is damaged; begin again with: vitrail train --config {path}")
    step = 0 if state is None else state.step
    group.say(quiet, f"resuming {path} after step {step}")
    return trainer.run(state)


class _Trainer:
    """The parts of one run, put together."""

    def __init__(
        self, config: RunConfig, data: DataSet, bad: Sequence[Bad], group: ProcessGroup, quiet: bool, folder: RunFolder
    ) -> None:
        if data.unlabelled:  # nothing to judge by
            config = replace(config, evaluators=())
        self.config, self.data, self.bad = config, data, bad
        self.group, self.quiet, self.folder = group, quiet, folder
        self.device = choose_device(config.engine.device, group)
        self.precision = choose_precision(config.engine.precision, self.device)
        self.compile = prepare(config.engine, config.seed, self.device, group)
        with torch.random.fork_rng(devices=[]):  # all processes begin with the same weights
            torch.default_generator.manual_seed(config.seed)
            self.model = build_model(config.model, config, data)
        self.base_hash = "" if config.model.adapter is None else base_hash(self.model)
        self.tuned, self.parameters = choose_tuned(self.model, config.optim.tune)
        train = data["train"]
        if template_of(data):
            self.model.stated["template"] = template_of(data)
        if data.classes and not data.multilabel:  # real images tell which classes are rare
            real = train.labels if train.generated is None else train.labels[~train.generated]
            self.model.stated[COUNTS] = class_counts(real, len(data.classes)).tolist()
        self.schedule = make_schedule(config.optim, config.data.batch, len(train))
        self.feed = make_feed(config, data, self.model, self.device, group)
        facts = TrainingFacts(
            train.labels,
            train.index,
            self.schedule.steps,
            config.data.augment,
            self.feed.once,
            train.generated,
        )
        self.objective = build_objective(config.objective, self.model, facts)
        self.order = BatchSampler(
            len(train), config.data.batch, config.seed, config.data.sampling, train.labels, config.data.repeats
        )
        self.feed.prepare(self.objective.views, self.order)
        self.config = self.feed.config
        self.compile = self.compile and (self.feed.compiles or bool(config.engine.compile))
        self.reference: JudgedBatches | None = None  # training examples as evaluation sees them
        self.feed.batches(0, 0).close()  # refuses batches that cannot be cut, before anything is written
        said = before_training(config, data, self.parameters, self.tuned, self.schedule.peak)
        said += learned_before(config, data)
        self.reading = "" if data.unlabelled else self.objective.reading
        group.say(quiet, *said, *self.feed.notes, *self.objective.notes, *filter(None, [self.reading]))

    def run(self, state: checkpoint.State | None) -> Run:
        config, group = self.config, self.group
        val = self.feed.judged("val") if "val" in self.data.splits else None

        def look(model: Classifier) -> dict[str, float]:
            assert val is not None
            return self._judged(model, val, "val", config.evaluators)

        loaders: list[Batches] = []

        def batches(start: int, stop: int) -> Batches:
            loaders.append(self.feed.batches(start, stop))
            return loaders[-1]

        train = self.data["train"]
        fit = Fit(
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
            autocast=self.precision,
            compile=self.compile,
            graph=self.device.type == "cuda" and self.feed.compiles
            if config.engine.graph is None
            else config.engine.graph,
            group=group,
            evaluate=None if val is None else look,
            indices=lambda step: [int(train.index[d.row]) for d in self.order.draws(step)],
            facts={
                "data": fingerprint(self.data),
                "world": group.world,
                **({"base": self.base_hash} if self.base_hash else {}),  # of an adapter
                **self.feed.facts(),
            },
            quiet=self.quiet,
        )
        try:
            if state is not None:
                fit.restore(state)
            if group.main:
                self.folder.cut_metrics(fit.step)
                if config.engine.track == "tensorboard":
                    self.folder.tracker = TensorBoard(self.folder.path, fit.step)
                self.folder.write_environment({"device": str(self.device), "precision": str(self.precision)})
            result = fit.run()
        finally:
            if val is not None:
                val.close()
            for loader in loaders:
                loader.close()
        skipped = [*self.bad, *(row for loader in loaders for row in loader.skipped)]
        return self._finish(fit, result.seconds, skipped)

    def _judged(self, model: Classifier, loader: JudgedBatches, split: str, judges: Sequence[str]) -> dict[str, float]:
        """What the named evaluators find on a split."""
        seen: dict[str, JudgedBatches] = {split: loader}
        if not WANT_TRAINING_IMAGES.isdisjoint(judges):
            self.reference = self.reference or self.feed.judged("train")
            seen["train"] = self.reference
        data = Loaders(self.data.classes, seen, split, [level.name for level in self.data.levels])
        found: dict[str, float] = {}
        for name in judges:
            found |= EVALUATORS[name](model, data, device=self.device, autocast=self.precision)["numbers"]
        return found

    def _finish(self, fit: Fit, seconds: float, skipped: Sequence[Bad]) -> Run:
        """The one look at test (val, where settings are still being chosen), the model, the report."""
        split = self.config.data.judge if "test" in self.data.splits else "val"
        with self.feed.judged(split) as loader:
            figures, predictions = figures_of(
                fit.kept, loader, self.data.classes, device=self.device, autocast=self.precision
            )
            known = ("perplexity", "bleu") if writes_texts(fit.kept) else ("classification",)
            others = [name for name in self.config.evaluators if name not in known]
            more = self._judged(fit.kept, loader, split, others)
            skipped = [*skipped, *loader.skipped]
        if self.reference is not None:
            self.reference.close()
        if self.config.objective.kind in ("supervised", "distillation"):
            fit.notes += (only := one_answer(predictions, self.data))
            self.group.say(self.quiet, *only)
        model = fit.kept
        model.stated |= {
            "recipe": self.config.recipe,
            "data": self.data.uri,
            "division": division(self.config.data),
            "split": split,
            "figures": {**figures.scalars(), **more},
            "seed": self.config.seed,
        }
        stored: dict[str, Any] | None = None
        if self.group.main:
            line = {"step": fit.step, "epoch": round(fit.step * fit.batch / fit.images, 6), "split": split}
            if isinstance(figures, LanguageFigures):
                figures.keep(self.folder.path)
            elif not isinstance(figures, UnlabelledFigures):
                write_predictions(self.folder.path, predictions)
            self.folder.write_metrics({**line, "final": True, **figures.scalars(), **more})
            stored = self._save(model, fit.notes)
            told = Told(
                self.folder,
                without_adapters(model),
                self.data,
                predictions,
                figures,
                split=split,
                skipped=list(dict.fromkeys(skipped)),
                seconds=seconds,
                device=self.device,
                autocast=self.precision,
                title=f"{self.config.model.name} on {self.data.uri}",
                config=dump(self.config),
                adapter=stored,
            )
            self.feed.report(told)
        self.group.barrier()
        return Run(self.folder.path, figures, split, model.eval(), tuple(fit.notes), stored, more, self.reading)

    def _save(self, model: Classifier, notes: list[str]) -> dict[str, Any] | None:
        """Keep the model, or the adapter alone where it has one; returns what the file of that holds."""
        if adapters_of(model) is None:
            model.save(self.folder.model)
            return None
        if base_hash(model) != self.base_hash:  # an objective that changes more than it trains
            notes.append("the base changed while the adapter was trained, so the whole model is kept, merged")
            self.group.say(self.quiet, notes[-1])
            model.save(self.folder.model)
            return None
        save_adapted(model, self.folder.model, weights=self.config.model.weights, seed=self.config.seed)
        return summary(read_header(self.folder.model / ADAPTER))


def build_model(chosen: ModelConfig, config: RunConfig, data: DataSet) -> Classifier:
    """The model of a run, with the classes of its data and the preprocessing it will be evaluated with."""
    refuse_other_kind(chosen.name.startswith("text:"), data)
    refuse_other_task(getattr(chosen.head, "kind", "") == "next_token", data)
    overrides = dict(chosen.trunk)
    if chosen.drop_path is not None:
        overrides["drop_path_rate" if chosen.name.startswith("timm:") else "drop_path"] = chosen.drop_path
    if holds_texts(data):
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
    if config.data.crop_ratio is not None:
        changes["crop_ratio"] = config.data.crop_ratio
    if config.data.resize is not None:
        changes["resize"] = config.data.resize
        if config.data.resize != "crop":  # whoever asks for the whole image does not want its border cut off
            changes.setdefault("crop_ratio", 1.0)
    model.preprocess = replace(model.preprocess, **changes)
    return model if chosen.adapter is None else apply(model, chosen.adapter)


def _run_name(config: RunConfig) -> str:
    source = re.sub(r"[^A-Za-z0-9]+", "-", Path(config.data.uri.split("?")[0]).stem or "data").strip("-")
    model = re.sub(r"[^A-Za-z0-9_]+", "-", config.model.name)
    return f"{config.recipe}-{model}-{source}"


def _refuse_machine(config: RunConfig, group: ProcessGroup) -> None:
    """What this machine lacks, before images are read."""
    refuse_untracked(config.engine.track)
    choose_device(config.engine.device, group)


def _refuse_existing(config: RunConfig) -> None:
    if config.out is None:
        return
    path = Path(config.out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        how = f"continue it with: vitrail train --resume {path}, or " if (path / "config.yaml").exists() else ""
        raise FileExistsError(f"{path} already exists; {how}choose another --out")
