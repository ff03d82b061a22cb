"""What the heads cost: svPN against the SVD, the second-order head on DeiT-S, Gramian heads, a map for every class.

    python benchmarks/heads.py [--device cuda] [--quick] [--only svpn second_order gramian per_class] [--profile]

Forward and backward (the second-order head: whole training steps), as `vitrail train` computes them: on an accelerator
bfloat16 autocast, TF32 and once more compiled; float32 elsewhere. Medians of interleaved rounds after a warm-up; ratios
are medians of the rounds' ratios, with their quartiles. `--quick` takes small batches and few rounds; `--profile` adds
the costliest kernels of the heads. Times of one machine compare with each other and with nothing else.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rounds import Rounds, in_turns, where
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.kernels.covariance import cross_covariance, svpn, svpn_fast
from vitrail.measure.speed import Timing
from vitrail.model.build import create_model, replace_head
from vitrail.model.classifier import Classifier
from vitrail.model.heads.class_attention import AttentionPoolHead
from vitrail.model.heads.config import AttentionPool, Gramian, SecondOrder
from vitrail.model.heads.gramian import GramianHead
from vitrail.model.parts.tokens import Tokens

CLASSES = 1000
MILLI, MEBI = 1e3, 2**20


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: torch.device
    quick: bool
    profile: bool

    @property
    def accelerated(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.accelerated)

    def size(self, accelerator: int, host: int, quick: int) -> int:
        return quick if self.quick else accelerator if self.accelerated else host

    @property
    def modes(self) -> tuple[str, ...]:
        return ("eager", "compiled") if self.accelerated else ("eager",)


# ---- svPN ------------------------------------------------------------------------------------------------------------


def through_svd(matrices: Tensor, alpha: float) -> Tensor:
    """What one would write without this package; its gradient divides by differences of squared singular values."""
    U, s, Vh = torch.linalg.svd(matrices, full_matrices=False)
    return (U * s.pow(alpha)[..., None, :]) @ Vh


def measure_svpn(setting: Setting) -> None:
    """Fast (1, 1), exact, and autograd through torch.linalg.svd, on cross-covariances of random tokens."""
    heads, tokens, alpha = 6, 196, 0.5
    batches = (16, 64) if setting.quick else (128, 256, 512, 1024)
    print(f"\nsvPN, batch x {heads} heads, float32: ms forward and backward; 'queued': launched ahead, device alone")
    print(
        f"{'batch':>5} {'size':>5} {'exact':>9} {'svd':>9} {'fast':>8}   {'svd / fast':21} "
        + "".join(f"{f'{mode}, queued':>17} {'svd / it':>9}" for mode in setting.modes if setting.accelerated)
        + " rounds"
    )
    for size in (14, 24, 38):
        torch.compiler.reset()
        compiled = torch.compile(svpn_fast)
        for batch in batches:
            # Made in pieces: tokens take far more memory than their matrices.
            pieces = [torch.randn(2, 16, heads, size, tokens, device=setting.device) for _ in range(batch // 16)]
            matrices = torch.cat([cross_covariance(x, y) for x, y in pieces]).requires_grad_()
            start = torch.randn(size, device=setting.device, requires_grad=True)
            fast = partial(there_and_back, partial(svpn_fast, matrices, alpha, 1, 1, start), matrices)
            ways = {
                "fast": fast,
                "exact": partial(there_and_back, partial(svpn, matrices, alpha), matrices),
                "svd": partial(there_and_back, partial(through_svd, matrices, alpha), matrices),
            }
            fast()
            # Decompositions of larger matrices take seconds on an accelerator: warmed up at the first batch only.
            warm_up = 1 if batch == batches[0] else 0
            rounds = in_turns(ways, setting.device, setting.size(9, 9, 3), warm_up=warm_up, patience=2)
            line = f"{batch:>5} {size:>5} {MILLI * rounds.median('exact'):>9.2f} {MILLI * rounds.median('svd'):>9.2f} "
            line += f"{MILLI * rounds.median('fast'):>8.3f}   {shown(rounds, 'svd', 'fast'):21} "
            if setting.accelerated:
                once = partial(there_and_back, partial(compiled, matrices, alpha, 1, 1, start), matrices)
                queued = in_turns({"eager": fast, "compiled": once}, setting.device, 15, warm_up=3, lead=True)
                for mode in setting.modes:
                    took = queued.median(mode)
                    line += f"{MILLI * took:>17.4f} {rounds.median('svd') / took:>9.1f}"
            print(f"{line} {len(rounds.timings['svd'].rounds):>6}", flush=True)


def there_and_back(normalize: Callable[[], Tensor], matrices: Tensor) -> None:
    matrices.grad = None
    normalize().backward(matrices.detach())


# ---- the second-order head on a trunk --------------------------------------------------------------------------------


class Loss(nn.Module):
    """What a run compiles: model and loss together."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).float(), labels)


