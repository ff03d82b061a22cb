"""Several ways of doing one thing, timed in turns, so that a slow moment of the machine falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP = 2  # rounds that choose kernels, compile and fill memory pools, and do not count
LEAD_CYCLES = 40_000_000  # about 20 ms of an idle device, in which the host queues what is timed


@dataclass(frozen=True)
class Rounds:
    """Seconds of every way in every round that counts."""

    seconds: dict[str, list[float]]

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, to: str) -> tuple[float, float, float]:
        """How many times as long as `to` a way takes: median of the rounds' ratios, lower and upper quartile."""
        ratios = [a / b for a, b in zip(self.seconds[way], self.seconds[to], strict=True)]
        if len(ratios) == 1:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    *,
    warm_up: int = WARM_UP,
    patience: float = float("inf"),
    lead: bool = False,
) -> Rounds:
    """Time every way once a round, in an order that is turned around from round to round.

    After `patience` seconds no further round begins; one is always made. With `lead` an accelerator first idles while
    the host queues the work: what is timed is then the device alone, as behind a long trunk in a real step, and not how
    fast the host launches. Work that waits for the device has no such lead.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(warm_up):
        for work in ways.values():
            timed(work, device, lead)
    began = time.perf_counter()
    for turn in range(rounds):
        for name in reversed(ways) if turn % 2 else ways:
            seconds[name].append(timed(ways[name], device, lead))
        if time.perf_counter() - began > patience:
            break
    return Rounds(seconds)


def timed(work: Callable[[], object], device: torch.device, lead: bool = False) -> float:
    """Seconds from the start of `work` until the device has finished it."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if lead:
        torch.cuda._sleep(LEAD_CYCLES)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def where(device: torch.device) -> str:
    """Hardware and versions, for the head of a table."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return f"{place}, torch {torch.__version__}"
