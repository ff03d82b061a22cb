"""`vitrail bench`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.say import print_json, show
from vitrail.files import refuse_unwritable


def bench(
    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")] = (),
    /,
    train: bool = False,
    against: Literal["timm"] | None = None,
    batch: Annotated[str | None, tyro.conf.arg(metavar="N|search")] = None,
    image_size: int | None = None,
    device: str = "auto",
    precision: Literal["auto", "bf16", "float32"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",  # noqa: A002
    seconds: float = 2.0,
    rounds: int | None = None,
    checks: bool = False,
    data: Annotated[str | None, tyro.conf.arg(metavar="URI")] = None,
    attack: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None,
    json: bool = False,
) -> int:
    """How fast models are on this machine: images a second, latency, memory, share of what the machine can do.

    Example: vitrail bench deit_small --against timm
    Example: vitrail bench runs/ats --data photos/ --attack runs/attack

    Args:
        models: names of `vitrail list models`, timm:NAME, run or model folders
        train: whole training steps instead of inference
        against: measure timm's model of the same architecture beside each
        batch: images at a time, or search for the fastest that fits (none: what suits the device)
        image_size: side of the images (none: each model's own)
        device: auto, cpu, cuda
        precision: auto is bf16 where the accelerator has it, float32 on a CPU
        compile: measure the optimized form, too (auto: on CUDA)
        seconds: time of each model's rounds together
        rounds: how many times all models take turns (none: 11 on CUDA, else 7)
        checks: the hardware-relative claims of the literature, measured here
        data: measure on its test images instead of random ones (an adaptive model's time depends on them)
        attack: what `vitrail attack` left: adaptive models once more, under its patch (needs --data)
        out: draw accuracy (or MACs) against time
        json: print one JSON object
    """
    from vitrail.bench.page import bench_tables, chart_path, save_chart
    from vitrail.bench.run import bench as measure
    from vitrail.engine.progress import Progress
    from vitrail.measure.speed import keep_freed_memory

    if out is not None:
        refuse_unwritable(chart_path(out), file=True)  # said before minutes of measuring
    keep_freed_memory()  # this process does nothing else
    with ExitStack() as stack:
        bars: list[Progress] = []

        def told(done: int, total: int, note: str) -> None:
            if not bars:
                bars.append(stack.enter_context(Progress("bench", total, quiet=json)))
            bars[0].advance(done - bars[0].done, note)

        found = measure(
            models,
            train=train,
            against=against,
            batch=_batch(batch),
            image_size=image_size,
            device=device,
            precision=precision,
            compile={"auto": None, "on": True, "off": False}[compile],
            seconds=seconds,
            rounds=rounds,
            checks=checks,
            data=data,
            attack=attack,
            progress=told,
        )
    if out is not None:
        save_chart(found, out)
    if json:
        print_json(found.to_json())
        return 0
    show(bench_tables(found))
    if out is not None:
        print(f"picture: {out}")
    return 0


def _batch(text: str | None) -> int | Literal["search"] | None:
    if text is None or text == "search":
        return None if text is None else "search"
    if not text.isdecimal():
        raise ValueError(f"--batch: {text!r}; use a number above 0, or search")
    return int(text)
