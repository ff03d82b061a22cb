"""Models side by side on this machine: built, timed in turns, compared with timm's."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.bench.claims import CLAIMS, Checked, check_claims, on_device, subjects
from vitrail.bench.measurements import Bench, BenchRow, energy_meter, joules_per_image
from vitrail.bench.roofline import (
    MOST,
    Ceiling,
    Found,
    copy_share,
    free_memory,
    measure_ceiling,
    memory_is_short,
    out_of_memory,
    product_share,
    search_batch,
)
from vitrail.bench.subjects import (
    BenchSubject,
    Call,
    Conditions,
    Form,
    Ready,
    RealImages,
    attacked,
    choose_subjects,
    make_call,
    owns_weights,
)
from vitrail.engine.device import choose_device, choose_precision
from vitrail.measure.speed import (
    MemoryWatch,
    Noise,
    Ratio,
    Timing,
    Way,
    Work,
    fresh_images,
    in_turns,
    noise,
    ratio,
    timed_calls,
)
from vitrail.model.classifier import Classifier
from vitrail.version import __version__

BATCH = {False: 256, True: 128}  # on CUDA, by whether it trains
CPU_BATCH = 8
CPU_CALL_MACS = (
    2e10  # of the default batch: such a call takes a quarter of a second on two quick cores, a second on slow
)
ROUNDS, CPU_ROUNDS = 11, 7
SECONDS = 2.0  # of each model's rounds together
PATIENCE = 30.0  # seconds after which no further round begins, however slow the models are
SLOW_CALL = 1.5  # seconds: a search tries nothing twice as large
CHECK_BATCH, CHECK_ROUNDS, CHECK_SECONDS = 256, 7, 1.0  # the document's batch
CPU_CHECK_BATCH, CPU_CHECK_ROUNDS, CPU_CHECK_SECONDS = 2, 3, 0.3
TRAIN_TRAFFIC = 10  # times a step reads or writes a weight, its gradient or AdamW's two states, at the least
CONTROL = "control"

Progress = Callable[[int, int, str], None]  # told (steps done, steps in all, what comes next)


class Steps:
    """Counts what is done, for a progress bar; called before each step."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, note: str) -> None:
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, note)
        self.done += 1


