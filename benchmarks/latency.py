"""Latency of one image and of eight: our models as modules and as exported files, timm's, and small networks for scale.

    python benchmarks/latency.py [--threads 2] [--seconds 5] [--files FOLDER] [--compiled] [--only TEXT ...] [--smoke]
    python benchmarks/latency.py --together
    python benchmarks/latency.py --blocks

On a CPU (float32, `--threads` for every runtime):

ours             the module as `vitrail.load` gives it
ours optimized   `model.optimize()`: LayerScale, affine maps and batch norms folded
ours compiled    the same, compiled (with --compiled)
onnxruntime      the file of `vitrail export` (float input, logits), by its CPU provider
OpenVINO         the same file, where openvino is installed
int8             the file of `vitrail export --int8`, by onnxruntime (random weights: nothing is known of accuracy)
timm             timm's model of the same architecture and weights
timm compiled    torch.compile of it (with --compiled: minutes)

On CUDA (bf16): ours, ours optimized (compiled, one CUDA graph), timm, timm compiled (mode reduce-overhead).

Weights are random, and all runtimes get the same images, which lie on the device. Every call is waited for. Runtimes
take turns, so that a slow moment of the machine affects all; p50 and p99 are over all calls, and a ratio is the median
of the rounds' ratios. On a machine that others use, `--clock cpu --threads 1` takes processor time instead, which
leaves out what other processes do. `--files` keeps exported files, whose export takes up to two minutes a model, for
the next call. `--together` prepares all models at once, each in a process of its own, since compilation takes minutes
on one core; one after the other is timed when all are ready, under the lock of a file (`--lock`), which other programs
can hold, too: `flock FILE COMMAND`.

`--blocks` times one attention block (qkv, attention, projection; batch 1) of each kind: at the two shapes of the edge
device table of SimA (Koohpayegani and Pirsiavash 2022, arXiv 2206.08898), whose D is read as channels per head, and at
ViT-Ti's and ViT-S's widths with more and more tokens. Products of linear kinds are in the cheaper order.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import timm
import torch
from rounds import WARM_UP, add_to_history, where
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

from vitrail.engine.device import keep_freed_memory
from vitrail.measure.speed import Way, in_turns, ratio
from vitrail.model.adaptive.budget import calibrate, mean_gmacs
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats
from vitrail.model.cost import cost
from vitrail.model.export import to_onnx
from vitrail.model.mixers.config import EluKernel, MixerOptions, Sima, Softmax, Xca
from vitrail.model.mixers.mixer import build_mixer
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.tokens import Tokens
from vitrail.model.quantize import write_int8
from vitrail.model.timm_weights import load_weights
from vitrail.model.trunks.timm_trunk import TimmTrunk
from vitrail.model.zoo import ZOO

BATCHES = (1, 8)
KEPT = 0.85  # sampling points of each of nine layers, of the patches that enter it: about 0.6 of the cost
CPU = torch.device("cpu")  # the clock is the host's on every device
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Work = Callable[[int], object]
waits: list[Barrier] = []  # of a process that prepares one of several models: until all are ready


@dataclass(frozen=True)
class Subject:
    """A model of the table; `name` is ours, or timm's as `timm:NAME`."""

    title: str
    name: str
    sampled: bool = False

    @property
    def ours(self) -> bool:
        return not self.name.startswith("timm:")


SUBJECTS = (
    Subject("DeiT-Ti", "deit_tiny"),
    Subject("DeiT-S", "deit_small"),
    Subject("DeiT-S, ATS sampled", "deit_small", sampled=True),
    Subject("PatchConvNet-S60", "patchconvnet_s60"),
    Subject("CaiT-XXS24", "cait_xxs24"),
    Subject("ResMLP-S12", "resmlp_s12"),
    Subject("MobileNetV4-S", "timm:mobilenetv4_conv_small"),
    Subject("EfficientNet-Lite0", "timm:efficientnet_lite0"),
    Subject("FastViT-T8", "timm:fastvit_t8"),
    Subject("RepViT-M1", "timm:repvit_m1"),
)
SMOKE = ("DeiT-Ti", "DeiT-S, ATS sampled", "MobileNetV4-S")

