"""`vitrail fit`: photographs and a budget in, the best classifier that was found as a checked file out."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image

from vitrail.config import RunConfig
from vitrail.console import progress
from vitrail.data.check.check import check_data
from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device
from vitrail.engine.run_folder import environment
from vitrail.files import FORMAT_VERSION, json_text, parse_json, reject_unwritable, write_text
from vitrail.fit.candidates import (
    SMALL,
    SMALLER,
    TEACHERS,
    Candidate,
    Measured,
    accelerator_latency,
    candidates_for,
    expected,
    file_latency,
    known_without_measuring,
    measure,
    others_at_work,
    training_speed,
    within_time,
)
from vitrail.fit.limits import HEADROOM, Budget
from vitrail.fit.pictures import Pictures
from vitrail.fit.search import FINE_TUNING, KEPT, SHARES, Form, Search, Trial
from vitrail.measure.classification import wilson_interval
from vitrail.measure.evaluator import Predictions
from vitrail.model.export import read_onnx
from vitrail.model.hub import unreachable
from vitrail.recipes import recipe, with_values
from vitrail.recipes.row import flat
from vitrail.run.choose import PHOTOS_ON_CPU
from vitrail.run.deploy import export_onnx
from vitrail.run.evaluate import calibrate, evaluate, load
from vitrail.run.preflight import reject_missing_data
from vitrail.run.run_data import open_for, open_run

STATE, FILE = "fit.json", "model.onnx"
ENOUGH_EPOCHS, ENOUGH_IMAGES = 20.0, 60_000.0  # of the last training on a processor, from scratch
ATTEMPTS, PAUSE = 3, 5.0  # of measuring the finished file; seconds between them
MORE = 2.0  # points that int8 may cost where less makes it too slow: images smaller by 8 % of their side cost as much
LEAST, PIXELS = 0.7, 4  # of the size of images that it learned from, what weights are tried with; steps of that size


@dataclass(frozen=True)
class FitResult:
    """The outcome: a file that was measured, and everything that was tried."""

    folder: Path
    file: Path
    budget: Budget
    latency: float
    bytes: int
    split: str
    correct: int
    images: int
    chosen: Trial
    trials: tuple[Trial, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]
    metric: str = "top1"  # by which val chose

    @property
    def accuracy(self) -> float:
        return self.correct / self.images

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.correct, self.images)

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "file": str(self.file),
            "budget": asdict(self.budget),
            "latency": self.latency,
            "bytes": self.bytes,
            "split": self.split,
            "top1": self.accuracy,
            "interval": list(self.interval),
            "images": self.images,
            "chosen": self.chosen.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "measured": [each.to_json() for each in self.measured],
            "notes": list(self.notes),
        }


def fit(
    data: str,
    budget: Budget,
    out: str | Path,
    *,
    metric: str = "top1",
    minutes: float = 30.0,
    weights: Literal["auto", "none"] = "auto",
    say: Callable[[str], None] = print,
    quiet: bool = False,
) -> FitResult:
    """Search, train, export and check; the same call goes on where an interrupted one was.

    Settings are chosen on val; test images (val, where there are none) are evaluated once, with the finished file.
    Raises `ValueError` where nothing meets the budget, with the nearest that can be met, and `StudyStopped` when
    interrupted.
    """
    from vitrail.fit.page import write_fit

    out = Path(out)
    reject_unwritable(out)
    reject_missing_data(data)
    base = _base(data, weights, say)
    state = _state(
        out, {"data": data, "budget": asdict(budget), "metric": metric, "minutes": minutes, "base": base.recipe}
    )

    def keep() -> None:
        write_text(out / STATE, json_text(state, indent=1))

    if not state["measured"] and budget.on == "cpu" and (load := others_at_work()):  # before our own work counts
        say(f"warning: other programs use this machine ({load}); latencies will be longer than on a quiet one")
    opened = open_run(base.data)
    _check(opened, state, say, quiet)
    if base.optim.lr_batch is None and on_accelerator():  # Muon's learning rate goes with any batch
        base = with_values(base, {"data.batch": _batch(len(opened["train"]))})
    pictures = Pictures(opened["train"], [base.data.augment])
    published = base.recipe == "finetune"
    passes: dict[str, float] = state.setdefault("passes", {})
    candidates, slower, teacher_at = trainable(opened, pictures.side, 60 * minutes, passes, published, say)
    promising = sorted(candidates, key=lambda candidate: -expected(candidate, published))
    where = opened, budget, pictures, out, state, keep, say
    measured = measure_all(promising, KEPT[0], *where)
    if slower and not any(m.meets(budget) for m in measured):
        say(f"of what learns enough in {minutes:g} minutes nothing meets {budget.text}; trying what learns less")
        measured = measure_all(slower, KEPT[1], *where)
        candidates += slower
    fits = [m for m in measured if m.meets(budget)]
    if not fits:
        raise ValueError(_nothing_fits(budget, measured, pictures))
    for name, speed in passes.items():  # nothing else need be timed before the first trainings
        for form in (name, f"{name}-int8"):
            state["speeds"].setdefault(form, speed)
    beyond = _next_larger(budget, measured)
    search = Search(
        base, len(opened["train"]), len(opened["val"]), 60 * minutes, out / "studies", metric, state, keep, say, quiet
    )
    say(f"{len(fits)} of {len(measured)} candidates meet {budget.text}; {minutes:g} minutes of training")
    teacher = teacher_at(max(m.candidate.size for m in fits))

    def other_heads(best: Candidate) -> list[Form]:
        return _other_heads(best, opened, budget, pictures, out)

    def smaller(slow: Candidate) -> Measured | None:
        sizes = [c for c in candidates if c.architecture == slow.architecture and c.size < slow.size]
        if not sizes:
            return None
        candidate = max(sizes, key=lambda c: c.size)
        forms = candidate, replace(candidate, precision="int8")
        known = [m for m in measured if m.candidate in forms and m.latency is not None]
        if not known:
            measured.extend(known := measure(candidate, opened.classes, budget, pictures, out))
            state["measured"] = [each.to_json() for each in measured]
            keep()
        return next((m for m in known if m.meets(budget)), None)

    try:
        search.run(fits, beyond, teacher, other_heads, smaller)
    finally:
        search.idle.end()
    tried = {id(beyond)} if beyond else set()
    ranked = sorted((t for t in search.trials if id(t.form.measured) not in tried), key=lambda t: (-t.rung, -t.value))
    result = _deployed(ranked, search, measured, opened, budget, pictures, out, say)
    write_fit(result, environment())
    return result


def _base(data: str, weights: str, say: Callable[[str], None]) -> RunConfig:
    """Fine-tuning where published weights can be had, training from scratch where not."""
    published = weights == "auto" and not unreachable()
    base = recipe("finetune" if published else "scratch")
    if weights == "auto":
        reason = "published weights can be downloaded" if published else "no network to download published weights"
        say(f"recipe {base.recipe}: {reason}")
    if not on_accelerator():
        parts = {} if published else {part: values for part, values in PHOTOS_ON_CPU.items() if part != "model"}
        base = with_values(base, {"data.batch": 32, **flat(parts)})
    engine = {"engine.evaluate_every": 0.0, "engine.checkpoint_every": 5.0}
    return with_values(base, {"data.uri": data, "data.judge": "val", **engine})


def on_accelerator() -> bool:
    """Whether models are trained on one."""
    return choose_device("auto").type != "cpu"


def trainable(
    data: DataSet,
    side: int,
    seconds: float,
    speeds: dict[str, float],
    published: bool,
    say: Callable[[str], None],
) -> tuple[list[Candidate], list[Candidate], Callable[[int], Candidate | None]]:
    """Candidates, others that would learn too little here (fastest first), and the teacher of images of a size.

    Only a processor has too little time: enough is `ENOUGH_EPOCHS`, or `ENOUGH_IMAGES` where there are many images,
    where two trainings share the last and longest part of the time. `speeds` keeps what was measured, in images/s.
    """
    candidates, model = candidates_for(side), TEACHERS["small" if side <= SMALL else "photo"]
    if on_accelerator():
        return candidates, [], partial(Candidate, model)
    enough = min(ENOUGH_EPOCHS * len(data["train"]), ENOUGH_IMAGES) * (FINE_TUNING if published else 1)
    enough /= seconds * SHARES[-1] / 2  # images/s

    def learns(candidate: Candidate) -> float:
        if candidate.name not in speeds:
            speeds[candidate.name] = training_speed(candidate, data.classes)
        return speeds[candidate.name] / enough

    say("measuring what this processor can learn in the time")
    chosen, slower = within_time(candidates, learns, () if published else SMALLER)  # weights are of larger images
    if left := {c.name for c in candidates} - {c.name for c in chosen}:
        say(f"{len(left)} of {len(candidates)} candidates, at these sizes, would learn too little and are left out")

    def teacher_at(size: int) -> Candidate | None:
        teacher = Candidate(model, size)
        if learns(teacher) >= 1:
            return teacher
        say(f"no teacher: {teacher.name} would learn too little")
        return None

    return chosen, slower, teacher_at


def _batch(images: int) -> int:
    """A hundredth of the images, as a power of two from 64 to 512: small sets want steps, large ones throughput.

    >>> _batch(2_270), _batch(45_000)
    (64, 512)
    """
    return int(min(512, max(64, 2 ** round(math.log2(images / 100)))))


def _state(out: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What an interrupted search had found. Raises `ValueError` where it was another one."""
    path = out / STATE
    options = parse_json(json_text(options))
    if not path.is_file():
        return {"format_version": FORMAT_VERSION, "options": options, "measured": [], "speeds": {}, "epochs": {}}
    state: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    changed = [name for name, value in options.items() if state["options"].get(name) != value]
    if changed:
        raise ValueError(f"{out} holds a search with another {', '.join(changed)}; choose another --out")
    return state


