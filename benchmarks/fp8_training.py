"""Training in 8-bit floats compared with bf16: a layer's gradients, whole steps, and loss curves.

    python benchmarks/fp8_training.py --json FILE [--part check speed curves] [--data cifar10.npz]

`check` compares a layer with its plain twin, by compiler. `speed` times training steps (compiled, one CUDA graph) of
ViT-B and ViT-L, in turns; all get ready at once, each in a process of its own. `curves` trains a ViT of width 768 on
32-pixel images, both precisions and all seeds at once. Every row is written as it comes; a part that fails is a row
with its error.
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
from gpu import Row, ceilings, serve, vit
from torch import Tensor

from vitrail.kernels import fp8_training as fp8

PARTS = ("check", "speed", "curves")
BACKENDS = ("eager", "aot_eager", "inductor")  # eager: not compiled
MODELS = {
    "ViT-B": Row("ViT-B training", "vit_base", vit(768, 12, 16, 224, 1000), True, 224, 256, 1000, 4_500),
    "ViT-L": Row("ViT-L training", "vit_large", {}, True, 224, 64, 1000, 0),
}
RECIPES = ("bf16", "fp8")


class Rows:
    """Rows as JSON lines, printed and written as they come; and how much time is left."""

    def __init__(self, file: Path | None, seconds: float) -> None:
        self.file, self.end = file, time.monotonic() + seconds
        self.began = time.monotonic()
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


# A layer and its twin


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


def bad(tensor: Tensor) -> int:
    """How many numbers are NaN or infinite."""
    return int((~tensor.detach().float().isfinite()).sum())


def check_layer(rows: Rows, backend: str, device: str) -> None:
    """A layer's output and gradients (input, weight, bias) on the device and of the plain twin on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(197 * 3, 768, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(1024, 768, generator=generator) / 28).to(torch.bfloat16).float()  # numbers of bf16
    bias = torch.randn(1024, generator=generator)
    grad = torch.randn(197 * 3, 1024, generator=generator).to(torch.bfloat16) * 1e-5
    kind: Any = fp8.RowwiseProduct

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
        "check",
        what=backend,
        to_twin=[relative(a, b) for a, b in zip(found, twin, strict=True)],
        to_float32=[relative(a, b) for a, b in zip(found, [exact, *exact_gradients], strict=True)],
        not_finite={"device": [bad(t) for t in found], "twin": [bad(t) for t in twin]},
    )


def check(rows: Rows, device: str) -> None:
    for backend in BACKENDS:
        work = lambda b=backend: check_layer(rows, b, device)  # noqa: E731
        rows.attempt("check", work, what=backend)


# Training steps


def ready(row: Row, recipe: str, orders: Connection) -> None:
    """A process: the training step of one recipe, made ready and timed as `gpu.py` does."""
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
    for recipe in RECIPES:
        for model, row in MODELS.items():
            here, there = context.Pipe()
            process = context.Process(target=ready, args=(row, recipe, there), daemon=True)
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
    parser.add_argument("--part", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--data", help="an .npz with x_train, y_train, x_test, y_test (none: patterns with noise)")
    parser.add_argument("--seconds", type=float, default=300.0, help="end after so long, with what there is")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda", help="of check and curves; speed needs CUDA")
    options = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    rows = Rows(options.json, options.seconds)
    try:
        import torchao

        rows.add("torchao", version=torchao.__version__, note="inference is not compared here")
    except Exception as error:
        rows.add("torchao", note=f"not compared: {error!r}")
    if options.device == "cuda":
        machine = rows.attempt("machine", ceilings) or {}
        name = rows.attempt("machine", torch.cuda.get_device_name)
        rows.attempt("machine", torch.cuda.empty_cache)
        rows.add("machine", device=name, torch=torch.__version__, cuda=torch.version.cuda, **machine)
    works: dict[str, Callable[[], None]] = {
        "check": lambda: check(rows, options.device),
        "speed": lambda: speed(rows, 200.0),
        "curves": lambda: curves(rows, options, list(RECIPES)),
    }
    for part, work in works.items():
        if part in options.part:
            rows.attempt(part, work)
            if torch.cuda.is_available():
                rows.attempt(part, torch.cuda.empty_cache)
    rows.add("end")


if __name__ == "__main__":
    main()
