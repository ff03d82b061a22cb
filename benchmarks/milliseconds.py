"""Accuracy against milliseconds: policies that leave out tokens, without training, on one trained dense run.

    python benchmarks/milliseconds.py RUN --data DATA [--json FILE] [--device cuda] [--batch 1 1024]
        [--shares 0.9 0.8 0.7 0.6 0.5] [--policies tome evit ...] [--tuned RUN ...] [--minutes 9]

RUN is a run or model folder of a plain ViT with a class token. ToMe (also with fewer merges block by block, and without
proportional attention), EViT, and ATS with inverse, top-K and uniform sampling are set to each share of the dense
model's multiply-accumulates by the budget dial (ATS: on images of val, or of train), then evaluated on test and timed.
`--tuned` names runs that were fine-tuned under a policy; they are measured as they are.

Every model is optimised (on CUDA: bf16, compiled, one CUDA graph; ATS inverse packed, with room calibrated for the
batch). Each takes turns with the dense model, call by call in rounds; a speed-up is the median of the rounds' ratios.
What cannot be compiled is measured as a graph alone, or without one, and says so.

Each point is one JSON line in FILE as soon as it is known. A point that fails is a line with its error; the next call
with the same FILE measures failed and missing points only, so that `--minutes` may cut the work into parts. The table
at the end is of all lines of the file: points within 0.5 of the dense accuracy are set in bold.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rounds import where
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.engine.device import choose_device
from vitrail.measure.speed import Timing, Way, in_turns, keep_freed_memory, ratio
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import calibrate, mean_gmacs
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import AdaptiveConfig, Ats, Evit, Tome
from vitrail.model.cost import cost
from vitrail.model.optimize import Optimized
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for

POLICIES: dict[str, AdaptiveConfig] = {
    "tome": Tome(),
    "evit": Evit(),
    "ats-inverse": Ats(),
    "ats-top": Ats(sampling="top"),
    "ats-uniform": Ats(sampling="uniform"),
    "tome-decreasing": Tome(schedule="decreasing"),
    "tome-plain-attention": Tome(proportional=False),
}
SHARES = (0.7, 0.5, 0.9, 0.6, 0.8)  # those first that decide most, should time run out
CLOSE = 0.005  # of accuracy: what may be lost
TUNING = 512  # images on which ATS finds its points
CHUNK = 64  # images at a time where shapes are not fixed: dial, cost, and accuracy on a CPU


@dataclass
class Bench:
    """The dense model, the images, and how things are measured."""

    options: argparse.Namespace
    device: torch.device
    dense: Classifier
    test: Tensor
    labels: Tensor
    tuning: list[Tensor]
    gmacs: float
    ready: dict[int, Optimized] = field(default_factory=dict)  # the dense model by batch size

    def batches(self, size: int) -> list[Tensor]:
        """Up to four batches of test images of one size, some images twice where there are too few."""
        count = max(1, min(4, len(self.test) // size))
        places = torch.arange(count * size, device=self.device) % len(self.test)
        return list(self.test[places].split(size))


def images_of(model: Classifier, split: Split, most: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as an optimised model takes them, and labels, on the device."""
    rows = split if most is None else split.take(list(range(min(most, len(split)))))
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


def optimised(bench: Bench, model: Classifier, size: int) -> tuple[Optimized, str]:
    """A copy for batches of this size that has run once, and why it is not compiled or captured; empty where it is."""
    if isinstance(model.policy, AtsPolicy) and not model.policy.even and bench.device.type == "cuda":
        with autocast(bench.device):
            calibrate(model, [part.float() for part in bench.tuning], batch=size)
    example, reasons = bench.batches(size)[0], []
    tries: Sequence[dict[str, Any]] = ({}, {"compile": False}, {"compile": False, "graph": False})
    if bench.options.compile == "off":
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


