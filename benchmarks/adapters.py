"""A training step with LoRA, NOLA and PRANC on one frozen model: time and memory.

    python benchmarks/adapters.py [--way compiled|eager|graph] [--rounds N] [--out FILE] [--smoke] [--kernel]

Two models with random weights, in bfloat16 on CUDA: of the shape of GPT-2 large (q and v, rank 8, k = l = 1000; 8 x 512
tokens) and of ViT-B (MLP, rank 4, k = l = 1024; 64 images of 224 pixels). All adapters are on one copy of the model and
take turns in every round; a step is forward, backward and AdamW. Memory is the most that is allocated during a step.
`--way graph` replays captured eager steps: what the device takes, without the host and without minutes of compilation.
Goals, against LoRA of the same rank: NOLA with shared bases at most 1.10 times its time, 1.02 times its memory.
`--kernel` times the sums of bases alone. `--smoke` is small and runs anywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rounds import Rounds, in_turns, where
from torch import Tensor, nn

from vitrail.kernels.bases import combine
from vitrail.measure.speed import as_one_graph
from vitrail.model.adapters.apply import adapters_of, apply, counts, use
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc
from vitrail.model.build import create_model

TIME_GOAL, MEMORY_GOAL = 1.10, 1.02
BASELINE, JUDGED = "LoRA", "NOLA shared"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """The shape of GPT-2, with tied embedding: tokens [batch, length] -> mean loss of the next ones."""

    def __init__(self, width: int, depth: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class ImageLoss(nn.Module):
    """A classifier and its loss: images and labels -> mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).float(), labels)


def ways(rank: int, coefficients: int, targets: tuple[str, ...], head: bool) -> dict[str, AdapterConfig]:
    nola = partial(Nola, rank=rank, coefficients=coefficients, targets=targets, train_head=head)
    return {
        BASELINE: Lora(rank=rank, targets=targets, train_head=head),
        JUDGED: nola(shared=True),
        "NOLA separate": nola(shared=False),
        "PRANC": Pranc(coefficients=coefficients, targets=targets, train_head=head),
    }


def gpt2_large(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, AdapterConfig]]:
    width, depth, heads, words, batch, length = (64, 2, 2, 100, 2, 16) if small else (1280, 36, 20, 50257, 8, 512)
    with device:
        model = Decoder(width, depth, heads, words, length)
        tokens = torch.randint(words, (batch, length))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model, (tokens,), ways(8, 16 if small else 1000, ("qv",), head=False)


def vit_base(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, AdapterConfig]]:
    model = create_model("vit_tiny_32", classes=10, depth=2) if small else create_model("vit_base", classes=100)
    side, batch = (32, 4) if small else (224, 64)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(10, (batch,), device=device)
    return ImageLoss(model.to(device)), (images, labels), ways(4, 16 if small else 1024, ("mlp",), head=True)


def stepping(
    model: nn.Module, run: Callable[..., Tensor], batch: tuple[Tensor, ...], name: str
) -> Callable[[], object]:
    """A training step with one of the adapters."""
    inner = model.model if isinstance(model, ImageLoss) else model
    use(inner, name)
    trained = [p for p in inner.parameters() if p.requires_grad]
    on_cuda = batch[0].is_cuda
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=on_cuda, capturable=on_cuda)

    def step() -> None:
        use(inner, name)
        run(*batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare(
    title: str, model: nn.Module, batch: tuple[Tensor, ...], configs: dict[str, AdapterConfig], o: argparse.Namespace
) -> list[str]:
    device = batch[0].device
    inner = model.model if isinstance(model, ImageLoss) else model
    if device.type == "cuda":
        inner.to(torch.bfloat16)
        batch = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in batch)
    keys = {name: name.replace(" ", "_") for name in configs}
    for name, config in configs.items():
        apply(inner, config, keys[name])
    adapters = adapters_of(inner)
    assert adapters is not None
    way = o.way if device.type == "cuda" else "eager"
    run = torch.compile(model, dynamic=False) if way == "compiled" else model
    steps = {name: stepping(model, run, batch, keys[name]) for name in configs}
    for step in steps.values():  # compiles
        step()
        step()
    peaks = {}
    for name, step in steps.items():
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
    if way == "graph":
        steps = {name: as_one_graph(step, warm_up=1) for name, step in steps.items()}
    found = in_turns(steps, device, o.rounds)
    lines = [f"{title}, {way}"]
    lines += [line(name, found, peaks, counts(inner, keys[name]).adapter) for name in configs]
    if peaks:
        time, memory = found.ratio(JUDGED, BASELINE)[0], peaks[JUDGED] / peaks[BASELINE]
        lines.append(
            f"  goals for {JUDGED}: time {time:.3f} <= {TIME_GOAL:.2f} {'met' if time <= TIME_GOAL else 'MISSED'}, "
            f"memory {memory:.3f} <= {MEMORY_GOAL:.2f} {'met' if memory <= MEMORY_GOAL else 'MISSED'}"
        )
    return lines


def line(name: str, found: Rounds, peaks: dict[str, int], numbers: int) -> str:
    ratio, low, high = found.ratio(name, BASELINE)
    memory = f" {peaks[name] / 2**30:7.2f} GiB ({peaks[name] / peaks[BASELINE]:.3f} x)" if peaks else ""
    return (
        f"  {name:14} {numbers:9,} numbers {found.median(name) * 1e3:9.2f} ms"
        f" {ratio:6.3f} ({low:.3f} to {high:.3f}) x {BASELINE}{memory}"
    )


def kernels(device: torch.device, o: argparse.Namespace) -> list[str]:
    """The sums alone: forward and backward of one factor of all layers."""
    lines = ["sums of bases alone, one factor of all layers, forward + backward"]
    sizes = [(4, 16, 64)] if o.smoke else [(72, 1000, 1280 * 8), (12, 1024, 3072 * 4), (12, 1024, 768 * 4)]
    for many, bases, elements in sizes:
        coefficients = torch.randn(many, bases, device=device, requires_grad=True)
        grad = torch.randn(many, elements, device=device)
        numbers = torch.arange(many, device=device)

        def both(layers: Tensor | None, coefficients: Tensor = coefficients, grad: Tensor = grad) -> object:
            made = combine(coefficients, grad.shape[1], seed=0, factor=0, layers=layers)
            return torch.autograd.grad(made, coefficients, grad)

        found = in_turns({"shared": partial(both, None), "separate": partial(both, numbers)}, device, o.rounds)
        times = ", ".join(f"{name} {found.median(name) * 1e3:.3f} ms" for name in found.timings)
        lines.append(f"  {many} layers, {bases} bases of {elements}: {times}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("compiled", "eager", "graph"), default="compiled")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    if o.smoke:
        o.rounds = 2
    device = torch.device(o.device)
    torch.manual_seed(0)
    lines = [where(device), *kernels(device, o)]
    if not o.kernel:
        for title, make in (("GPT-2 large, q and v", gpt2_large), ("ViT-B, MLP", vit_base)):
            lines += compare(title, *make(device, o.smoke), o)
    text = "\n".join(lines)
    print(text, flush=True)
    if o.out:
        o.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
