"""Successive halving on val: many candidates are trained briefly, the better ones longer, the best in other forms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail.compare.budgets import probe
from vitrail.compare.jobs import IdleWorkers, visible_devices
from vitrail.compare.run import compare_study
from vitrail.compare.study import Study
from vitrail.compare.tuning import merged
from vitrail.config import RunConfig, from_mapping
from vitrail.fit.candidates import Candidate, Measured, expected
from vitrail.schema import plain

SHARES = (0.15, 0.2, 0.65)  # of the training time, for each rung
KEPT = (8, 3, 1)  # candidates of each rung; the last one is trained in several forms
FEWEST_EPOCHS, FEWEST_SECONDS = 1.0, 3.0  # of a first trial, while more candidates are left than the second rung takes
HALVED = 6.0  # what half of that takes from what is expected: places of the list, or points of published weights
AMPLE_EPOCHS = 60.0  # of each form in the last rung, from scratch: with fewer, epochs bring more (docs/results/fit.md)
FINE_TUNING = 0.1  # times that is enough for published weights
MOST_EPOCHS, FEWEST_STEPS = 300.0, 20
COMPILED_FROM = 240.0  # seconds of training: what torch.compile takes is not made up for in less
TAUGHT = {"objective": {"kind": "distillation", "teacher": "run:teacher", "mode": "soft", "weight": 0.5}}
CLOSE = 1.0  # standard errors of val: nearer ones are trained once more, with another seed


@dataclass(frozen=True)
class Form:
    """A candidate and how it is trained."""

    measured: Measured
    training: Mapping[str, Any] = field(default_factory=dict)  # nested settings of the run
    lose: float = 0.3  # points of accuracy on val that int8 may cost

    @property
    def name(self) -> str:
        return self.measured.candidate.name + ("-distilled" if "objective" in self.training else "")


@dataclass(frozen=True)
class Trial:
    """A trained form."""

    form: Form
    rung: int
    value: float  # the metric on val, mean over seeds
    error: float  # standard error of it over the images of val
    epochs: float
    seconds: float
    path: str  # of the run with the first seed
    seeds: int = 1

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("rung", "value", "error", "epochs", "seconds", "path", "seeds")}
        return {"name": self.form.name, **facts, "cost": self.form.measured.to_json()}


@dataclass
class Search:
    """What all rungs share. `state` keeps speeds between interruptions, and `keep` stores it."""

    base: RunConfig
    images: int  # of train
    held_out: int  # of val
    seconds: float  # of training, for the whole search
    root: Path
    metric: str
    state: dict[str, Any]
    keep: Callable[[], None]
    say: Callable[[str], None]
    quiet: bool = False
    trials: list[Trial] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # images/s of trials by candidate, instead of `speeds`
    idle: IdleWorkers = field(default_factory=IdleWorkers)  # one process trains all models: starting takes long

    def run(
        self,
        feasible: Sequence[Measured],
        beyond: Measured | None,
        teacher: Candidate | None,
        other_heads: Callable[[Candidate], list[Form]],
        smaller: Callable[[Candidate], Measured | None],
    ) -> Trial:
        """The best form. `beyond` is trained in the first rung only: what the next larger budget would buy. `smaller`
        measures the same network with smaller images, for one that is slow to learn."""
        first = self._first(feasible, 0 if beyond is None else 1, smaller)
        forms, few = [Form(m) for m in (*first, *([beyond] if beyond else []))], len(first) <= KEPT[1]
        rung = self._rung(0, forms, shares=2 if few else 1)  # few have the time of two rungs at once
        rung = [trial for trial in rung if beyond is None or trial.form.measured is not beyond]
        if not few:
            rung = self._rung(1, [trial.form for trial in _best(rung)[: KEPT[1]]])
        best, *others = _best(rung)
        winner = best.form.measured.candidate
        last = [best.form, *[trial.form for trial in others if self._close(best, trial)]]
        if teacher is not None and winner.model == teacher.model:
            teacher = None
        times = FINE_TUNING if self._published else 1.0
        if teacher is None or self._ample(winner, 1 + len(last), teacher, times):
            last += [] if teacher is None else [Form(best.form.measured, TAUGHT)]
            last += other_heads(winner) if self._ample(winner, 1 + len(last), teacher) else []
        else:
            self.say(f"no teacher: {winner.name} learns more in its time")
            teacher = None
        again = len(last) > 1 and self._ample(winner, 2 + len(last), teacher, times)
        shared_by = len(last) + 2 * again
        rung = _best(self._rung(2, last, teacher, shared_by=shared_by))
        if len(rung) > 1 and self._close(rung[0], rung[1]):
            both = rung[:2]
            close = " and ".join(trial.form.name for trial in both) + " are too close on val"
            if not again:
                self.say(f"{close}, and there is no time for a second seed")
                return rung[0]
            self.say(f"{close}; a second seed of both decides")
            self.trials = [trial for trial in self.trials if trial not in both]  # two seeds take the place of one
            rung = _best(self._rung(2, [trial.form for trial in both], teacher, seeds=2, shared_by=shared_by))
        return rung[0]

    def _ample(self, candidate: Candidate, forms: int, teacher: Candidate | None, times: float = 1.0) -> bool:
        """Whether so many forms in the last rung would each train for `AMPLE_EPOCHS` (`times` so many)."""
        return self._epochs(candidate, self._share(2, forms, teacher)) >= times * AMPLE_EPOCHS

    @property
    def _published(self) -> bool:
        return self.base.recipe == "finetune"

    def _close(self, best: Trial, other: Trial) -> bool:
        return best.value - other.value < CLOSE * best.error

    def _rung(
        self,
        number: int,
        forms: Sequence[Form],
        teacher: Candidate | None = None,
        seeds: int = 1,
        shared_by: int | None = None,
        shares: int = 1,
    ) -> list[Trial]:
        """Trains forms, each as long as if `shared_by` of them (none: as many as there are) shared the rung's time."""
        seconds = self._share(number, shared_by or len(forms), teacher, shares)
        return self.train(f"rung-{number}" + ("-seeds" if seeds > 1 else ""), number, forms, seconds, teacher, seeds)

    def _share(self, number: int, count: int, teacher: Candidate | None = None, shares: int = 1) -> float:
        """Seconds of each training of a rung (with the shares of those after it); one more is kept in reserve, in the
        last for the teacher. The last rung has all time that is left."""
        last = len(SHARES) - 1
        left = self.seconds - sum(trial.seconds for trial in self.trials if trial.rung < last)
        seconds = max(sum(SHARES[number : number + shares]) * self.seconds, left if number == last else 0.0)
        return seconds / (count + (number < last or teacher is not None))

    def _first(
        self, feasible: Sequence[Measured], others: int, smaller: Callable[[Candidate], Measured | None]
    ) -> list[Measured]:
        """The most promising architectures; with smaller images, then fewer of them, where their trials (and `others`)
        would be too short to tell."""
        first = most_promising(feasible, KEPT[0], self._published)
        while len(first) > KEPT[1]:
            seconds = self._share(0, len(first) + others)
            epochs = {m.candidate.name: self._epochs(m.candidate, seconds) for m in first}
            slowest = min(first, key=lambda m: epochs[m.candidate.name])
            fewest = epochs[slowest.candidate.name]
            if seconds >= FEWEST_SECONDS and fewest >= self._fewest_epochs:
                break
            trials = f"{len(first)} first trials would be of {seconds:.2g} s"
            left = min(first, key=lambda m: self._worth(m.candidate, epochs[m.candidate.name]))
            for slow in [slowest] if left is slowest else [slowest, left]:
                count = epochs[slow.candidate.name]
                if count < self._fewest_epochs and (other := smaller(slow.candidate)):
                    first[first.index(slow)] = other
                    names = f"{other.candidate.name} takes the place of {slow.candidate.name}"
                    self.say(f"{names}: {trials}, {count:.2g} epochs of that")
                    break
            else:
                first.remove(left)
                trials += f", {fewest:.2g} epochs of {slowest.candidate.name}"
                self.say(f"{left.candidate.name} is left out: {trials}")
        return first

    def _worth(self, candidate: Candidate, epochs: float) -> float:
        """What is expected of a candidate whose first trial has so many epochs."""
        missing = max(0.0, math.log2(self._fewest_epochs / epochs))
        return expected(candidate, self._published) - HALVED * missing

    @property
    def _fewest_epochs(self) -> float:
        """Of a training that tells anything: of few images, enough for some steps."""
        return max(FEWEST_EPOCHS, FEWEST_STEPS * self.base.data.batch / self.images)

    def _epochs(self, candidate: Candidate, seconds: float) -> float:
        return seconds * self._speed(candidate, seconds) / self.images

    def train(
        self,
        name: str,
        number: int,
        forms: Sequence[Form],
        seconds: float,
        teacher: Candidate | None = None,
        seeds: int = 1,
        jobs: int | None = None,
    ) -> list[Trial]:
        """Trains forms, each for about so many seconds, as a study of this name; those that failed are left out."""
        taught = teacher is not None and any("objective" in form.training for form in forms)
        variants = {form.name: self._settings(form.measured.candidate, form.training, seconds) for form in forms}
        first = {"teacher": self._settings(teacher, {}, seconds)} if taught and teacher else {}
        study = Study(name, self.base, variants, seeds=range(seeds), budget="none", first=first)
        # What one model compiles is of no use to another, and fills torch's cache of compiled code.
        idle = self.idle if seconds < COMPILED_FROM else None
        comparison, _ = compare_study(study, root=self.root, jobs=jobs, seconds=0, quiet=self.quiet, idle=idle)
        by_name, trials = {form.name: form for form in forms}, []
        for row in comparison.rows:
            for failure in row.failures:
                self.say(f"{row.variant} failed and is left out: {failure.reason}")
            if not row.members:
                continue
            known = row.members[0].metrics
            if self.metric not in known:
                raise ValueError(f"--metric: {self.metric!r} is none of {', '.join(sorted(known))}")
            value = sum(member.metrics[self.metric] for member in row.members) / len(row.members)
            error = (max(value * (1 - value), 1 / self.held_out) / self.held_out) ** 0.5
            taken = sum(member.seconds or 0.0 for member in row.members)
            epochs = study.configs[row.variant].optim.epochs
            facts = (value, error, epochs, taken, row.members[0].path, len(row.members))
            form = by_name[row.variant]
            trials.append(Trial(form, number, *facts))
            lines = [line for line in row.members[0].history if "images_per_second" in line]
            if lines and "objective" not in form.training:
                rates = [line["images_per_second"] for line in lines[1:] or lines]  # the first has what starts once
                self.rates[form.measured.candidate.name] = statistics.median(rates)
        self.trials += trials
        return trials

    def _settings(self, candidate: Candidate, training: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Nested settings of a run of about this length."""
        model = _model(candidate)
        engine = {"compile": False} if seconds < COMPILED_FROM else {}
        settings = merged({"model": model, "engine": engine}, training)
        fewest = FEWEST_STEPS * self.base.data.batch / self.images
        epochs = min(MOST_EPOCHS, max(self._epochs(candidate, seconds), fewest))
        key = f"{candidate.name} {seconds:.4g}"
        epochs = self.state["epochs"].setdefault(key, float(f"{epochs:.3g}"))
        self.keep()
        return merged(settings, {"optim": {"epochs": epochs, "warmup": min(5.0, round(epochs / 10, 3))}})

    def _speed(self, candidate: Candidate, seconds: float) -> float:
        """Images/s of training: of its trials, or measured once, briefly for a training that is short."""
        if candidate.name in self.rates:
            return self.rates[candidate.name]
        speeds: dict[str, float] = self.state["speeds"]
        if candidate.name not in speeds:
            self.say(f"{candidate.name}: measuring its training speed")
            changes = {"model": _model(candidate), "engine": {"compile": False}}
            config = from_mapping(merged(plain(self.base), changes), replace(self.base))
            steps = 3 if visible_devices() else 1  # a step of a processor takes seconds, and nothing is compiled
            speeds[candidate.name] = probe(config, min(8.0, seconds / 10), steps, self.idle)
            self.keep()
        return speeds[candidate.name]


def _model(candidate: Candidate) -> dict[str, Any]:
    return {"name": candidate.model, "image_size": candidate.size, **candidate.settings}


def _best(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: (-trial.value, trial.form.measured.latency or 0.0))


def most_promising(feasible: Sequence[Measured], count: int, published: bool) -> list[Measured]:
    """Of every architecture its form nearest to the budget, and of those the ones that are expected to be best."""
    nearest: dict[str, Measured] = {}
    for measured in sorted(feasible, key=lambda m: m.latency or 0.0):
        nearest[measured.candidate.architecture] = measured
    return sorted(nearest.values(), key=lambda m: -expected(m.candidate, published))[:count]