MIXERS: dict[str, MixerOptions] = {
    "softmax": Softmax(),
    "softmax, map stored": Softmax(),
    "SimA": Sima(),
    "SimA, q kᵀ first": Sima(order="qk_first"),
    "ELU": EluKernel(),
    "XCA": Xca(),
}
EDGE_TABLE = ((256, 512, 8), (64, 2048, 8))  # tokens, width, heads
GRIDS = (14, 24, 32, 48)  # patches per side, besides the class token


# The runtimes of one model


def modules(subject: Subject, size: int, smoke: bool) -> tuple[Classifier, nn.Module | None]:
    """Our model and, where timm has it, timm's with the same weights."""
    torch.manual_seed(0)
    if not subject.ours:
        ours = create_model(subject.name, image_size=size).eval()
        assert isinstance(ours.trunk, TimmTrunk)
        reparameterize_model(ours.trunk.backbone, inplace=True)  # branches of training merged
        return ours, ours.trunk.backbone
    small: dict[str, Any] = {"depth": 1} if smoke else {}
    policy = {"adaptive": Ats(cap=(KEPT,))} if subject.sampled else {}
    ours = create_model(subject.name, image_size=size, **small, **policy).eval()
    known = None if subject.sampled else ZOO[subject.name].timm
    if known is None:
        return ours, None
    sized = {"img_size": size} if smoke else {}  # CaiT and ResMLP of timm have one size
    theirs = timm.create_model(known, **small, **sized).eval()
    load_weights(ours, theirs.state_dict())
    return ours, theirs


def module_work(model: Callable[[Tensor], object], images: Tensor) -> Work:
    def work(_: int) -> None:
        with torch.inference_mode():
            model(images)
        if images.is_cuda:
            torch.cuda.synchronize(images.device)

    return work


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process has the lock of this file meanwhile."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def onnxruntime_work(file: Path, images: Tensor, threads: int) -> Work:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    array = images.numpy()
    return lambda _: session.run(None, {"images": array})


def openvino_work(file: Path, images: Tensor, threads: int) -> Work:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().read_model(file)
    model.reshape(list(images.shape))
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()
    array = images.numpy()
    return lambda _: request.infer({0: array})


RUNTIMES = {"onnxruntime": onnxruntime_work, "OpenVINO": openvino_work}


def cpu_works(subject: Subject, images: Tensor, options: argparse.Namespace) -> tuple[dict[str, Work], dict[str, str]]:
    """The runtimes on a CPU, and those that are left out with the reason."""
    ours, theirs = modules(subject, options.size, options.smoke)
    works: dict[str, Work] = {}
    without: dict[str, str] = {}
    if subject.ours:
        works["ours"] = module_work(ours, images)
        works["ours optimized"] = module_work(ours.optimize(), images)
        if options.compiled:
            works["ours compiled"] = module_work(ours.optimize(compile=True), images)
    kind = "-ats" if subject.sampled else ""
    file = options.files / f"{subject.name.replace(':', '-')}{kind}-{options.size}.onnx"
    for name, prepare in RUNTIMES.items():
        if find_spec(name.lower()) is None:
            without[name] = "not installed"
            continue
        try:
            with locked(file.with_suffix(".lock")):
                if not file.exists():
                    to_onnx(ours, file, input="float", output="logits")
            works[name] = prepare(file, images, options.threads)
        except (ValueError, RuntimeError) as error:
            without[name] = " ".join(str(error).split())[:200]
    if "onnxruntime" in works:
        reduced = file.with_suffix(".int8.onnx")
        try:
            with locked(reduced.with_suffix(".lock")):
                if not reduced.exists():
                    write_int8(file, reduced, torch.randn(32, *images.shape[1:]))
            works["int8"] = onnxruntime_work(reduced, images, options.threads)
        except Exception as error:  # onnxruntime has error classes of its own
            without["int8"] = " ".join(str(error).split())[:200]
    if theirs is not None:
        works["timm"] = module_work(theirs, images)
        if options.compiled:
            works["timm compiled"] = module_work(torch.compile(theirs, dynamic=False), images)
    return works, without