def _check(data: DataSet, state: dict[str, Any], say: Callable[[str], None], quiet: bool) -> None:
    if not {"train", "val"} <= data.splits.keys():
        raise ValueError(f"{data.uri} has no images to train on and to hold out; give a folder of class folders")
    if data.multilabel or data.holds_texts or data.unlabelled or data.numeric:
        raise ValueError(f"{data.uri}: fit is for images with one label each")
    if not state["measured"]:
        with progress("check", quiet=quiet) as bar:
            report = check_data(data, progress=lambda done, total: bar(done, total, f"{done} images"))
        say(f"{data.uri}: {report.summary}")
        for level, text, count, _ in report.rows():
            if level != "note":
                say(f"{level}: {text} ({count})")
        if report.severity == "errors":
            raise ValueError(f"{data.uri} has errors; look at them with: vitrail check {data.uri}")


def measure_all(
    candidates: Sequence[Candidate],
    enough: int | None,
    data: DataSet,
    budget: Budget,
    pictures: Pictures,
    out: Path,
    state: dict[str, Any],
    keep: Callable[[], None],
    say: Callable[[str], None],
) -> list[Measured]:
    """Costs on the target, until so many architectures (none: all) are within the budget.

    They are kept, so that a search that goes on does not measure again.
    """
    known = [Measured.from_json(values) for values in state["measured"]]
    done = {m.candidate.name.removesuffix("-int8") for m in known}
    left = [c for c in candidates if c.name not in done]
    for number, candidate in enumerate(left):
        fits = [m.candidate for m in known if m.meets(budget)]
        if enough is not None and len({c.architecture for c in fits}) >= enough:
            say(f"{len(left) - number} more are not measured: {enough} that are expected to be better meet the budget")
            break
        reason = known_without_measuring(candidate, known, budget)
        measured = [Measured(candidate, reason=reason)] if reason else []
        for found in measured or measure(candidate, data.classes, budget, pictures, out):
            cost = found.reason or f"{1e3 * (found.latency or 0):.3g} ms, {found.bytes / 1e6:.3g} MB"
            say(f"[{number + 1}/{len(left)}] {found.candidate.name}: {cost}")
            known.append(found)
        state["measured"] = [each.to_json() for each in known]
        keep()
    return known


