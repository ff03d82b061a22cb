"""The speed table: ours beside timm's, training steps and inference, in one run on one accelerator.

    python benchmarks/gpu.py [--out FOLDER] [--only TEXT ...] [--also VARIANT ...] [--profile] [--history]

Every model builds and compiles in a process of its own, some rows at once; then each is timed alone, in turns.
Compilation is not part of a time. Inputs are drawn once and used in turn. `--also` times ours with something left
out or changed, e.g. `plain-attention`, to see what each part gives; `--profile` writes the kernels that took longest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDS, ROUND_SECONDS, INPUTS = 7, 0.25, 4


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the table."""

    name: str
    model: str  # ours
    timm: dict[str, Any]  # arguments of timm's VisionTransformer
    train: bool
    size: int
    batch: int
    classes: int
    goal: int  # images a second


def vit(width: int, heads: int, patch: int, size: int, classes: int) -> dict[str, Any]:
    return {
        "img_size": size,
        "patch_size": patch,
        "embed_dim": width,
        "depth": 12,
        "num_heads": heads,
        "num_classes": classes,
    }


ROWS = (
    Row("DeiT-S inference", "deit_small", vit(384, 6, 16, 224, 1000), False, 224, 1024, 1000, 40_000),
    Row("ViT-B inference", "vit_base", vit(768, 12, 16, 224, 1000), False, 224, 512, 1000, 14_000),
    Row("DeiT-S training", "deit_small", vit(384, 6, 16, 224, 1000), True, 224, 512, 1000, 12_000),
    Row("ViT-B training", "vit_base", vit(768, 12, 16, 224, 1000), True, 224, 256, 1000, 4_200),
    Row("ViT-Ti/4 32 px training", "vit_tiny_32", vit(192, 3, 4, 32, 100), True, 32, 1024, 100, 100_000),
    Row("ViT-S/4 32 px training", "vit_small_32", vit(384, 6, 4, 32, 100), True, 32, 2048, 100, 45_000),
)
WAVES = (ROWS[:2], (ROWS[2], ROWS[4]), (ROWS[3], ROWS[5]))  # what is ready at the same time shares the memory
OTHERS = ("timm", "timm compiled")


# One process: a model that is ready and waits to be timed


def timm_inference(row: Row, compiled: bool) -> Callable[[int], None]:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(**row.timm).cuda().to(torch.bfloat16).eval()
    call = torch.compile(model) if compiled else model
    images = [torch.randn(row.batch, 3, row.size, row.size, device="cuda").to(torch.bfloat16) for _ in range(INPUTS)]

    def run(i: int) -> None:
        with torch.inference_mode():
            call(images[i % INPUTS])

    return run