def accuracy(bench: Bench, ready: Optimized, size: int) -> float:
    """Top-1 on test. Batches keep the size that was compiled and captured; the last one is filled up."""
    torch.manual_seed(0)  # uniform sampling draws
    right = 0
    for images, labels in zip(bench.test.split(size), bench.labels.split(size), strict=True):
        full = torch.cat([images, bench.batches(size)[0][len(images) :]]) if bench.device.type == "cuda" else images
        right += int((ready(full)[: len(images)].argmax(1) == labels).sum())
    return right / len(bench.test)


def timed(bench: Bench, works: dict[str, Optimized], size: int) -> dict[str, Timing]:
    batches = bench.batches(size)

    def way(model: Optimized) -> Way:
        return Way(lambda i: model(batches[i % len(batches)]), size)

    ways = {name: way(model) for name, model in works.items()}
    return in_turns(ways, bench.device, rounds=bench.options.rounds, seconds=bench.options.seconds)


def figures(bench: Bench, model: Classifier, size: int) -> tuple[dict[str, Any], Optimized]:
    """Time of one batch size, next to the dense model's in the same rounds."""
    if model is bench.dense:
        ready, reason = bench.ready[size], ""
        found = timed(bench, {"policy": ready}, size)
        faster: dict[str, Any] = {"speedup": 1.0}
    else:
        ready, reason = optimised(bench, model, size)
        found = timed(bench, {"dense": bench.ready[size], "policy": ready}, size)
        gain = ratio(found["policy"], found["dense"])
        faster = {"speedup": gain.median, "quartiles": [gain.low, gain.high], "dense_ms": 1e3 * found["dense"].seconds}
    row = {"ms": 1e3 * found["policy"].seconds, "images_per_second": found["policy"].images_per_second, **faster}
    row |= {"compiled": ready.compiled, "graph": ready.graph, "precision": ready.precision}
    row |= {"recomputed": ready.recomputed, "calls": ready.batches} if ready.recomputed else {}
    return {**row, "fell_back": reason} if reason else row, ready


def point(bench: Bench, model: Classifier) -> dict[str, Any]:
    """Accuracy, cost and times of a model; a batch size that fails has its error in place of times."""
    row: dict[str, Any] = {"gmacs": gmacs_of(bench, model), "batches": {}}
    row["mac_share"] = row["gmacs"] / bench.gmacs
    row["adaptive"] = model.spec["trunk"].get("adaptive")
    for size in sorted(bench.ready, reverse=True):
        try:
            row["batches"][str(size)], ready = figures(bench, model, size)
            if "top1" not in row:
                row["top1"] = accuracy(bench, ready, size if bench.device.type == "cuda" else CHUNK)
        except Exception as error:
            traceback.print_exc()
            row["batches"][str(size)] = {"error": short(error)}
    return row


def at_share(bench: Bench, policy: str, share: float) -> Classifier:
    model = make_adaptive(bench.dense, POLICIES[policy])
    with autocast(bench.device):
        model.set_budget(share=share, images=[part.float() for part in bench.tuning])
    return model


def works(bench: Bench) -> dict[tuple[str, float | None], Callable[[], Classifier]]:
    """How each point gets its model, the dense one first."""
    points: dict[tuple[str, float | None], Callable[[], Classifier]] = {("dense", None): lambda: bench.dense}
    for run in bench.options.tuned:
        points[str(run), None] = lambda run=run: load(run).to(bench.device).eval()  # type: ignore[misc]
    for share in bench.options.shares:
        for policy in bench.options.policies:
            points[policy, share] = lambda p=policy, s=share: at_share(bench, p, s)  # type: ignore[misc]
    return points


def prepared(options: argparse.Namespace) -> Bench:
    device = choose_device(options.device)
    dense = load(options.run).to(device).eval()
    if dense.policy is not None:
        raise SystemExit(f"{options.run} is adaptive already; name the dense run that it comes from")
    data = open_for(dense, options.data)
    test, labels = images_of(dense, data["test" if "test" in data.splits else "val"], options.images, device)
    split = data["val" if "val" in data.splits and "test" in data.splits else "train"]
    tuning = in_parts(images_of(dense, split, TUNING, device)[0], CHUNK)
    bench = Bench(options, device, dense, test, labels, tuning, cost(dense).macs / 1e9)
    for size in options.batch:
        bench.ready[size], reason = optimised(bench, dense, size)
        if reason:
            print(f"dense, batch {size}: {reason}", flush=True)
    return bench


