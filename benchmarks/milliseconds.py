"""Accuracy against milliseconds: policies that leave out or merge tokens, on trained dense runs.

    python benchmarks/milliseconds.py RUN [RUN ...] --data DATA [--json FILE] [--device cuda] [--batch 1 1024]
        [--compile off auto] [--runtimes torch onnxruntime OpenVINO int8] [--shares 0.5 0.6 ...]
        [--policies tome-3 evit ...] [--tuned RUN ...] [--seconds 150]

Each RUN is a run or model folder of a plain ViT with a class token; several are seeds of one configuration, and the
table has their mean and standard deviation. ToMe (in every block, and in 3, 4 and 6 of them with more merges in each;
with fewer merges block by block, and without proportional attention), EViT, and ATS with inverse, top-K and uniform
sampling are set to each share of the dense model's multiply-accumulates by the budget dial (ATS: on images of val, or
of train), then evaluated on test and timed. Nothing is trained here. A-ViT and AdaViT cannot be put on a dense model:
A-ViT reads its halting scores from a channel that must learn them, AdaViT's decisions have weights of their own, and
before training both keep everything. They, and any other policy, are fine-tuned by

    vitrail train --config RUN/config.yaml --model.weights RUN --optim.epochs 10 --optim.lr 1e-4 \\
        --model.trunk.adaptive.kind avit --out TUNED      (adavit; tome and .r; evit and .keep; ats and .cap, .sampling)

and `--tuned` measures such runs as they are, next to the dense model of the first RUN.

Every model is optimised (on CUDA: bf16, one CUDA graph; ATS inverse packed, with room calibrated for the batch).
`--compile off`: graphs alone, `auto`: compiled as well (a minute per model and batch size); both may be given, and are
rows of their own. Each model takes turns with the dense one of the same kind, call by call in rounds; a speed-up is the
median of the rounds' ratios. What cannot be compiled is measured as a graph alone, or without one, and says so.
On a CPU, `--runtimes` also times the file of `vitrail export`, in float32 by onnxruntime and OpenVINO, and in int8 by
onnxruntime, next to the dense model's file in the same runtime. What cannot be a file (uniform sampling draws) is a row
with its error.

Each point is one JSON line in FILE as soon as it is known, those that decide most first. A point that fails is a line
with its error; the next call with the same FILE measures failed and missing points only, so that `--seconds` may cut
the work into parts. The table at the end is of all lines of the file: points within 0.5 of the dense accuracy are set
in bold.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from latency import RUNTIMES, Work
from rounds import where
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.engine.device import choose_device, keep_freed_memory
from vitrail.measure.speed import Timing, Way, in_turns, ratio
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import calibrate, mean_gmacs
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import AdaptiveConfig, Ats, Evit, Tome
from vitrail.model.cost import cost
from vitrail.model.export import read_onnx, to_onnx
from vitrail.model.optimize import Optimized
from vitrail.model.quantize import write_int8
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for

Key = tuple[str, str, float | None, str]
"""Run, policy, share, and whether it is compiled (auto, off), or the runtime of its file."""


def layers(depth: int, *shares: float) -> tuple[int, ...]:
    """Blocks at these shares of the depth."""
    return tuple(sorted({int(depth * share) for share in shares}))


POLICIES: dict[str, Callable[[int], AdaptiveConfig]] = {  # those first that decide most, should time run out
    "tome-3": lambda depth: Tome(layers=layers(depth, 1 / 6, 1 / 3, 1 / 2)),
    "evit": lambda depth: Evit(),
    "tome": lambda depth: Tome(),
    "ats-uniform": lambda depth: Ats(sampling="uniform"),
    "ats-inverse": lambda depth: Ats(),
    "tome-4": lambda depth: Tome(layers=layers(depth, 1 / 12, 1 / 4, 5 / 12, 7 / 12)),
    "tome-6": lambda depth: Tome(layers=tuple(range(0, depth, 2))),
    "tome-3-late": lambda depth: Tome(layers=layers(depth, 1 / 4, 1 / 2, 3 / 4)),
    "ats-top": lambda depth: Ats(sampling="top"),
    "tome-decreasing": lambda depth: Tome(schedule="decreasing"),
    "tome-plain-attention": lambda depth: Tome(proportional=False),
}
SHARES = (0.5, 0.6, 0.7, 0.9, 0.8)
CLOSE = 0.005  # of accuracy: what may be lost
TUNING = 512  # images on which ATS finds its points
CHUNK = 64  # images at a time where shapes are not fixed: dial, cost, and accuracy on a CPU


class Exported:
    """A model's file in a runtime, called as an optimised model is. `work` is timed, with the first batch alone."""

    compiled, graph, recomputed, batches = False, False, 0, 0

    def __init__(self, bench: Bench, model: Classifier, size: int, runtime: str) -> None:
        name = "dense" if model is bench.dense else bench.point
        file, reduced = (bench.folder / f"{name}{end}.onnx" for end in ("", "-int8"))
        if not file.exists():
            to_onnx(model, file, input="float", output="logits")
        if runtime == "int8" and not reduced.exists():
            write_int8(file, reduced, bench.tuning[0])
        self.precision, load_file = "float32", RUNTIMES["onnxruntime" if runtime == "int8" else runtime]
        if runtime == "int8":
            self.precision, file = "int8", reduced
        self.work: Work = load_file(file, bench.batches(size)[0], torch.get_num_threads())
        self.run = read_onnx(file)

    def __call__(self, images: Tensor) -> Tensor:
        return self.run(images)