def _nothing_fits(budget: Budget, measured: list[Measured], pictures: Pictures) -> str:
    costs = [m for m in measured if m.latency is not None]
    if not costs:
        fastest = min(measured, key=lambda m: math.inf if m.eager is None else m.eager)
        if fastest.eager is None:
            return f"no candidate could be measured: {fastest.reason}"
        name, wanted = fastest.candidate.name, 1e3 * fastest.eager
        return f"nothing meets {budget.text}; {name} is nearest, {wanted:.3g} ms in PyTorch: --latency {wanted:.2g}ms"
    nearest = min(costs, key=lambda m: max((m.latency or 0) / budget.latency, m.bytes / (budget.bytes or m.bytes)))
    wanted = 1e3 * (nearest.latency or 0) / HEADROOM
    size = "" if budget.bytes is None else f" --size {nearest.bytes / 1e6:.2g}MB"
    text = f"nothing meets {budget.text}; the nearest is {nearest.candidate.name}: --latency {wanted:.2g}ms{size}"
    preparing = pictures.preparing(nearest.candidate.size)
    if preparing < budget.latency / 2:
        return text
    sides = " x ".join(map(str, pictures.size))
    return f"{text} ({1e3 * preparing:.2g} ms of it to resize images of {sides} pixels; smaller ones take less)"


