"""Small runs side by side on one accelerator: what a step costs alone, and how much all of them make together.

    python benchmarks/side.py DATA [--runs 1 4 8] [--model vit resnet] [--batch 250 1000] [--seconds 6] [--profile 25]
                              [--out FOLDER]

Runs are processes of their own, each a step captured as one graph with the data on the device, as `vitrail compare
--jobs` makes them. All are built first; then so many of them train for some seconds while the others wait. The first
line says whether the accelerator works for several processes at once (`nvidia-cuda-mps-control -d` before) or gives
each a slice of its time: two kernels that only wait, on one multiprocessor each, take as long as one or as long as two.
`--profile` prints the kernels of a step that took longest. On a CPU it works, and means nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))

import torch
from device_runs import DeviceRuns

from vitrail.config import RunConfig
from vitrail.recipes import recipe, with_values

CYCLES = 1_000_000_000  # of a kernel that waits: half a second or so
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("small-deit", {"model.trunk": {"depth": 6}, "optim.lr": 1e-3}),
    "resnet": (
        "small-rsb",
        {"model.name": "cifar_resnet32", "optim.name": "sgd", "optim.lr": 0.1, "objective.loss": "cross_entropy"},
    ),
}


def settings(model: str, batch: int, data: str) -> RunConfig:
    name, changes = MODELS[model]
    return with_values(recipe(name), {**changes, "data.uri": data, "data.batch": batch, "optim.epochs": 10_000.0})


def profiled(advance: Callable[[int], None], wait: Callable[[], None], steps: int, most: int) -> list[str]:
    """Lines: kernels and milliseconds a step, then the longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as made:
        began = time.perf_counter()
        advance(steps)
        wait()
        wall = time.perf_counter() - began
    kernels = [e for e in made.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    count, busy = sum(e.count for e in kernels) / steps, sum(e.self_device_time_total for e in kernels) / steps / 1e3
    lines = [f"{count:.0f} kernels a step, busy {busy:.2f} ms, {1e3 * wall / steps:.2f} ms with the profiler"]
    longest = ((e.self_device_time_total / steps / 1e3, e.count / steps, e.key[:110]) for e in kernels[:most])
    return [*lines, *(f"  {ms:7.3f} ms {times:6.1f} x  {name}" for ms, times, name in longest)]


def child(pipe: Connection, data: str, seed: int, words: dict[str, Any]) -> None:
    """One run, told what to do next."""
    runs = DeviceRuns(data, limit=words["limit"])
    made: dict[tuple[str, int], Any] = {}
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, *more = order
        if what == "sleep":
            began = time.perf_counter()
            if runs.fast:
                torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            runs.wait()
            pipe.send(time.perf_counter() - began)
            continue
        model, batch = more[:2]
        if (model, batch) not in made:
            made.clear()
            step, loader, _ = runs.prepared(settings(model, batch, data), seed, compiled=words["compiled"])
            batches = iter(loader)

            def advance(count: int, step: Any = step, batches: Any = batches) -> None:
                for _ in range(count):
                    step.feed(next(batches))

            advance(words["warm"])
            runs.wait()
            made[model, batch] = advance
        if what == "build":
            pipe.send("built")
        elif what == "profile":
            pipe.send(profiled(made[model, batch], runs.wait, 20, more[2]))
        else:
            seconds, count, began = more[2], 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                made[model, batch](10)
                runs.wait()  # one wait in ten steps
                count += 10
            pipe.send(count * batch / (time.perf_counter() - began))


class Side:
    """Children, and orders to some of them."""

    def __init__(self, count: int, data: str, words: dict[str, Any]) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Any] = []
        for seed in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, data, seed, words), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def ask(self, count: int, *order: Any) -> list[Any]:
        for pipe in self.pipes[:count]:
            pipe.send(order)
        return [pipe.recv() for pipe in self.pipes[:count]]

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[250, 1000])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--profile", type=int, default=0, help="so many kernels of a step")
    parser.add_argument("--limit", type=int, help="images of the data")
    parser.add_argument("--warm", type=int, default=30, help="steps before times are taken")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = {"compiled": not options.no_compile, "limit": options.limit, "warm": options.warm}
    side = Side(max(options.runs), options.data, words)
    found: dict[str, Any] = {"torch": torch.__version__, "rows": []}
    if torch.cuda.is_available() and len(side.pipes) > 1:
        side.ask(2, "sleep")
        alone = side.ask(1, "sleep")[0]
        found["two waiting kernels"] = max(side.ask(2, "sleep")) / alone
        print(f"two kernels that wait take {found['two waiting kernels']:.2f} times one", flush=True)
    for model in options.model:
        for batch in options.batch:
            side.ask(len(side.pipes), "build", model, batch)
            if options.profile:
                print("\n".join(side.ask(1, "profile", model, batch, options.profile)[0]), flush=True)
            first = 0.0
            for count in options.runs:
                total = sum(side.ask(count, "train", model, batch, options.seconds))
                first = first or total
                row = {"model": model, "batch": batch, "runs": count, "images_per_second": round(total)}
                found["rows"].append(row)
                print(f"{model} batch {batch}: {count} runs {total:,.0f} img/s, {total / first:.2f}", flush=True)
    side.end()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "side.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
