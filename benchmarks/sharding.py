"""Sharding with FSDP2: cost of a step on one process compared with plain and DDP steps, and memory of building a model.

    python benchmarks/sharding.py --device cuda --json        # ViT-B/16, batch 256, bf16, NCCL with one rank
    python benchmarks/sharding.py --device cpu                # a tiny ViT, gloo
    python benchmarks/sharding.py --build --processes 2 4     # host memory while a model of 203 M parameters is built
    python benchmarks/sharding.py --run --processes 2 4       # and in each part of a run, from first step to resume

Steps are eager for all three, in interleaved rounds; figures are medians, and the ratio is that of each round to the
plain one of the same round. Peak memory is that of a variant alone: weights, optimiser state, activations (CUDA only).
With `--build` processes report the high-water mark of their memory (VmHWM) above that before the model: built whole and
then sharded, and built block by block with only a process's rows kept. With `--run` two steps are trained on a CPU, and
one more after a resume; figures are the most anonymous memory (RssAnon, sampled) that any process had in each part,
above that before the model: files that are mapped do not count, since the system can drop what it read of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.data.batch import Batch
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import ProcessGroup, choose_precision
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.shard import keeping_rows, shard_objective
from vitrail.engine.step import TrainStep
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model

VARIANTS = ("plain", "DDP", "FSDP2", "FSDP2, activation checkpointing")
LARGE: dict[str, Any] = {"width": 1024, "depth": 16, "heads": 16}  # vit_base with these: 203 M parameters
PARTS = ("between", "built", "steps", "evaluated", "checkpoint", "resumed", "finished")
RUN: dict[str, Any] = {
    "data.uri": "synthetic:shapes?n=40&size=64",
    "data.batch": 8,
    "data.check": "off",
    "data.workers": 0,
    "data.loader": "host",
    "model.name": "vit_base",
    "model.image_size": 64,
    "model.trunk": {**LARGE, "depth": 8},
    "optim.name": "adamw",
    "optim.steps": 2,
    "engine.device": "cpu",
    "engine.shard": "full",
}


def objective_of(size: str, recompute: bool = False) -> Supervised:
    torch.manual_seed(0)
    shapes: dict[str, dict[str, Any]] = {"base": {}, "tiny": {"depth": 2, "width": 64, "heads": 2}, "large": LARGE}
    model = create_model("vit_tiny_32" if size == "tiny" else "vit_base", **shapes[size])
    if recompute:
        model.trunk.checkpoint_blocks()
    return Supervised(model, SupervisedConfig())


def step_of(variant: str, device: torch.device) -> TrainStep:
    """A training step of a variant, ready to be fed."""
    objective = objective_of("base" if device.type == "cuda" else "tiny", recompute="checkpointing" in variant)
    optim = OptimConfig()
    autocast = choose_precision("auto", device)
    schedule = make_schedule(optim, 256, 100_000)
    shard = Path(tempfile.gettempdir()) / "gathered" if variant.startswith("FSDP2") else None  # nothing is gathered
    step = TrainStep(objective, optim, schedule, device=device, autocast=autocast, shard=shard)
    if variant == "DDP":
        devices = [device] if device.type == "cuda" else None
        step._wrapped = nn.parallel.DistributedDataParallel(objective, device_ids=devices)
    return step


def timed(step: TrainStep, batch: Batch, steps: int, device: torch.device) -> float:
    """Seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        step.feed(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / steps


def compare_steps(device: torch.device, rounds: int, steps: int, count: int) -> list[dict[str, Any]]:
    cuda = device.type == "cuda"
    ready: dict[str, TrainStep] = {}
    memory: dict[str, int | None] = {}
    for variant in VARIANTS:
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        step = ready[variant] = step_of(variant, device)
        side, classes = step.objective.model.preprocess.size, len(step.objective.model.classes)
        images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, device=device)
        label = torch.randint(classes, (count,), device=device)
        batch = Batch((images,), label, label, torch.arange(count, device=device))
        timed(step, batch, 2, device)
        memory[variant] = torch.cuda.max_memory_allocated(device) - before if cuda else None
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
            times[variant].append(timed(ready[variant], batch, steps, device))
    plain = times["plain"]
    return [
        {
            "variant": variant,
            "milliseconds": round(1000 * statistics.median(every), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(every, plain, strict=True)), 3),
            "peak_bytes": memory[variant],
        }
        for variant, every in times.items()
    ]


