"""ToMe (arXiv 2210.09461) and EViT (arXiv 2202.07800) in a trunk, against one image at a time in plain loops."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import quick_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.cli import run
from vitrail.kernels.token_merge import bipartite_matching, match_tokens, merge_tokens
from vitrail.learn.attack import reject_unfit
from vitrail.learn.attack_config import AttackConfig
from vitrail.measure.attention_maps import AttentionCollector, stages
from vitrail.measure.compute import worst_case
from vitrail.model.adaptive.budget import calibrate, mean_gmacs, trace_macs
from vitrail.model.build import create_model, make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.export import to_onnx, to_torch
from vitrail.model.parts.tokens import Trace
from vitrail.model.weights import load_model

DEPTH, PATCHES = 4, 36
BOTH = ({"kind": "tome", "r": 4}, {"kind": "evit", "keep": 0.6})
SOME = {"kind": "tome", "r": 9, "layers": (0, 2)}


def vit(adaptive: dict[str, Any] | None = None, **changes: Any) -> Classifier:
    """A small ViT far from its start, with peaked attention; the same weights whatever the policy."""
    torch.manual_seed(0)
    shape = {"depth": DEPTH, "width": 32, "heads": 2, "image_size": 24, "patch": 4, **changes}
    model = create_model("deit_tiny", classes=10, adaptive=adaptive, **shape).eval()
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        p.data.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return model


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def trace_of(model: Classifier, images: Tensor) -> Trace:
    with torch.no_grad():
        trace = model.outputs(images).trace
    assert trace is not None
    return trace


def leaving(model: Classifier, images: Tensor) -> list[int]:
    """Tokens that leave every block, the same for every image."""
    counts = torch.stack([block.leaving for block in trace_of(model, images).blocks])
    assert (counts == counts[:, :1]).all()
    return [int(n) for n in counts[:, 0]]


# One image at a time, token by token


def attention_of(block: Any, x: Tensor, size: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """The mixing branch of tokens [n, width], the class token's row averaged over heads, and the mean key of each."""
    mixer = block.attn
    heads = mixer.heads
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in mixer.qkv(block.norm1(x)).chunk(3, -1))
    out, row = torch.zeros_like(q), torch.zeros(len(x))
    for head in range(heads):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1]) + torch.tensor(size).log()
        weights = scores.exp() / scores.exp().sum(1, keepdim=True)
        out[:, head] = weights @ v[:, head]
        row += weights[0] / heads
    return mixer.proj(out.flatten(1)), row, k.mean(1)


def merged_by_hand(
    x: Tensor, keys: Tensor, size: list[float], r: int, prefix: int, first: int
) -> tuple[Tensor, list[float]]:
    """ToMe's five steps, from the text: partition, one edge each, the r most similar, merge, join."""
    places = list(range(prefix, len(x)))
    a, b = places[first::2], places[1 - first :: 2]
    edges = []
    for i in a:
        similar = [float(F.cosine_similarity(keys[i], keys[j], dim=0)) for j in b]
        edges.append((max(similar), i, b[similar.index(max(similar))]))
    groups = {j: [j] for j in range(len(x))}
    for _, i, j in sorted(edges, reverse=True)[:r]:
        groups[j].append(i)
        del groups[i]
    weights = {j: [size[i] for i in members] for j, members in groups.items()}
    means = [sum(size[i] * x[i] for i in members) / sum(weights[j]) for j, members in groups.items()]
    return torch.stack(means), [sum(weights[j]) for j in groups]


def logits_by_hand(model: Classifier, image: Tensor, reduce: Callable[..., tuple[Tensor, list[float]]]) -> Tensor:
    trunk: Any = model.trunk
    x = trunk.embed(image[None]).sequence[0]
    size = [1.0] * len(x)
    for i, block in enumerate(trunk.blocks):
        mixed, row, keys = attention_of(block, x, size)
        x = x + mixed
        x, size = reduce(i, x, size, row, keys)
        x = x + block.mlp(block.norm2(x))
    x = trunk.norm(x)
    if trunk.prefix == 0:
        return model.head.fc(torch.tensor(size) @ x / sum(size))  # type: ignore[operator, union-attr]
    if trunk.prefix == 2:
        return (model.head.fc(x[0]) + model.head.fc_dist(x[1])) / 2  # type: ignore[operator, union-attr]
    return model.head.fc(x[0])  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize(("head", "prefix"), [("class_token", 1), ("distilled", 2), ("mean", 0)])
