"""Multiply-accumulates of a trace against `cost`, a profiler and printed values (SlowFormer, arXiv 2310.02544)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.model.adaptive.budget import fixed_macs, macs_of_mean, trace_macs
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import Adavit, Ats, Avit
from vitrail.model.cost import cost
from vitrail.model.parts.tokens import BlockUse, Tokens, Trace

SMALL = {"classes": 5, "image_size": 32, "patch": 8, "width": 32, "depth": 4, "heads": 2}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def uses(model: Classifier, entering: list[list[float]], leaving: list[list[float]] | None = None) -> Trace:
    """A trace by hand: token counts [blocks][images], heads and branches whole."""
    heads = float(model.trunk.config.heads)
    made = []
    for n_in, n_out in zip(entering, leaving or entering, strict=True):
        one = torch.ones(len(n_in))
        made.append(BlockUse(torch.tensor(n_in), torch.tensor(n_out), one * heads, one, one))
    return Trace(tuple(made))


def sampled_once(model: Classifier, stage: int, patches: int) -> Trace:
    """197 tokens as far as block `stage`, which lets the class token and so many patches out."""
    leaving = [[197.0 if i < stage else patches + 1.0] for i in range(12)]
    return uses(model, [[197.0], *leaving[:-1]], leaving)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("adaptive", [Ats(), Avit()])
@pytest.mark.parametrize(
    ("name", "plain", "normed"),
    [("tiny", 1.2537, 1.2584), ("small", 4.5989, 4.6083), ("base", 17.5638, 17.5827)],
)
def test_everything_kept_costs_what_the_plain_model_costs(
    name: str, plain: float, normed: float, adaptive: Ats | Avit, norms: bool
) -> None:
    model = create_model(f"deit_{name}", device="meta", adaptive=adaptive)
    found = trace_macs(model, uses(model, [[197.0]] * 12), norms=norms).tolist()
    assert found == [cost(create_model(f"deit_{name}", device="meta"), norms=norms).macs]
    assert round(found[0] / 1e9, 4) == (normed if norms else plain)
    # The convention in closed form, with nothing of ours in it.
    d = model.trunk.width
    weights = 12 * (12 * 197 * d**2 + 2 * 197**2 * d) + 196 * 768 * d + d * 1000
    assert found == [weights + (5 * 197 * d * 25 if norms else 0)]


@pytest.mark.parametrize(
    ("stage", "patches", "giga"), [(3, 108, 3.064), (3, 78, 2.563), (3, 48, 2.073), (0, 130, 3.039), (6, 56, 3.027)]
)
def test_one_stage_of_sampling_costs_what_is_printed(stage: int, patches: int, giga: float) -> None:
    model = create_model("deit_small", device="meta", adaptive=Ats(layers=(stage,), cap=(float(patches),)))
    assert round(float(trace_macs(model, sampled_once(model, stage, patches))) / 1e9, 3) == giga


@pytest.mark.parametrize(
    ("share", "patches", "tokens"),
    [(1.0, 4.60, 4.60), (0.87, 3.00, 3.06), (0.865, 2.97, 3.01), (0.72, 2.17, 2.20)],
)
def test_sampling_in_nine_blocks_costs_at_most_what_is_stated(share: float, patches: float, tokens: float) -> None:
    """Every block keeps all it may: a share of its patches, as here, or of its tokens."""
    model = create_model("deit_small", device="meta", adaptive=Ats(cap=(share,)))
    for stated, of_tokens in ((patches, 0), (tokens, 1)):
        counts = [197.0] * 4  # entering the first block to leaving the third
        for i in range(3, 12):
            kept = model.policy.room(i, int(counts[-1]) - 1 + of_tokens)
            counts.append(min(1.0 + kept, counts[-1]))
        found = trace_macs(model, uses(model, [[n] for n in counts[:-1]], [[n] for n in counts[1:]]))
        assert round(float(found) / 1e9, 2) == stated


@pytest.mark.parametrize("head", ["class_token", "mean", "class_attention"])
@torch.no_grad()
def test_stem_and_head_are_counted_as_they_are(head: str) -> None:
    model = create_model("deit_tiny", adaptive=Avit(gate_center=1e4), head=head, stem={"kind": "conv"}, **SMALL).eval()
    for norms in (False, True):
        assert trace_macs(model, model.outputs(IMAGES[:1]).trace, norms=norms).tolist() == [
            cost(model, norms=norms).macs
        ]


def test_scores_of_kept_rows_alone_are_what_sampling_computes() -> None:
    """The class token's row over all keys twice: for the scores, and among those that stay."""
    model = create_model("deit_small", device="meta", adaptive=Ats(layers=(3,), cap=(108.0,)))
    trace = sampled_once(model, 3, 108)
    saved = trace_macs(model, trace) - trace_macs(model, trace, scores="kept")
    assert saved.tolist() == [(197 - 109 - 1) * 197 * 384]