def cuda_works(subject: Subject, images: Tensor, options: argparse.Namespace) -> dict[str, Work]:
    """The runtimes on CUDA."""
    ours, theirs = modules(subject, options.size, options.smoke)
    half, works = images.to(torch.bfloat16), {}
    if subject.ours:
        ours = ours.to(images.device)
        if subject.sampled:  # room for the tokens that are kept, so that one graph can hold the model
            calibrate(ours, [torch.randn_like(images) for _ in range(16)], batch=len(images))
        works["ours optimized"] = module_work(ours.optimize("bf16"), images)
        works["ours"] = module_work(ours.to(torch.bfloat16), half)
    if theirs is not None:
        theirs = theirs.to(images.device, torch.bfloat16)
        works["timm"] = module_work(theirs, half)
        works["timm compiled"] = module_work(torch.compile(theirs, dynamic=False, mode="reduce-overhead"), half)
    return works


# Rows


def timed_row(works: dict[str, Work], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of every way, the fastest by its median, and the best of ours compared with the best of timm's."""
    ways = {name: Way(work, batch) for name, work in works.items()}
    patience = options.seconds * len(ways)  # three rounds are timed whatever they take
    warm_up = WARM_UP if options.device == "cpu" else 3 * WARM_UP  # compiled graphs are captured in the third call
    how: dict[str, Any] = {"warm_up": warm_up, "patience": patience, "clock": CLOCKS[options.clock]}
    timings = in_turns(ways, CPU, rounds=options.rounds, seconds=options.seconds, **how)
    p50 = {name: 1e3 * timing.latency(50) for name, timing in timings.items()}
    row: dict[str, Any] = {
        "p50_ms": p50,
        "p99_ms": {name: 1e3 * timing.latency(99) for name, timing in timings.items()},
        "calls": {name: len(timing.calls) for name, timing in timings.items()},
        "fastest": min(p50, key=lambda name: p50[name]),
        "threads": options.threads,
        "clock": options.clock,
    }
    if "ours" in timings and "timm" in timings:
        found = ratio(timings["ours"], timings["timm"])
        row["ours_to_timm"] = [found.median, found.low, found.high]
    return row


def model_rows(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    wanted = [s for s in SUBJECTS if s.title in SMOKE or not options.smoke]
    chosen = [s for s in wanted if any(text.lower() in s.title.lower() for text in options.only)]
    tasks = [(subject, batch) for subject in chosen for batch in options.batches]
    if not options.together:
        for subject, batch in tasks:
            yield model_row(subject, batch, options, device)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(tasks), spawn, _keep, (spawn.Barrier(len(tasks)),)) as processes:
        rows = {processes.submit(model_row, *task, options, device): task for task in tasks}
        for row in as_completed(rows):
            if error := row.exception():
                subject, batch = rows[row]
                print(f"{subject.title}, batch {batch}: {type(error).__name__}: {error}", flush=True)
            else:
                yield row.result()


def _keep(barrier: Barrier) -> None:
    waits.append(barrier)


def model_row(subject: Subject, batch: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A row of the table. A process of several waits until all of them are prepared."""
    torch.set_num_threads(options.threads)
    try:
        images = torch.randn(batch, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
        works, without = (
            (cuda_works(subject, images.to(device), options), {})
            if device.type == "cuda"
            else cpu_works(subject, images, options)
        )
        row = {"model": subject.title, "batch": batch, "not_measured": without, **macs(subject, images, options)}
        for work in works.values() if options.together else ():
            for call in range(3 * WARM_UP):
                work(call)
    finally:
        for barrier in waits:
            barrier.wait()
    with locked(options.lock):
        return {**row, **timed_row(works, batch, options)}


def macs(subject: Subject, images: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """GMACs of the model, and of the same model with all tokens."""
    plain, _ = modules(replace(subject, sampled=False), options.size, options.smoke)
    dense = gmacs = cost(plain, options.size).macs / 1e9
    if subject.sampled:
        gmacs = mean_gmacs(modules(subject, options.size, options.smoke)[0], [images[:1]])
    return {"gmacs": gmacs, "dense_gmacs": dense}


def stored_map(mixer: SoftmaxMixer, x: Tensor, tokens: Tokens) -> Tensor:
    """Softmax attention with its map in memory, as without a fused kernel."""
    q, k, v = mixer.project(x, tokens)
    return mixer.mix((q, k, v), tokens, mixer.attention(q, k, tokens))


def block_rows(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    ours = ((1 + side * side, width, width // 64) for width in (192, 384) for side in GRIDS)
    for count, width, heads in EDGE_TABLE if options.smoke else (*EDGE_TABLE, *ours):
        side = int(count**0.5)
        torch.manual_seed(0)
        x = torch.randn(1, count, width, device=device)
        tokens = Tokens(x, prefix=count - side * side, grid=(side, side))
        works = {}
        for name, config in MIXERS.items():
            mixer = build_mixer(config, width, heads, (side, side)).to(device).eval()
            run = partial(stored_map, mixer) if "map" in name else mixer  # type: ignore[arg-type]
            works[name] = module_work(lambda x, run=run, tokens=tokens: run(x, tokens), x)
        yield {"tokens": count, "width": width, "heads": heads, **timed_row(works, 1, options)}


def line(row: dict[str, Any], titles: list[str], ways: list[str]) -> str:
    cells = [f"{row['p50_ms'][w]:.1f} / {row['p99_ms'][w]:.1f}" if w in row["p50_ms"] else "" for w in ways]
    return f"| {' | '.join([*(str(row[t]) for t in titles), *cells, row['fastest']])} |"


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU, for every runtime")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each runtime, model and batch, about")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, with --threads 1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose title contains one of these")
    parser.add_argument("--compiled", action="store_true", help="torch.compile on the CPU, too")
    parser.add_argument("--together", action="store_true", help="prepare all models at once, time one after the other")
    parser.add_argument(
        "--lock", type=Path, help="file whose lock is held while a model is timed (none: a temporary one)"
    )
    parser.add_argument("--blocks", action="store_true", help="attention blocks instead of models")
    parser.add_argument("--files", type=Path, help="folder that keeps exported files (none: a temporary one)")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--history", action="store_true", help="append medians to benchmarks/history.jsonl")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    options.size = 96 if options.smoke else 224
    if options.smoke:
        options.threads, options.seconds, options.rounds = 1, 0.01, 2
    if options.clock == "cpu" and (options.threads > 1 or options.device != "cpu"):
        parser.error("--clock cpu adds up the time of all threads and knows of no device; use --threads 1 --device cpu")
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    versions = f"timm {timm.__version__}, {platform.machine()}, {options.size} px, {options.rounds} rounds"
    print(f"{where(device)}, {versions}; ms of {options.clock} time, p50 / p99\n", flush=True)
    titles = ["tokens", "width", "heads"] if options.blocks else ["model", "batch"]
    ways = list(MIXERS) if options.blocks else ["ours", "ours optimized", "timm", "timm compiled"]
    if not options.blocks and device.type == "cpu":
        ways[2:] = [
            *(["ours compiled"] if options.compiled else []),
            *RUNTIMES,
            "int8",
            *ways[2 : 4 if options.compiled else 3],
        ]
    print(f"| {' | '.join([*titles, *ways, 'fastest'])} |\n{'|---' * (len(titles) + len(ways) + 1)}|", flush=True)
    rows = []
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options.files = options.files or temporary
        options.lock = options.lock or temporary / "lock"
        options.files.mkdir(parents=True, exist_ok=True)
        for row in (block_rows if options.blocks else model_rows)(options, device):
            rows.append({"machine": where(device), **row})
            print(line(row, titles, ways), flush=True)
            if options.json:
                options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        for name, reason in row.get("not_measured", {}).items():
            print(f"{row['model']}, batch {row['batch']}, {name}: {reason}")
    if options.history:
        figures = {
            f"{', '.join(f'{t} {row[t]}' for t in titles)}, {way}, {part} ms": value
            for row in rows
            for part in ("p50", "p99")
            for way, value in row[f"{part}_ms"].items()
        }
        add_to_history("latency.py", where(device), figures)


if __name__ == "__main__":
    main()
