"""Token sampling in milliseconds: a dense DeiT-S, the same with ATS packed and padded, and SimA over tokens, in one go.

    python benchmarks/adaptive.py [--device cpu] [--gmacs 2.9] [--batch 1024] [--weights RUN --data URI] [--out FILE]

With `--weights` (a run or model folder) and `--data` images and kept counts are real. Without them, weights are random
with sharpened attention and images are noise of different contrast, so that images keep different numbers of tokens;
either way the budget dial brings the mean cost to `--gmacs`, and the counts are printed. Compared are optimised models
(compiled, one CUDA graph): images a second, time ratio to dense, cost ratio to dense, and the one over the other (1:
all that is saved in arithmetic is saved in time).
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rounds import in_turns, where
from sima import DIM, HEADS, crossover
from torch import Tensor

from vitrail.kernels.packing import owners
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import calibrate, set_budget
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats
from vitrail.model.cost import cost

ROUNDS, INPUTS = 9, 4
SHARPER = 2.0  # times the weights of queries and keys


def with_sampling(options: argparse.Namespace, form: str, layers: tuple[int, ...]) -> Classifier:
    torch.manual_seed(0)
    ats = Ats(form=form, layers=layers)  # type: ignore[arg-type]
    weights = str(options.weights) if options.weights else "none"
    size = {"image_size": options.size} if options.size else {}
    return create_model(options.model, adaptive=ats, weights=weights, **size).eval()


def sharpen(model: Classifier) -> None:
    for block in model.trunk.blocks:  # type: ignore[union-attr]
        width = block.attn.qkv.in_features
        block.attn.qkv.weight.data[: 2 * width].mul_(SHARPER)  # type: ignore[union-attr]


def pictures(options: argparse.Namespace, size: int, device: torch.device) -> list[Tensor]:
    if options.data:
        from vitrail.data.loading.loader import EvalLoader
        from vitrail.data.open import open_data
        from vitrail.data.preprocess import Preprocess
        from vitrail.model.assemble import default_preprocess

        data = open_data(options.data)["test"]
        loader = EvalLoader(data, Preprocess(default_preprocess(size)), batch=options.batch, device=device, workers=2)
        found = [b.images.to(device) for b in islice(loader, INPUTS)]
        return [b for b in found if len(b) == options.batch]
    torch.manual_seed(1)
    made = []
    for _ in range(INPUTS):
        contrast = torch.rand(options.batch, 1, 1, 1, device=device) * 60
        coarse = torch.randn(options.batch, 3, size // 16, size // 16, device=device)
        images = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") * contrast + 128
        made.append(images.clamp(0, 255).to(torch.uint8))
    return made


def table(options: argparse.Namespace, device: torch.device) -> list[str]:
    layers = tuple(options.layers)
    models = {form: with_sampling(options, form, layers).to(device) for form in ("padded", "packed")}
    size = models["padded"].preprocess.size
    images = pictures(options, size, device)
    dense = create_model(options.model, weights=str(options.weights or "none"), image_size=size).to(device).eval()
    dense.load_state_dict(models["padded"].state_dict())
    if not options.weights:
        for model in (dense, *models.values()):
            sharpen(model)
    full = cost(dense).macs / 1e9
    bf16 = device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        found = set_budget(models["padded"], gmacs=options.gmacs, images=images[:2])
        policy = models["packed"].policy
        assert isinstance(policy, AtsPolicy)
        assert isinstance(models["padded"].policy, AtsPolicy)
        policy.set_cap(tuple(models["padded"].policy.cap.values()))
        room = calibrate(models["packed"], images, batch=options.batch)
        with torch.no_grad():
            blocks = models["padded"].outputs(images[0]).trace.blocks  # type: ignore[union-attr]
    ready = {"dense": dense.optimize(), **{f"ATS {form}": model.optimize() for form, model in models.items()}}
    turn = [0]

    def work(name: str) -> None:
        turn[0] += 1
        ready[name](images[turn[0] % len(images)])

    rounds = in_turns({name: partial(work, name) for name in ready}, device, ROUNDS)
    lines = [
        f"{options.model}, {size} px, batch {options.batch}, sampling in blocks {policy.at}, share "
        f"{next(iter(policy.cap.values())):.3f}, {found:.3f} of {full:.3f} GMACs an image",
        "tokens that leave each block, mean and std over images: "
        + ", ".join(f"{float(b.leaving.mean()):.0f}±{float(b.leaving.std()):.0f}" for b in blocks),
        f"room for rows an image: {', '.join(f'{r:.1f}' for r in room)}",
    ]
    assert found is not None
    for name in ready:
        ratio, low, high = rounds.ratio(name, "dense")
        rate = options.batch / rounds.median(name)
        share = 1.0 if name == "dense" else found / full
        lines.append(
            f"{name:12} {rate:9,.0f} img/s  {1 / ratio:5.2f} x dense ({1 / high:.2f} to {1 / low:.2f})"
            f"  time ratio {ratio:.3f} / cost ratio {share:.3f} = {ratio / share:.2f}"
        )
    return lines


def attention_alone(device: torch.device) -> list[str]:
    """Attention over ragged batches of DeiT-S's shape beside dense attention at the full length."""
    from vitrail.kernels.attention import packed_attention
    from vitrail.kernels.ragged_attention import ragged_attention

    batch, most = (512, 197) if device.type == "cuda" else (8, 197)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    lengths = torch.randint(40, most + 1, (batch,), device=device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rows = torch.randn(int(offsets[-1]), 3, HEADS, DIM, device=device, dtype=dtype)
    assert bool(owners(offsets, len(rows))[2].all())
    full = torch.randn(batch, most, 3, HEADS, DIM, device=device, dtype=dtype)
    ways = {
        "dense": lambda: packed_attention(full),
        "ragged": lambda: ragged_attention(rows, offsets, most=most),
    }
    with torch.no_grad():
        found = in_turns(ways, device, ROUNDS, lead=device.type == "cuda")
    ratio, low, high = found.ratio("ragged", "dense")
    return [
        f"attention alone, lengths 40 to 197 (mean {float(lengths.float().mean()):.0f}), batch {batch}: dense "
        f"{found.median('dense') * 1e3:.3f} ms, ragged {found.median('ragged') * 1e3:.3f} ms, "
        f"ratio {ratio:.2f} ({low:.2f} to {high:.2f})"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small")
    parser.add_argument("--size", type=int)
    parser.add_argument("--layers", type=int, nargs="*", default=list(range(3, 12)))
    parser.add_argument("--gmacs", type=float, default=2.9)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    options.batch = options.batch or (1024 if device.type == "cuda" else 4)
    lines = [where(device), *table(options, device), *attention_alone(device), *crossover(device)]
    text = "\n".join(lines)
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
