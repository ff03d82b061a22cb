"""Models measured together on this machine: built, timed in turns, compared with timm's."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.bench import roofline
from vitrail.bench.claims import CLAIMS, Checked, DeviceMeter, check_claims, claim_subjects
from vitrail.bench.subjects import (
    BenchSubject,
    Conditions,
    Form,
    RealImages,
    choose_subjects,
    make_call,
    owns_weights,
    with_attacked,
)
from vitrail.console import out_of_memory
from vitrail.engine.device import choose_device, choose_precision
from vitrail.engine.progress import Progress
from vitrail.measure import speed
from vitrail.model.classifier import Classifier
from vitrail.version import __version__

BATCH = {False: 256, True: 128}  # on CUDA, by whether it trains
CPU_BATCH = 8
CPU_CALL_MACS = 2e10  # of the default batch: a call takes a quarter of a second on two quick cores, a second on slow
ROUNDS, CPU_ROUNDS = 11, 7
SECONDS = 2.0  # of each model's rounds together
PATIENCE = 30.0  # seconds after which no further round begins, however slow the models are
SLOW_CALL = 1.5  # seconds: a search tries nothing twice as large
CHECK_BATCH, CHECK_ROUNDS, CHECK_SECONDS = 256, 7, 1.0  # the papers' batch
CPU_CHECK_BATCH, CPU_CHECK_ROUNDS, CPU_CHECK_SECONDS = 2, 3, 0.3
TRAIN_TRAFFIC = 10  # times a step reads or writes a weight, its gradient or AdamW's two states, at the least
CONTROL = "control"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class BenchRow:
    """One model in one form."""

    model: str
    form: str  # "eager" or "optimized"
    family: str  # "vitrail" or "timm"
    parameters: int
    macs: int  # per image, forward
    image_size: int
    timing: speed.Timing
    peak_memory: int | None  # bytes of weights, one batch and all between; none where it is not measured
    product_share: float  # of the matrix product's speed
    copy_share: float  # of the copy's speed, at the least: weights and images read once per call
    joules_per_image: float | None
    top1: float | None  # as stated by the model's folder
    reference: str | None  # what `ratio` is to
    ratio: speed.Ratio | None  # above 1: faster than the reference

    @property
    def batch(self) -> int:
        return self.timing.batch

    @property
    def seconds_per_image(self) -> float:
        return 1 / self.timing.images_per_second

    def to_json(self) -> dict[str, Any]:
        timing = self.timing
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "timing"},
            "batch": timing.batch,
            "images_per_second": timing.images_per_second,
            "images_per_second_quartiles": list(timing.quartiles),
            "spread": timing.spread,
            "latency_seconds": {f"p{p}": timing.latency(p) for p in PERCENTILES},
            "rounds": len(timing.rounds),
            "calls": len(timing.calls),
            "ratio": None if self.ratio is None else asdict(self.ratio),
        }


@dataclass(frozen=True)
class Bench:
    """Rows, and under which conditions they were measured."""

    rows: tuple[BenchRow, ...]
    train: bool
    device: str
    precision: str
    versions: Mapping[str, str]
    against: str | None = None
    ceiling: roofline.Ceiling | None = None
    noise: speed.Noise | None = None
    searches: Mapping[str, Any] = field(default_factory=dict)  # of batch sizes, by model
    checks: tuple[Checked, ...] = ()
    check_batch: int | None = None
    notes: tuple[str, ...] = ()  # forms left out, models without a twin

    def to_json(self) -> dict[str, Any]:
        noise = self.noise
        return {
            "what": "training" if self.train else "inference",
            "device": self.device,
            "precision": self.precision,
            "versions": dict(self.versions),
            "against": self.against,
            "ceiling": None if self.ceiling is None else self.ceiling.to_json(),
            "noise": None if noise is None else {"noisy": noise.noisy, **asdict(noise), "reasons": list(noise.reasons)},
            "rows": [row.to_json() for row in self.rows],
            "searches": dict(self.searches),
            "checks": [check.to_json() for check in self.checks],
            "check_batch": self.check_batch,
            "notes": list(self.notes),
        }


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
    quiet: bool = True,
) -> Bench:
    """How fast models are here: zoo names, `timm:NAME`s, run or model folders; or models themselves, by names for them.

    Inference, or whole training steps with `train`, on random images that are already on the device. All models take
    turns round by round, and ratios are medians of the rounds' ratios: to the timm twin with `against="timm"`, else to
    the first model. `batch` is a number, `search` for the fastest that fits, or none for one that suits the device.
    Each model runs `eager` and, where `compile` (none: on CUDA), `optimized`. `checks` adds the hardware-relative
    claims of the DeiT, CaiT and PatchConvNet papers. `data` measures on test images of a data set; `attack` adds every
    adaptive model under the patch of that folder: what serving it costs then. Progress is shown unless `quiet`. Raises
    `ValueError` for unknown names and impossible settings.

    >>> bench(["vit_micro_28"], batch=2, rounds=3, seconds=0.01).rows[0].batch
    2
    """
    names, given = [str(name) for name in models], models if isinstance(models, Mapping) else {}
    _validate(names, given, against, batch, precision, rounds, checks)
    if attack is not None and (data is None or train):
        raise ValueError("an attack is measured in inference, on images: name --data, and leave --train")
    real = None if data is None else RealImages(str(data))
    on = choose_device(device)
    small = on.type != "cuda"
    compiled = not small if compile is None else compile
    conditions = Conditions(
        on, choose_precision(precision, on), train, ("eager", "optimized") if compiled else ("eager",)
    )
    rounds = rounds or (CPU_ROUNDS if small else ROUNDS)
    check_batch = batch if isinstance(batch, int) else CPU_CHECK_BATCH if small else CHECK_BATCH
    check_rounds = CPU_CHECK_ROUNDS if small else CHECK_ROUNDS
    check_seconds = CPU_CHECK_SECONDS if small else CHECK_SECONDS
    measured: dict[str, Any] = {"rows": ()}
    checked: tuple[Checked, ...] = ()
    with _torch_settings(conditions, precision):
        subjects, notes = choose_subjects(names, against, image_size, on, given)
        if data is not None:  # a run's stated accuracy is on its own data
            for subject in subjects:
                subject.top1 = subject.top1 if subject.data == str(data) else None
        if attack is not None:
            subjects = with_attacked(subjects, Path(attack))
        steps = 1 + len(subjects) * ((batch == "search") + 2 * len(conditions.forms)) + rounds if subjects else 0
        if checks:
            steps += check_rounds + sum(len(claim_subjects(CLAIMS, q)) for q in ("speed", "memory", "macs"))
        with Progress("bench", steps, quiet=quiet) as progress:
            if subjects:
                progress.advance(note="machine ceiling")
                ceiling = roofline.measure_ceiling(on, conditions.dtype)
                searches = _choose_batches(subjects, batch, conditions, progress)
                _prepare(subjects, conditions, progress, notes, real)
                timings, control = _time(subjects, conditions, rounds, seconds, progress)
                rows = _rows(subjects, timings, against, ceiling, conditions, progress)
                measured = {"rows": rows, "ceiling": ceiling, "noise": speed.noise(timings, control)}
                measured["searches"] = {name: search.to_json() for name, search in searches.items()}
            if checks:
                subjects.clear()  # their memory is for the checks
                roofline.free_memory()
                report = lambda note: progress.advance(note=note)  # noqa: E731
                meter = DeviceMeter(on, conditions.autocast, check_batch, check_rounds, check_seconds, report)
                checked = check_claims(CLAIMS, meter)
            progress.advance(progress.total - progress.done, "done")
    return Bench(
        **measured,
        train=train,
        device=_device_name(on),
        precision=str(conditions.dtype).removeprefix("torch."),
        versions=_versions(),
        against=against,
        checks=checked,
        check_batch=check_batch if checks else None,
        notes=tuple(notes),
    )


def _choose_batches(
    subjects: Sequence[BenchSubject], batch: int | str | None, conditions: Conditions, progress: Progress
) -> dict[str, roofline.BatchSearch]:
    """Give every subject its batch: with `search` the fastest eager one of each, else the same for all."""
    if batch != "search":
        heaviest = max(subject.cost.macs for subject in subjects) * (3 if conditions.train else 1)
        cpu_batch = max(1, min(CPU_BATCH, int(CPU_CALL_MACS // heaviest)))
        default = BATCH[conditions.train] if conditions.device.type == "cuda" else cpu_batch
        for subject in subjects:
            subject.batch = int(batch or default)
        return {}
    searches = {}
    for subject in subjects:
        subject.module.to("cpu")  # each is searched alone
    for subject in subjects:
        progress.advance(note=f"{subject.name}: batch size")
        searches[subject.name] = _search(subject, conditions)
        subject.batch = searches[subject.name].best
        subject.module.zero_grad(set_to_none=True)
        subject.module.to("cpu")
        roofline.free_memory()
    return searches


def _search(subject: BenchSubject, conditions: Conditions) -> roofline.BatchSearch:
    device = conditions.device
    subject.module.to(device)
    longest = 0.0  # seconds of a call

    def attempt(batch: int) -> float:
        nonlocal longest
        subject.module.zero_grad(set_to_none=True)  # left by an attempt that did not fit
        work = _work(subject, "eager", speed.fresh_images(batch, subject.size, device, sets=1), batch, conditions)
        work(0)
        once = sum(speed.timed_calls(work, 1, device))
        seconds = speed.timed_calls(work, max(1, min(20, round(0.2 / max(once, 1e-6)))), device)
        longest = max(longest, *seconds)
        return batch * len(seconds) / sum(seconds)

    def stop() -> str:
        return "memory" if roofline.memory_is_short(device) else "time" if longest > SLOW_CALL else ""

    most = roofline.MOST.get(device.type, roofline.MOST["cuda"])
    return roofline.search_batch(attempt, most=most, closeness=1 / 16, stop=stop)


def _prepare(
    subjects: Sequence[BenchSubject],
    conditions: Conditions,
    progress: Progress,
    notes: list[str],
    real: RealImages | None,
) -> None:
    """Make every form of every subject ready and warm; what does not fit or compile is left out with a note."""
    pool: dict[tuple[int, int], list[Tensor]] = {}  # images are shared: of many models they would take much memory
    for subject in subjects:
        subject.module.to(conditions.device)
        shape = (subject.batch, subject.size)
        images = None if real is None else real(subject, conditions.device)
        for form in conditions.forms:
            progress.advance(note=f"{_label(subject.name, form)}: warm-up")
            if images is None and shape not in pool:
                pool[shape] = speed.fresh_images(*shape, conditions.device)
            problem = _try(subject, form, images or pool[shape], conditions)
            if problem:  # outside the handler, whose frames hold what did not fit
                notes.append(problem)
                subject.module.zero_grad(set_to_none=True)
                roofline.free_memory()
    if not any(subject.work for subject in subjects):
        raise ValueError("nothing could be measured: " + "; ".join(notes))


def _try(subject: BenchSubject, form: Form, images: Sequence[Tensor], conditions: Conditions) -> str:
    """Make a form ready; returns a note where that cannot be."""
    try:
        _warm_up(subject, form, images, conditions)
    except Exception as error:
        if out_of_memory(error):
            return (
                f"{_label(subject.name, form)} does not fit into memory at batch {subject.batch}; use a smaller batch"
            )
        if form == "eager":
            raise
        # No compiler here, or a model that cannot be compiled: the eager form is measured all the same.
        reason = (str(error).strip() or "no reason given").splitlines()[0][:120]
        return f"{subject.name} could not be optimized ({type(error).__name__}: {reason})"
    return ""


def _warm_up(subject: BenchSubject, form: Form, images: Sequence[Tensor], conditions: Conditions) -> None:
    weights = sum(t.nbytes for t in (*subject.module.parameters(), *subject.module.buffers()))
    watch = speed.MemoryWatch(conditions.device)
    work = _work(subject, form, images, subject.batch, conditions)
    for call in range(conditions.warm_up):
        work(call)
    if form == "eager" and conditions.device.type == "cuda":
        watch.again()  # the first calls also chose kernels; a CUDA graph, though, takes its memory while it is captured
        work(0)
    peak = watch.peak()
    if peak is not None:
        peak += images[0].nbytes + (0 if owns_weights(subject.module, form, conditions) else weights)
    subject.work[form], subject.peak_memory[form] = work, peak


def _work(
    subject: BenchSubject, form: Form, images: Sequence[Tensor], batch: int, conditions: Conditions
) -> speed.Work:
    call = make_call(subject.module, form, conditions, subject.multilabel)
    targets = subject.targets(batch, conditions.device)
    return lambda i: call(images[i % len(images)], targets)


def _time(
    subjects: Sequence[BenchSubject], conditions: Conditions, rounds: int, seconds: float, progress: Progress
) -> tuple[dict[str, speed.Timing], speed.Ratio]:
    """Timings of all forms in turns, and the first of them against itself."""
    ways = {_label(s.name, form): speed.Way(work, s.batch) for s in subjects for form, work in s.work.items()}
    first = next(iter(ways))
    timings = speed.in_turns(
        {**ways, CONTROL: ways[first]},
        conditions.device,
        rounds=rounds,
        seconds=seconds,
        warm_up=0,
        patience=PATIENCE,
        turn=lambda done, total: progress.advance(note=f"round {done} of {total}"),
    )
    return {name: timings[name] for name in ways}, speed.ratio(timings[CONTROL], timings[first])


def _rows(
    subjects: Sequence[BenchSubject],
    timings: Mapping[str, speed.Timing],
    against: str | None,
    ceiling: roofline.Ceiling,
    conditions: Conditions,
    progress: Progress,
) -> tuple[BenchRow, ...]:
    first, meter, rows = next(iter(timings)), roofline.energy_meter(conditions.device), []
    for subject in subjects:
        macs = subject.macs or subject.cost.macs
        bytes_per_weight = TRAIN_TRAFFIC * 4 if conditions.train else conditions.dtype.itemsize
        needed = subject.cost.parameters * bytes_per_weight + subject.batch * 3 * subject.size**2 * 4
        for form, work in subject.work.items():
            label = _label(subject.name, form)
            progress.advance(note=f"{label}: energy")
            timing = timings[label]
            reference: str | None = first
            if against is not None:  # like with like: the twin in the same form, where it has one
                twins = [_label(subject.twin, f) for f in (form, "eager")] if subject.twin else []
                reference = next((twin for twin in twins if twin in timings), None)
            if reference == label:
                reference = None
            rows.append(
                BenchRow(
                    model=subject.name,
                    form=form,
                    family=subject.family,
                    parameters=subject.cost.parameters,
                    macs=macs,
                    image_size=subject.size,
                    timing=timing,
                    peak_memory=subject.peak_memory[form],
                    product_share=roofline.product_share(
                        macs, timing.images_per_second, ceiling, train=conditions.train
                    ),
                    copy_share=roofline.copy_share(needed, timing.images_per_second / subject.batch, ceiling),
                    joules_per_image=roofline.joules_per_image(work, subject.batch, conditions.device, meter),
                    top1=subject.top1,
                    reference=reference,
                    ratio=None if reference is None else speed.ratio(timing, timings[reference]),
                )
            )
    return tuple(rows)


def _label(name: str, form: str) -> str:
    return name if form == "eager" else f"{name} ({form})"


def _validate(
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
def _torch_settings(conditions: Conditions, precision: str) -> Iterator[None]:
    """Global settings of torch, as in training (`vitrail.engine.device.prepare`), restored afterwards."""
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

    versions = {"vitrail": __version__, "torch": torch.__version__, "timm": timm.__version__}
    return {**versions, "python": platform.python_version()}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}), {count} thread{'s' if count > 1 else ''}"