def timm_training(row: Row, compiled: bool) -> Callable[[int], None]:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(**row.timm).cuda().train()
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    batches = [
        (
            torch.randn(row.batch, 3, row.size, row.size, device="cuda"),
            torch.randint(row.classes, (row.batch,), device="cuda"),
        )
        for _ in range(INPUTS)
    ]

    def run(i: int) -> None:
        images, labels = batches[i % INPUTS]
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(call(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def pixels(row: Row) -> list[Tensor]:
    return [
        torch.randint(256, (row.batch, 3, row.size, row.size), dtype=torch.uint8, device="cuda") for _ in range(INPUTS)
    ]


def our_inference(row: Row, switches: set[str]) -> Callable[[int], None]:
    from vitrail.model.build import create_model

    model = create_model(row.model, classes=row.classes).cuda().eval()
    ready = model.optimize("fp8" if "fp8" in switches else "bf16", graph="no-graph" not in switches)
    images = pixels(row)

    def run(i: int) -> None:
        ready(images[i % INPUTS])

    return run


def our_training(row: Row, switches: set[str]) -> Callable[[int], None]:
    from vitrail.data.batch import Batch
    from vitrail.engine.config import OptimConfig
    from vitrail.engine.optimizer import make_schedule
    from vitrail.engine.step import TrainStep
    from vitrail.learn.config import SupervisedConfig
    from vitrail.learn.supervised import Supervised
    from vitrail.model.build import create_model

    torch.set_float32_matmul_precision("high")
    model = create_model(row.model, classes=row.classes)
    optim = OptimConfig(lr=1e-4, clip=1.0 if "clip" in switches else 0.0)
    step = TrainStep(
        Supervised(model, SupervisedConfig()),
        optim,
        make_schedule(optim, row.batch, 50_000),
        device=torch.device("cuda"),
        autocast=torch.bfloat16,
        fp8="fp8" in switches,
        compile=True,
        graph="no-graph" not in switches,
        ema=0.999 if "ema" in switches else 0.0,
    )
    batches = []
    for images in pixels(row):
        labels = torch.randint(row.classes, (row.batch,), device="cuda")
        batches.append(Batch((images,), labels, labels, torch.arange(row.batch, device="cuda")))

    def run(i: int) -> None:
        step.feed(batches[i % INPUTS])

    return run


def switch(names: set[str]) -> None:
    """Change what the variants leave out, before anything is compiled."""
    import torch._inductor.config as inductor

    from vitrail.kernels import attention
    from vitrail.model.parts.stems import PatchEmbed, Stem
    from vitrail.model.trunks.vit import Trunk

    if "plain-attention" in names or "cudnn-attention" in names:
        attention.able = lambda qkv: False  # type: ignore[assignment]
    if "cudnn-attention" in names:
        for kind in ("flash", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
    if "wide-stream" in names:
        Trunk._stream = lambda self, x: x  # type: ignore[method-assign]
    if "convolution-stem" in names:
        PatchEmbed.forward = Stem.forward  # type: ignore[method-assign]
    if "plain-gelu" in names:
        from vitrail.kernels import gelu

        gelu.Gelu.forward = lambda self, x: F.gelu(x)  # type: ignore[method-assign]
        gelu.linear_gelu = lambda x, w, b: F.gelu(F.linear(x, w, b))  # type: ignore[assignment]
    if "combo" in names:
        inductor.combo_kernels = True
    if "split" in names:  # fewer partial sums of norm gradients
        inductor.triton.mix_order_reduction_split_size = 128
    if "no-mix-order" in names:
        inductor.triton.mix_order_reduction = False
    if "pdl" in names:  # kernels begin while the one before ends
        inductor.triton.enable_pdl = True
    if "autotune" in names:
        inductor.max_autotune_gemm = True
        inductor.max_autotune_gemm_backends = "ATEN,TRITON"
    if "descent" in names:
        inductor.coordinate_descent_tuning = True


def serve(row: Row, who: str, orders: Connection) -> None:
    """Get ready, then do what the parent asks for."""
    try:
        began = time.monotonic()
        switches = set(who.split("+")[1:])
        if who.startswith("timm"):
            run = (timm_training if row.train else timm_inference)(row, "compiled" in who)
        else:
            switch(switches)
            run = (our_training if row.train else our_inference)(row, switches)
        for i in range(6):
            while True:
                try:
                    run(i)
                    torch.cuda.synchronize()
                    break
                except RuntimeError as error:  # the others are getting ready, too
                    full = any(word in str(error) for word in ("out of memory", "ALLOC_FAILED", "INTERNAL_ERROR"))
                    if not full or time.monotonic() - began > 240:
                        raise
                    torch.cuda.empty_cache()
                    time.sleep(2)
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        orders.send({"ready": time.monotonic() - began, "memory": peak / 2**30})
        calls = 0
        while (order := orders.recv()) != "end":
            if order == "profile":
                orders.send(profile(run))
                continue
            if not calls:
                calls = max(2, round(ROUND_SECONDS * 1e3 / timed(run, 3)))
            orders.send(timed(run, calls))
    except Exception:
        orders.send({"error": traceback.format_exc()})


def timed(run: Callable[[int], None], calls: int) -> float:
    """Milliseconds a call."""
    run(0)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(calls):
        run(i)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def profile(run: Callable[[int], None], calls: int = 3) -> list[tuple[str, float, int]]:
    """Kernel, milliseconds a call, launches a call; longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(calls):
            run(i)
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda k: -k.self_device_time_total)
    return [(k.key[:110], k.self_device_time_total / 1e3 / calls, k.count // calls) for k in kernels[:40]]


# The parent


def ceilings() -> dict[str, float]:
    """What this machine does at best: a bf16 product (TFLOP/s) and a copy (TB/s, read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    product = min(timed(lambda i: a @ b, 10) for _ in range(3))
    copy = min(timed(lambda i: target.copy_(source), 10) for _ in range(3))
    return {"TFLOP/s": 2 * 8192**3 / product / 1e9, "TB/s": 4 * 2**30 / copy / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("speed"))
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--also", nargs="*", default=[])
    parser.add_argument("--skip-timm", action="store_true")
    parser.add_argument("--together", action="store_true", help="all rows ready at once (without timm they fit)")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--history", action="store_true", help="append the medians to benchmarks/history.jsonl")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    lines: list[str] = []
    record: list[dict[str, Any]] = []
    profiles: list[str] = []
    machine = ceilings()
    lines = [
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Python {platform.python_version()}, "
        f"ceilings {machine['TFLOP/s']:.0f} TFLOP/s (bf16 product), {machine['TB/s']:.2f} TB/s (copy)",
        "",
        "| work | batch | who | img/s (quartiles) | against timm compiled | goal | GiB | s to get ready |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for wave in (ROWS,) if options.together else WAVES:
        rows = [row for row in wave if any(text.lower() in row.name.lower() for text in options.only)]
        for about in measured(rows, options):
            lines += about["lines"]
            record += about["record"]
            profiles += about["profiles"]
            print("\n".join(about["lines"]), flush=True)
            (options.out / "speed.md").write_text("\n".join(lines) + "\n")
            (options.out / "speed.json").write_text(json.dumps({"machine": machine, "rows": record}, indent=1))
            (options.out / "profile.txt").write_text("\n".join(profiles) + "\n")
        print(f"{time.monotonic() - began:.0f} s so far", flush=True)
    if options.history:
        from rounds import add_to_history, where

        medians = {f"{r['row']}, {r['who']}, images/s": statistics.median(r["rates"]) for r in record}
        add_to_history("gpu.py", where(torch.device("cuda")), medians)


def measured(rows: list[Row], options: argparse.Namespace) -> Iterator[dict[str, list[Any]]]:
    """Start all models of some rows, wait until they are ready, and time them row by row."""
    context = mp.get_context("spawn")
    servers: dict[tuple[Row, str], tuple[Any, Connection]] = {}
    for row in rows:
        names = [*(() if options.skip_timm else OTHERS), "ours", *(() if row.train else ("ours+fp8",))]
        names += [f"ours+{v}" for v in options.also if row.train or "ema" not in v]
        for who in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(row, who, there), daemon=True)
            process.start()
            servers[row, who] = process, here
    ready: dict[tuple[Row, str], dict[str, float]] = {}
    for key, (_, pipe) in servers.items():
        said = pipe.recv() if pipe.poll(300) else {"error": "not ready in time"}
        if "error" in said:
            print(f"{key[0].name}, {key[1]}: {said['error'][-600:]}", flush=True)
        else:
            ready[key] = said
    for row in rows:
        names = [who for r, who in ready if r is row]
        samples: dict[str, list[float]] = {who: [] for who in names}
        for _ in range(ROUNDS):
            for who in names:
                pipe = servers[row, who][1]
                pipe.send("time")
                samples[who].append(pipe.recv())
        found: dict[str, list[Any]] = {"lines": [], "record": [], "profiles": []}
        for who in names:
            rates = [row.batch / t * 1e3 for t in samples[who]]
            low, middle, high = statistics.quantiles(rates, n=4)
            ratio = ""
            if "timm compiled" in samples:
                pairs = zip(samples["timm compiled"], samples[who], strict=True)
                ratio = f"{statistics.median(a / b for a, b in pairs):.2f}"
            goal = f"{row.goal:,}{' met' if middle >= row.goal else ''}" if who.startswith("ours") else ""
            about = ready[row, who]
            found["lines"].append(
                f"| {row.name} | {row.batch} | {who} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) | {ratio} | {goal} | "
                f"{about['memory']:.1f} | {about['ready']:.0f} |"
            )
            found["record"].append({"row": row.name, "who": who, "batch": row.batch, "rates": rates, **about})
        for who in names if options.profile else ():
            if who.startswith("ours"):
                pipe = servers[row, who][1]
                pipe.send("profile")
                kernels = pipe.recv()
                found["profiles"] += [f"\n{row.name}, {who}: {sum(k[1] for k in kernels):.2f} ms"]
                found["profiles"] += [f"{ms:9.3f} ms {count:5d}  {name}" for name, ms, count in kernels]
        yield found
    for process, pipe in servers.values():
        if process.is_alive():
            pipe.send("end")
    for process, _ in servers.values():
        process.join(5)
        process.terminate()


if __name__ == "__main__":
    main()