def known(file: Path | None) -> dict[tuple[str, float | None], dict[str, Any]]:
    """Points that are in the file without an error."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    rows = {(row["policy"], row["share"]): row for row in map(json.loads, lines)}
    return {key: row for key, row in rows.items() if "error" not in row and "top1" in row}


def table(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> list[str]:
    """All points, and those of each batch size that lose no more than `CLOSE`, the fastest first."""
    dense = next((row["top1"] for row in rows if row["policy"] == "dense"), None)
    columns = ["policy", "share", "top-1, %", "points", "MACs", *(f"batch {s}: ms | times dense" for s in sizes)]
    lines = [f"| {' | '.join(columns)} |", "|---" * (len(columns) + len(sizes)) + "|"]

    def close(row: dict[str, Any]) -> bool:
        return dense is not None and row["top1"] >= dense - CLOSE - 1e-9

    for row in rows:
        cells = [row["policy"], "" if row["share"] is None else f"{row['share']:g}", f"{100 * row['top1']:.2f}"]
        cells += ["" if dense is None else f"{100 * (row['top1'] - dense):+.2f}", f"{row['mac_share']:.3f}"]
        for size in sizes:
            times = row["batches"].get(str(size), {})
            cells += [f"{times['ms']:.3f}", f"{times['speedup']:.2f}"] if "ms" in times else ["", ""]
        lines.append(f"| {' | '.join(f'**{c}**' if close(row) and c else c for c in cells)} |")
    for size in sizes:
        kept = [r for r in rows if close(r) and r["policy"] != "dense" and "ms" in r["batches"].get(str(size), {})]
        kept.sort(key=lambda r: -r["batches"][str(size)]["speedup"])
        best = [f"{r['policy']} at {r['mac_share']:.2f}: {r['batches'][str(size)]['speedup']:.2f}" for r in kept[:5]]
        lines.append(
            f"batch {size}, within {100 * CLOSE:g} points of dense, times as fast: {', '.join(best) or 'none'}"
        )
    return lines


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--json", type=Path, help="file of rows, which a second call completes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 1024])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the dense model's MACs")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--tuned", type=Path, nargs="*", default=[], help="runs fine-tuned under a policy")
    parser.add_argument("--images", type=int, help="at most so many of test (none: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each model and batch size, about")
    parser.add_argument("--compile", choices=["auto", "off"], default="auto", help="off: graphs alone, minutes saved")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further point after so many")
    parser.add_argument("--threads", type=int, help="of the CPU")
    options = parser.parse_args()
    began = time.monotonic()
    if options.threads:
        torch.set_num_threads(options.threads)
    # Otherwise torch stops compiling after the eighth model: every one runs the same lines of code.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    warnings.filterwarnings("ignore", message=".*computed again.*")  # rows count them
    bench = prepared(options)
    about = {"machine": where(bench.device), "run": str(options.run), "data": options.data, "images": len(bench.test)}
    print(f"{about['machine']}, {options.run}, {len(bench.test)} images, {bench.gmacs:.4f} GMACs dense\n", flush=True)
    rows = known(options.json)
    points = works(bench)
    for key in points:
        if key in rows:
            continue
        if (time.monotonic() - began) / 60 > options.minutes:
            missing = sum(key not in rows for key in points)
            print(f"{options.minutes:g} minutes are over: {missing} points are left for another call", flush=True)
            break
        row: dict[str, Any] = {"policy": key[0], "share": key[1], **about}
        start = time.monotonic()
        try:
            row |= point(bench, points[key]())
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
    print("\n" + "\n".join(table(list(rows.values()), options.batch)), flush=True)


if __name__ == "__main__":
    main()