def _next_larger(budget: Budget, measured: list[Measured]) -> Measured | None:
    """The slowest candidate within twice the latency that does not fit in int8, either: what more would buy."""
    fits = {m.candidate.name for m in measured if m.meets(budget)}
    over = [m for m in measured if m.latency is not None and m.candidate.precision == "float32"]
    over = [m for m in over if f"{m.candidate.name}-int8" not in fits]  # one training serves both
    over = [m for m in over if budget.latency < (m.latency or 0) <= 2 * budget.latency]
    return max(over, key=lambda m: m.latency or 0, default=None)


def _other_heads(best: Candidate, data: DataSet, budget: Budget, pictures: Pictures, out: Path) -> list[Form]:
    """The same trunk with attention pooling, where that is within the budget."""
    if best.settings:
        return []
    swapped = replace(best, settings={"head": {"kind": "attention_pool"}}, precision="float32")
    costs = measure(swapped, data.classes, budget, pictures, out)
    return [Form(m) for m in costs if m.meets(budget)][:1]


def _deployed(
    ranked: list[Trial],
    search: Search,
    measured: list[Measured],
    data: DataSet,
    budget: Budget,
    pictures: Pictures,
    out: Path,
    say: Callable[[str], None],
) -> FitResult:
    """The best trial whose file, calibrated and exported, is within the budget; evaluated once.

    Weights whose file takes too long are tried in faster forms before what learned less.
    """
    notes: list[str] = []
    failed: list[Candidate] = []
    made: set[str] = set()
    while ranked:  # another training of what failed has a file that takes as long, and comes last
        trial = min(
            ranked, key=lambda t: (t in search.trials and t.form.measured.candidate in failed, -t.rung, -t.value)
        )
        ranked = [other for other in ranked if other is not trial]
        path, candidate, file = trial.path, trial.form.measured.candidate, out / FILE
        try:
            calibrate(path, data.uri, compare=False)  # embeddings of train would take bytes and time of the file
        except ValueError as error:
            notes.append(f"probabilities are not calibrated: {error}")
        model = load(path)
        seen, change = pictures.decoded(model.preprocess), 0.0
        try:
            if budget.on == "cuda":
                file = model.save(out / "model")
                latency, size = accelerator_latency(model, seen), sum(f.stat().st_size for f in file.iterdir())
            else:
                precision: Literal["int8"] | None = "int8" if candidate.precision == "int8" else None
                exported = export_onnx(model, file, Path(path), precision, data.uri, trial.form.lose, with_predict=True)
                size, latency = exported.bytes, _settled_latency(file, seen, budget)
                change = exported.precision["change"] if exported.precision else 0.0
        except Exception as error:  # exporters and runtimes have error classes of their own
            notes.append(f"{trial.form.name} was not deployed: {error}")
            say(notes[-1])
            failed.append(candidate)
            ranked += in_fewer_bits(trial, budget) if candidate.precision == "int8" else []
            continue
        if not budget.meets(latency, size, 1.0):
            notes.append(
                f"{trial.form.name}, {1e3 * latency:.3g} ms and {size / 1e6:.3g} MB as a file, is over the budget"
            )
            say(notes[-1])
            failed.append(candidate)
            slow = latency > budget.latency
            forms = faster(trial, latency, data, budget, search.metric, out) if slow else in_fewer_bits(trial, budget)
            made |= {form.path for form in forms}
            ranked += forms
            continue
        if trial not in search.trials:  # made of the weights of one
            form = replace(trial.form, measured=Measured(candidate, latency, size))
            trial = replace(trial, form=form, value=trial.value + change, seconds=0.0)
            search.trials.append(trial)
            may = f", where int8 may cost {trial.form.lose:g} points" * (candidate.precision == "int8")
            notes.append(f"{trial.form.name} has weights of another row, images of {model.preprocess.size} pixels{may}")
        for unused in {Path(path) for path in made - {trial.path}}:
            if unused.parent == out:
                shutil.rmtree(unused)
        split = "test" if "test" in data.splits else "val"
        correct = _correct(file, model, data, split, budget)
        counts = int(sum(correct)), len(correct)
        decoding = 1e3 * pictures.seconds(model.preprocess)
        notes.append(f"reading and decoding a photograph takes {decoding:.2g} ms, which the budget does not count")
        trials, all_costs = tuple(search.trials), tuple(measured)
        return FitResult(
            out, file, budget, latency, size, split, *counts, trial, trials, all_costs, tuple(notes), search.metric
        )
    raise ValueError(f"no trained model meets {budget.text} as a file: {notes[-1]}")