def test_merging_is_the_papers_five_steps_one_image_at_a_time(
    images: Tensor, head: str, prefix: int, proportional: bool
) -> None:
    model = vit({"kind": "tome", "r": 5, "proportional": proportional}, head=head)

    def reduce(i: int, x: Tensor, size: list[float], row: Tensor, keys: Tensor) -> tuple[Tensor, list[float]]:
        return merged_by_hand(x, keys, size, 5, prefix, prefix % 2)

    def without_sizes(i: int, x: Tensor, size: list[float], row: Tensor, keys: Tensor) -> tuple[Tensor, list[float]]:
        x, sizes[0] = merged_by_hand(x, keys, sizes[0] if i else [1.0] * len(x), 5, prefix, prefix % 2)
        return x, sizes[0] if i == DEPTH - 1 else [1.0] * len(x)  # the head pools with them

    sizes: list[list[float]] = [[]]
    with torch.no_grad():
        logits = model(images)
        for image, found in zip(images, logits, strict=True):
            expected = logits_by_hand(model, image, reduce if proportional else without_sizes)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (logits - make_adaptive(model, None)(images)).abs().max() > 1e-3


@pytest.mark.parametrize(("layers", "merges"), [((0, 2), (9, 0, 9, 0)), ((1,), (0, 9, 0, 0))])
def test_chosen_blocks_merge_as_the_paper_does_and_no_others(
    images: Tensor, layers: tuple[int, ...], merges: tuple[int, ...]
) -> None:
    model = vit({"kind": "tome", "r": 9, "layers": layers})

    def reduce(i: int, x: Tensor, size: list[float], row: Tensor, keys: Tensor) -> tuple[Tensor, list[float]]:
        return merged_by_hand(x, keys, size, merges[i], 1, 1)

    with torch.no_grad():
        for image, found in zip(images, model(images), strict=True):
            torch.testing.assert_close(found, logits_by_hand(model, image, reduce), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [0.5, 0.75])
def test_fusing_keeps_the_patches_that_the_class_token_attends_to_and_adds_up_the_rest(
    images: Tensor, keep: float
) -> None:
    model = vit({"kind": "evit", "keep": keep})

    def reduce(i: int, x: Tensor, size: list[float], row: Tensor, keys: Tensor) -> tuple[Tensor, list[float]]:
        if i not in (1, 2, 3):
            return x, size
        patches = sorted(range(1, len(x)), key=lambda j: -float(row[j]))
        kept = math.ceil(keep * len(patches))
        fused = sum(float(row[j]) * x[j] for j in patches[kept:])
        x = torch.stack([x[0], *(x[j] for j in sorted(patches[:kept])), fused])  # type: ignore[list-item]
        return x, [1.0] * len(x)

    with torch.no_grad():
        for image, found in zip(images, model(images), strict=True):
            torch.testing.assert_close(found, logits_by_hand(model, image, reduce), rtol=1e-4, atol=1e-4)


# Merging


def test_merged_tokens_are_means_weighted_by_size_and_sizes_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x, size = torch.randn(2, 7, 3, generator=generator), torch.tensor([[1.0, 2, 1, 4, 1, 1, 3]]).expand(2, -1)
    branch = torch.randn(2, 7, 3, generator=generator)
    slots = torch.tensor([[0, 0, 1, 0, 2, 3, 4], [0, 1, 1, 2, 3, 3, 4]])
    found, total = merge_tokens(x, branch, size, slots, 5)
    y = x + branch
    torch.testing.assert_close(found[0, 0], (y[0, 0] + 2 * y[0, 1] + 4 * y[0, 3]) / 7)
    torch.testing.assert_close(found[1, 1], (y[1, 2] + 2 * y[1, 1]) / 3)
    torch.testing.assert_close(found[:, 4], y[:, 6], rtol=0, atol=0)
    assert total.tolist() == [[7, 1, 1, 1, 3], [1, 3, 4, 2, 3]]


@pytest.mark.parametrize(("prefix", "tokens"), [(0, 8), (1, 9), (1, 10), (2, 9)])
def test_slots_are_those_of_the_tokens_that_stay_in_their_order(prefix: int, tokens: int) -> None:
    k = torch.randn(5, 2, tokens, 4, generator=torch.Generator().manual_seed(tokens))
    patch_of = torch.arange(100, 100 + tokens - prefix).expand(5, -1)
    slots, left = match_tokens(k, 3, prefix, patch_of)
    source, target = bipartite_matching(k[:, :, prefix:].mean(1), 3, prefix % 2)
    for image in range(5):
        joins = dict(zip((source[image] + prefix).tolist(), (target[image] + prefix).tolist(), strict=True))
        stay = [n for n in range(tokens) if n not in joins]
        assert slots[image].tolist() == [stay.index(joins.get(n, n)) for n in range(tokens)]
        assert left[image].tolist() == [100 + n - prefix for n in stay[prefix:]]


