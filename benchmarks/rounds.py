"""The package's timer as benchmarks use it: one call of every way a round, and ratios of time."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.measure import speed
from vitrail.measure.speed import Timing, Way

HISTORY = Path(__file__).parent / "history.jsonl"
PRODUCTS = {
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
}
WARM_UP = 2  # calls that choose kernels, compile and fill memory pools, and do not count


@dataclass(frozen=True)
class Rounds:
    """What was found of every way."""

    timings: Mapping[str, Timing]

    def median(self, way: str) -> float:
        """Seconds."""
        return self.timings[way].seconds

    def ratio(self, way: str, to: str) -> tuple[float, float, float]:
        """How many times as long as `to` a way takes: median of the rounds' ratios, lower and upper quartile."""
        found = speed.ratio(self.timings[to], self.timings[way])
        return found.median, found.low, found.high


def in_turns(
    ways: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, *, warm_up: int = WARM_UP, **how: Any
) -> Rounds:
    """`vitrail.measure.speed.in_turns` of works that take no number; `how` is its `patience`, `lead` and `clock`."""
    numbered = {name: Way(lambda _, work=work: work()) for name, work in ways.items()}
    return Rounds(speed.in_turns(numbered, device, rounds=rounds, calls=1, warm_up=warm_up, **how))


def where(device: torch.device) -> str:
    """Hardware and versions, for the head of a table."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"cpu ({processor()}), {torch.get_num_threads()} threads, torch {torch.__version__}"


def processor() -> str:
    """The processor's name and what it has for 8-bit and 16-bit products, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("Features", "")).split()) & PRODUCTS
    return " ".join([facts.get("model name", platform.machine()), *sorted(flags)])


def add_to_history(benchmark: str, machine: str, figures: Mapping[str, float], file: Path = HISTORY) -> None:
    """Append a line to `benchmarks/history.jsonl`: what was measured, when, on which commit and machine."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    line = {"date": time.strftime("%Y-%m-%d"), "benchmark": benchmark, "commit": commit, "machine": machine}
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**line, "figures": {name: float(f"{v:.5g}") for name, v in figures.items()}}) + "\n")