def training_step(loss: Loss, images: Tensor, labels: Tensor, setting: Setting) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with setting.autocast():
            value = loss(images, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_second_order(setting: Setting) -> None:
    """A training step of DeiT-S with a class-token head and with the second-order head of SoT-S."""
    batch = setting.size(256, 8, 2)
    images = torch.randn(batch, 3, 224, 224, device=setting.device)
    labels = torch.randint(0, CLASSES, (batch,), device=setting.device)
    print(f"\nDeiT-S, 224 px, batch {batch}, {precision(setting)}: ms a training step, what the head adds [quartiles]")
    print(f"{'':10} {'class token':>12} {'second order':>13}   added")
    for mode in setting.modes:
        plain = create_model("deit_small", device=setting.device)
        second, _ = replace_head(plain, SecondOrder(rows=24, columns=24))
        losses = {"plain": Loss(plain).train(), "second": Loss(second).train()}
        if mode == "compiled":
            for loss in losses.values():
                loss.compile(dynamic=False)
        steps = {name: training_step(loss, images, labels, setting) for name, loss in losses.items()}
        rounds = in_turns(steps, setting.device, setting.size(25, 9, 3), warm_up=setting.size(5, 2, 1))
        ratio, low, high = rounds.ratio("second", "plain")
        print(
            f"{mode:10} {MILLI * rounds.median('plain'):>12.2f} {MILLI * rounds.median('second'):>13.2f}   "
            f"{ratio - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]",
            flush=True,
        )
        if setting.profile and mode == "eager":
            with torch.no_grad(), setting.autocast():
                sample = second.tokens(images[:2])
            alone = heads_step(second.head, sample, batch, setting)
            costliest(alone, "the second-order head alone, eager", setting)


# ---- Gramian heads beside their trunk --------------------------------------------------------------------------------


class Features(nn.Module):
    """A model without its head."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.tokens(images).sequence


class Loop(nn.Module):
    """Heads one after the other."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(heads)

    def forward(self, tokens: Tokens) -> Tensor:
        return torch.cat([head(tokens) for head in self.each], dim=1)


def heads_step(head: nn.Module, sample: Tokens, batch: int, setting: Setting) -> Callable[[], None]:
    """Forward and backward of a head on random tokens like `sample`; the trunk's gradient is wanted too."""
    shape = (batch, *sample.sequence.shape[1:])
    x = torch.randn(shape, device=setting.device, dtype=sample.sequence.dtype).requires_grad_()
    tokens = Tokens(x, sample.prefix, sample.grid)

    def once() -> None:
        x.grad = None
        head.zero_grad(set_to_none=True)
        with setting.autocast():
            out = head(tokens)
        out.backward(torch.ones_like(out))

    return once


def trunk_step(features: nn.Module, images: Tensor, setting: Setting) -> Callable[[], None]:
    def once() -> None:
        features.zero_grad(set_to_none=True)
        with setting.autocast():
            out = features(images)
        out.backward(torch.ones_like(out))

    return once


def macs(module: nn.Module, sample: Tensor | Tokens) -> int:
    """Multiply-accumulates of the forward pass of one image."""
    module = copy.deepcopy(module).to("meta").eval()
    if isinstance(sample, Tokens):
        one: Tensor | Tokens = Tokens(sample.sequence[:1].detach().float().to("meta"), sample.prefix, sample.grid)
    else:
        one = sample[:1].to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(one)
    return int(counter.get_total_flops()) // 2


def measure_gramian(setting: Setting) -> None:
    """Five heads at once and in a loop, beside what their arithmetic takes at the rate of their own trunk."""
    batch = setting.size(256, 8, 4)
    images = torch.randn(batch, 3, 224, 224, device=setting.device)
    print(
        f"\nfive Gramian heads, batch {batch}, {precision(setting)}: ms forward and backward of the heads alone;\n"
        "'ideal' is their arithmetic at the MACs a second of the trunk in the same rounds; 'queued': launched ahead"
    )
    print(
        f"{'trunk, Gram width':42} {'M MACs':>7} {'trunk':>8} {'ideal':>7} {'at once':>8} {'/ ideal':>8} {'loop':>8}"
        "   loop / at once"
    )
    vit, resnet = create_model("ga_vit_small", device=setting.device), create_model("timm:resnet50", head=Gramian())
    small = vit.head
    assert isinstance(small, GramianHead)
    for mode in setting.modes:
        compare_gramian(vit, (small.config, Gramian()), images, mode, setting)
    # Compiled convolutions take minutes to compile and are cuDNN's all the same.
    resnet = resnet.to(setting.device, memory_format=torch.channels_last)
    compare_gramian(resnet, (Gramian(),), images.contiguous(memory_format=torch.channels_last), "eager", setting)


def compare_gramian(model: Classifier, heads: tuple[Gramian, ...], images: Tensor, mode: str, setting: Setting) -> None:
    with setting.autocast(), torch.no_grad():
        sample = model.train().tokens(images[:2])
    trunk: nn.Module = Features(model)
    trunk_macs, head_macs, steps = macs(trunk, images), {}, {}
    for config in heads:
        head = GramianHead(config, sample.sequence.shape[-1], CLASSES).to(setting.device)
        ways: dict[str, nn.Module] = {"at once": head}
        if mode == "eager":
            ways["loop"] = Loop([head.keep([k]) for k in range(config.heads)])
        else:
            head.compile(dynamic=False)
        head_macs[config.gram_width] = macs(head, sample)
        for way, module in ways.items():
            steps[f"{way} {config.gram_width}"] = heads_step(module, sample, len(images), setting)
    if mode == "compiled":
        trunk.compile(dynamic=False)
    steps["trunk"] = trunk_step(trunk, images, setting)
    for lead in (False, True) if setting.accelerated else (False,):
        rounds = in_turns(steps, setting.device, setting.size(15, 7, 3), lead=lead)
        for gram, count in head_macs.items():
            took, ideal = rounds.median(f"at once {gram}"), rounds.median("trunk") * count / trunk_macs
            title = f"{model.spec['name']}, {gram}, {mode}{', queued' if lead else ''}"
            line = f"{title:42} {count / 1e6:>7.1f} {MILLI * rounds.median('trunk'):>8.2f} {MILLI * ideal:>7.3f} "
            line += f"{MILLI * took:>8.3f} {took / ideal:>8.2f} "
            if mode == "eager":
                line += f"{MILLI * rounds.median(f'loop {gram}'):>8.3f}   "
                line += shown(rounds, f"loop {gram}", f"at once {gram}")
            print(line, flush=True)
    if setting.profile:
        for gram in head_macs:
            costliest(steps[f"at once {gram}"], f"five heads, Gram width {gram}, {mode}", setting)


# ---- one attention map for every class -------------------------------------------------------------------------------


class ClassByClass(nn.Module):
    """The first `count` classes of a per-class head, one after the other; keys and values are formed once."""

    def __init__(self, head: AttentionPoolHead, count: int) -> None:
        super().__init__()
        self.head, self.count = head, count

    def forward(self, tokens: Tokens) -> Tensor:
        head, block = self.head, self.head.blocks[0]
        attn = block.attn
        read = block.norm1(tokens.patches)
        k, v = attn._split(attn.k(read)), attn._split(attn.v(read))
        logits = []
        for c in range(self.count):
            token = head.cls_token[:, c : c + 1].expand(len(read), -1, -1)
            q = attn._split(attn.q(block.norm1(token)))
            found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            token = token + block.ls1(attn.proj(found))
            token = head.norm(token + block.ls2(block.mlp(block.norm2(token))))
            logits.append(F.linear(token[:, 0], head.fc.weight[c : c + 1], head.fc.bias[c : c + 1]))
        return torch.cat(logits, dim=1)[:, None]


def saved_bytes(step: Callable[[], None], own: nn.Module) -> int:
    """Memory that the forward pass keeps for the backward pass, weights left out, every storage once."""
    seen = {p.untyped_storage().data_ptr(): 0 for p in own.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(seen.values())


def measure_per_class(setting: Setting) -> None:
    """One query a class for 1,000 classes: all in one product, and a loop timed on few classes and scaled."""
    batch, few, width = setting.size(64, 2, 1), 20, 384
    head = AttentionPoolHead(AttentionPool(queries="per_class"), width, CLASSES, layerscale=0.1).to(setting.device)
    loop = ClassByClass(head, few)
    sample = Tokens(torch.zeros(1, 196, width, device=setting.device), 0, (14, 14))
    with torch.no_grad():  # the two ways must be one function
        x = sample.but(torch.randn_like(sample.sequence))
        torch.testing.assert_close(head(x)[..., :few], loop(x), rtol=1e-3, atol=1e-4)
    print(
        f"\nattention pooling with a map for each of {CLASSES} classes, 196 x {width}, batch {batch}, "
        f"{precision(setting)}: ms forward and backward; the loop was timed on {few} classes, x {CLASSES // few}"
    )
    print(f"{'':10} {'one product':>12} {'loop':>10} {'loop / one product':>24} {'MiB kept':>9}")
    modules = {"one product": head, "loop": loop}
    steps = {name: heads_step(module, sample, batch, setting) for name, module in modules.items()}
    rounds = in_turns(steps, setting.device, setting.size(15, 7, 3))
    seconds = tuple(CLASSES / few * s for s in rounds.timings["loop"].rounds)
    whole = Rounds({**rounds.timings, "loop": Timing(1, seconds, seconds)})
    kept = saved_bytes(steps["one product"], head) / MEBI
    print(
        f"{'eager':10} {MILLI * whole.median('one product'):>12.2f} {MILLI * whole.median('loop'):>10.1f} "
        f"{shown(whole, 'loop', 'one product'):>24} {kept:>9.0f}",
        flush=True,
    )


# ----------------------------------------------------------------------------------------------------------------------


def shown(rounds: Rounds, way: str, to: str) -> str:
    ratio, low, high = rounds.ratio(way, to)
    digits = 0 if ratio >= 100 else 1 if ratio >= 10 else 2
    return f"{ratio:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def precision(setting: Setting) -> str:
    return "bfloat16 autocast" if setting.accelerated else "float32"


def costliest(step: Callable[[], None], title: str, setting: Setting, rows: int = 16) -> None:
    """The kernels (on a host: operations) on which a step spends most time."""
    kinds = torch.profiler.ProfilerActivity
    step()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if setting.accelerated else [kinds.CPU]) as profiler:
        step()
        if setting.accelerated:
            torch.cuda.synchronize(setting.device)
    own = "self_device_time_total" if setting.accelerated else "self_cpu_time_total"
    place = torch.autograd.DeviceType.CUDA if setting.accelerated else torch.autograd.DeviceType.CPU
    events = sorted((e for e in profiler.key_averages() if e.device_type == place), key=lambda e: -getattr(e, own))
    total = sum(getattr(e, own) for e in events)
    print(f"  {title}: {total:.0f} us in {sum(e.count for e in events)} calls, of which")
    for e in events[:rows]:
        print(f"  {getattr(e, own):>9.0f} us {e.count:>4} x  {e.key[:110]}")


PARTS = {
    "svpn": measure_svpn,
    "second_order": measure_second_order,
    "gramian": measure_gramian,
    "per_class": measure_per_class,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small batches, few rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--profile", action="store_true", help="print the costliest kernels of the heads")
    asked = parser.parse_args()
    setting = Setting(torch.device(asked.device), asked.quick, asked.profile)
    torch.manual_seed(0)
    if setting.accelerated:
        torch.set_float32_matmul_precision("high")  # as a run with bfloat16 does
    print(where(setting.device))
    for part in asked.only:
        PARTS[part](setting)


if __name__ == "__main__":
    main()
