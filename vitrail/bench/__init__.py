"""`vitrail bench`: its flags. `vitrail.bench(...)`, the function of the same name, is `vitrail.bench.run.bench`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from vitrail.console import output
from vitrail.files import reject_unwritable
from vitrail.schema import Positional


@dataclass(frozen=True)
class BenchCommand:
    """How fast models are on this machine: images/s, latency, memory, share of what the machine can do.

    Example: vitrail bench deit_small --against timm
    Example: vitrail bench runs/ats --data photos/ --attack runs/attack
    """

    models: Annotated[tuple[str, ...], Positional("MODEL ...")] = ()
    """names of `vitrail list models`, timm:NAME, run or model folders"""
    train: bool = False  # whole training steps instead of inference
    against: Literal["timm"] | None = None  # compare each with timm's model of the same architecture
    batch: Annotated[str | None, "N|search"] = None
    """images at a time, or search for the fastest that fits (none: what suits the device)"""
    image_size: int | None = None  # side of the images (none: each model's own)
    device: str = "auto"  # auto, cpu, cuda
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """auto is bf16 where the accelerator has it, float32 on a CPU"""
    compile: Literal["auto", "on", "off"] = "auto"  # measure the optimized form, too (auto: on CUDA)
    seconds: float = 2.0  # time of each model's rounds together
    rounds: int | None = None  # how many times all models take turns (none: 11 on CUDA, else 7)
    checks: bool = False  # the hardware-relative claims of the literature, measured here
    data: Annotated[str | None, "URI"] = None
    """measure on its test images instead of random ones (an adaptive model's time depends on them)"""
    attack: Annotated[Path | None, "FOLDER"] = None
    """output of `vitrail attack`: adaptive models once more, under its patch (needs --data)"""
    out: Annotated[Path | None, "FILE.svg"] = None  # draw accuracy (or MACs) against time
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail.bench.page import bench_tables, chart_path, save_chart
        from vitrail.bench.run import bench
        from vitrail.engine.device import keep_freed_memory

        if self.out is not None:
            reject_unwritable(chart_path(self.out), file=True)  # before minutes of measuring
        keep_freed_memory()  # this process does nothing else
        options = {name: value for name, value in vars(self).items() if name not in ("out", "json")}
        options |= {"batch": _batch(self.batch), "compile": {"auto": None, "on": True, "off": False}[self.compile]}
        result = bench(**options, quiet=self.json)
        if self.out is not None:
            save_chart(result, self.out)
        chart = [] if self.out is None else [f"chart: {self.out}"]
        return output(self.json, result.to_json(), bench_tables(result), *chart)


def _batch(text: str | None) -> int | Literal["search"] | None:
    if text is None or text == "search":
        return None if text is None else "search"
    if not text.isdecimal():
        raise ValueError(f"--batch: {text!r}; use a number above 0, or search")
    return int(text)


class _CallableModule(ModuleType):
    """Importing this folder sets `vitrail.bench` to it, and `vitrail.bench(...)` must go on working."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from vitrail.bench.run import bench

        return bench(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