def test_only_pairs_across_the_two_sets_merge_and_the_most_similar_first() -> None:
    metric = torch.tensor([[[1.0, 0], [0, 1], [1, 0.01], [0.1, 1], [5, 5], [1, 0.9]]])
    assert [p.tolist() for p in bipartite_matching(metric, 1)] == [[[4]], [[5]]]  # not 0 and 2, which are both even
    source, target = bipartite_matching(metric, 3, first=1)
    assert dict(zip(source[0].tolist(), target[0].tolist(), strict=True)) == {1: 4, 3: 4, 5: 4}


@pytest.mark.parametrize("head", ["class_token", "distilled", "mean"])
@pytest.mark.parametrize("proportional", [True, False])
def test_sizes_add_up_to_the_patches_and_class_tokens_stay_alone(images: Tensor, head: str, proportional: bool) -> None:
    model = vit({"kind": "tome", "r": 6, "proportional": proportional}, head=head)
    with torch.no_grad():
        tokens = model.outputs(images).tokens
    assert tokens.size is not None
    assert tokens.size.shape[1] == tokens.prefix + PATCHES - 4 * 6
    assert (tokens.size[:, : tokens.prefix] == 1).all()
    assert tokens.size[:, tokens.prefix :].sum(1).tolist() == [PATCHES] * 3
    assert tokens.size.max() > 2


@pytest.mark.parametrize(
    "adaptive", [{"kind": "tome", "r": 0}, {"kind": "tome", "r": 0, "layers": (1,)}, {"kind": "evit", "keep": 1}]
)
def test_what_reduces_nothing_is_the_dense_model_bit_for_bit(images: Tensor, adaptive: dict[str, Any]) -> None:
    dense = vit()
    with torch.no_grad():
        assert torch.equal(make_adaptive(dense, adaptive)(images), dense(images))


def test_merging_equal_tokens_changes_nothing() -> None:
    dense = vit(positions="none")
    plain = torch.randn(2, 3, 1, 1, generator=torch.Generator().manual_seed(2)).expand(-1, -1, 24, 24)
    with torch.no_grad():
        expected = dense(plain)
        merged = make_adaptive(dense, {"kind": "tome", "r": 8})
        torch.testing.assert_close(merged(plain), expected, rtol=1e-5, atol=1e-5)
        assert leaving(merged, plain)[-1] == 1 + 6  # 36, 28, 20, 12, and no more than half of 12
        light = make_adaptive(dense, {"kind": "tome", "r": 8, "proportional": False})
        assert (light(plain) - expected).abs().max() > 1e-3  # a token of many no longer weighs as many


@pytest.mark.parametrize(
    ("options", "merges"),
    [
        ({"r": 3}, [3, 3, 3, 3]),
        ({"r": 2.5}, [2, 3, 2, 3]),
        ({"r": 3, "schedule": "decreasing"}, [6, 4, 2, 0]),
        ({"r": 100}, [18, 9, 4, 2]),
        ({"r": 100, "layers": (1, 3)}, [0, 18, 0, 9]),
        ({"r": 2.5, "layers": (3, 0)}, [2, 0, 0, 3]),
        ({"r": 3, "layers": (0, 1, 2), "schedule": "decreasing"}, [6, 3, 0, 0]),
    ],
)
def test_every_image_loses_as_many_as_the_schedule_says(
    images: Tensor, options: dict[str, Any], merges: list[int]
) -> None:
    model, count = vit({"kind": "tome", **options}), 1 + PATCHES
    expected = [count := count - r for r in merges]
    assert leaving(model, images) == expected
    assert stages(model) == tuple(i for i, r in enumerate(merges) if r)


