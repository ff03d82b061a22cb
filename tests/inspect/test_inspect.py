"""Where models look and what they keep: figures against loops, pictures against masks, the command from end to end."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.cli import run
from vitrail.config import from_mapping
from vitrail.data.open import open_data
from vitrail.inspect.kept import other_selection
from vitrail.inspect.model_similarity import Divergence, cka_table, jensen_shannon, transfer_account
from vitrail.inspect.run import by_turns, inspect_models
from vitrail.learn.attack import UniversalPatch, save_patch
from vitrail.measure.attention_maps import (
    AttentionCollector,
    CapturedBatch,
    LayerCollector,
    LayerMaps,
    LayerStatistics,
    class_rows,
    entropies,
    patch_distances,
    row_distances,
    shares,
    spread_out,
)
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.weights import load_model
from vitrail.recipes import recipe
from vitrail.report.sheets import FADED, GROUND, dimmed, enlarged, evenly, kept_sheet, sheet_picture

GRID = (2, 3)
SMALL = {"image_size": 32, "patch": 8, "depth": 2, "width": 32, "heads": 2, "classes": 3}


def random_maps(prefix: int = 1, images: int = 3, heads: int = 2, grid: tuple[int, int] = GRID) -> LayerMaps:
    tokens = prefix + grid[0] * grid[1]
    weights = torch.randn(images, heads, tokens, tokens, dtype=torch.float64).mul(2).softmax(-1)
    there = torch.ones(images, tokens, dtype=torch.bool)
    return LayerMaps(weights, there, there, prefix, grid)


def look(*batches: LayerMaps) -> LayerStatistics:
    collector = LayerCollector(0)
    for maps in batches:
        collector.add(maps)
    return collector.result()


def model(name: str = "vit_tiny", **options: Any) -> Classifier:
    made = create_model(name, **{**SMALL, **options})
    for block in made.trunk.blocks:  # attention that differs from patch to patch, as after training
        if hasattr(block, "attn") and hasattr(block.attn, "qkv"):
            torch.nn.init.normal_(block.attn.qkv.weight, std=0.4)
    return made.eval()


def some_images(count: int = 5, size: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


ATS = {"kind": "ats", "layers": [0, 1], "cap": [0.6], "least": 2}
AVIT = {"kind": "avit", "gate_center": 0.0, "gate_scale": 3.0}
ADAVIT = {"kind": "adavit", "whole": 0}


# Figures, against loops


def test_entropy_is_that_of_a_loop_over_rows() -> None:
    maps = random_maps()
    found = look(maps)
    weights = maps.weights.numpy()
    for head in range(2):
        rows = [-sum(p * math.log(p) for p in row) for image in weights[:, head] for row in image]
        of_class = [-sum(p * math.log(p) for p in image[0]) for image in weights[:, head]]
        assert found.entropy[head] == pytest.approx(np.mean(rows), rel=1e-12)
        assert found.entropy_share[head] == pytest.approx(np.mean(rows) / math.log(7), rel=1e-12)
        assert found.class_entropy[head] == pytest.approx(np.mean(of_class), rel=1e-12)
        assert found.class_entropy_share[head] == pytest.approx(np.mean(of_class) / math.log(7), rel=1e-12)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_distance_is_that_of_a_loop_over_pairs_of_patches(prefix: int) -> None:
    maps = random_maps(prefix)
    found = look(maps)
    places = [(r, c) for r in range(GRID[0]) for c in range(GRID[1])]
    for head in range(2):
        means = []
        for image in maps.weights[:, head].numpy():
            for i, (r, c) in enumerate(places):
                row = image[prefix + i, prefix:]
                far = [p * math.hypot(r - y, c - x) for p, (y, x) in zip(row, places, strict=True)]
                means.append(sum(far) / row.sum())
        assert found.distance[head] == pytest.approx(np.mean(means), rel=1e-12)


def test_even_attention_has_the_logarithm_and_the_mean_distance_of_the_grid() -> None:
    even = random_maps()
    even = LayerMaps(torch.full_like(even.weights, 1 / 7), even.rows, even.keys, 1, GRID)
    found = look(even)
    # A grid of 2 x 3: from a corner 0, 1, 2, 1, √2, √5; from a middle patch 0, 1, 1, 1, √2, √2.
    corner, middle = 4 + math.sqrt(2) + math.sqrt(5), 3 + 2 * math.sqrt(2)
    assert found.entropy == pytest.approx([math.log(7)] * 2)
    assert found.class_entropy_share == pytest.approx([1, 1])
    assert found.distance == pytest.approx([(4 * corner + 2 * middle) / 36] * 2)


def test_attention_to_oneself_has_no_entropy_and_no_distance() -> None:
    maps = random_maps()
    found = look(LayerMaps(torch.eye(7, dtype=torch.float64).expand(3, 2, 7, 7), maps.rows, maps.keys, 1, GRID))
    assert found.entropy == found.class_entropy == found.distance == (0, 0)


def test_batches_give_what_all_images_give() -> None:
    maps = random_maps(images=5)
    parts = [LayerMaps(maps.weights[s], maps.rows[s], maps.keys[s], 1, GRID) for s in (slice(0, 2), slice(2, 5))]
    whole, streamed = look(maps), look(*parts)
    for name in ("entropy", "entropy_share", "class_entropy", "class_entropy_share", "distance"):
        assert getattr(streamed, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_tokens_that_are_gone_count_in_nothing() -> None:
    maps = random_maps(images=1)
    left = [0, 1, 3, 4]  # class token and three patches
    there = torch.zeros(1, 7, dtype=torch.bool)
    there[:, left] = True
    weights = shares(maps.weights.masked_fill(~(there[:, None, :, None] & there[:, None, None]), 0.0))
    found = look(LayerMaps(weights, there, there, 1, GRID))
    small = weights[0, :, left][..., left]
    assert found.entropy == pytest.approx(entropies(small).mean(1).tolist(), rel=1e-12)
    assert found.entropy_share == pytest.approx((entropies(small).mean(1) / math.log(4)).tolist(), rel=1e-12)
    far = patch_distances(GRID)[[0, 2, 3]][:, [0, 2, 3]]
    inner = small[:, 1:, 1:] / small[:, 1:, 1:].sum(-1, keepdim=True)
    assert found.distance == pytest.approx((inner * far).sum(-1).mean(1).tolist(), rel=1e-12)


def test_a_row_that_looks_at_no_patch_has_no_distance() -> None:
    maps = random_maps(images=1)
    weights = maps.weights.clone()
    weights[:, :, 2] = torch.eye(7, dtype=torch.float64)[0]  # patch 1 looks at the class token alone
    far, looks = row_distances(LayerMaps(weights, maps.rows, maps.keys, 1, GRID))
    assert looks[0, 0].tolist() == [True, False, True, True, True, True]
    assert bool(far.isfinite().all())


def test_magnitudes_of_signed_maps_become_shares() -> None:
    signed = torch.tensor([[3.0, -1.0], [0.0, 0.5]])
    assert shares(signed).tolist() == [[0.75, 0.25], [0.0, 1.0]]


# From a model's maps to the grid


def test_sampled_maps_are_put_where_their_tokens_were() -> None:
    asking = torch.tensor([[True, False, False, True], [False, False, True, False]])
    seen = torch.tensor([[True, True, False, True], [True, False, True, False]])
    small = torch.rand(2, 1, 3, 4)  # class token and at most 2 queries; class token and at most 3 keys
    small[1, :, :, 3] = 0  # padding
    found = spread_out(small, asking, seen, 1)
    for image in range(2):
        queries = [0] + [1 + i for i in range(4) if asking[image, i]]
        keys = [0] + [1 + i for i in range(4) if seen[image, i]]
        for a, query in enumerate(queries):
            for b, key in enumerate(keys):
                assert found[image, 0, query, key] == small[image, 0, a, b]


@pytest.mark.parametrize("adaptive", [ATS, AVIT, ADAVIT], ids=lambda a: str(a["kind"]))
def test_adaptive_maps_are_of_the_tokens_that_were_there(adaptive: dict[str, Any]) -> None:
    made = model(adaptive=adaptive)
    if adaptive["kind"] == "adavit":
        for decision in made.policy.decisions.values():
            torch.nn.init.normal_(decision.patches.weight, std=1.0)
            torch.nn.init.zeros_(decision.patches.bias)
    seen = CapturedBatch(made, some_images())
    dropped = 0
    for i in range(2):
        maps = seen.maps(i)
        keys = maps.keys[:, 1:]
        assert torch.equal(keys, seen.kept(i if adaptive["kind"] == "adavit" else i - 1))
        assert bool((maps.weights.sum((1, 2)) > 0)[~maps.keys].logical_not().all())
        sums = maps.weights.sum(-1).transpose(1, 2)
        torch.testing.assert_close(sums, maps.rows[..., None].float().expand_as(sums))
        dropped += int((~keys).sum()) + int((~maps.rows).sum())
    assert dropped > 0


def test_an_image_looks_the_same_alone_and_in_a_batch_of_sampled_ones() -> None:
    made, images = model(adaptive=ATS), some_images()
    together = CapturedBatch(made, images).maps(1).weights
    alone = torch.cat([CapturedBatch(made, images[i : i + 1]).maps(1).weights for i in range(len(images))])
    # float32 sums in another order
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("adaptive", [ATS, {**ATS, "layers": [0]}, AVIT, ADAVIT], ids=lambda a: str(a["kind"]))
def test_packed_models_show_what_padded_ones_show(adaptive: dict[str, Any]) -> None:
    images = some_images()
    padded, packed = (model(adaptive={**adaptive, "form": form}) for form in ("padded", "packed"))
    packed.load_state_dict(padded.state_dict())
    packed.train()
    one, other = CapturedBatch(padded, images), CapturedBatch(packed, images)
    assert torch.equal(one.maps(1).weights, other.maps(1).weights)
    assert packed.training


def test_a_class_token_that_has_halted_has_no_row() -> None:
    made = model(adaptive={"kind": "avit", "gate_center": -50.0})  # every score is 1: all halt after the first block
    collector = AttentionCollector(made, 5)
    seen = collector.add(some_images())
    assert not seen.maps(1).rows.any()
    first, second = collector.result().to_json()["layers"]
    assert first["class_entropy"] > 0
    assert second["class_entropy"] is second["entropy"] is second["distance"] is None


def test_counts_and_compute_are_those_of_the_trace() -> None:
    made, images = model(adaptive=ATS), some_images()
    collector = AttentionCollector(made, 2)
    collector.add(images[:3])
    collector.add(images[3:])
    found = collector.result()
    with torch.inference_mode():
        trace = made.outputs(images).trace
    assert found.entering == pytest.approx([float(use.entering.mean()) for use in trace.blocks])
    assert found.leaving == pytest.approx([float(use.leaving.mean()) for use in trace.blocks])
    assert found.counts.tolist() == torch.stack([use.leaving - 1 for use in trace.blocks], 1).tolist()
    assert 0 < found.macs < found.macs_whole
    assert found.kept.shape == (2, 2, 16)


def test_a_model_seen_in_batches_is_the_model_seen_at_once() -> None:
    made, images = model(), some_images(5)
    whole, parts = AttentionCollector(made, 3), AttentionCollector(made, 3)
    whole.add(images)
    parts.add(images[:2])
    parts.add(images[2:])
    one, other = whole.result(), parts.result()
    # float32 products of batches of other sizes
    assert one.layers[1].entropy == pytest.approx(other.layers[1].entropy, rel=1e-5)
    torch.testing.assert_close(one.class_maps, other.class_maps, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(one.features[1], other.features[1], atol=1e-5, rtol=1e-4)


def test_without_a_class_token_the_mean_row_is_shown_and_said() -> None:
    made = model(head="mean")
    collector = AttentionCollector(made, 5)
    seen = collector.add(some_images())
    found = collector.result()
    torch.testing.assert_close(class_rows(seen.maps(0)), seen.maps(0).weights.mean(2))
    assert found.layers[0].row == "mean"
    assert any("no class token" in note for note in found.notes)


def test_sima_is_signed_and_has_its_saliency() -> None:
    made = model(mixer="sima")
    collector = AttentionCollector(made, 2)
    collector.add(some_images(2))
    found = collector.result()
    assert any("negative" in note for note in found.notes)
    with torch.inference_mode():
        q = made.outputs(collected_images(), want={"q.1"}).captured["q.1"]  # [1, heads, tokens, dim]
    q = q[0].numpy()
    hat = q / np.abs(q).sum(1, keepdims=True)
    by_hand = [math.sqrt(sum(hat[h, t, d] ** 2 for h in range(2) for d in range(16))) for t in range(1, 17)]
    again = AttentionCollector(made, 1)
    again.add(collected_images())
    assert again.result().saliency[0][0].tolist() == pytest.approx(by_hand, rel=1e-4)


def collected_images() -> Tensor:
    return torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8).reshape(1, 3, 32, 32)


def test_talking_heads_show_maps_and_the_heads_own() -> None:
    made = model("cait_xxs24", width=32)
    collector = AttentionCollector(made, 2)
    collector.add(some_images(2))
    found = collector.result()
    assert len(found.layers) == 2
    assert found.head_maps.shape == (2, 16)


def test_a_mixer_without_maps_is_named() -> None:
    made = create_model("resmlp_s12", image_size=32, patch=8, depth=2, width=32, classes=3)
    collector = AttentionCollector(made, 2)
    collector.add(some_images(2))
    found = collector.result()
    assert found.layers == ()
    assert found.notes == ("the mixer linear_patches has no attention maps over patches",)


# Two models


def test_the_table_of_cka_is_cka_pair_by_pair() -> None:
    first = [torch.randn(20, 5, dtype=torch.float64) for _ in range(2)]
    second = [torch.randn(20, 4, dtype=torch.float64) + first[0][:, :4] for _ in range(3)]
    table = cka_table(first, second)
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            a, b = x - x.mean(0), y - y.mean(0)
            expected = (b.T @ a).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm())  # by products of channels
            assert float(table[i, j]) == pytest.approx(float(expected), rel=1e-9)


def test_divergence_in_batches_is_that_of_all_images() -> None:
    first, second = random_maps(images=4), random_maps(images=4)
    batches, whole = Divergence(), Divergence()
    whole.add(first, second)
    for part in (slice(0, 1), slice(1, 4)):
        batches.add(*(LayerMaps(m.weights[part], m.rows[part], m.keys[part], 1, GRID) for m in (first, second)))
    assert batches.values() == pytest.approx(whole.values(), rel=1e-9)


def test_divergence_is_of_rows_that_both_have_and_of_any_number_of_heads() -> None:
    first, second = random_maps(images=1), random_maps(images=1, heads=3)
    rows = first.rows.clone()
    rows[0, 2:] = False
    gathered = Divergence()
    gathered.add(LayerMaps(first.weights, rows, first.keys, 1, GRID), second)
    found = gathered.values()
    assert found["direct"] is found["bipartite"] is None
    pairs = jensen_shannon(first.weights[0, :, None, :2], second.weights[0, None, :, :2])  # [heads, others, rows]
    assert found["minimum"] == pytest.approx(float(pairs.mean(-1).amin(1).mean()), rel=1e-9)


def test_the_account_of_transfer_is_the_published_one() -> None:
    large = create_model("vit_large", device="meta")
    account = transfer_account(large, large)
    assert account["maps"] == 14_902_656
    assert account["queries_and_keys"] == 9_682_944
    assert account["macs_copy"] == 2 * account["macs_distilled"]


def test_models_that_do_not_fit_are_told_apart_in_words() -> None:
    assert transfer_account(model(), model(heads=4)) == "attention transfer does not fit: 2 and 4 heads"
    assert "adaptive" in str(transfer_account(model(adaptive=ATS), model()))
    assert "softmax and sima" in str(transfer_account(model(), model(mixer="sima")))


# Pictures


@pytest.mark.parametrize("size", [(28, 28), (30, 41)])
def test_dimming_changes_exactly_the_patches_that_were_dropped(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0)
    image = noise.integers(0, 100, (*size, 3), dtype=np.uint8)  # far from the ground colour
    kept = noise.random((4, 7)) < 0.5
    found = dimmed(image, kept)
    for y in range(size[0]):
        for x in range(size[1]):
            if kept[y * 4 // size[0], x * 7 // size[1]]:
                assert (found[y, x] == image[y, x]).all()
            else:
                assert found[y, x] == pytest.approx((1 - FADED) * image[y, x] + FADED * np.array(GROUND), abs=0.5)


def test_the_strip_shows_what_the_model_kept_and_counts_it() -> None:
    made = model(adaptive=ATS)
    images = some_images(2) // 3
    collector = AttentionCollector(made, 2)
    collector.add(images)
    maps = collector.result()
    pixels = [image.permute(1, 2, 0).numpy() for image in images]
    sheet = kept_sheet("ats", maps, pixels, ["one", "two"])
    assert list(sheet.columns) == ["image", "after block 0", "after block 1"]
    with torch.inference_mode():
        kept = made.outputs(images, want={"kept.0", "kept.1"}).captured
    for row, (_, cells) in enumerate(sheet.rows):
        for block in range(2):
            mask = kept[f"kept.{block}"][row].reshape(4, 4) > 0
            cell = cells[block + 1]
            assert cell.caption == f"{int(mask.sum())} of 16"
            times = cell.picture.shape[0] // 32
            same = (cell.picture[::times, ::times] == pixels[row]).all(-1)
            whole = same.reshape(4, 8, 4, 8).all((1, 3))
            assert (whole == mask.numpy()).all()
    assert sheet_picture(sheet).width > 3 * cells[0].picture.shape[1]


def test_the_other_rule_keeps_what_a_model_made_with_it_keeps_and_leaves_no_trace() -> None:
    made, images = model(adaptive={**ATS, "cap": [0.8]}), some_images(4)
    collector = AttentionCollector(made, 4)
    collector.add(images)
    maps = collector.result()
    pixels = [image.permute(1, 2, 0).numpy() for image in images]
    found = other_selection(made, pixels, maps.counts)
    assert found is not None
    assert (found.own, found.other) == ("inverse transform", "top-K")
    most = [round(float(maps.counts[:, i].double().mean())) for i in range(2)]
    by_rank = model(adaptive={**ATS, "cap": most, "sampling": "top"})
    by_rank.load_state_dict(made.state_dict())
    for image in range(4):
        alone = CapturedBatch(by_rank, images[image : image + 1])
        for stage in range(2):
            assert torch.equal(found.attention.kept[image, stage], alone.kept(stage)[0])
            assert int(found.attention.kept[image, stage].sum()) == most[stage]
    again = AttentionCollector(made, 4)
    again.add(images)
    assert torch.equal(again.result().kept, maps.kept)


def test_a_model_that_takes_the_top_is_shown_with_inverse_sampling_and_others_with_nothing() -> None:
    made, images = model(adaptive={**ATS, "sampling": "top"}), some_images(2)
    pixels = [image.permute(1, 2, 0).numpy() for image in images]
    found = other_selection(made, pixels, torch.ones(2, 2))
    usual = model(adaptive=ATS)
    usual.load_state_dict(made.state_dict())
    assert found is not None
    assert found.other == "inverse transform"
    assert torch.equal(found.attention.kept[:, 0], CapturedBatch(usual, images).kept(0))
    assert other_selection(model(), pixels, torch.ones(2, 2)) is None
    assert other_selection(model(adaptive=AVIT), pixels, torch.ones(2, 2)) is None


def test_small_images_grow_by_whole_factors_and_large_ones_shrink() -> None:
    small = np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8)
    grown = enlarged(small, 112)
    assert grown.shape == (112, 112, 3)
    assert (grown[::4, ::4] == small).all()
    assert enlarged(np.zeros((300, 200, 3), dtype=np.uint8), 112).shape[0] == 112


def test_chosen_layers_hold_the_first_and_the_last() -> None:
    assert evenly(range(5), 12) == [0, 1, 2, 3, 4]
    chosen = evenly(range(48), 12)
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 47, 12)


def test_images_are_taken_from_all_classes_in_turn() -> None:
    labels = np.array([2, 2, 0, 1, 1, 0, 2])
    assert by_turns(labels, 5) == [2, 3, 0, 5, 4]
    assert by_turns(labels, 99) == by_turns(labels, 7)


# The command

TINY = {
    "recipe": "demo",
    "data": {"uri": "synthetic:shapes?n=90&size=28&classes=3", "batch": 16, "workers": 0, "check": "off"},
    "model": {"trunk": {"depth": 2, "width": 32, "heads": 2, "adaptive": {**ATS, "cap": [0.5]}}},
    "optim": {"steps": 3, "warmup": 0},
    "engine": {"ema": 0, "device": "cpu"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that samples tokens."""
    out = tmp_path_factory.mktemp("runs") / "sampled"
    vitrail.train(from_mapping({**TINY, "out": str(out)}, recipe("demo")), quiet=True)
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model of the same size, without a run."""
    torch.manual_seed(1)
    made = create_model("vit_micro_28", classes=["a", "b", "c"], depth=2, width=32, heads=2)
    return made.save(tmp_path_factory.mktemp("models") / "plain")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.headings: list[str] = []
        self.tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag = tag
        self.outside += [str(v) for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]

    def handle_data(self, data: str) -> None:
        if self.tag == "h2" and data.strip():
            self.headings.append(data)


def test_the_report_of_an_adaptive_run_shows_what_it_keeps(trained: Path) -> None:
    page = Page((trained / "report.html").read_text(encoding="utf-8"))
    assert "Kept patches" in page.headings
    assert "Attention maps" in page.headings


def test_the_command_writes_a_page_pictures_and_json(
    trained: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", str(trained), str(saved), "--count", "3", "--over", "9", "--layers", "1"]
    assert run([*words, "--out", str(tmp_path), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = Page(Path(told["report"]).read_text(encoding="utf-8"))
    assert page.outside == []
    assert {"Attention maps", "Kept patches", "Attention maps by head", "Similarity of the two models"} <= set(
        page.headings
    )
    for name in ("attention", "heads-0", "heads-1", "kept-0"):
        assert Image.open(tmp_path / f"{name}.png").width > 200
    ats, plain = told["models"]
    assert (ats["adaptive"], plain["adaptive"], ats["images"]) == ("ats", "", 9)
    assert ats["tokens"][0] == 17
    assert ats["tokens"][1] < 17
    assert 0 < ats["macs"] < ats["macs_whole"] == plain["macs"]
    assert [layer["layer"] for layer in plain["layers"]] == [0, 1]
    assert 0 < plain["layers"][0]["entropy_share"] <= 1
    assert plain["layers"][0]["distance_pixels"] == pytest.approx(7 * plain["layers"][0]["distance"])
    assert np.shape(told["cka"]) == (2, 2)
    assert set(told["divergence"]) == {"layers", "images", "direct", "bipartite", "minimum", "averaged"}
    assert told["notes"] == [
        "attention transfer does not fit: an adaptive model's maps differ in size from image to image"
    ]


def test_charts_are_files_that_stand_alone(trained: Path, tmp_path: Path) -> None:
    _, folder = inspect_models([trained], count=1, over=6, judge=0, out=tmp_path, device="cpu")
    names = {path.stem for path in folder.glob("*.svg")}
    assert {"mean-attention-distance-patches", "patches-kept-after-block-1", "map-of-the-images"} <= names
    page = (folder / "inspect.html").read_text(encoding="utf-8")
    assert len(names) == page.count('<svg class="chart"')
    for name in names:
        tree = ElementTree.parse(folder / f"{name}.svg").getroot()
        assert tree.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme" not in "".join(tree.itertext())
        assert float(tree.attrib["width"]) > 100


def test_the_command_prints_a_row_a_layer(
    saved: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", str(saved), "--images", str(photos / "red"), "--count", "2", "--over", "4"]
    assert run([*words, "--out", str(tmp_path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain, 4 images")
    assert [line.split()[0] for line in lines[1:4]] == ["layer", "0", "1"]
    assert max(len(line) for line in lines if not line.startswith("report:")) <= 80


def test_models_of_other_grids_are_compared_as_far_as_they_can(saved: Path, photos: Path, tmp_path: Path) -> None:
    other = create_model("vit_micro_28", classes=3, depth=2, width=32, heads=2, patch=4)
    found, _ = inspect_models([saved, other], images=[photos / "red"], count=2, over=4, out=tmp_path, device="cpu")
    assert found.cka is not None
    assert not found.divergence
    assert "divergence of maps is left out: maps over 4x4 and 7x7 patches cannot be compared" in found.notes


def test_equal_models_are_alike_and_do_not_diverge(saved: Path, photos: Path, tmp_path: Path) -> None:
    found, _ = inspect_models([saved, saved], images=[photos / "red"], count=2, over=8, out=tmp_path, device="cpu")
    assert found.cka_diagonal == pytest.approx([1, 1])
    assert found.divergence["direct"] == pytest.approx([0, 0], abs=1e-12)
    assert found.transfer["maps"] == 2 * 2 * 17 * 17


def test_a_name_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "timm:vit_tiny_patch16_224", "--count", "1", "--over", "2", "--what", "evidence", "attention"]
    assert run([*words, "--out", str(tmp_path), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "test of embedded:fashion"
    assert told["models"][0]["evidence"]["kinds"] == ["attention", "rollout", "gradient_attention", "grad_cam"]
    assert len(told["models"][0]["layers"]) == 12
    assert told["notes"] == ["timm:vit_tiny_patch16_224 is untrained"]


def test_a_model_without_attention_gets_grad_cam_and_a_sentence(photos: Path, tmp_path: Path) -> None:
    made = create_model("resmlp_s12", image_size=32, patch=8, depth=2, width=32, classes=3)
    images = [photos / "red" / "00.jpg"]
    found, folder = inspect_models([made], images=images, judge=1, out=tmp_path / "out", device="cpu")
    subject = found.subjects[0]
    assert subject.evidence is not None
    assert list(subject.evidence.maps) == ["grad_cam"]
    assert [row["kind"] for row in subject.evidence.quality] == ["grad_cam", "random", "centre"]
    assert "linear_patches has no attention maps" in " ".join(subject.attention.notes)
    assert (folder / "evidence-0.png").is_file()
    assert (folder / "classes-0.png").is_file()


@pytest.mark.parametrize(("data", "boxes"), [("synthetic:shapes?n=60&size=32", True), ("embedded:fashion", False)])
def test_the_columns_that_are_explained_are_those_of_the_table(data: str, boxes: bool, tmp_path: Path) -> None:
    made = create_model("deit_tiny", image_size=32, patch=8, width=32, depth=1, heads=2, classes=10)
    options: dict[str, Any] = {"judge": 2, "count": 1, "over": 2, "device": "cpu", "what": ["judged"]}
    inspection, _ = inspect_models([made], data=data, out=tmp_path, **options)
    (part,) = (part for part in inspection.parts if part.name == "judged")
    columns = part.cards[0].items[0].columns[1:]
    assert re.findall(r"(\w+): ", part.lead) == [name.capitalize() for name in columns] + ["model"]
    assert ("pointing" in columns) is boxes


def test_the_first_screen_has_the_accuracy_on_the_images(tmp_path: Path) -> None:
    data = open_data("embedded:fashion")
    made = create_model("deit_tiny", image_size=32, patch=8, width=32, depth=1, heads=2, classes=data.classes)
    _, folder = inspect_models([made], data=data, over=30, what=["attention"], out=tmp_path, device="cpu")
    rows = by_turns(data["test"].labels, 30)
    labels = [made.predict(data["test"].read(row))[0].label for row in rows]
    right = sum(label == data.classes[data["test"].labels[row]] for label, row in zip(labels, rows, strict=True))
    first = (folder / "inspect.html").read_text(encoding="utf-8").split("<nav")[0].replace("\N{NO-BREAK SPACE}", " ")
    assert f"{100 * right / 30:.1f} % of 30 images, test of embedded:fashion, are classified correctly" in first
    assert f"<dt>top-1 on these images</dt><dd>{100 * right / 30:.1f} %</dd>" in first


def test_boxes_of_shapes_are_pointed_at_and_photographs_have_none(photos: Path, tmp_path: Path) -> None:
    made = create_model("deit_tiny", image_size=32, patch=8, width=32, depth=2, heads=2, classes=10)
    options: dict[str, Any] = {"judge": 2, "count": 1, "over": 2, "device": "cpu"}
    shapes, _ = inspect_models([made], data="synthetic:shapes?n=60&size=32", out=tmp_path / "a", **options)
    plain, _ = inspect_models([made], images=[photos], out=tmp_path / "b", **options)
    for found, there in ((shapes, True), (plain, False)):
        evidence = found.subjects[0].evidence
        assert evidence is not None
        assert ("pointing" in evidence.quality[0]) == there
        assert evidence.quality[0]["images"] == 2


def test_what_cannot_be_done_is_said_in_one_sentence(
    saved: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.jpg"
    torn.write_bytes((photos / "red" / "00.jpg").read_bytes()[:200])
    image = str(photos / "red" / "00.jpg")
    for words, said in (
        ([], "name at least one run"),
        ([str(saved), "--images", image, "--judge", "-1"], "judge is a number of images"),
        ([str(saved)], "--data URI or --images PATH"),
        ([str(saved), "--images", str(torn)], "torn.jpg cannot be read"),
        ([str(saved), "--images", image, "--data", "embedded:fashion"], "use one of them"),
        ([str(saved), "--images", image, "--layers", "7"], "no layer 7; layers with attention maps are 0 to 1"),
        ([str(saved), "--data", "embedded:fashion", "--split", "tset"], "has no split 'tset'"),
        ([str(tmp_path / "nowhere"), "--images", image], "no model at"),
    ):
        assert run(["inspect", *words, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        told = capsys.readouterr().err.strip().splitlines()
        assert len(told) == 1
        assert said in told[0]
    assert not (tmp_path / "out").exists()


# Under a patch


@pytest.fixture(scope="module")
def patch(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patch of seven pixels, drawn and not learned."""
    folder = tmp_path_factory.mktemp("patch")
    change = UniversalPatch(7, "14,0", 28, seed=3, preprocess=load_model(trained).preprocess)
    save_patch(folder, change, {"seed": 3, "victim": {}})
    return folder


