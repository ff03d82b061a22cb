"""Attacks on the compute of a trained adaptive model: a patch, learned by the usual engine and evaluated on test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table

from vitrail.config import RunConfig, from_mapping, load_yaml
from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine import checkpoint
from vitrail.engine.device import choose_device, choose_precision, evaluation_batch, join
from vitrail.engine.loop import resumable
from vitrail.engine.progress import Progress
from vitrail.engine.run_folder import RunFolder
from vitrail.learn.attack import Universal, load_patch, make_change, reject_unfit, save_patch
from vitrail.learn.attack_config import AttackConfig
from vitrail.learn.objective import weights_hash
from vitrail.measure.compute import Spent, attack_success, reject_static, spent, worst_case
from vitrail.model.assemble import Parts
from vitrail.model.classifier import Classifier
from vitrail.model.config import ModelConfig, TrunkConfig
from vitrail.model.store import model_folder
from vitrail.model.zoo import ZOO
from vitrail.quantities import amount, number, percent
from vitrail.recipes import recipe, with_values
from vitrail.run.evaluate import _with_classes_of, load
from vitrail.run.run_data import division, open_for, own_data_of
from vitrail.run.train import build_model, resume, train
from vitrail.schema import build, near, plain


@dataclass(frozen=True)
class AttackRow:
    """What the victim does under one attack, or under none."""

    attack: str
    figures: Spent
    success: float | None  # share of what adaptivity saved that the attack took back; none where nothing was saved

    def to_json(self) -> dict[str, Any]:
        return {"attack": self.attack, "success": self.success, **self.figures.to_json()}


@dataclass(frozen=True)
class Judgement:
    """A victim without attack, under a random change of the same kind, and under the learned one."""

    folder: Path
    data: str
    split: str
    rows: tuple[AttackRow, ...]
    most: float  # multiply-accumulates of an image that is given everything
    same_victim: bool = True  # the one that the patch was made for

    def to_json(self) -> dict[str, Any]:
        facts = {"folder": str(self.folder), "data": self.data, "split": self.split, "worst_case": self.most}
        rows = {"rows": [row.to_json() for row in self.rows]}
        return {**facts, "same_victim": self.same_victim, **rows}


def attack(
    run: str | Path,
    values: Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Judgement:
    """Learn a patch (or perturbation) against the model of a run or model folder, and evaluate it on test images.

    `values` are settings over those of the recipe `attack`, nested as in a run's configuration: {"objective": {"size":
    8}, "optim": {"steps": 300}}. Data are the run's own unless `data` names others with its classes. The folder is
    that of a run, with `patch.png`, `patch.safetensors` and `patch.json` besides. Raises one sentence where the model
    cannot be attacked; `vitrail.engine.loop.Stopped` when interrupted, after saving.
    """
    victim = load(run)
    reject_static(victim)
    config = from_mapping({**(values or {}), **({} if out is None else {"out": str(out)})}, _base(Path(run), victim))
    assert isinstance(config.objective, AttackConfig)
    reject_unfit(victim, config.objective)
    if not config.data.uri:
        raise ValueError("say which images to learn the patch on: --data URI")
    make_change(config.objective, victim.preprocess)  # rejects a place outside the image
    _reject_other_victim(config, victim, run)
    return _judged_run(train(config, quiet=quiet).path, quiet)


def resume_attack(folder: str | Path, *, quiet: bool = False) -> Judgement:
    """Continue an interrupted attack; a finished one, or a run of an attack recipe, is evaluated (again)."""
    folder = Path(folder)
    if not is_attack(folder):
        raise ValueError(f"{folder} is no attack; continue it with: vitrail train --resume {folder}")
    if not RunFolder(folder).finished:
        resume(folder, quiet=quiet)
    return _judged_run(folder, quiet)


def is_attack(folder: str | Path) -> bool:
    """Whether a run learned a patch and not a model."""
    return isinstance(_config(Path(folder)).objective, AttackConfig)


def evaluate_patch(
    run: str | Path | Classifier,
    folder: str | Path,
    data: str | Path | DataSet,
    *,
    split: str | None = None,
    **options: Any,
) -> Judgement:
    """A stored patch on any adaptive model that takes images of its size, on a split (none: test, or val).

    `options`: batch, workers, device, precision, quiet, as for `evaluate`.
    """
    model = run if isinstance(run, Classifier) else load(run)
    change, facts = fitting_patch(model, folder)
    opened = open_for(model, data)
    judgement = _judged(model, change, int(facts.get("seed", 0)), opened, split, Path(folder), **options)
    return replace(judgement, same_victim=weights_hash(model) == facts.get("victim", {}).get("hash"))


def fitting_patch(model: Classifier, folder: str | Path) -> tuple[Universal, dict[str, Any]]:
    """A stored patch for an adaptive model, and what is known of it. Raises one sentence where one of both is not."""
    reject_static(model)
    return load_patch(Path(folder), model.preprocess)


def _judged_run(folder: Path, quiet: bool) -> Judgement:
    """Judge the patch in the newest checkpoint of an attack, and store it with what was found.

    Raises `Stopped` when interrupted.
    """
    with resumable(folder):
        return _evaluated_run(folder, quiet)


def _evaluated_run(folder: Path, quiet: bool) -> Judgement:
    config, group = _config(folder), join()
    assert isinstance(config.objective, AttackConfig)
    victim = load(folder)
    change, state = make_change(config.objective, victim.preprocess), checkpoint.newest(folder / "checkpoint")[0]
    if state is None:
        raise ValueError(f"{folder} has no whole checkpoint to take the patch from")
    change.load_state_dict({name.removeprefix("patch."): t for name, t in state.part("objective").items()})
    chosen = config.data
    with own_data_of(folder, ""):
        data = open_data(chosen.uri, level=chosen.level, **division(chosen))
    options: dict[str, Any] = {"device": config.engine.device, "precision": config.engine.precision}
    workers = chosen.workers
    judgement = _judged(
        victim, change, config.objective.seed, data, None, folder, workers=workers, quiet=quiet, **options
    )
    if group.main:
        provenance = {
            "victim": {"from": config.model.weights, "name": config.model.name, "hash": weights_hash(victim)},
            **{k: v for k, v in plain(config.objective).items() if k not in ("kind", "place", "size", "eps", "change")},
            "steps": state.step,
            "data": chosen.uri,
            "split": judgement.split,
            "worst_case": judgement.most,
            "figures": [row.to_json() for row in judgement.rows],
        }
        save_patch(folder, change, provenance)
    group.barrier()
    return judgement


def _judged(
    model: Classifier,
    change: Universal,
    seed: int,
    data: DataSet,
    split: str | None,
    folder: Path,
    *,
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = True,
) -> Judgement:
    chosen = choose_device(device)
    autocast = choose_precision(precision, chosen)
    model.to(chosen)
    change.to(chosen)
    opened = _with_classes_of(model, data)
    split = split or ("test" if "test" in opened.splits else "val")
    if split not in opened.splits:
        raise ValueError(
            f"{opened.uri} has no split {split!r}; it has {', '.join(opened.splits)}{near(split, opened.splits)}"
        )
    rows, count = opened[split], auto_workers(opened[split]) if workers is None else workers
    start = change.drawn(seed).to(chosen)
    attacks = {"none": None, "random": lambda images: change.paste(images, start), change.word: change}
    spent_by: dict[str, Spent] = {}
    with (
        EvalLoader(
            rows, Preprocess(model.preprocess), batch=batch or evaluation_batch(chosen), device=chosen, workers=count
        ) as loader,
        Progress("evaluate", len(attacks) * len(rows), quiet=quiet) as bar,
        torch.no_grad(),
    ):
        for name, laid in attacks.items():
            spent_by[name] = spent(model, loader, change=laid, device=chosen, autocast=autocast, progress=bar.advance)
        for key, reason in loader.skipped:
            bar.say(f"skipped {key}: {reason}")
    most, least = worst_case(model), spent_by["none"].macs
    success = {
        name: attack_success(f.macs, least, most) if most > least and name != "none" else None
        for name, f in spent_by.items()
    }
    made = tuple(AttackRow(name, figures, success[name]) for name, figures in spent_by.items())
    return Judgement(folder, opened.uri, split, made, most)


def _base(run: Path, victim: Classifier) -> RunConfig:
    """The recipe `attack`, for this victim and its own data."""
    base = recipe("attack")
    data = base.data
    for folder in (run, run.parent):  # a run folder, or model/ inside one
        if (folder / "config.yaml").is_file():
            own = _config(folder).data
            names = ("uri", "val_fraction", "test_fraction", "split_seed", "level", "workers", "check", "bad_limit")
            kept = {name: getattr(own, name) for name in names}
            data = replace(data, **kept, batch=min(own.batch, data.batch), augment=AugmentConfig(crop="evaluation"))
            break
    model = _model_config(run, victim)
    return with_values(base, {"data": data, "model": model, "objective.size": _in_proportion(victim)})


def _model_config(run: Path, victim: Classifier) -> ModelConfig:
    """From which the same architecture is made again, with the victim's weights."""
    parts = build(Parts, victim.spec)
    if parts.name not in ZOO or not isinstance(parts.trunk, TrunkConfig):
        raise ValueError(f"{run} is no model of the zoo with a plain trunk; only those can be attacked")
    native = plain(ZOO[parts.name].trunk)
    changed = {k: v for k, v in plain(parts.trunk).items() if v != native.get(k)}
    size = changed.pop("image_size", None)
    return ModelConfig(parts.name, str(model_folder(run)), size, parts.head, trunk=changed)