def test_fusing_is_at_a_quarter_half_and_three_quarters_and_rounds_up() -> None:
    meta = {"device": "meta", "adaptive": {"kind": "evit", "keep": 0.7}}
    assert stages(create_model("deit_tiny", **meta)) == (3, 6, 9)
    assert stages(create_model("deit_tiny", depth=2, **meta)) == (0, 1)
    policy: Any = create_model("deit_tiny", **meta).policy
    # 197, 140, 100 and 72 tokens, of Liang et al.'s DeiT-S with a keep rate of 0.7.
    assert [policy.left(i, n) for i, n in ((0, 196), (3, 196), (6, 139), (9, 99))] == [196, 139, 99, 71]


# The account


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head", ["class_token", "distilled"])
@pytest.mark.parametrize("adaptive", [*BOTH, SOME])
def test_a_trace_counts_what_a_profiler_counts(
    images: Tensor, adaptive: dict[str, Any], head: str, norms: bool
) -> None:
    model = vit(adaptive, head=head)
    found = trace_macs(model, trace_of(model, images), scores="kept", norms=norms)
    assert found.tolist() == [cost(model, norms=norms).macs] * 3


def test_products_of_every_layer_are_counted() -> None:
    """By hooks on the linear layers, and attention's own products from the tokens that they saw."""
    model = vit(BOTH[0])
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, x, y: seen.append(x[0].numel() * m.out_features))
    counts = [37, 33, 29, 25, 21]
    assert leaving(model, torch.zeros(1, 3, 24, 24)) == counts[1:]
    attention = sum(2 * n * n * 32 for n in counts[:-1])
    halves = sum(((n - 1) // 2) * (n - 1 - (n - 1) // 2) * 16 for n in counts[:-1])
    stem = PATCHES * 32 * 3 * 4 * 4
    linear = sum(seen)  # of one pass: counting makes another one
    found = trace_macs(model, trace_of(model, torch.zeros(1, 3, 24, 24)))
    assert float(found) == linear + attention + halves + stem


@pytest.mark.parametrize(
    ("adaptive", "giga"),
    [
        ({"kind": "evit", "keep": 0.9}, 4.0),
        ({"kind": "evit", "keep": 0.7}, 3.0),
        ({"kind": "evit", "keep": 0.5}, 2.3),
        ({"kind": "tome", "r": 13}, 2.7),
    ],
)
def test_deit_small_costs_what_the_papers_print(adaptive: dict[str, Any], giga: float) -> None:
    assert round(cost(create_model("deit_small", device="meta", adaptive=adaptive)).macs / 1e9, 1) == giga


@pytest.mark.parametrize("adaptive", [*BOTH, SOME])
def test_the_dial_sets_a_share_of_the_dense_cost_and_is_saved(
    images: Tensor, adaptive: dict[str, Any], tmp_path: Path
) -> None:
    model, dense = vit(adaptive), cost(vit()).macs / 1e9
    model.stated["figures"] = {"top1": 1.0}
    for share in (0.9, 0.7, 0.55):
        said = model.set_budget(share=share)
        assert said == pytest.approx(share * dense, rel=0.02)  # one patch of 36 is as much
        assert said == mean_gmacs(model, [images])
    assert model.set_budget(gmacs=dense) == dense == worst_case(model) / 1e9
    model.set_budget(gmacs=0.7 * dense)
    assert "figures" not in model.stated
    again = load_model(model.save(tmp_path / "m"))
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    assert leaving(again, images)[-1] < 1 + PATCHES


@pytest.mark.parametrize("adaptive", BOTH)
def test_the_dial_names_what_it_cannot_do(adaptive: dict[str, Any]) -> None:
    model = vit(adaptive)
    before = model.policy.level  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="out of reach"):
        model.set_budget(share=0.01)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        model.set_budget(share=1.2)
    with pytest.raises(ValueError, match="share= or gmacs="):
        model.set_budget(ratio=0.5)
    with pytest.raises(ValueError, match="one of tokens, ratio, gmacs and share"):
        model.set_budget(share=0.5, gmacs=1.0)
    with pytest.raises(ValueError, match="no room to calibrate"):
        calibrate(model, [], batch=1)
    assert model.policy.level == before  # type: ignore[union-attr]


def test_sampling_takes_a_share_of_the_dense_cost_too(images: Tensor) -> None:
    model = vit({"kind": "ats", "least": 2})
    assert model.set_budget(share=0.6, images=images) == pytest.approx(0.6 * cost(vit()).macs / 1e9, rel=0.02)


# Around it


@pytest.mark.parametrize("adaptive", BOTH)
def test_a_trained_model_takes_it_without_new_weights_and_gives_it_back(
    images: Tensor, adaptive: dict[str, Any]
) -> None:
    dense = vit()
    reduced = make_adaptive(dense, adaptive)
    assert reduced.state_dict().keys() == dense.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(make_adaptive(reduced, None)(images), dense(images))


@pytest.mark.parametrize("adaptive", BOTH)
def test_an_image_does_not_depend_on_its_batch(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive)
    bad = images.clone()
    bad[0] = math.nan
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(bad)[1:], alone[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adaptive", [*BOTH, {"kind": "tome", "r": 4, "proportional": False}])
def test_training_through_it_moves_every_weight_of_attention(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive, drop_path=0.1).train()
    model(images).logsumexp(1).sum().backward()
    for block in model.trunk.blocks:  # type: ignore[union-attr]
        for part in block.attn.qkv.weight.grad.chunk(3):  # type: ignore[union-attr]
            assert part.isfinite().all()
            assert part.abs().max() > 0


CONTROLS = (
    {"kind": "ats", "sampling": "top", "cap": (0.6,), "least": 2},
    {"kind": "ats", "sampling": "uniform", "cap": (0.6,), "least": 2},
)


@pytest.mark.parametrize("adaptive", [*BOTH, *CONTROLS])
def test_shapes_depend_on_no_image_and_it_compiles_whole(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive)
    assert model.policy is not None
    assert model.policy.static
    with torch.no_grad():
        tokens = model.outputs(images).tokens
        assert tokens.mask is None
        assert tokens.offsets is None
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.manual_seed(3)
        expected = model(images)
        torch.manual_seed(3)  # of the uniform control
        torch.testing.assert_close(compiled(images), expected, rtol=1e-5, atol=1e-5)
    assert leaving(model, images) == leaving(model, -images)


@pytest.mark.parametrize(
    ("adaptive", "write", "name"),
    quick_of(
        [(a, w, n) for a in (*BOTH, CONTROLS[0]) for w, n in ((to_torch, "m.pt2"), (to_onnx, "m.onnx"))],
        [(a, to_torch, "m.pt2") for a in BOTH] + [(BOTH[0], to_onnx, "m.onnx")],
    ),
)
def test_it_is_exported(tmp_path: Path, adaptive: dict[str, Any], write: Any, name: str) -> None:
    if write is to_onnx:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    differences = write(vit(adaptive, depth=3), tmp_path / name).differences  # at batches of 1, 2 and 7
    assert max(differences.values()) < 1e-4


def test_a_file_in_which_threads_would_lose_sums_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: False)  # merging is an index_add then
    with pytest.raises(ValueError, match="where threads of onnxruntime lose sums; export to torch"):
        to_onnx(vit(BOTH[0], depth=2), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_a_model_that_draws_tokens_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draws tokens at random"):
        to_torch(vit(CONTROLS[1]), tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize(("kind", "flag", "value"), [("tome", "r", 4.0), ("evit", "keep", 0.7)])
def test_the_command_line_trains_evaluates_and_benches_it(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, flag: str, value: float
) -> None:
    small = "--model.name vit_micro_28 --model.trunk.depth 2 --model.trunk.width 32 --model.trunk.heads 2"
    adaptive = f"--model.trunk.adaptive.kind {kind} --model.trunk.adaptive.{flag} {value:g}"
    words = f"train vit --data {photos} {small} {adaptive} --data.workers 0 --optim.steps 2 --data.batch 16"
    assert run([*words.split(), "--out", str(tmp_path / "run"), "--json"]) == 0
    assert getattr(load_model(tmp_path / "run").policy, "level", None) == value
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run"), "--workers", "0", "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["top1"] <= 1
    assert run(["bench", str(tmp_path / "run"), "--seconds", "0.1", "--rounds", "1", "--batch", "2", "--json"]) == 0


@pytest.mark.parametrize("adaptive", [*BOTH, SOME])
def test_an_optimised_copy_gives_the_same(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive)
    with torch.no_grad():
        torch.testing.assert_close(model.optimize("float32")(images), model(images), rtol=1e-4, atol=1e-4)


class Launches(TorchDispatchMode):
    """Counts operators that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not any(word in func.name() for word in ("empty", "unsafe_view", "detach", "prim::")):
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def launched_on_cuda(adaptive: dict[str, Any] | None) -> Counter[str]:
    """Operators of a pass in bfloat16 on a GPU that need not be there: shapes are computed and nothing else."""
    model = create_model("deit_tiny", image_size=112, patch=8, depth=DEPTH, adaptive=adaptive, device="meta").eval()
    model.requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        half = {"device": "cuda", "dtype": torch.bfloat16}
        weights = {name: torch.empty(p.shape, **half) for name, p in model.named_parameters()}
        images = torch.empty(2, 3, 112, 112, **half)
        with torch.no_grad(), Launches() as launches:
            torch.func.functional_call(model, weights, (images,))
    return launches.names


@pytest.mark.slow
def test_on_cuda_a_merge_is_one_operator_that_takes_the_place_of_the_addition() -> None:
    pytest.importorskip("triton")
    more, less = (launched_on_cuda(a) for a in ({"kind": "tome", "r": 10}, None))
    assert more - less == Counter({"vitrail::merge_similar": DEPTH, "aten::arange": 1, "aten::full_like": 2})
    assert less - more == Counter({"aten::add.Tensor": DEPTH})


@pytest.mark.parametrize("adaptive", BOTH)
def test_it_runs_under_autocast_and_in_bf16(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive)
    with torch.no_grad():
        expected, scale = model(images), model(images).abs().max()
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(images) - expected).abs().max() < 0.3 * scale  # other tokens may be chosen
        assert model.to(torch.bfloat16)(images.to(torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize(("adaptive", "kept"), [(BOTH[0], [32, 28, 24, 20]), (BOTH[1], [36, 22, 14, 9])])
def test_pictures_show_patches_that_are_tokens_of_their_own(
    images: Tensor, adaptive: dict[str, Any], kept: list[int]
) -> None:
    collector = AttentionCollector(vit(adaptive))
    batch = collector.add(images)
    for i in range(DEPTH):
        maps = batch.maps(i)
        assert maps.weights.shape == (3, 2, 1 + PATCHES, 1 + PATCHES)
        expected = batch.kept(i - 1).sum(1) + 1
        assert maps.rows.sum(1).tolist() == expected.tolist()
        sums = maps.weights.sum(-1).transpose(1, 2)[maps.rows]
        assert (sums <= 1 + 1e-5).all()
        assert (sums > 0.3).all()  # EViT's token of all others is no patch, and its share is not drawn
    counts = collector.result().counts
    assert counts is not None
    # A token of all others may go on, and is none of these patches.
    assert all(
        n - max(0, i - 1) <= int(c) <= n for row in counts for i, (c, n) in enumerate(zip(row, kept, strict=True))
    )
    assert adaptive["kind"] == "evit" or counts.tolist() == [kept] * 3


@pytest.mark.parametrize("adaptive", BOTH)
def test_its_compute_cannot_be_attacked(adaptive: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="spends the same on every image"):
        reject_unfit(vit(adaptive), AttackConfig())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"adaptive": {"kind": "evit"}, "head": "mean"}, "asks the class token"),
        ({"adaptive": {"kind": "evit", "layers": (4,)}}, "blocks are 0 to 3"),
        ({"adaptive": {"kind": "evit", "keep": 0}}, "more than 0 and at most 1"),
        ({"adaptive": {"kind": "tome", "r": -1}}, "at least 0"),
        ({"adaptive": {"kind": "tome", "layers": (4,)}}, "blocks are 0 to 3"),
        ({"adaptive": {"kind": "tome", "layers": (1, 1)}}, "each at most once"),
        ({"adaptive": {"kind": "tome"}, "mixer": "sima"}, "must be softmax"),
        ({"adaptive": {"kind": "evit"}, "mixer": "talking_heads"}, "must be softmax"),
        ({"adaptive": {"kind": "tome"}, "parallel": 2}, "parallel must be 1"),
        ({"adaptive": {"kind": "evit"}, "local": True}, "local patch interaction"),
    ],
)
def test_what_it_cannot_work_with_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_model("deit_tiny", **{"depth": DEPTH, "width": 32, "heads": 2, **changes})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("adaptive", [*BOTH, {"kind": "tome", "r": 4, "proportional": False}, CONTROLS[0]])
def test_compiled_and_captured_on_cuda_it_gives_the_same(images: Tensor, adaptive: dict[str, Any]) -> None:
    model = vit(adaptive).cuda()
    ready = model.optimize("float32", compile=True, graph=True)
    with torch.no_grad():
        for batch in (images.cuda(), -images.cuda()):
            torch.testing.assert_close(ready(batch), model(batch), rtol=1e-2, atol=1e-2)
    fast = model.optimize()
    assert fast.compiled
    assert fast.graph
    assert fast(images.cuda()).isfinite().all()