def bench(
    models: Sequence[str | Path] | Mapping[str, Classifier],
    *,
    train: bool = False,
    against: str | None = None,
    batch: int | Literal["search"] | None = None,
    image_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    compile: bool | None = None,  # noqa: A002
    seconds: float = SECONDS,
    rounds: int | None = None,
    checks: bool = False,
    data: str | Path | None = None,
    attack: str | Path | None = None,
    progress: Progress | None = None,
) -> Bench:
    """How fast models are here: zoo names, `timm:NAME`s, run or model folders; or models themselves, by names for them.

    Inference, or whole training steps with `train`, on random images that are already on the device. All models take
    turns round by round, and ratios are medians of the rounds' ratios: to the timm twin with `against="timm"`, else to
    the first model. `batch` is a number, `search` for the fastest that fits, or none for one that suits the device.
    Each model runs `eager` and, where `compile` (none: on CUDA), `optimized`. `checks` adds the hardware-relative
    claims of the DeiT, CaiT and PatchConvNet papers. `data` measures on test images of a data set; `attack` adds every
    adaptive model under the patch of that folder: what serving it costs then. Raises `ValueError` for unknown names and
    impossible settings.

    >>> bench(["vit_micro_28"], batch=2, rounds=3, seconds=0.01).rows[0].batch
    2
    """
    names, given = [str(name) for name in models], models if isinstance(models, Mapping) else {}
    _refuse(names, given, against, batch, precision, rounds, checks)
    if attack is not None and (data is None or train):
        raise ValueError("an attack is measured in inference, on images: name --data, and leave --train")
    real = None if data is None else RealImages(str(data))
    place = choose_device(device)
    small = place.type != "cuda"
    compiled = not small if compile is None else compile
    autocast = choose_precision(precision, place)
    conditions = Conditions(place, autocast, train, ("eager", "optimized") if compiled else ("eager",))
    rounds = rounds or (CPU_ROUNDS if small else ROUNDS)
    with _settings(conditions, precision):
        chosen, notes = choose_subjects(names, against, image_size, place, given)
        if data is not None:  # what a run stated was of its own data
            for one in chosen:
                one.top1 = one.top1 if one.of == str(data) else None
        if attack is not None:
            chosen = attacked(chosen, Path(attack))
        searched = batch == "search"
        steps = Steps(_count(len(chosen), conditions, rounds, searched, checks), progress)
        found = _measure(chosen, batch, conditions, rounds, seconds, against, steps, notes, real) if chosen else None
        chosen.clear()  # their memory is for the checks
        check_batch = batch if isinstance(batch, int) else CPU_CHECK_BATCH if small else CHECK_BATCH
        checked = _check(conditions, check_batch, steps) if checks else ()
    if progress is not None:
        progress(steps.total, steps.total, "done")
    return Bench(
        rows=() if found is None else found.rows,
        train=train,
        device=_place(place),
        precision=str(conditions.dtype).removeprefix("torch."),
        versions=_versions(),
        against=against,
        ceiling=None if found is None else found.ceiling,
        noise=None if found is None else found.noise,
        searches={} if found is None else {name: one.to_json() for name, one in found.searches.items()},
        checks=checked,
        check_batch=check_batch if checks else None,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Measured:
    """What is known of the models when all were timed."""

    rows: tuple[BenchRow, ...]
    ceiling: Ceiling
    noise: Noise
    searches: Mapping[str, Found]


def _measure(
    chosen: Sequence[BenchSubject],
    batch: int | str | None,
    conditions: Conditions,
    rounds: int,
    seconds: float,
    against: str | None,
    steps: Steps,
    notes: list[str],
    real: RealImages | None = None,
) -> Measured:
    steps("machine ceiling")
    ceiling = measure_ceiling(conditions.device, conditions.dtype)
    searches = _choose_batches(chosen, batch, conditions, steps)
    _prepare(chosen, conditions, steps, notes, real)
    timings, control = _time(chosen, conditions, rounds, seconds, steps)
    joules = {}
    meter = energy_meter(conditions.device)
    for one in chosen:
        for form, ready in one.forms.items():
            steps(f"{_label(one.name, form)}: energy")
            joules[_label(one.name, form)] = joules_per_image(ready.way.work, one.batch, conditions.device, meter)
    rows = _rows(chosen, timings, joules, against, ceiling, conditions)
    return Measured(rows, ceiling, noise(timings, control), searches)


# What they run on


def _choose_batches(
    chosen: Sequence[BenchSubject], batch: int | str | None, conditions: Conditions, steps: Steps
) -> dict[str, Found]:
    """Give every subject its batch: with `search` the fastest eager one of each, else the same for all."""
    if batch != "search":
        heaviest = max(one.cost.macs for one in chosen) * (3 if conditions.train else 1)
        fitting = max(1, min(CPU_BATCH, int(CPU_CALL_MACS // heaviest)))
        usual = BATCH[conditions.train] if conditions.device.type == "cuda" else fitting
        for one in chosen:
            one.batch = int(batch or usual)
        return {}
    found = {}
    for one in chosen:
        one.module.to("cpu")  # each is searched alone
    for one in chosen:
        steps(f"{one.name}: batch size")
        found[one.name] = _search(one, conditions)
        one.batch = found[one.name].best
        one.module.zero_grad(set_to_none=True)
        one.module.to("cpu")
        free_memory()
    return found


def _search(one: BenchSubject, conditions: Conditions) -> Found:
    device = conditions.device
    one.module.to(device)

    def attempt(batch: int) -> float:
        one.module.zero_grad(set_to_none=True)  # left by an attempt that did not fit
        call = make_call(one.module, "eager", conditions, one.multilabel)
        work = _work(call, fresh_images(batch, one.size, device, sets=1), _targets(one, batch, device))
        work(0)
        once = sum(timed_calls(work, 1, device))
        taken = timed_calls(work, max(1, min(20, round(0.2 / max(once, 1e-6)))), device)
        longest[0] = max(longest[0], *taken)
        return batch * len(taken) / sum(taken)

    def stop() -> str:
        return "memory" if memory_is_short(device) else "time" if longest[0] > SLOW_CALL else ""

    longest = [0.0]  # seconds of a call
    most = MOST.get(device.type, MOST["cuda"])
    return search_batch(attempt, most=most, closeness=1 / 16, stop=stop)


def _prepare(
    chosen: Sequence[BenchSubject], conditions: Conditions, steps: Steps, notes: list[str], real: RealImages | None
) -> None:
    """Make every form of every subject ready and warm; what does not fit or compile is left out with a note."""
    pool: dict[tuple[int, int], list[Tensor]] = {}  # images are shared: of many models they would take much memory
    for one in chosen:
        one.module.to(conditions.device)
        shape = (one.batch, one.size)
        own = None if real is None else real(one, conditions.device)
        for form in conditions.forms:
            steps(f"{_label(one.name, form)}: warm-up")
            if own is None and shape not in pool:
                pool[shape] = fresh_images(*shape, conditions.device)
            problem = _try(one, form, own or pool[shape], conditions)
            if problem:  # outside the handler, whose frames hold what did not fit
                notes.append(problem)
                one.module.zero_grad(set_to_none=True)
                free_memory()
    if not any(one.forms for one in chosen):
        raise ValueError("nothing could be measured: " + "; ".join(notes))


def _try(one: BenchSubject, form: Form, images: Sequence[Tensor], conditions: Conditions) -> str:
    """Make a form ready; returns what a person should know where that cannot be."""
    try:
        one.forms[form] = _ready(one, form, images, conditions)
    except Exception as error:
        if out_of_memory(error):
            return f"{_label(one.name, form)} does not fit into memory at batch {one.batch}; use a smaller batch"
        if form == "eager":
            raise
        # No compiler here, or a model that cannot be compiled: the eager form still tells something.
        said = (str(error).strip() or "no reason given").splitlines()[0][:120]
        return f"{one.name} could not be optimized ({type(error).__name__}: {said})"
    return ""


def _ready(one: BenchSubject, form: Form, images: Sequence[Tensor], conditions: Conditions) -> Ready:
    device = conditions.device
    weights = sum(t.nbytes for t in (*one.module.parameters(), *one.module.buffers()))
    watch = MemoryWatch(device)
    call = make_call(one.module, form, conditions, one.multilabel)
    work = _work(call, images, _targets(one, one.batch, device))
    for i in range(conditions.warm_up):
        work(i)
    if form == "eager" and device.type == "cuda":
        watch.again()  # the first calls also chose kernels; a CUDA graph, though, takes its memory while it is captured
        work(0)
    peak = watch.peak()
    if peak is not None:
        peak += images[0].nbytes + (0 if owns_weights(one.module, form, conditions) else weights)
    return Ready(Way(work, one.batch), peak)


def _targets(one: BenchSubject, batch: int, device: torch.device) -> Tensor:
    if one.multilabel:
        return torch.randint(2, (batch, one.classes), device=device).float()
    return torch.randint(one.classes, (batch,), device=device)


def _work(call: Call, images: Sequence[Tensor], targets: Tensor) -> Work:
    return lambda i: call(images[i % len(images)], targets)


# What came out


def _time(
    chosen: Sequence[BenchSubject], conditions: Conditions, rounds: int, seconds: float, steps: Steps
) -> tuple[dict[str, Timing], Ratio]:
    """Timings of all forms in turns, and the first of them against itself."""
    ways = {_label(one.name, form): ready.way for one in chosen for form, ready in one.forms.items()}
    first = next(iter(ways))
    timings = in_turns(
        {**ways, CONTROL: ways[first]},
        conditions.device,
        rounds=rounds,
        seconds=seconds,
        warm_up=0,
        patience=PATIENCE,
        turn=lambda done, all_: steps(f"round {done} of {all_}"),
    )
    return {name: timings[name] for name in ways}, ratio(timings[CONTROL], timings[first])


def _rows(
    chosen: Sequence[BenchSubject],
    timings: Mapping[str, Timing],
    joules: Mapping[str, float | None],
    against: str | None,
    ceiling: Ceiling,
    conditions: Conditions,
) -> tuple[BenchRow, ...]:
    first = next(iter(timings))
    rows = []
    for one in chosen:
        for form, ready in one.forms.items():
            label = _label(one.name, form)
            timing = timings[label]
            reference: str | None = first
            if against is not None:  # like with like: the twin in the same form, where it has one
                twins = [_label(one.twin, f) for f in (form, "eager")] if one.twin else []
                reference = next((twin for twin in twins if twin in timings), None)
            if reference == label:
                reference = None
            width = conditions.dtype.itemsize
            needed = (
                one.cost.parameters * (TRAIN_TRAFFIC * 4 if conditions.train else width)
                + one.batch * 3 * one.size**2 * 4
            )
            rate = timing.images_per_second
            macs = one.macs or one.cost.macs
            rows.append(
                BenchRow(
                    model=one.name,
                    form=form,
                    family=one.family,
                    parameters=one.cost.parameters,
                    macs=macs,
                    image_size=one.size,
                    timing=timing,
                    peak_memory=ready.peak_memory,
                    product_share=product_share(macs, rate, ceiling, train=conditions.train),
                    copy_share=copy_share(needed, rate / one.batch, ceiling),
                    joules_per_image=joules.get(label),
                    top1=one.top1,
                    reference=reference,
                    ratio=None if reference is None else ratio(timing, timings[reference]),
                )
            )
    return tuple(rows)


def _check(conditions: Conditions, batch: int, steps: Steps) -> tuple[Checked, ...]:
    free_memory()
    small = conditions.device.type != "cuda"
    measures = on_device(
        conditions.device,
        conditions.autocast,
        batch=batch,
        rounds=CPU_CHECK_ROUNDS if small else CHECK_ROUNDS,
        seconds=CPU_CHECK_SECONDS if small else CHECK_SECONDS,
        tell=steps,
    )
    return check_claims(CLAIMS, measures)


def _count(models: int, conditions: Conditions, rounds: int, searched: bool, checks: bool) -> int:
    """Steps of a whole benchmark."""
    steps = 1 + models * (searched + 2 * len(conditions.forms)) + rounds if models else 0
    if checks:
        steps += CPU_CHECK_ROUNDS if conditions.device.type != "cuda" else CHECK_ROUNDS
        steps += sum(len(subjects(CLAIMS, quantity)) for quantity in ("speed", "memory", "macs"))
    return steps


def _label(name: str, form: str) -> str:
    return name if form == "eager" else f"{name} ({form})"


# Conditions


def _refuse(
    names: Sequence[str],
    given: Mapping[str, Classifier],
    against: str | None,
    batch: int | str | None,
    precision: str,
    rounds: int | None,
    checks: bool,
) -> None:
    if not names and not checks:
        raise ValueError("name at least one model, `timm:NAME`, run or model folder (`vitrail list models` names all)")
    for name, model in given.items():
        if not isinstance(model, Classifier):
            raise ValueError(f"{name}: a {type(model).__name__} is no model of vitrail; name timm's by `timm:NAME`")
    if against not in (None, "timm"):
        raise ValueError(f"against: {against!r}, but only timm has twins of our models")
    if batch not in (None, "search") and not (isinstance(batch, int) and batch > 0):
        raise ValueError(f"batch: {batch!r}; use a number above 0, or search")
    if precision not in ("auto", "bf16", "float32"):
        raise ValueError(f"precision: {precision!r}; use auto, bf16 or float32")
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds: {rounds}; use 1 or more")


@contextmanager
def _settings(conditions: Conditions, precision: str) -> Iterator[None]:
    """What is global in torch, as in training (`vitrail.engine.device.prepare`), and put back afterwards."""
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        if conditions.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        if "optimized" in conditions.forms:
            from torch._dynamo import config

            # Models of many shapes share one forward function; beyond the limit it would silently run eager.
            stack.enter_context(config.patch(recompile_limit=64))
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _versions() -> dict[str, str]:
    import timm

    found = {"vitrail": __version__, "torch": torch.__version__, "timm": timm.__version__}
    return {**found, "python": platform.python_version()}


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}), {count} thread{'s' if count > 1 else ''}"