Ready = Optimized | Exported


@dataclass
class Bench:
    """The dense model, the images, and how things are measured."""

    options: argparse.Namespace
    run: Path
    device: torch.device
    dense: Classifier
    test: Tensor
    labels: Tensor
    tuning: list[Tensor]
    gmacs: float
    folder: Path  # of exported files
    point: str = ""  # that is measured: what its file is called
    ready: dict[tuple[int, str], Ready] = field(default_factory=dict)  # the dense model by batch size and compile

    def dense_for(self, size: int, compiled: str) -> Ready:
        if (size, compiled) not in self.ready:
            self.ready[size, compiled], reason = optimised(self, self.dense, size, compiled)
            if reason:
                print(f"dense, batch {size}: {reason}", flush=True)
        return self.ready[size, compiled]

    def batches(self, size: int) -> list[Tensor]:
        """Up to four batches of mixed test images of one size, some images twice where there are too few."""
        count = max(1, min(4, len(self.test) // size))
        mixed = torch.randperm(len(self.test), generator=torch.Generator().manual_seed(0)).to(self.device)
        return list(self.test[mixed[torch.arange(count * size, device=self.device) % len(mixed)]].split(size))


def images_of(model: Classifier, split: Split, most: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as an optimised model takes them, and labels, on the device; `most` evenly spaced ones, as folders are
    sorted by class and ATS leaves more tokens in some classes than in others."""
    rows = split if most is None or most >= len(split) else split.take([i * len(split) // most for i in range(most)])
    with evaluation_batches(model, rows, model.preprocess, batch=256, device=device, workers=None) as loader:
        parts = [(batch.images, batch.label) for batch in loader]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return images.to(torch.bfloat16 if device.type == "cuda" else torch.float32), labels


def in_parts(images: Tensor, size: int) -> list[Tensor]:
    return list(images.split(size))


def gmacs_of(bench: Bench, model: Classifier) -> float:
    """Mean cost on test; of policies that leave equally many tokens of every image, that of any."""
    if model.policy is None:
        return bench.gmacs
    same = model.policy.same_cost or (isinstance(model.policy, AtsPolicy) and model.policy.even)
    images = bench.test[:2] if same else bench.test
    with autocast(bench.device):
        return mean_gmacs(model, [part.float() for part in in_parts(images, 4 * CHUNK)])


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimised(bench: Bench, model: Classifier, size: int, compiled: str) -> tuple[Ready, str]:
    """A copy for batches of this size that has run once, and why it is not compiled or captured; empty where it is."""
    if compiled in (*RUNTIMES, "int8"):
        return Exported(bench, model, size, compiled), ""
    if isinstance(model.policy, AtsPolicy) and not model.policy.even and bench.device.type == "cuda":
        with autocast(bench.device):
            calibrate(model, [part.float() for part in bench.tuning], batch=size)
    example, reasons = bench.batches(size)[0], []
    # As a graph A-ViT and AdaViT compute every token, and save the launches, which take longest on a small network.
    tries: Sequence[dict[str, Any]] = ({}, {"compile": False, "graph": True}, {"compile": False, "graph": False})
    if compiled == "off":
        tries = tries[1:]
    for settings in tries if bench.device.type == "cuda" else ({},):
        try:
            ready = model.optimize(**settings)
            ready(example)
            synchronize(bench.device)
        except Exception as error:
            if settings == tries[-1] or bench.device.type == "cpu":
                raise
            reasons.append(f"{settings or 'compiled'}: {short(error)}")
        else:
            return ready, "; ".join(reasons)
    raise AssertionError


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def accuracy(bench: Bench, ready: Ready, size: int) -> float:
    """Top-1 on test. Batches keep the size that was compiled and captured; the last one is filled up."""
    torch.manual_seed(0)  # uniform sampling draws
    right = 0
    for images, labels in zip(bench.test.split(size), bench.labels.split(size), strict=True):
        full = torch.cat([images, bench.batches(size)[0][len(images) :]]) if bench.device.type == "cuda" else images
        right += int((ready(full)[: len(images)].argmax(1) == labels).sum())
    return right / len(bench.test)


def timed(bench: Bench, works: dict[str, Ready], size: int) -> dict[str, Timing]:
    batches = bench.batches(size)

    def way(model: Ready) -> Way:
        return Way(model.work if isinstance(model, Exported) else lambda i: model(batches[i % len(batches)]), size)

    ways = {name: way(model) for name, model in works.items()}
    return in_turns(ways, bench.device, rounds=bench.options.rounds, seconds=bench.options.seconds_each)


def figures(bench: Bench, model: Classifier, size: int, compiled: str) -> tuple[dict[str, Any], Ready]:
    """Time of one batch size, next to the dense model's in the same rounds."""
    if model is bench.dense:
        ready, reason = bench.dense_for(size, compiled), ""
        found = timed(bench, {"policy": ready}, size)
        faster: dict[str, Any] = {"speedup": 1.0}
    else:
        ready, reason = optimised(bench, model, size, compiled)
        found = timed(bench, {"dense": bench.dense_for(size, compiled), "policy": ready}, size)
        gain = ratio(found["policy"], found["dense"])
        faster = {"speedup": gain.median, "quartiles": [gain.low, gain.high], "dense_ms": 1e3 * found["dense"].seconds}
    row = {"ms": 1e3 * found["policy"].seconds, "images_per_second": found["policy"].images_per_second, **faster}
    row |= {"compiled": ready.compiled, "graph": ready.graph, "precision": ready.precision}
    row |= {"recomputed": ready.recomputed, "calls": ready.batches} if ready.recomputed else {}
    return {**row, "fell_back": reason} if reason else row, ready


def point(bench: Bench, model: Classifier, compiled: str) -> dict[str, Any]:
    """Accuracy, cost and times of a model; a batch size that fails has its error in place of times."""
    row: dict[str, Any] = {"gmacs": gmacs_of(bench, model), "batches": {}}
    row["mac_share"] = row["gmacs"] / bench.gmacs
    row["adaptive"] = model.spec["trunk"].get("adaptive")
    for size in sorted(bench.options.batch, reverse=True):
        try:
            row["batches"][str(size)], ready = figures(bench, model, size, compiled)
            if "top1" not in row:
                row["top1"] = accuracy(bench, ready, size if bench.device.type == "cuda" else CHUNK)
        except Exception as error:
            traceback.print_exc()
            row["batches"][str(size)] = {"error": short(error)}
    return row


def at_share(bench: Bench, policy: str, share: float) -> Classifier:
    model = make_adaptive(bench.dense, POLICIES[policy](len(list(bench.dense.trunk.blocks))))  # type: ignore[arg-type]
    with autocast(bench.device):
        model.set_budget(share=share, images=[part.float() for part in bench.tuning])
    return model


def works(bench: Bench) -> dict[Key, Callable[[], Classifier]]:
    """How each point of a run gets its model, the dense one first; all without compilation before any with it."""
    options, run, points = bench.options, str(bench.run), {}
    runtimes = ["off" if name == "torch" else name for name in options.runtimes]
    for compiled in sorted(options.compile, reverse=True) if bench.device.type == "cuda" else runtimes:
        points[run, "dense", None, compiled] = lambda: bench.dense
        for tuned in options.tuned if bench.run == options.run[0] else []:
            points[run, str(tuned), None, compiled] = lambda tuned=tuned: load(tuned).to(bench.device).eval()
        for share in options.shares:
            for policy in options.policies:
                points[run, policy, share, compiled] = lambda p=policy, s=share: at_share(bench, p, s)
    return points


def prepared(options: argparse.Namespace, run: Path, folder: Path) -> Bench:
    device = choose_device(options.device)
    dense = load(run).to(device).eval()
    if dense.policy is not None:
        raise SystemExit(f"{run} is adaptive already; name the dense run that it comes from")
    data = open_for(dense, options.data)
    test, labels = images_of(dense, data["test" if "test" in data.splits else "val"], options.images, device)
    split = data["val" if "val" in data.splits and "test" in data.splits else "train"]
    tuning = in_parts(images_of(dense, split, TUNING, device)[0], CHUNK)
    return Bench(options, run, device, dense, test, labels, tuning, cost(dense).macs / 1e9, folder)


def known(file: Path | None) -> dict[Key, dict[str, Any]]:
    """Points that are in the file without an error."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    rows = {(row["run"], row["policy"], row["share"], row["compile"]): row for row in map(json.loads, lines)}
    return {key: row for key, row in rows.items() if "error" not in row and "top1" in row}


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the standard deviation where there are several."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}"


def table(rows: Mapping[Key, dict[str, Any]], sizes: Sequence[int]) -> list[str]:
    """All points, means over runs, and those of each batch size that lose no more than `CLOSE`, the fastest first."""
    times = [f"batch {s}: {what}" for s in sizes for what in ("ms", "times dense")]
    columns = ["policy", "share", "compile", "runs", "top-1, %", "points", "MACs", *times]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    groups: dict[tuple[str, float | None, str], list[dict[str, Any]]] = {}
    for (_, *group), row in rows.items():
        groups.setdefault(tuple(group), []).append(row)  # type: ignore[arg-type]
    fastest: dict[int, list[tuple[float, str]]] = {size: [] for size in sizes}
    for (policy, share, compiled), group in groups.items():
        pairs = [(row, rows.get((row["run"], "dense", None, compiled))) for row in group]
        points = [100 * (row["top1"] - dense["top1"]) for row, dense in pairs if dense is not None]
        close = bool(points) and statistics.fmean(points) >= -100 * CLOSE - 1e-9
        cells = [policy, "" if share is None else f"{share:g}", compiled, str(len(group))]
        cells += [spread([100 * row["top1"] for row in group], ".2f"), spread(points, "+.2f") if points else ""]
        cells += [f"{statistics.fmean(row['mac_share'] for row in group):.3f}"]
        for size in sizes:
            found = [row["batches"][str(size)] for row in group if "ms" in row["batches"].get(str(size), {})]
            cells += [
                spread([t[what] for t in found], f".{d}f") if found else "" for what, d in (("ms", 3), ("speedup", 2))
            ]
            if found and close and policy != "dense":
                fastest[size].append(
                    (statistics.fmean(t["speedup"] for t in found), f"{policy} at {cells[6]} ({compiled})")
                )
        lines.append(f"| {' | '.join(f'**{c}**' if close and c else c for c in cells)} |")
    for size, found in fastest.items():
        best = [f"{name}: {gain:.2f}" for gain, name in sorted(found, reverse=True)[:5]]
        lines.append(
            f"batch {size}, within {100 * CLOSE:g} points of dense, times as fast: {', '.join(best) or 'none'}"
        )
    return lines


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="dense runs: seeds of one configuration")
    parser.add_argument("--data", required=True)
    parser.add_argument("--json", type=Path, help="file of rows, which a second call completes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 1024])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the dense model's MACs")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--tuned", type=Path, nargs="*", default=[], help="runs fine-tuned under a policy")
    parser.add_argument("--images", type=int, help="at most so many of test (none: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds_each", type=float, default=0.7, help="timing of each model and batch size, about")
    parser.add_argument(
        "--compile", choices=["off", "auto"], nargs="+", default=["off"], help="CUDA: rows of each kind"
    )
    parser.add_argument(
        "--runtimes", choices=["torch", *RUNTIMES, "int8"], nargs="+", default=["torch"], help="CPU: rows of each kind"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a run: begin no further point after")
    parser.add_argument("--threads", type=int, help="of the CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # Otherwise torch stops compiling after the eighth model: every one runs the same lines of code.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    warnings.filterwarnings("ignore", message=".*computed again.*")  # rows count them
    rows = known(options.json)
    for run in options.run:
        with tempfile.TemporaryDirectory() as folder:
            measured(options, run, rows, Path(folder))
    print("\n" + "\n".join(table(rows, options.batch)), flush=True)


def measured(options: argparse.Namespace, run: Path, rows: dict[Key, dict[str, Any]], folder: Path) -> None:
    """Add the points of a run that are missing."""
    began = time.monotonic()
    bench = prepared(options, run, folder)
    about = {"machine": where(bench.device), "data": options.data, "images": len(bench.test)}
    print(f"{about['machine']}, {run}, {len(bench.test)} images, {bench.gmacs:.4f} GMACs dense\n", flush=True)
    points = works(bench)
    for key, model in points.items():
        if key in rows:
            continue
        if time.monotonic() - began > options.seconds:
            missing = sum(key not in rows for key in points)
            print(f"{options.seconds:g} seconds are over: {missing} points are left for another call", flush=True)
            break
        row: dict[str, Any] = dict(zip(("run", "policy", "share", "compile"), key, strict=True)) | about
        start, bench.point = time.monotonic(), f"{Path(key[1]).name}-{key[2]}"
        try:
            row |= point(bench, model(), key[3])
        except Exception as error:
            traceback.print_exc()
            row["error"] = short(error)
        row["seconds"] = round(time.monotonic() - start, 1)
        if "error" not in row and "top1" in row:
            rows[key] = row
        text = json.dumps(row)
        print(text, flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
