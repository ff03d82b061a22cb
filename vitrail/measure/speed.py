"""Timing of work on this machine: several ways take turns, so that a slow moment affects all of them."""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.kernels.cuda_graph import captured
from vitrail.measure.evaluator import evaluation_mode
from vitrail.quantities import percent

ROUNDS = 5
WARM_UP_CALLS = 3  # compilation, kernel choice and memory pools happen in the first calls
MOST_CALLS = 1000  # per round
LEAD_CYCLES = 40_000_000  # about 20 ms of an idle device, in which the host queues what is timed
FRESH_SETS = 4  # different inputs, used in turn, so that no call finds its own input in a cache
FRESH_BYTES = 2**31  # of all sets together; large batches fill the caches anyway
NOISY_SPREAD, NOISY_DRIFT, NOISY_CONTROL = 0.10, 0.05, 0.03  # shares from which a machine is called noisy

Work = Callable[[int], object]  # called with the number of the call, so that inputs can change from call to call
Clock = Callable[[], float]  # seconds since some moment


@dataclass(frozen=True)
class Way:
    """One of several things to time; `batch` images per call."""

    work: Work
    batch: int = 1


@dataclass(frozen=True)
class Timing:
    """Seconds of every round and, inside the rounds, of every call; all rounds have equally many calls."""

    batch: int
    rounds: tuple[float, ...]
    calls: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Per call: median of the rounds' means."""
        return statistics.median(self.rounds) * len(self.rounds) / len(self.calls)

    @property
    def speeds(self) -> list[float]:
        """Images/s in each round."""
        images = self.batch * len(self.calls) / len(self.rounds)
        return [images / seconds for seconds in self.rounds]

    @property
    def images_per_second(self) -> float:
        return statistics.median(self.speeds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the rounds' images/s."""
        return quartiles(self.speeds)[::2]

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        low, middle, high = quartiles(self.speeds)
        return (high - low) / middle

    def latency(self, percent: int) -> float:
        """Seconds within which `percent` of the calls were done."""
        return percentile(self.calls, percent)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one way is as another: median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Noise:
    """How far the machine can be trusted; `reasons` is empty where it was quiet."""

    spread: float  # largest distance of quartiles of any way, as a share of its median
    drift: float  # how much longer the second half of the rounds took than the first, as a share
    control: float | None  # one way against itself: the median of the rounds' ratios, less 1
    reasons: tuple[str, ...] = ()

    @property
    def noisy(self) -> bool:
        return bool(self.reasons)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    return cast("tuple[float, float, float]", tuple(statistics.quantiles(values, n=4, method="inclusive")))


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` (1 to 99) of the values lie, interpolated between neighbours.

    >>> percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50)
    3.0
    """
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def ratio(way: Timing, to: Timing) -> Ratio:
    """How many times as fast as `to` a way is, round by round: what slows the machine for a while cancels out."""
    low, middle, high = quartiles([a / b for a, b in zip(way.speeds, to.speeds, strict=True)])
    return Ratio(middle, low, high)


def in_turns(
    ways: Mapping[str, Way],
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    seconds: float = 1.0,
    calls: int | None = None,
    warm_up: int = WARM_UP_CALLS,
    patience: float = float("inf"),
    lead: bool = False,
    clock: Clock = perf_counter,
    turn: Callable[[int, int], object] | None = None,
) -> dict[str, Timing]:
    """Time every way once per round, in an order that alternates from round to round.

    A round makes `calls` calls of a way (none: as many as make its rounds take about `seconds` together). After
    `patience` seconds no further round begins; three are always timed, if as many are asked for. `turn` is called with
    the rounds done and their total. `lead` and `clock` are as in `timed_calls`.
    """
    counts: dict[str, int] = {}
    for name, way in ways.items():
        for i in range(warm_up):
            way.work(i)
        counts[name] = calls or _calls(way.work, seconds / rounds, device)
    every: dict[str, list[list[float]]] = {name: [] for name in ways}
    began = perf_counter()
    for done in range(rounds):
        for name in reversed(list(ways)) if done % 2 else ways:
            first = done * counts[name]
            every[name].append(timed_calls(ways[name].work, counts[name], device, first, lead=lead, clock=clock))
        if turn is not None:
            turn(done + 1, rounds)
        if done >= 2 and perf_counter() - began > patience:
            break
    return {
        name: Timing(ways[name].batch, tuple(map(sum, seconds)), tuple(s for calls in seconds for s in calls))
        for name, seconds in every.items()
    }


def _calls(work: Work, seconds: float, device: torch.device) -> int:
    """How many calls take about so long."""
    count = 1
    for _ in range(2):  # the first call after another way may be slow; as many as make a round are a better probe
        once = sum(timed_calls(work, count, device)) / count
        count = min(MOST_CALLS, max(1, round(seconds / max(once, 1e-7))))
        if count == 1:
            break
    return count


def timed_calls(
    work: Work, calls: int, device: torch.device, first: int = 0, *, lead: bool = False, clock: Clock = perf_counter
) -> list[float]:
    """Seconds of each of `calls` calls made one after the other.

    On CUDA, events on the stream mark where each call ends and the host waits once, after the last: a call's time is
    what the device spent on it, waiting for the host included. With `lead` the device first idles while the host queues
    the work: what is timed is then the device alone, as behind a long trunk in a real step, and not how fast the host
    launches (work that waits for the device has no such lead). Elsewhere each call is waited for, and `clock` read
    (`time.process_time` leaves out what other processes do).
    """
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        if lead:
            torch.cuda._sleep(LEAD_CYCLES)
        marks[0].record(stream)
        for i in range(calls):
            work(first + i)
            marks[i + 1].record(stream)
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    _wait(device)
    seconds = []
    for i in range(calls):
        start = clock()
        work(first + i)
        _wait(device)
        seconds.append(clock() - start)
    return seconds


def noise(timings: Mapping[str, Timing], control: Ratio | None = None) -> Noise:
    """Whether the machine was quiet enough for these timings, and if not, why.

    `control` is one of the ways against itself in the same rounds: how far from 1 chance alone goes.
    """
    widest = max(timings, key=lambda name: timings[name].spread)
    spread, count = timings[widest].spread, len(timings[widest].rounds)
    # One course for all ways: each round's time over the way's median, which drift of the machine moves alike.
    courses = [[s / statistics.median(t.rounds) for s in t.rounds] for t in timings.values()]
    course = [statistics.fmean(times) for times in zip(*courses, strict=True)]
    half = count // 2
    drift = statistics.median(course[count - half :]) / statistics.median(course[:half]) - 1 if half else 0.0
    reasons = []
    if count < 3:
        reasons.append(f"{count} rounds are too few to tell how noisy the machine is")
    if spread > NOISY_SPREAD:
        reasons.append(
            f"the quartiles of {widest} are {percent(spread, 0)} apart (quiet: up to {percent(NOISY_SPREAD, 0)})"
        )
    if abs(drift) > NOISY_DRIFT:
        more = "longer" if drift > 0 else "less"
        most = percent(NOISY_DRIFT, 0)
        reasons.append(f"the second half took {percent(abs(drift), 0)} {more} than the first (quiet: up to {most})")
    off = None if control is None else control.median - 1
    if off is not None and abs(off) > NOISY_CONTROL:
        reasons.append(
            f"a model against itself is off by {100 * off:+.1f} % (quiet: up to {percent(NOISY_CONTROL, 0)})"
        )
    return Noise(spread, drift, off, tuple(reasons))


def fresh_images(
    batch: int, size: int, device: torch.device, sets: int = FRESH_SETS, channels: int = 3
) -> list[Tensor]:
    """Different random images [batch, channels, size, size] on the device; fewer sets where they would take much
    memory."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, channels, size, size)
    count = max(1, min(sets, FRESH_BYTES // (math.prod(shape) * 4)))
    return [torch.randn(*shape, generator=generator, device=device) for _ in range(count)]


class MemoryWatch:
    """Bytes that tensors take on a CUDA device beyond what was there when the watch began; elsewhere unknown."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            gc.collect()
            self.before = torch.cuda.memory_allocated(device)
        self.again()

    def again(self) -> None:
        """Reset the highest value so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before


def throughput(
    model: Callable[[Tensor], Tensor],
    image_size: int,
    batch: int,
    device: torch.device | str = "cpu",
    seconds: float = 1.0,
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Images/s of inference on random images [batch, 3, image_size, image_size] already on the device.

    `images_per_second` is the median of rounds that together take about `seconds` after a warm-up, and `spread` is the
    distance of their quartiles over it. `peak_memory` is in bytes: on CUDA what tensors took (weights included),
    elsewhere the highest resident memory the whole process ever had (none where the system does not tell).
    """
    device = torch.device(device)
    images = fresh_images(batch, image_size, device, channels=getattr(model, "channels", 3))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with evaluation_mode(model), torch.inference_mode(), precision:
        way = Way(lambda i: model(images[i % len(images)]), batch)
        timing = in_turns({"model": way}, device, seconds=seconds)["model"]
    peak = peak_memory(device)
    if peak is not None and device.type == "cuda":
        peak -= sum(sets.nbytes for sets in images[1:])  # one batch of images is what inference needs
    return {
        "images_per_second": timing.images_per_second,
        "spread": timing.spread,
        "rounds": len(timing.rounds),
        "batch": batch,
        "image_size": image_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(autocast or torch.get_default_dtype()).removeprefix("torch."),
        "peak_memory": peak,
    }


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Highest bytes so far: of tensors on CUDA, elsewhere of the whole process; none where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def as_one_graph(call: Callable[[], object], calls: int = 1, warm_up: int = 3) -> Callable[[], None]:
    """Replays a CUDA graph of so many calls, captured after `warm_up` calls: launches do not count."""
    return captured(call, calls=calls, warm_up=warm_up)[0].replay
