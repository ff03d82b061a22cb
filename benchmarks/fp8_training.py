"""Training in 8-bit floats compared with bf16: single products and casts, whole steps, and loss curves.

    python benchmarks/fp8_training.py --json FILE [--part check products speed curves] [--data cifar10.npz]

`check` compares the kernels with their plain twins. `diagnose`, on request only, says where a wrong number comes from.
`products` times the three products of every linear layer of ViT-B
and ViT-L, and the casts apart. `speed` times training steps (compiled, one CUDA graph) of both models, in turns; all
models get ready at once, each in a process of its own. `curves` trains a ViT of width 768 on 32-pixel images, all
precisions and seeds at once. Every row is written as it comes; a part that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import Row, ceilings, serve, timed, vit
from torch import Tensor

from vitrail.kernels import fp8_training as fp8
from vitrail.kernels.fp8 import quantise

PARTS = ("check", "products", "speed", "curves")
BACKENDS = ("eager", "aot_eager", "inductor")  # eager: not compiled
MODELS = {
    "ViT-B": Row("ViT-B training", "vit_base", vit(768, 12, 16, 224, 1000), True, 224, 256, 1000, 4_500),
    "ViT-L": Row("ViT-L training", "vit_large", {}, True, 224, 64, 1000, 0),
}
RECIPES = {  # name -> models whose steps are timed
    "bf16": ("ViT-B", "ViT-L"),
    "tensorwise": ("ViT-B", "ViT-L"),
    "rowwise": ("ViT-B", "ViT-L"),
    "tensorwise, weight gradient in bf16": ("ViT-B",),
}
TOKENS = {"ViT-B": (197 * 256, 768), "ViT-L": (197 * 128, 1024)}  # rows and width of the products
E4M3, E5M2 = fp8.FORWARD, fp8.BACKWARD


class WeightInBf16(torch.autograd.Function):
    """One scale per tensor, without transposed copies of activations: the gradient of the weight stays in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        small, scale = cast(x, E4M3)
        w_small, w_transposed, w_scale, _ = fp8.tensorwise(weight)
        ctx.save_for_backward(x, w_transposed, w_scale)
        ctx.weight_dtype = weight.dtype
        return in_type_of(x, fp8.product(small, w_small, scale, w_scale, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, w_scale = ctx.saved_tensors
        small, scale = cast(grad, E5M2)
        to_input = fp8.product(small, weight, scale, w_scale).to(grad.dtype)
        return to_input, (grad.T @ x).to(ctx.weight_dtype), added_up(grad)


class RowwiseProduct(torch.autograd.Function):
    """One scale per token and per channel; the gradient of the weight, a sum over tokens, stays in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, *quantise(weight.T.contiguous()))
        ctx.weight_dtype = weight.dtype
        (small, scale), (w_small, w_scale) = quantise(x), quantise(weight)
        return in_type_of(x, fp8.product(small, w_small, scale, w_scale, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, w_scale = ctx.saved_tensors
        small, scale = quantise(grad, fp8.LEAST)
        to_input = fp8.product(small, weight, scale, w_scale).to(grad.dtype)
        return to_input, (grad.T @ x).to(ctx.weight_dtype), added_up(grad)


def in_type_of(x: Tensor, out: Tensor) -> Tensor:
    """As `fp8.TensorwiseProduct` does it: without a cast where there is nothing to cast."""
    return out if out.dtype == x.dtype else out.to(x.dtype)


def added_up(grad: Tensor) -> Tensor:
    """The sum of rows as a product: as a sum, torch.compile would keep all of `grad` in float32 for it."""
    return (grad.new_ones(1, len(grad)) @ grad)[0].float()


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits with one scale, as it lies."""
    largest = torch.finfo(dtype).max
    peak = x.abs().amax(-1).amax().float().clamp(min=fp8.LEAST)
    return (x.float() * (largest / peak)).clamp(-largest, largest).to(dtype), peak / largest


PRODUCTS = {
    "tensorwise": fp8.TensorwiseProduct,
    "rowwise": RowwiseProduct,
    "tensorwise, weight gradient in bf16": WeightInBf16,
}


class Rows:
    """Rows as JSON lines, printed and written as they come; and how much time is left."""

    def __init__(self, file: Path | None, seconds: float) -> None:
        self.file, self.end = file, time.monotonic() + seconds
        self.began, self.fastest = time.monotonic(), "tensorwise"
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    def add(self, part: str, **values: Any) -> None:
        line = json.dumps({"part": part, "s": round(time.monotonic() - self.began, 1), **values})
        print(line, flush=True)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    def attempt(self, part: str, work: Callable[[], Any], **about: Any) -> Any:
        """What `work` returns; none, and a row with the error, where it fails."""
        try:
            return work()
        except Exception:
            self.add(part, **about, error=traceback.format_exc()[-1500:])
            return None

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


# Kernels and their twins


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


def bad(tensor: Tensor) -> int:
    """How many numbers are NaN or infinite."""
    return int((~tensor.detach().float().isfinite()).sum())


def same_bytes(found: Tensor, expected: Tensor) -> float:
    """The share of equal bytes."""
    equal = found.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    return float(equal.float().mean())


def check_layouts(rows: Rows, part: str, kind: torch.dtype, dtype: torch.dtype, count: int, **how: Any) -> None:
    """The kernel of both layouts and PyTorch on the same device, bit by bit; `how`: tile and warps."""
    from vitrail.kernels import fp8_triton

    x = torch.randn(count, 768, device="cuda").to(kind)
    for largest in (False, True):  # up to the largest number of the format, too
        factor = torch.finfo(dtype).max / x.abs().amax().float() if largest else torch.full((), 112.0, device="cuda")
        for add in (False, True):
            small, transposed, total = fp8_triton.layouts(x, factor, dtype, add, **how)
            plain, plain_transposed, expected = fp8.plain_layouts(x, factor, dtype, add)
            rows.add(
                part,
                what=f"both layouts of {kind}, {dtype}, {count} rows",
                **how,
                add=add,
                largest=largest,
                equal=[same_bytes(small, plain), same_bytes(transposed, plain_transposed)],
                transpose_of_the_other=same_bytes(transposed[:, :count], small.T),
                not_finite=[bad(small), bad(transposed)],
                error_of_sum=relative(total, expected) if add else None,
            )


def check_layer(rows: Rows, part: str, name: str, backend: str, device: str) -> None:
    """A layer's output and gradients (input, weight, bias) on the device and of the plain twin on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(197 * 3, 768, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(1024, 768, generator=generator) / 28).to(torch.bfloat16).float()  # numbers of bf16
    bias = torch.randn(1024, generator=generator)
    grad = torch.randn(197 * 3, 1024, generator=generator).to(torch.bfloat16) * 1e-5
    kind: Any = PRODUCTS[name]

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return kind.apply(x, weight.to(x.dtype), bias)

    def results(run: Any, device: str) -> list[Tensor]:
        inputs = [t.to(device, copy=True).requires_grad_() for t in (x, weight, bias)]
        out = run(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad.to(device, out.dtype))]

    exact = torch.nn.functional.linear(x.float(), weight, bias)
    exact_gradients = [grad.float() @ weight, grad.float().T @ x.float(), grad.float().sum(0)]
    torch._dynamo.reset()
    found = results(plain if backend == "eager" else torch.compile(plain, dynamic=False, backend=backend), device)
    twin = results(plain, "cpu")
    rows.add(
        part,
        what=f"{name}, {backend}",
        to_twin=[relative(a, b) for a, b in zip(found, twin, strict=True)],
        to_float32=[relative(a, b) for a, b in zip(found, [exact, *exact_gradients], strict=True)],
        not_finite={"device": [bad(t) for t in found], "twin": [bad(t) for t in twin]},
    )


def check_product(rows: Rows, fast: bool) -> None:
    """The product of the gradient of the input: e5m2 x e4m3, with numbers up to the largest of both formats."""
    a = torch.randn(197 * 3, 1024, device="cuda").mul(2e4).clamp(-57344, 57344).to(E5M2)
    b = torch.randn(768, 1024, device="cuda").mul(100).clamp(-448, 448).to(E4M3)
    scale = torch.full((), 1e-4, device="cuda")
    exact = (a.double() * 1e-4) @ (b.double() * 1e-4).T
    for what, operand, expected in (("normal", a, exact), ("zeros", torch.zeros_like(a), exact * 0)):
        found = fp8.product(operand, b, scale, scale, fast=fast)
        error = float((found.double() - expected).norm() / exact.norm())
        rows.add("diagnose", what=f"e5m2 x e4m3, {what}", fast=fast, error=error, not_finite=bad(found))


def check(rows: Rows) -> None:
    for dtype in (E4M3, E5M2):
        for count in (256, 197 * 3):
            about = {"what": f"both layouts, {dtype}"}
            rows.attempt("check", lambda d=dtype, c=count: check_layouts(rows, "check", torch.bfloat16, d, c), **about)
    for name in PRODUCTS:
        for backend in ("eager", "inductor"):
            work = lambda n=name, b=backend: check_layer(rows, "check", n, b, "cuda")  # noqa: E731
            rows.attempt("check", work, what=f"{name}, {backend}")


def diagnose(rows: Rows, device: str) -> None:
    """Which tensor is wrong, where: kernels by type and tile, the product, and gradients by compiler."""
    if device == "cuda":
        for kind in (torch.bfloat16, torch.float32):  # of float32 the transpose is known to be wrong
            for tile, warps in ((64, 8), (128, 8)):
                how = {"tile": tile, "warps": warps}
                for dtype, count in ((E4M3, 1024), (E5M2, 197 * 3)):
                    work = lambda k=kind, d=dtype, c=count, h=how: check_layouts(rows, "diagnose", k, d, c, **h)  # noqa: E731
                    rows.attempt("diagnose", work, what=f"both layouts of {kind}, {dtype}", **how)
        for fast in (True, False):
            rows.attempt("diagnose", lambda f=fast: check_product(rows, f), what="e5m2 x e4m3", fast=fast)
    for backend in BACKENDS:
        for name in PRODUCTS:
            work = lambda n=name, b=backend: check_layer(rows, "diagnose", n, b, device)  # noqa: E731
            rows.attempt("diagnose", work, what=f"{name}, {backend}")


# Products and casts


def milliseconds(run: Callable[[], Any], rounds: int = 5) -> float:
    run()
    calls = max(3, min(50, round(15 / max(timed(lambda _: run(), 2), 1e-3))))
    return statistics.median(timed(lambda _: run(), calls) for _ in range(rounds))


def operands(m: int, n: int, k: int, gradient: bool) -> dict[str, Callable[[], Any]]:
    """The ways of one product [m, k] x [n, k]."""
    a, b = (torch.randn(size, k, device="cuda").to(torch.bfloat16) for size in (m, n))
    one = torch.ones((), device="cuda")
    small_a, small_b = a.to(E5M2 if gradient else E4M3), b.to(E4M3)
    row_a, row_b = a.to(E4M3), (torch.ones(m, 1, device="cuda"), torch.ones(n, 1, device="cuda"))
    return {
        "bf16": lambda: a @ b.T,
        "tensorwise fast": lambda: fp8.product(small_a, small_b, one, one),
        "tensorwise": lambda: fp8.product(small_a, small_b, one, one, fast=False),
        "rowwise fast": lambda: fp8.product(row_a, small_b, *row_b),
    }


def products(rows: Rows) -> None:
    for way, run in (rows.attempt("products", lambda: operands(8192, 8192, 8192, False)) or {}).items():
        ms = rows.attempt("products", lambda r=run: milliseconds(r), way=way)
        if ms is not None:
            rows.add("products", layer="8192 x 8192 x 8192", way=way, tflops=round(2e-9 * 8192**3 / ms))
    for model, (tokens, width) in TOKENS.items():
        layers = {
            "qkv": (width, 3 * width),
            "proj": (width, width),
            "fc1": (width, 4 * width),
            "fc2": (4 * width, width),
        }
        totals: dict[str, float] = {}
        for layer, (inputs, outputs) in layers.items():
            shapes = {
                "forward": (tokens, outputs, inputs),
                "grad input": (tokens, inputs, outputs),
                "grad weight": (outputs, inputs, tokens),
            }
            for name, (m, n, k) in shapes.items():
                found: dict[str, float] = {}
                ways = rows.attempt("products", lambda s=(m, n, k), g=name != "forward": operands(*s, g)) or {}
                for way, run in ways.items():
                    taken = rows.attempt("products", lambda r=run: milliseconds(r), model=model, layer=layer, way=way)
                    if taken is not None:
                        found[way] = taken
                        totals[f"{name}, {way}"] = totals.get(f"{name}, {way}", 0.0) + taken
                rates = {way: round(2e-9 * m * n * k / ms) for way, ms in found.items()}
                rows.add("products", model=model, layer=layer, product=name, shape=[m, n, k], ms=found, tflops=rates)
        rows.add("products", model=model, layer="one block", ms=totals)
        casts(rows, model, tokens, width)


def casts(rows: Rows, model: str, tokens: int, width: int) -> None:
    """Passes over activations, bytes read and written once: the ways to make the operands."""
    from vitrail.kernels import fp8_triton

    plain = torch.compile(lambda x, f: fp8.plain_layouts(x, f, E4M3, False), dynamic=False)
    whole = torch.compile(lambda x: x.abs().amax(-1).amax(), dynamic=False)
    by_row = torch.compile(quantise, dynamic=False)
    factor = torch.ones((), device="cuda")
    for channels in (width, 4 * width):
        x = torch.randn(tokens, channels, device="cuda").to(torch.bfloat16)
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            f"both layouts, tile {tile}, {warps} warps": (
                4,
                lambda x=x, t=tile, w=warps: fp8_triton.layouts(x, factor, E4M3, False, t, w),
            )
            for tile, warps in ((128, 8), (128, 4), (64, 4), (64, 8), (128, 16))
        }
        for tile, warps in ((128, 8), (64, 8), (64, 4), (32, 4)):
            with_sum = lambda x=x, t=tile, w=warps: fp8_triton.layouts(x, factor, E5M2, True, t, w)  # noqa: E731
            ways[f"both layouts and sum, tile {tile}, {warps} warps"] = 4, with_sum
        ways["sum, as a product"] = 2, lambda x=x: added_up(x)
        ways["both layouts, torch.compile"] = 4, lambda x=x: plain(x, factor)
        ways["largest magnitude"] = 2, lambda x=x: whole(x)
        ways["by row"] = 3, lambda x=x: by_row(x)
        for name, (count, run) in ways.items():
            ms = rows.attempt("casts", lambda r=run: milliseconds(r), model=model, way=name)
            if ms is not None:
                rate = round(count * x.numel() / ms / 1e9, 2)
                rows.add("casts", model=model, channels=channels, way=name, ms=ms, terabytes_per_s=rate)


# Training steps


def ready(row: Row, recipe: str, orders: Connection) -> None:
    """A process: the training step of one recipe, made ready and timed as `gpu.py` does."""
    if recipe != "bf16":
        fp8.Fp8TrainingLinear.product = PRODUCTS[recipe]
    serve(row, "ours" if recipe == "bf16" else "ours+fp8", orders)


def answer(pipe: Connection, seconds: float, order: str = "") -> Any:
    """What a process sends (after an order); an error where it is late or gone."""
    try:
        if order:
            pipe.send(order)
        return pipe.recv() if pipe.poll(max(seconds, 0.1)) else {"error": "no answer in time"}
    except (EOFError, OSError) as error:
        return {"error": f"the process has ended: {error!r}"}


def speed(rows: Rows, seconds: float) -> None:
    end = time.monotonic() + min(seconds, rows.left)
    context = mp.get_context("spawn")
    servers: dict[tuple[str, str], tuple[Any, Connection]] = {}
    for recipe, models in RECIPES.items():
        for model in models:
            here, there = context.Pipe()
            process = context.Process(target=ready, args=(MODELS[model], recipe, there), daemon=True)
            process.start()
            there.close()
            servers[model, recipe] = process, here
    facts: dict[tuple[str, str], dict[str, float]] = {}
    for (model, recipe), (process, pipe) in servers.items():
        said = answer(pipe, end - 45 - time.monotonic())
        if "error" in said:
            rows.add("speed", model=model, recipe=recipe, error=said["error"][-1500:])
            process.terminate()
        else:
            facts[model, recipe] = said
    try:
        for model in MODELS:
            time_in_turns(rows, model, {r: servers[m, r][1] for m, r in facts if m == model}, facts)
        for (model, recipe), (_, pipe) in servers.items():
            if (model, recipe) in facts and model == "ViT-B" and end - time.monotonic() > 8:
                kernels = answer(pipe, 15, "profile")
                if isinstance(kernels, list):
                    top = [[name[:80], round(ms, 3), count] for name, ms, count in kernels[:30]]
                    rows.add("profile", model=model, recipe=recipe, ms=sum(k[1] for k in kernels), kernels=top)
    finally:
        for process, _ in servers.values():
            process.terminate()
        for process, _ in servers.values():
            process.join(5)


def time_in_turns(
    rows: Rows, model: str, pipes: dict[str, Connection], facts: dict[tuple[str, str], dict[str, float]]
) -> None:
    batch, middle = MODELS[model].batch, dict[str, float]()
    samples: dict[str, list[float]] = {recipe: [] for recipe in pipes}
    for _ in range(7):
        for recipe, pipe in list(pipes.items()):
            taken = answer(pipe, 20, "time")
            if isinstance(taken, float):
                samples[recipe].append(taken)
            else:
                rows.add("speed", model=model, recipe=recipe, error=str(taken)[-1500:])
                del pipes[recipe]
    for recipe, times in samples.items():
        if len(times) < 2:
            continue
        rates = [batch / t * 1e3 for t in times]
        values: dict[str, Any] = {"images_per_s": round(statistics.median(rates)), "ms": statistics.median(times)}
        if recipe != "bf16" and len(samples.get("bf16", ())) == len(times):
            pairs = zip(samples["bf16"], times, strict=True)
            values["ratio_to_bf16"] = round(statistics.median(a / b for a, b in pairs), 3)
        values |= {"quartiles": [round(q) for q in statistics.quantiles(rates, n=4)], **facts[model, recipe]}
        middle[recipe] = values["ms"]
        rows.add("speed", model=model, recipe=recipe, batch=batch, **values)
    candidates = [recipe for recipe in middle if recipe in ("tensorwise", "rowwise")]
    if model == "ViT-B" and candidates:
        rows.fastest = min(candidates, key=middle.__getitem__)


# Loss curves


def images_of(data: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images [images, 3, 32, 32] as bytes, and labels; patterns with noise without data."""
    if data is None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (12_000,), generator=generator)
        patterns = torch.rand(10, 3, 32, 32, generator=generator)[labels]
        pixels = (patterns * 60 + torch.rand(patterns.shape, generator=generator) * 195).to(torch.uint8)
        return pixels[:10_000], labels[:10_000], pixels[10_000:], labels[10_000:]
    arrays = np.load(data)
    names = ("x_train", "y_train", "x_test", "y_test")
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in names)
    return x.permute(0, 3, 1, 2).contiguous(), y.long(), x_test.permute(0, 3, 1, 2).contiguous(), y_test.long()