def _in_proportion(victim: Classifier) -> int:
    """Side of a patch that covers as much as 64 of 224 pixels, in whole tokens."""
    token = int(victim.trunk.config.patch)  # type: ignore[union-attr, arg-type]
    return token * max(1, round(victim.preprocess.size * 64 / 224 / token))


def _reject_other_victim(config: RunConfig, victim: Classifier, run: str | Path) -> None:
    """The engine makes its own copy of the victim; before anything is learned, it must be the same."""
    with own_data_of(run):
        data = open_data(config.data.uri, level=config.data.level)
    if data.classes != victim.classes:
        raise ValueError(
            f"{config.data.uri} has {len(data.classes)} classes that are not those of {run}; a patch is learned on "
            "images with the victim's classes"
        )
    if weights_hash(build_model(config.model, config, data)) != weights_hash(victim):
        raise ValueError(f"the model of {run} cannot be made again from its description; it was changed after training")


def _config(folder: Path) -> RunConfig:
    """As it was when the run was made: weights that it began from need not be there any more."""
    return build(RunConfig, load_yaml(folder))


class AttackRowLike(Protocol):
    """What a row needs to know."""

    @property
    def attack(self) -> str: ...
    @property
    def figures(self) -> Spent: ...
    @property
    def success(self) -> float | None: ...


def attack_table(rows: Sequence[AttackRowLike], most: float, title: str) -> Table:
    """One row per attack, the worst case last. MACs: mean per image; in brackets, of an image with the mean counts."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("attack", "top-1", "MACs", "(of mean)", "costliest", "tokens", "success"):
        table.add_column(name, justify="left" if name == "attack" else "right", no_wrap=True)
    for row in rows:
        figures = row.figures
        tokens = number(sum(figures.tokens) / len(figures.tokens))
        cells = [amount(value) for value in (figures.macs, figures.macs_of_mean, figures.costliest)]
        table.add_row(row.attack, percent(figures.top1), *cells, tokens, percent(row.success))
    table.add_row("worst case", "", amount(most), "", "", "", "", style="dim")
    return table