def _memory(field: str) -> int:
    """Bytes that the kernel reports for this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def _build(rank: int, world: int, folder: str, in_rows: bool) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    shard_objective(objective_of("tiny"), torch.device("cpu"), None)  # imports count as memory before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, began = _memory("VmRSS"), time.monotonic()
    if in_rows:
        with keeping_rows(ProcessGroup(rank, world)):
            objective = objective_of("large")
    else:
        objective = objective_of("large")
    built = time.monotonic() - began
    peak = _memory("VmHWM") - before
    shard_objective(objective, torch.device("cpu"), None)
    whole = {"built": peak, "sharded": _memory("VmHWM") - before, "after": _memory("VmRSS") - before, "seconds": built}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(whole))
    torch.distributed.destroy_process_group()


def _run(rank: int, world: int, folder: str, call: int) -> None:
    """One process of a run, stopped after its first step (call 0) and resumed (call 1); records memory by part."""
    import vitrail
    from vitrail.engine.loop import Loop, Stopped
    from vitrail.recipes import recipe, with_values
    from vitrail.run import train

    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    meet = f"file://{folder}/meet-{call}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    shard_objective(objective_of("tiny"), torch.device("cpu"), None)  # imports count as memory before
    before, most, ended = _memory("RssAnon"), dict.fromkeys(PARTS, 0), threading.Event()
    parts, asked = ["between"], threading.Lock()

    def sample() -> None:
        while not ended.wait(0.005):
            most[parts[-1]] = max(most[parts[-1]], _memory("RssAnon") - before)

    def watch(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            parts.append(part)
            result = function(*args, **options)
            parts.pop()
            if part == "steps" and call == 0 and asked.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        setattr(owner, name, watched)

    watch(train.Trainer, "__init__", "built")
    watch(Loop, "restore", "resumed")
    watch(TrainStep, "feed", "steps")
    watch(Loop, "_evaluate", "evaluated")
    watch(Loop, "save", "checkpoint")
    watch(train, "finish", "finished")
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        vitrail.train(with_values(recipe("vit"), {**RUN, "out": f"{folder}/run"}), quiet=True, continued=True)
    except Stopped:
        pass
    finally:
        ended.set()
        sampler.join()
        Path(f"{folder}/{rank}-{call}.json").write_text(json.dumps(most))
        torch.distributed.destroy_process_group()


def _in_processes(function: Callable[..., None], world: int, *args: Any) -> None:
    """Call `function(rank, world, *args)` in so many processes."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=(rank, world, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=900)
        if process.exitcode != 0:
            raise SystemExit(f"a process ended with {process.exitcode}")


def _most(folder: str) -> dict[str, float]:
    """The largest of what processes recorded."""
    found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return {key: max(values[key] for values in found) for key in found[0]}


def compare_runs(worlds: list[int]) -> list[dict[str, Any]]:
    rows = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            _in_processes(_run, world, folder, 0)
            _in_processes(_run, world, folder, 1)
            rows.append({"processes": world, "most": _most(folder)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def compare_builds(worlds: list[int]) -> list[dict[str, Any]]:
    rows = []
    for world in worlds:
        for in_rows in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                _in_processes(_build, world, folder, in_rows)
                rows.append({"processes": world, "built": "in rows" if in_rows else "whole", "most": _most(folder)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--batch", type=int, help="default: 256 on CUDA, 16 on a CPU")
    parser.add_argument("--build", action="store_true", help="measure memory of building instead")
    parser.add_argument("--run", action="store_true", help="measure memory of a run instead")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    words = parser.parse_args()
    if words.build or words.run:
        if words.run:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # so that freed memory is returned
        rows = (compare_runs if words.run else compare_builds)(words.processes)
    else:
        cuda = words.device == "cuda"
        if cuda:
            torch.cuda.set_device(0)
        with tempfile.TemporaryDirectory() as folder:
            backend, meet = ("cpu:gloo,cuda:nccl" if cuda else "gloo"), f"file://{folder}/meet"
            torch.distributed.init_process_group(backend, init_method=meet, rank=0, world_size=1)
            count = words.batch or (256 if cuda else 16)
            device = torch.device("cuda", 0) if cuda else torch.device("cpu")
            rows = compare_steps(device, words.rounds, words.steps, count)
            torch.distributed.destroy_process_group()
    if words.json:
        print(json.dumps(rows))
        return
    for row in rows:
        if words.build or words.run:
            sizes = ", ".join(f"{key} {size / 2**20:,.0f} MiB" for key, size in row["most"].items() if key != "seconds")
            time = f"; {row['most']['seconds']:.1f} s" if words.build else ""
            print(f"{row['processes']} processes, {row.get('built', ''):<8} {sizes}{time}")
        else:
            peak = "" if row["peak_bytes"] is None else f"  peak {row['peak_bytes'] / 2**30:.2f} GiB"
            print(f"{row['variant']:<32} {row['milliseconds']:9.2f} ms per step  {row['ratio']:.3f} of plain{peak}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
