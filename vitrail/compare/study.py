"""A study: one base configuration, named variants of it, seeds, and a rule for how long each variant may train.

    name: stems                      # a YAML file
    base: demo                       # a recipe, a configuration file or run, or settings over a recipe
    variants:
      plain: {}
      conv: {model: {trunk: {stem: conv}}}
    seeds: 3                         # 0, 1 and 2; or a list
    folds: 5                         # cross-validation: every seed on each fold of train and val (none: 0)
    budget: epochs                   # epochs, time, macs: the same for all; none: as each variant says
    baseline: plain                  # what the others are compared with (none: the first)
    test_sets: [other.npz]           # further data on which finished runs are evaluated
    evaluate: [knn, linear]          # and protocols of `vitrail evaluate`, on a run's own data; or {knn: other.npz}

One run may stand on another: `run:NAME` in a setting (weights, a teacher) is the run of that variant with the same
seed, `run:NAME:0` that of seed 0. What is only needed for that stands under `first`, and is no row of the table:

    first:
      teacher: {model: {name: resnet18_32}}
    variants:
      alone: {}
      taught: {objective: {kind: distillation, teacher: "run:teacher"}}

Settings with a `recipe` are over that recipe, not the base, but for its data and engine; for `tune` see `tuning.py`.

Runs are named by a hash of all they depend on, so studies that have a run in common share it. Only what is not at its
default enters the name, so a new version with more settings still finds the runs of the one before. Where a version
changes a *default*, the name does not show it; the stored values do, and the run is then not shared (`run_folder`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from vitrail.compare.tuning import SettingsGrid, merged, read_grid
from vitrail.config import RUN_OF, RunConfig, from_mapping, load_yaml
from vitrail.files import json_text, write_text
from vitrail.recipes import RECIPES, recipe
from vitrail.registry import kinds
from vitrail.schema import ConfigError, build, near, plain

Budget = Literal["epochs", "time", "macs", "none"]

STUDIES = Path("runs") / "studies"
MOST_SEEDS = 10_000
KEYS = ("name", "base", "first", "variants", "seeds", "budget", "baseline", "test_sets", "evaluate", "folds", "tune")
SHARED = "run-"  # how folders of shared runs begin
REFERENCE = re.compile(rf"{RUN_OF}([\w.+=-]+?)(?::(\d+))?")  # to the run of another variant
# Settings of the machine, which do not change the result of a run; and calibration, which no run of a study has: their
# metrics are those of what was trained.
MACHINE = (
    ("out",),
    ("calibrate",),
    ("data", "workers"),
    *(("engine", name) for name in ("device", "keep", "checkpoint_every", "track")),
)
LENGTHS = ("epochs", "steps")


@dataclass(frozen=True)
class Study:
    """Variants of one configuration over seeds. Every problem is raised at once, as `ConfigError`, on construction.

    >>> study = Study("flips", recipe("demo"), {"none": {}, "half": {"data": {"augment": {"flip": 0.5}}}}, seeds=(0, 1))
    >>> study.baseline, study.configs["half"].data.augment.flip
    ('none', 0.5)
    """

    name: str
    base: RunConfig
    variants: Mapping[str, Mapping[str, Any]]  # name -> nested settings over the base
    seeds: Sequence[int] = (0, 1, 2)
    budget: Budget = "epochs"
    baseline: str = ""  # empty: the first variant
    test_sets: Sequence[str] = ()  # further data on which finished runs are evaluated
    first: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # as variants, for others to stand on
    evaluate: Mapping[str, str | None] = field(default_factory=dict)  # protocol -> data (none: the run's own)
    folds: int = 0  # of train and val together, each evaluated on by runs that learned from the others; 0: none
    tune: SettingsGrid = field(default_factory=SettingsGrid)  # settings to be chosen on val before the runs are trained
    configs: Mapping[str, RunConfig] = field(init=False, repr=False)  # of each variant, before seed and budget
    first_configs: Mapping[str, RunConfig] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        problems = _problems(self)
        configs, first_configs = (self._configs(name, getattr(self, name), problems) for name in ("variants", "first"))
        self._configs("tune.grid", {} if problems else self.tune.trials({**self.first, **self.variants}), problems)
        problems += _reference_problems({**configs, **first_configs}, self.first, self.variants)
        if self.budget == "epochs" and len({_length(c) for c in configs.values()}) > 1:
            problems.append("budget: epochs means the same length for all; use none to let variants differ in length")
        if not any(problem.startswith("variants.") for problem in problems):
            first: dict[str, str] = {}
            for name, config in configs.items():  # one of two equal variants is probably not what was meant
                if (same := first.setdefault(run_hash(config, seed=False), name)) != name:
                    problems.append(f"variants.{name}: the same runs as {same}; nothing that changes a result differs")
        if problems:
            raise ConfigError(problems)
        checked = {"configs": configs, "seeds": tuple(self.seeds), "test_sets": tuple(self.test_sets)}
        checked |= {"first_configs": first_configs, "baseline": self.baseline or next(iter(self.variants))}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _configs(self, group: str, runs: Mapping[str, Any], problems: list[str]) -> dict[str, RunConfig]:
        configs = {}
        for name, changes in runs.items():
            try:
                base = _start(self.base, _settings(changes))
                configs[name] = from_mapping(_over(base, _settings(changes)), base)
            except ConfigError as error:
                problems += [f"{group}.{name}.{problem}" for problem in error.problems]
        return configs

    def to_mapping(self) -> dict[str, Any]:
        """As `read_study` reads it; the base written out in full."""
        return {key: plain(replace(self.base, out=None) if key == "base" else getattr(self, key)) for key in KEYS}


SMOKE = {
    "data": {"batch": 12, "limit": 240, "check": "off"},
    "optim": {"steps": 2},
    "engine": {"evaluate_every": 1, "checkpoint_every": 0},  # not 0: variants may select weights by evaluations
}


def smoke(study: Study) -> Study:
    """The same variants, two steps each on a few images with one seed: whether all of them can be trained at all."""
    variants, first = (
        {name: merged(_settings(changes), SMOKE) for name, changes in group.items()}
        for group in (study.variants, study.first)
    )
    changes: dict[str, Any] = {"variants": variants, "first": first, "seeds": tuple(study.seeds)[:1], "budget": "none"}
    return replace(study, name=f"{study.name}-smoke", tune=study.tune.smaller(), **changes)


@dataclass(frozen=True)
class Planned:
    """One run that a study needs."""

    variant: str
    seed: int
    config: RunConfig
    path: Path
    needs: tuple[Path, ...] = ()  # runs that it stands on

    @property
    def name(self) -> str:
        fold = self.config.data.fold.partition("/")[0]
        return f"{self.variant}-seed{self.seed}" + (f"-fold{fold}" if fold else "")


def plan(study: Study, lengths: Mapping[str, Mapping[str, float]], root: Path) -> list[Planned]:
    """Every run of a study, seed by seed, so that all variants have results early (see `run_missing`); runs that others
    stand on come before these.

    `lengths` holds what the budget rule set: `{"wide": {"epochs": 7.3}}`.
    """
    runs: dict[tuple[str, int, str], Planned] = {}
    configs = {**study.first_configs, **study.configs}

    def planned(name: str, seed: int, fold: str) -> Planned:
        if (name, seed, fold) not in runs:
            config = configs[name]
            config = replace(config, data=replace(config.data, fold=fold, judge="val")) if fold else config
            optim = replace(config.optim, **lengths.get(name, {}))  # type: ignore[arg-type]
            config = replace(config, seed=seed, out=None, optim=optim, calibrate=False)
            needs = {text: planned(of, seed if at is None else at, fold).path for text, of, at in references(config)}
            if needs:
                config = build(RunConfig, _replaced(plain(config), {text: str(path) for text, path in needs.items()}))
            runs[name, seed, fold] = Planned(name, seed, config, run_folder(config, root), tuple(needs.values()))
        return runs[name, seed, fold]

    folds = [f"{number}/{study.folds}" for number in range(1, study.folds + 1)] or [""]
    for seed, fold, name in product(study.seeds, folds, study.configs):
        planned(name, seed, fold)
    return list(runs.values())


def references(config: RunConfig) -> list[tuple[str, str, int | None]]:
    """(text, name, seed) of each setting that stands for the run of another variant."""
    matches = (REFERENCE.fullmatch(text) for text in _texts(plain(config)))
    return [(match[0], match[1], None if match[2] is None else int(match[2])) for match in matches if match]


def stands_on(study: Study, name: str) -> set[str]:
    """Names of all runs that a run of a study stands on, directly or through others."""
    configs, names, left = {**study.first_configs, **study.configs}, set[str](), [name]
    while left:
        new = {of for _, of, _ in references(configs[left.pop()])} - names
        names, left = names | new, [*left, *new]
    return names


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(inner, texts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, texts) for inner in value]
    return texts.get(value, value) if isinstance(value, str) else value


def _reference_problems(
    configs: Mapping[str, RunConfig], first: Mapping[str, Any], variants: Mapping[str, Any]
) -> list[str]:
    """Names that are none, circles, and runs under `first` that nothing stands on."""
    named = {name: [of for _, of, _ in references(config)] for name, config in configs.items()}
    known = (*first, *variants)
    problems = [
        f"variants.{name}: {RUN_OF}{of} is none of the runs ({', '.join(known)}){near(of, known)}"
        for name, needs in named.items()
        for of in needs
        if of not in known
    ]
    unused = set(first) - {of for needs in named.values() for of in needs}
    problems += [f"first.{name}: no run stands on it; name it as {RUN_OF}{name}" for name in first if name in unused]
    graph = TopologicalSorter({name: [of for of in needs if of in configs] for name, needs in named.items()})
    try:
        graph.prepare()
    except CycleError as error:
        problems.append(f"variants: runs stand on one another in a circle ({' on '.join(error.args[1])})")
    return problems


def run_folder(config: RunConfig, root: Path) -> Path:
    """Where the run of a configuration is, or will be: `run-HASH`, numbered where a run of that name has other values.

    Such a run relied on defaults that have changed since; it is left as it is.
    """
    base = root / f"{SHARED}{run_hash(config)}"
    path, number = base, 1
    while (path / "config.yaml").is_file() and not _agree(plain(_typed(config)), load_yaml(path)):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _agree(wanted: Mapping[str, Any], stored: Mapping[str, Any], *above: str) -> bool:
    """Whether a run stored the values that are wanted, of the settings that both know.

    A setting that is newer than the run is at its default, which changes nothing; `auto` was stored as resolved.
    """
    for key, value in wanted.items():
        if key not in stored or (*above, key) in MACHINE or value == "auto":
            continue
        if isinstance(value, Mapping) and isinstance(stored[key], Mapping):
            if not _agree(value, stored[key], *above, key):
                return False
        elif _portable(value) != _portable(stored[key]):
            return False
    return True


def _portable(value: Any) -> Any:
    """A shared run is known by its name, wherever the folder of studies is."""
    name = value.rpartition("/")[2] if isinstance(value, str) else ""
    return name if re.fullmatch(rf"{SHARED}[0-9a-f]{{12}}(-\d+)?", name) else value


def run_hash(config: RunConfig, *, seed: bool = True) -> str:
    """Twelve characters that identify everything a run depends on; settings of the machine are left out.

    Two configurations with equal hashes give the same run; `seed=False` gives that of the recipe, whatever its seed.
    What is at its default is left out, so a setting that is added later changes no hash.
    """
    values = _chosen(_typed(config))
    for path in (*MACHINE, *(() if seed else (("seed",),))):
        *groups, last = path
        inner = values
        for group in groups:
            inner = inner.get(group, {})
        inner.pop(last, None)
    # A group whose every choice is of the machine is as one without choices.
    values = {key: value for key, value in values.items() if value != {}}
    text = json_text(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _typed(config: RunConfig) -> RunConfig:
    """With every value of its own type: 36 and 36.0 epochs are the same."""
    return build(type(config), plain(config))


def _chosen(value: Any) -> Any:
    """As `plain`, without the fields of dataclasses that are at their defaults; `kind` says which class it is."""
    if is_dataclass(value) and not isinstance(value, type):
        chosen = {}
        for setting in fields(value):
            default = setting.default if setting.default_factory is MISSING else setting.default_factory()
            inner = getattr(value, setting.name)
            if setting.name == "kind" or inner != default:
                chosen[setting.name] = _chosen(inner)
        return chosen
    if isinstance(value, (list, tuple)):
        return [_chosen(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _chosen(v) for k, v in value.items()}
    return _portable(value)


def read_study(source: str | Path) -> Study:
    """A study from a YAML file, or from `module:attribute`. Raises `ConfigError` with every problem at once."""
    text = str(source)
    if not Path(text).exists() and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        return _from_module(text)
    if text.endswith(".py"):
        raise ValueError(f"{text}: a study file is YAML; a study made in Python is named as module:attribute")
    path = Path(text)
    if path.is_dir():
        path = path / "study.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"no study at {path} (a YAML file, a study's folder, or module:attribute)")
    return study_from_mapping({"name": path.stem, **load_yaml(path)})


def study_from_mapping(values: Mapping[str, Any]) -> Study:
    """A study from plain values, as they stand in a YAML file."""
    problems = [f"{key}: no such setting of a study{near(str(key), KEYS)}" for key in values if key not in KEYS]
    problems += [f"{key}: a study needs it" for key in ("base", "variants") if key not in values]
    groups: dict[str, dict[str, Any]] = {}
    for key in ("variants", "first"):
        given = values.get(key) or {}
        if not isinstance(given, Mapping):
            problems.append(f"{key}: expected names with settings below each, got {given!r}")
            given = {}
        groups[key] = {str(name): {} if changes is None else changes for name, changes in given.items()}
    protocols = values.get("evaluate") or {}
    if isinstance(protocols, str | list):
        protocols = dict.fromkeys([protocols] if isinstance(protocols, str) else map(str, protocols))
    elif not isinstance(protocols, Mapping):
        problems.append(f"evaluate: expected names of protocols, with data or without, got {protocols!r}")
        protocols = {}
    seeds = values.get("seeds", 3)
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds > MOST_SEEDS:
            problems.append(f"seeds: {seeds} are more than {MOST_SEEDS:,}")
        seeds = list(range(min(seeds, MOST_SEEDS)))
    sets = values.get("test_sets") or []
    base = RunConfig()
    try:
        base = _base(values.get("base", {}))
    except ConfigError as error:
        problems += [f"base.{problem}" for problem in error.problems]
    except (ValueError, OSError) as error:
        problems.append(f"base: {error}")
    try:
        study = Study(
            name=str(values.get("name", "study")),
            base=base,
            **groups,
            seeds=seeds,
            evaluate=protocols,
            budget=values.get("budget", "epochs") or "none",
            baseline=str(values.get("baseline") or ""),
            test_sets=[sets] if isinstance(sets, str) else list(sets),
            folds=values.get("folds") or 0,
            tune=read_grid(values.get("tune") or {}, problems),
        )
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return study


def write_study(study: Study, folder: Path) -> Path:
    """`study.yaml`, from which the same study can be read again."""
    path = folder / "study.yaml"
    write_text(path, yaml.safe_dump(study.to_mapping(), sort_keys=False, allow_unicode=True))
    return path


def _base(given: Any) -> RunConfig:
    if isinstance(given, str):
        if given in RECIPES:
            return recipe(given)
        if not Path(given).exists():
            raise ValueError(f"no recipe and no configuration {given!r}{near(given, RECIPES)}")
        given = load_yaml(given)
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a recipe, a configuration file or settings, got {given!r}")
    return from_mapping({**given, "out": None}, recipe(str(given.get("recipe", "vit"))))


def _from_module(text: str) -> Study:
    module, _, name = text.partition(":")
    try:
        study = getattr(import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{text}: cannot import {module} ({error})") from None
    except AttributeError:
        raise ValueError(f"{text}: {module} has no {name!r}") from None
    if not isinstance(study, Study):
        raise ValueError(f"{text} is {type(study).__name__} and no vitrail.compare.study.Study")
    return study


def _problems(study: Study) -> list[str]:
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", study.name) or study.name.startswith(SHARED):
        problems.append(
            f"name: {study.name!r} becomes a folder; use letters, digits, dots, - and _, and do not begin with {SHARED}"
        )
    if not study.variants:
        problems.append("variants: name at least one, with what it changes ({} for the base itself)")
    if study.baseline and study.baseline not in study.variants:
        problems.append(
            f"baseline: {study.baseline!r} is none of the variants ({', '.join(study.variants)})"
            f"{near(study.baseline, study.variants)}"
        )
    budgets = get_args(Budget)
    if study.budget not in budgets:
        problems.append(
            f"budget: {study.budget!r} is not one of {', '.join(budgets)}{near(str(study.budget), budgets)}"
        )
    problems += _seed_problems(study.seeds)
    if study.folds is True or study.folds not in range(0, MOST_SEEDS) or study.folds == 1:
        problems.append(f"folds: {study.folds!r} is no number of folds; use 2 or more, or leave it out")
    problems += [f"first.{name}: a variant has that name, too" for name in study.first if name in study.variants]
    known = kinds("evaluator")
    problems += study.tune.problems((*study.first, *study.variants), known)
    problems += [f"evaluate: no protocol {n!r}{near(str(n), known)}" for n in study.evaluate if n not in known]
    for name, changes in (*study.variants.items(), *study.first.items()):
        if not re.fullmatch(r"[\w.+=-]+", name):
            problems.append(f"variants: {name!r} becomes a file name; use letters, digits and . + = - _")
        if _settings(changes) is not changes:
            problems.append(f"variants.{name}: expected settings, got {changes!r}")
            continue
        for key, remedy in (("seed", "give them as `seeds`"), ("out", "run folders are named by what they hold")):
            if key in changes:
                problems.append(f"variants.{name}.{key}: a study sets it; {remedy}")
        optim = changes.get("optim")
        lengths = [key for key in LENGTHS if isinstance(optim, Mapping) and key in optim]
        if lengths and study.budget in ("time", "macs"):
            problems.append(f"variants.{name}.optim.{lengths[0]}: budget {study.budget} sets it; leave one of them out")
    return problems


def _start(base: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """What changes are made to: the base, or the recipe that they name, on the data and with the engine of the base."""
    if "recipe" not in changes:
        return base
    name = str(changes["recipe"])
    if name not in RECIPES:
        raise ConfigError([f"recipe: no recipe {name!r}{near(name, RECIPES)}"])
    named = recipe(name)
    return replace(named, data=replace(named.data, uri=base.data.uri), engine=base.engine)


def _settings(changes: Any) -> Mapping[str, Any]:
    """The changes themselves; none where a file has something else in their place."""
    return changes if isinstance(changes, Mapping) else {}


def _over(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` with what the base overrides kept: a variant's `trunk: {width: 96}` leaves the base's depth."""
    merged = dict(changes)
    for name, value in changes.items():
        before = getattr(base, str(name), None)
        if isinstance(value, Mapping) and before is not None:
            merged[name] = {**before, **value} if isinstance(before, Mapping) else _over(before, value)
    return merged


def _seed_problems(seeds: Any) -> list[str]:
    if not isinstance(seeds, Sequence) or isinstance(seeds, str):
        return [f"seeds: {seeds!r} is neither a number of seeds nor a list of them"]
    wrong = [s for s in seeds if not isinstance(s, int) or isinstance(s, bool) or s < 0]
    if wrong:
        return [f"seeds: {wrong[0]!r} is no whole number from 0"]
    if not seeds:
        return ["seeds: at least one is needed (seeds: 3 means 0, 1 and 2)"]
    return ["seeds: one is given twice"] if len(set(seeds)) < len(seeds) else []


def _length(config: RunConfig) -> tuple[str, float]:
    """In steps of a batch where given so, else in epochs."""
    if config.optim.steps is not None:
        return "images", float(config.optim.steps * config.data.batch)
    return "epochs", config.optim.epochs
