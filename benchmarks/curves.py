"""Speed and memory as curves: against resolution, batch size, number of classes and rows of a memory bank.

    python benchmarks/curves.py --json FILE [--part resolution batch classes bank] [--compile off] [--seconds 300]
    python benchmarks/curves.py --json FILE --part resolution --only DeiT-S --values 256 448    other points
    python benchmarks/curves.py --draw FILE --out FOLDER       one SVG per part from the rows of FILE
    ... --smoke             tiny networks, for a CPU; the numbers mean nothing

    resolution  training and inference of six networks on 64 images of 96 to 512 pixels
    batch       the same networks on 1 to 512 images of 224 pixels
    classes     a training step of DeiT-S on 256 images, and one of its head alone, with 10 to 21,000 classes (cross
                entropy and BCE)
    bank        a training step of MSF (k = 5) and of MoCo with ResNet-18 on 256 images of 32 pixels, with 4,096 to
                1,048,576 rows of width 128

A training step is the engine's (forward, backward, optimiser; bank and momentum encoder where there are any), inference
is an optimised model, both on batches of bytes that lie on the device. On CUDA both run in bf16 as one CUDA graph, or,
where that fails, without one ('no_graph' says why); `--compile auto` also compiles, as `vitrail train` does unless told
otherwise. The head alone is trained on stored class tokens: forward, loss, backward and optimiser. 'ms' is the median
of rounds, 'peak_gib' the highest memory of all tensors but the stored batches (CUDA only).

Each point is one JSON line in FILE as soon as it is known. The middle and the ends of every curve come first. A point
that fails is a line with its error. The next call with the same FILE measures what is missing or failed; what ran out
of memory is not tried again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curve_charts import AXES, draw
from milliseconds import short, synchronize
from objectives import HEAD, OPTIM
from rounds import where
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.engine.config import EngineConfig, OptimConfig
from vitrail.engine.device import ProcessGroup, keep_freed_memory, prepare
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, TrainStep
from vitrail.learn.config import MocoConfig, MsfConfig, SupervisedConfig
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.learn.supervised import Supervised
from vitrail.measure.speed import MemoryWatch, Timing, Way, in_turns
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.parts.tokens import Tokens

ROUNDS, SECONDS, INPUTS, IMAGES = 5, 0.3, 4, 50_000
SMALL = {"depth": 2, "width": 64}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {  # name, and what makes it tiny
    "DeiT-S": ("deit_small", {**SMALL, "heads": 2}),
    "CaiT-XXS24": ("cait_xxs24", {**SMALL, "heads": 2}),
    "ResMLP-S24": ("resmlp_s24", SMALL),
    "PatchConvNet-S60": ("patchconvnet_s60", SMALL),
    "XCiT-S12/16": ("xcit_s12_p16", {**SMALL, "heads": 2}),
    "ResNet-50": ("timm:resnet50", {"layers": (1, 1, 1, 1)}),
}
STEPS = {  # what is trained with a growing number of classes, and its loss
    "step, CE": SupervisedConfig(),
    "step, BCE": SupervisedConfig(loss="bce"),
    "head, CE": SupervisedConfig(),
    "head, BCE": SupervisedConfig(loss="bce"),
}
BANKS: dict[str, Any] = {"MSF, k = 5": MsfConfig(k=5, predictor_hidden=512), "MoCo": MocoConfig()}


@dataclass(frozen=True)
class Point:
    """One measurement: a point of the line `name`."""

    part: str
    name: str
    work: str  # training, inference
    pixels: int
    batch: int
    classes: int
    rows: int = 0  # of the memory bank


@dataclass(frozen=True)
class Grid:
    """Values of each axis, the middle and the ends first, and what is fixed in the other parts."""

    values: dict[str, Sequence[int]]
    pixels: int
    batch: int  # against resolution
    step_batch: int  # against classes and rows
    classes: int


FULL = Grid(
    {
        "resolution": (224, 512, 96, 384, 160, 288, 128),
        "batch": (32, 512, 1, 128, 8),
        "classes": (1000, 21_000, 10, 10_000, 100),
        "bank": (65_536, 1_048_576, 4096, 262_144, 16_384),
    },
    *(224, 64, 256, 1000),
)
SMOKE = Grid({"resolution": (32, 64), "batch": (1, 2), "classes": (10, 20), "bank": (16, 64)}, 64, 2, 4, 10)


def points(grid: Grid) -> list[Point]:
    """All points, those that say most first: the first value of every part, then the second, and so on."""
    ranked = []
    for part, values in grid.values.items():
        if part in ("resolution", "batch"):
            lines = [(name, work) for name in NETWORKS for work in ("training", "inference")]
        else:
            lines = [(name, "training") for name in (STEPS if part == "classes" else BANKS)]
        pixels, classes = (32, 10) if part == "bank" else (grid.pixels, grid.classes)
        batch = grid.step_batch if part in ("classes", "bank") else grid.batch
        for rank, value in enumerate(values):
            for name, work in lines:
                point = Point(part, name, work, pixels, batch, classes)
                ranked.append((rank, replace(point, **{AXES[part]: value})))
    return [point for _, point in sorted(ranked, key=lambda pair: pair[0])]


# One point


@dataclass(frozen=True)
class Bench:
    """Where and how points are measured."""

    device: torch.device
    compile: bool
    smoke: bool

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def network(self, name: str, point: Point) -> Classifier:
        model, tiny = NETWORKS[name]
        changes = tiny if self.smoke else {}
        return create_model(model, classes=point.classes, image_size=point.pixels, device=self.device, **changes)


class HeadAlone(Supervised):
    """The loss of a head on stored class tokens: no trunk. Tokens are parameters, so that they get their gradient."""

    def __init__(self, model: Classifier, config: SupervisedConfig, batch: int) -> None:
        super().__init__(model, config)
        device = next(model.head.parameters()).device
        self.tokens = nn.Parameter(torch.randn(batch, 1, model.head.features, device=device))
        model.trunk.requires_grad_(False).blocks = nn.ModuleList()

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        stack = self.model.head(Tokens(self.tokens, 1, (0, 0)))
        return {"loss": self.criterion(stack[:, 0], batch.target)}


def objective(point: Point, bench: Bench) -> Objective:
    if point.part == "bank":
        name = "cifar_resnet20" if bench.smoke else "resnet18_32"
        model = create_model(name, classes=point.classes, head=HEAD)
        index = np.arange(IMAGES)
        facts = TrainingFacts(index % point.classes, index, OPTIM.steps or 1)
        return build_objective(replace(BANKS[point.name], bank=point.rows), model, facts)
    if point.part == "classes":
        model = bench.network("DeiT-S", point)
        config = STEPS[point.name]
        return HeadAlone(model, config, point.batch) if point.name.startswith("head") else Supervised(model, config)
    return Supervised(bench.network(point.name, point), SupervisedConfig())


def batches(point: Point, bench: Bench) -> list[Batch]:
    """Random batches on the device, of which steps take one after the other."""
    pixels = 1 if point.name.startswith("head") else point.pixels
    index = torch.arange(point.batch, device=bench.device)
    drawn = []
    for _ in range(INPUTS):
        shape = (2 if point.part == "bank" else 1, point.batch, 3, pixels, pixels)
        views = torch.randint(256, shape, dtype=torch.uint8, device=bench.device).unbind()
        labels = torch.randint(point.classes, (point.batch,), device=bench.device)
        drawn.append(Batch(tuple(views), labels, labels, index))
    return drawn


def work_of(point: Point, bench: Bench, held: Sequence[Batch], graph: bool) -> Callable[[int], object]:
    """What is timed: called with the number of the call."""
    if point.work == "inference":
        model = bench.network(point.name, point).eval()
        ready = model.optimize("bf16" if bench.on_cuda else "float32", compile=bench.compile, graph=graph)
        return lambda i: ready(held[i % INPUTS].views[0])
    optim = OPTIM if point.part == "bank" else OptimConfig(lr=1e-4)
    step = TrainStep(
        objective(point, bench),
        optim,
        make_schedule(optim, point.batch, IMAGES),
        device=bench.device,
        autocast=torch.bfloat16 if bench.on_cuda else None,
        compile=bench.compile,
        graph=graph,
    )
    if graph and step.why_no_graph:
        raise RuntimeError(step.why_no_graph)
    return lambda i: step.feed(held[i % INPUTS])


def timed(point: Point, bench: Bench, held: Sequence[Batch], graph: bool) -> tuple[Timing, int | None]:
    """The times, and the highest memory once everything is built."""
    watch = MemoryWatch(bench.device)
    way = Way(work_of(point, bench, held, graph), point.batch)
    watch.again()
    rounds, seconds = (2, 0.01) if bench.smoke else (ROUNDS, SECONDS)
    timing = in_turns({"work": way}, bench.device, rounds=rounds, seconds=seconds, warm_up=WARM_UP_STEPS + 2)["work"]
    return timing, watch.peak()


def measured(point: Point, bench: Bench) -> dict[str, Any]:
    """Time and memory of a point; without a graph where there can be none."""
    held = batches(point, bench)
    reason = ""
    try:
        timing, peak = timed(point, bench, held, graph=bench.on_cuda)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not bench.on_cuda:
            raise
        reason = short(error)
    if reason:
        tidy(bench)
        timing, peak = timed(point, bench, held, graph=False)
    row: dict[str, Any] = {"ms": 1e3 * timing.seconds, "images_per_second": timing.images_per_second}
    row |= {"quartiles": timing.quartiles, "peak_gib": None if peak is None else peak / 2**30}
    return {**row, "no_graph": reason} if reason else row


def tidy(bench: Bench) -> None:
    """Give all memory back. Raises where the device does not answer any more."""
    if bench.compile:
        torch._dynamo.reset()
    gc.collect()
    synchronize(bench.device)
    if bench.on_cuda:
        torch.cuda.empty_cache()


# All points


def rows_of(file: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; the last one of each point. A line that was cut off is left out."""
    rows: dict[tuple[Point, str], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[point_of(row), row["compile"]] = row
    return list(rows.values())


def point_of(row: dict[str, Any]) -> Point:
    return Point(**{field.name: row[field.name] for field in fields(Point)})


def is_known(row: dict[str, Any]) -> bool:
    """Whether a row is a result: a figure, or that memory does not suffice."""
    return "error" not in row or row["error"].startswith("OutOfMemoryError")


def append(row: dict[str, Any], file: Path | None) -> None:
    text = json.dumps(row)
    print(text, flush=True)
    if file is not None:
        torn = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
        with file.open("a", encoding="utf-8") as stream:
            stream.write("\n" * bool(torn) + text + "\n")


def measure_all(wanted: Sequence[Point], bench: Bench, file: Path | None, seconds: float) -> None:
    """Append a row for each point that the file does not have."""
    began = time.monotonic()
    setting = {"compile": "auto" if bench.compile else "off", "machine": where(bench.device)}
    rows = rows_of(file)
    if others := {row["machine"] for row in rows} - {setting["machine"]}:
        raise SystemExit(f"{file} has rows of {', '.join(sorted(others))}; name another file for {setting['machine']}")
    known = {point_of(row) for row in rows if row["compile"] == setting["compile"] and is_known(row)}
    missing = [point for point in wanted if point not in known]
    for count, point in enumerate(missing):
        if time.monotonic() - began > seconds:
            print(f"{seconds:g} seconds are over: {len(missing) - count} points are left for another call", flush=True)
            return
        row, start = {**asdict(point), **setting}, time.monotonic()
        try:
            row |= measured(point, bench)
        except Exception as error:
            traceback.print_exc()
            row["error"] = short(error)
        append({**row, "seconds": round(time.monotonic() - start, 2)}, file)
        tidy(bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--only", nargs="+", choices=[*NETWORKS, *STEPS, *BANKS], help="lines of the charts")
    parser.add_argument("--values", type=int, nargs="+", help="of the axis of one part, in place of the usual ones")
    parser.add_argument("--json", type=Path, help="file of rows, which a second call completes")
    parser.add_argument("--compile", choices=["off", "auto"], default="off", help="of what is measured or drawn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further point after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--draw", type=Path, help="file of rows: draw them and measure nothing")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="folder of the drawings")
    options = parser.parse_args()
    if options.draw is not None:
        draw([row for row in rows_of(options.draw) if row["compile"] == options.compile], options.out)
        return
    grid = SMOKE if options.smoke else FULL
    if options.values:
        if len(options.part) > 1:
            parser.error("--values are those of one axis: name one --part, too")
        grid = replace(grid, values={options.part[0]: options.values})
    wanted = [p for p in points(grid) if p.part in options.part and (not options.only or p.name in options.only)]
    bench = Bench(torch.device(options.device), options.compile == "auto", options.smoke)
    keep_freed_memory()
    prepare(EngineConfig(), 0, bench.device, ProcessGroup())
    # Otherwise torch stops compiling after the eighth model: every one runs the same lines of code.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    measure_all(wanted, bench, options.json, options.seconds)


if __name__ == "__main__":
    main()