def in_fewer_bits(trial: Trial, budget: Budget) -> list[Trial]:
    """The same weights in int8, where they were not; where they were, in int8 that may cost more."""
    form = trial.form
    candidate = form.measured.candidate
    if budget.on != "cpu" or form.lose >= MORE:
        return []
    int8, lose = replace(candidate, precision="int8"), MORE if candidate.precision == "int8" else form.lose
    return [replace(trial, form=replace(form, measured=Measured(int8), lose=lose))]


def faster(trial: Trial, latency: float, data: DataSet, budget: Budget, metric: str, folder: Path) -> list[Trial]:
    """Weights whose file takes `latency` in fewer bits, and (once) with images that are as much smaller as that is too
    long, measured on val; their model is in `folder`. What the network cannot take is left out."""
    forms, candidate = in_fewer_bits(trial, budget), trial.form.measured.candidate
    model, most = load(trial.path), candidate.size * (HEADROOM * budget.latency / latency) ** 0.5
    sizes = range(int(most) // PIXELS * PIXELS, math.ceil(LEAST * candidate.size) - 1, -PIXELS)
    for size in () if Path(trial.path).parent == folder else sizes:
        try:
            figures, _, _ = evaluate(model, data, split="val", image_size=size)
        except ValueError:  # patches that do not divide it, say
            continue
        model.preprocess, smaller = replace(model.preprocess, size=size), replace(candidate, size=size)
        path = str(model.save(folder / smaller.name))
        form = replace(trial.form, measured=Measured(smaller))
        return [*forms, replace(trial, form=form, value=figures.scalars()[metric], path=path)]
    return forms


def _settled_latency(file: Path, pictures: Sequence[Image], budget: Budget) -> float:
    """Of a file that was within the budget before: over it, it is measured again, since the machine may be busy."""
    latency = math.inf
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * bool(attempt))
        latency = min(latency, file_latency(file, pictures, budget.threads))
        if latency <= budget.latency:
            break
    return latency


def _correct(file: Path, model: Any, data: DataSet, split: str, budget: Budget) -> list[bool]:
    """Of every image, whether the file's prediction is right; one image at a time, as it is deployed."""
    if budget.on == "cuda":
        _, predictions, _ = evaluate(model, data.uri, split=split)
        assert isinstance(predictions, Predictions)  # of images with one label each
        return [bool(right) for right in predictions.guess == predictions.target]
    rows, run = open_for(model, data.uri)[split], read_onnx(file)
    right: list[bool] = []
    with EvalLoader(rows, Preprocess(model.preprocess), batch=64, device="cpu", workers=auto_workers(rows)) as loader:
        for batch in loader.received():
            for image, label in zip(batch.views[0], batch.label.tolist(), strict=True):
                right.append(int(run(image[None])[0].argmax()) == label)
    return right