def curve(recipe: str, seed: int, options: argparse.Namespace, pipe: Connection) -> None:
    """A process: one run; sends [step, loss] every 50 steps, then the accuracy on test images."""
    try:
        for message in trained(recipe, seed, options):
            pipe.send(message)
    except Exception:
        pipe.send({"error": traceback.format_exc()[-1500:]})


def trained(recipe: str, seed: int, options: argparse.Namespace) -> Iterator[Any]:
    from vitrail.data.batch import Batch
    from vitrail.engine.config import OptimConfig
    from vitrail.engine.optimizer import make_schedule
    from vitrail.engine.step import TrainStep
    from vitrail.learn.config import SupervisedConfig
    from vitrail.learn.supervised import Supervised
    from vitrail.model.build import create_model

    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    if recipe != "bf16":
        fp8.Fp8TrainingLinear.product = PRODUCTS[recipe]
    x, y, x_test, y_test = (tensor.to(device) for tensor in images_of(options.data))
    torch.manual_seed(seed)
    model = create_model("vit_small_32", classes=10, width=options.width, heads=options.width // 64, depth=4)
    optim = OptimConfig(lr=5e-4, steps=options.steps, warmup=1.0, clip=1.0)
    step = TrainStep(
        Supervised(model, SupervisedConfig(smoothing=0.1)),
        optim,
        make_schedule(optim, options.batch, len(x)),
        device=device,
        autocast=torch.bfloat16,
        fp8=recipe != "bf16",
        compile=device.type == "cuda",
        graph=device.type == "cuda",
    )
    order = torch.Generator().manual_seed(seed + 100)
    for number in range(1, options.steps + 1):
        index = torch.randint(len(x), (options.batch,), generator=order).to(device)
        images = x[index].flip(-1) if number % 2 else x[index]
        step.feed(Batch((images,), y[index], y[index], index))
        if number % options.every == 0:
            yield [number, step.meter.read(step.group)["loss"]]
    right = 0
    step.objective.eval()
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
        for i in range(0, len(x_test), 1000):
            logits = model(x_test[i : i + 1000])
            right += int((logits.argmax(-1) == y_test[i : i + 1000]).sum())
    yield {"top1": right / len(x_test)}


def curves(rows: Rows, options: argparse.Namespace, recipes: list[str]) -> None:
    context = mp.get_context("spawn")
    runs: dict[Any, tuple[str, int, Any]] = {}
    losses: dict[tuple[str, int], list[list[float]]] = {}
    ends: dict[tuple[str, int], float] = {}
    for seed in range(options.seeds):
        for recipe in recipes:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=curve, args=(recipe, seed, options, there), daemon=True)
            process.start()
            there.close()
            runs[here] = recipe, seed, process
            losses[recipe, seed] = []
    waiting, end = set(runs), time.monotonic() + min(180.0, rows.left)
    while waiting and time.monotonic() < end:
        for pipe in wait(list(waiting), timeout=2.0):
            recipe, seed, _ = runs[pipe]
            try:
                message = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                waiting.discard(pipe)
                continue
            if isinstance(message, list):
                losses[recipe, seed].append(message)
                continue
            if "top1" in message:
                ends[recipe, seed] = message["top1"]
            rows.add("curves", recipe=recipe, seed=seed, **message, losses=losses[recipe, seed])
            waiting.discard(pipe)
    for pipe in waiting:
        recipe, seed, _ = runs[pipe]
        if (recipe, seed) not in ends:
            rows.add("curves", recipe=recipe, seed=seed, error="not finished in time", losses=losses[recipe, seed])
    for _, _, process in runs.values():
        process.terminate()
    for recipe in recipes:
        summary(rows, recipe, losses, ends)


