"""`vitrail fit`: photographs and a budget in, the best classifier that was found as a checked file out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vitrail.config import RunConfig
from vitrail.console import progress
from vitrail.data.check.check import check_data
from vitrail.data.dataset import DataSet
from vitrail.engine.device import choose_device
from vitrail.engine.run_folder import environment
from vitrail.files import FORMAT_VERSION, json_text, parse_json, reject_unwritable, write_text
from vitrail.fit.candidates import (
    SMALL,
    SMALLER,
    TEACHERS,
    Candidate,
    Measured,
    candidates_for,
    expected,
    known_without_measuring,
    measure,
    others_at_work,
    training_speed,
    within_time,
)
from vitrail.fit.finished_file import FitResult, deployed
from vitrail.fit.limits import HEADROOM, Budget
from vitrail.fit.pictures import Pictures
from vitrail.fit.search import FINE_TUNING, KEPT, SHARES, Form, Search
from vitrail.model.hub import unreachable
from vitrail.recipes import recipe, with_values
from vitrail.recipes.row import flat
from vitrail.run.choose import PHOTOS_ON_CPU
from vitrail.run.preflight import reject_missing_data
from vitrail.run.run_data import open_run

STATE = "fit.json"
ENOUGH_EPOCHS, ENOUGH_IMAGES = 20.0, 60_000.0  # of the last training on a processor, from scratch


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
    result = deployed(ranked, search, measured, opened, budget, pictures, out, say)
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