def test_fewer_tokens_at_the_final_norm_are_counted_there_too() -> None:
    model = create_model("deit_small", device="meta", adaptive=Ats(layers=(3,), cap=(108.0,)))
    trace = sampled_once(model, 3, 108)
    norms = trace_macs(model, trace, norms=True) - trace_macs(model, trace)
    assert norms.tolist() == [5 * 384 * (3 * 2 * 197 + 197 + 109 + 8 * 2 * 109 + 109)]


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_a_block_costs_what_a_profiler_counts_on_so_many_tokens(count: int) -> None:
    model = create_model("deit_tiny", device="meta", adaptive=Avit(), **SMALL)
    with FlopCounterMode(display=False) as counter:
        model.trunk.blocks[0].eval()(Tokens(torch.empty(1, count, 32, device="meta"), 1, (4, 4)))
    trace = uses(model, [[float(count)], [0.0], [0.0], [0.0]])
    assert trace_macs(model, trace).tolist() == [fixed_macs(model) + counter.get_total_flops() // 2]


@pytest.mark.parametrize("adaptive", [Avit(gate_center=1e4), Adavit()])
@torch.no_grad()
def test_a_pass_that_keeps_everything_is_counted_as_the_profiler_counts_it(adaptive: Avit | Adavit) -> None:
    """AdaViT's own layers included: `cost` of the adaptive model sees them."""
    model = create_model("deit_tiny", adaptive=adaptive, **SMALL).eval()
    assert trace_macs(model, model.outputs(IMAGES).trace).tolist() == [cost(model).macs] * 3


def test_heads_and_branches_that_are_off_cost_nothing() -> None:
    model = create_model("deit_tiny", adaptive=Adavit(), **SMALL)
    trace, d, t, fixed = uses(model, [[17.0]] + [[9.0]] * 3), 32, 9, fixed_macs(model)
    off = torch.zeros(1)
    changed = [
        trace.blocks[0],
        replace(trace.blocks[1], heads=torch.ones(1)),
        replace(trace.blocks[2], mixing=off),
        replace(trace.blocks[3], channels=off),
    ]
    w = d // 2
    wanted = 12 * 17 * d**2 + 2 * 17**2 * d
    wanted += 3 * t * d * w + 2 * t**2 * w + t * w * d + 8 * t * d**2
    wanted += 8 * t * d**2
    wanted += 4 * t * d**2 + 2 * t**2 * d
    assert trace_macs(model, Trace(tuple(changed))).tolist() == [fixed + wanted]
    # Stem, head, and three times a logit of each patch, of two heads and of two branches.
    assert fixed == 16 * 192 * d + 5 * d + 3 * (16 + 2 + 2) * d


def test_cost_rises_with_every_token_kept() -> None:
    model = create_model("deit_tiny", adaptive=Avit(), **SMALL)
    counts = torch.arange(18.0)
    found = trace_macs(model, uses(model, [counts.tolist()] * 4))
    assert (found.diff() > 0).all()


def test_the_mean_of_costs_is_at_least_the_cost_of_means() -> None:
    """Attention is quadratic (Jensen); equal where all images are alike."""
    model = create_model("deit_tiny", adaptive=Avit(), **SMALL)
    counts = torch.randint(1, 18, (4, 50)).float()
    trace = uses(model, counts.tolist())
    mean = float(trace_macs(model, trace).mean())
    variance = float(counts.double().var(1, correction=0).sum())
    assert mean - macs_of_mean(model, trace) == pytest.approx(2 * 32 * variance)
    assert variance > 0
    even = uses(model, [[9.0] * 5] * 4)
    assert float(trace_macs(model, even).mean()) == macs_of_mean(model, even)


@torch.no_grad()
def test_other_image_sizes_are_counted_at_their_own_size() -> None:
    model = create_model("deit_tiny", adaptive=Avit(gate_center=1e4), **SMALL).eval()
    trace = model.outputs(torch.randn(1, 3, 48, 48)).trace
    assert trace_macs(model, trace, image_size=48).tolist() == [cost(model, 48).macs]
    assert trace_macs(model, trace, fixed=fixed_macs(model, 48)).tolist() == [cost(model, 48).macs]


def test_counting_leaves_the_model_as_it_was() -> None:
    model = create_model("deit_tiny", adaptive=Avit(), **SMALL)
    fixed_macs(model)
    assert len(model.trunk.blocks) == 4
    assert model.policy is not None
    assert model.trunk is model._modules["trunk"]
    assert not any(p.is_meta for p in model.parameters())


def test_traces_of_part_of_a_pass_and_other_mixers_are_refused() -> None:
    model = create_model("deit_tiny", adaptive=Avit(), **SMALL)
    with pytest.raises(ValueError, match="not of a whole pass"):
        trace_macs(model, uses(model, [[17.0]] * 2))
    other = create_model("deit_tiny", adaptive=Avit(), mixer={"kind": "sima"}, **SMALL)
    with pytest.raises(ValueError, match="softmax attention only"):
        trace_macs(other, uses(other, [[17.0]] * 4))