def test_the_strip_shows_every_image_with_the_patch_below_it(trained: Path, patch: Path, tmp_path: Path) -> None:
    found, folder = inspect_models(
        [trained], attack=patch, what=["kept"], count=3, over=6, out=tmp_path / "out", device="cpu"
    )
    subject = found.subjects[0]
    drawn = np.asarray(Image.open(patch / "patch.png"))
    victim = load_model(trained)
    assert subject.attacked is not None
    for image in range(3):
        by_hand = subject.pixels[image].copy()
        by_hand[14:21, :7] = drawn
        assert (subject.attacked_pixels[image] == by_hand).all()
        alone = CapturedBatch(victim, torch.from_numpy(by_hand).permute(2, 0, 1)[None])
        for stage in range(2):
            assert torch.equal(subject.attacked.kept[image, stage], alone.kept(stage)[0])
    attacked = (subject.attacked, subject.attacked_pixels)
    sheet = kept_sheet(subject.name, subject.attention, subject.pixels, found.captions, attacked=attacked)
    assert [name.startswith("attacked, predicted ") for name, _ in sheet.rows] == [False, True] * 3
    page = (folder / "inspect.html").read_text(encoding="utf-8")
    assert "Under the patch" in page
    assert (folder / "selection-0.png").is_file()


def test_a_patch_is_refused_where_nothing_could_show_it(
    trained: Path, saved: Path, patch: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ([str(saved), "--attack", str(patch), "--images", str(photos)], "spends the same on every image"),
        ([str(trained), "--attack", str(patch), "--what", "attention"], "add kept to --what"),
        ([str(trained), "--attack", str(tmp_path)], "no patch in"),
    ):
        assert run(["inspect", *words, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
        told = capsys.readouterr().err.strip().splitlines()
        assert len(told) == 1
        assert said in told[0]


def test_the_command_tells_what_the_patch_costs(trained: Path, patch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(trained), "--attack", str(patch), "--what", "kept", "--count", "2", "--over", "4"]
    assert run([*words, "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["models"][0]
    assert told["attacked"]["images"] == told["images"] == 4
    assert told["attacked"]["tokens"][0] == 17
    assert told["attacked"]["macs_whole"] == told["macs_whole"]
    assert run([*words, "--device", "cpu"]) == 0
    assert "\nunder the patch: " in capsys.readouterr().out