def summary(
    rows: Rows, recipe: str, losses: dict[tuple[str, int], list[list[float]]], ends: dict[tuple[str, int], float]
) -> None:
    """Means and spread over the seeds that ended, and differences to bf16 with the same seed."""
    seeds = sorted(seed for name, seed in ends if name == recipe)
    if not seeds:
        return
    final = {seed: losses[recipe, seed][-1][1] for seed in seeds}
    paired = [seed for seed in seeds if ("bf16", seed) in ends]
    gaps = [final[seed] - losses["bf16", seed][-1][1] for seed in paired]
    curve_gaps = [
        abs(a[1] - b[1]) for seed in paired for a, b in zip(losses[recipe, seed], losses["bf16", seed], strict=False)
    ]
    several = len(seeds) > 1
    rows.add(
        "curves",
        recipe=recipe,
        seeds=len(seeds),
        final_loss=statistics.mean(final.values()),
        final_loss_sd=statistics.stdev(final.values()) if several else None,
        top1=statistics.mean(ends[recipe, s] for s in seeds),
        top1_sd=statistics.stdev([ends[recipe, s] for s in seeds]) if several else None,
        final_minus_bf16=gaps,
        largest_gap_on_the_way=max(curve_gaps, default=None),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="*", default=PARTS, choices=("diagnose", *PARTS))
    parser.add_argument("--data", help="an .npz with x_train, y_train, x_test, y_test (none: patterns with noise)")
    parser.add_argument("--recipes", nargs="*", help="of the curves (none: bf16 and the faster one of the others)")
    parser.add_argument("--seconds", type=float, default=300.0, help="end after so long, with what there is")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda", help="of curves and diagnose; the other parts need CUDA")
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    rows = Rows(options.json, options.seconds)
    try:
        import torchao

        rows.add("torchao", version=torchao.__version__, note="inference is not compared here")
    except Exception as error:
        rows.add("torchao", note=f"not compared: {error!r}")
    if options.device == "cuda":
        machine = {} if options.part == ["diagnose"] else rows.attempt("machine", ceilings) or {}
        name = rows.attempt("machine", torch.cuda.get_device_name)
        rows.attempt("machine", torch.cuda.empty_cache)
        rows.add("machine", device=name, torch=torch.__version__, cuda=torch.version.cuda, **machine)
    works: dict[str, Callable[[], None]] = {
        "diagnose": lambda: diagnose(rows, options.device),
        "check": lambda: check(rows),
        "products": lambda: products(rows),
        "speed": lambda: speed(rows, 200.0),
        "curves": lambda: curves(rows, options, options.recipes or ["bf16", rows.fastest]),
    }
    for part, work in works.items():
        if part in options.part:
            rows.attempt(part, work)
            if torch.cuda.is_available():
                rows.attempt(part, torch.cuda.empty_cache)
    rows.add("end")


if __name__ == "__main__":
    main()
