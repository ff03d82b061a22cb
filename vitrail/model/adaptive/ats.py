"""ATS: each image keeps the tokens that its class token attends to (Fayyaz et al. 2022, arXiv 2111.15667).

Inside the attention of a block, scores of patches give a distribution, a fixed set of points is drawn from its inverse,
and only the drawn patches are queries; all tokens are still their keys and values. The class token's row of the map
comes first, so rows of dropped tokens are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.packing import compact, kept_first, pack
from vitrail.kernels.ragged_attention import ragged_attention
from vitrail.kernels.sampling import (
    check_points,
    class_attention,
    class_scores,
    inverse_sample,
    nearest_sample,
    ragged_sample,
    ragged_uniform_sample,
    random_sample,
    top_sample,
    uniform_sample,
)
from vitrail.model.config import Ats, TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.parts.block import Block
from vitrail.model.parts.tokens import AdaptivePolicy, Passage, Probe, Tokens, show_kept

DRAW = {"inverse": inverse_sample, "nearest": nearest_sample, "random": random_sample}


class AtsPolicy(AdaptivePolicy):
    """Samples tokens in the blocks `at`. Nothing is learned, and nothing is added to a state dict.

    Raises `ValueError` where the trunk has no class token, other mixers than softmax, or too few blocks.
    """

    def __init__(self, config: Ats, trunk: TrunkConfig, blocks: Sequence[Block], prefix: int) -> None:
        super().__init__()
        depth = len(blocks)
        self.config = config
        self.at = config.layers or tuple(range(depth // 4, depth))
        if any(not isinstance(b, Block) for b in blocks):
            raise ValueError("ats works in plain blocks, one after the other: parallel must be 1")
        if max(self.at) >= depth or len(set(self.at)) < len(self.at):
            raise ValueError(f"adaptive.layers: {self.at}, but blocks are 0 to {depth - 1}, each at most once")
        if not prefix:
            raise ValueError(
                "ats asks the class token which patches matter; use a head with one: class_token, distilled"
            )
        for i in self.at:
            if not (isinstance(blocks[i].attn, SoftmaxMixer) and blocks[i].attn.fused):
                raise ValueError("ats samples from softmax attention; the mixer must be softmax")
            if blocks[i].local_mp is not None:
                raise ValueError("ats leaves holes in the grid, which local patch interaction cannot read")
        for name, values, other in (("cap", config.cap, 1), ("capacity", config.capacity, 0)):
            if len(values) not in (other, len(self.at)):
                raise ValueError(f"adaptive.{name}: {len(values)} values for {len(self.at)} layers")
        scored = (config.score, config.order, config.value_norm) != ("class", "raster", True)
        if config.sampling == "uniform" and scored:
            raise ValueError("sampling uniform looks at no scores: leave adaptive.score, order and value_norm out")
        self.set_cap(config.cap)
        self.capacity = config.capacity
        self.fixed = False  # whether `capacity` is all the room there is: who sets it looks at `trace.overflow`

    def set_cap(self, cap: Sequence[float]) -> None:
        """Sampling points from now on, for all layers or one per layer, as `Ats.cap`."""
        many = tuple(cap) * len(self.at) if len(cap) == 1 else tuple(cap)
        if len(many) != len(self.at) or any(c <= 0 for c in many):
            raise ValueError(f"a cap is a positive number, one for all or one for each of {len(self.at)} layers: {cap}")
        if any(c > 1 and c != int(c) for c in many):
            raise ValueError(f"a cap above 1 is a number of patches and must be whole: {cap}")
        self.cap = dict(zip(self.at, many, strict=True))

    @property
    def even(self) -> bool:
        """Whether every image of a size keeps equally many tokens: a batch then stays dense, and nothing is masked."""
        return self.config.sampling in ("top", "uniform") and self.config.keep_class and self.config.form != "packed"

    @property
    def static(self) -> bool:
        return bool(self.capacity) or self.config.form == "padded" or self.even

    @contextmanager
    def with_room(self, *, fixed: bool) -> Iterator[None]:
        """Room as `capacity` says, or as it is needed, which the host must ask for."""
        before, self.fixed = self.fixed, fixed
        try:
            yield
        finally:
            self.fixed = before

    def begin(self, tokens: Tokens) -> Passage:
        return _Sampling(self)

    def points(self, i: int, patches: Tensor) -> Tensor:
        """Sampling points of images with so many patches, [batch], float32."""
        cap = self.cap[i]
        if cap > 1:
            return torch.full_like(patches, cap)
        return (cap * patches + 1e-4).floor().clamp(min=float(self.config.least))  # 0.87 * 100 is 86.99...

    def room(self, i: int, patches: int) -> int:
        """Patches that an image of so many can keep at most."""
        cap = self.cap[i]
        points = int(cap) if cap > 1 else max(self.config.least, math.floor(cap * patches + 1e-4))
        check_points(points, patches)
        return min(points, patches)


class _Sampling(Passage):
    def __init__(self, policy: AtsPolicy) -> None:
        super().__init__()
        self.policy, self.config = policy, policy.config

    def run(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        entering = tokens.counts()
        if i not in self.policy.cap:
            tokens = block(tokens, probe)
        elif self._packs(tokens, block, i, probe):
            tokens = self._packed(block, i, tokens)
        else:
            tokens = self._padded(block, i, tokens.padded(), probe)
        self.used(block, entering, tokens.counts())
        show_kept(probe, i, tokens)
        return tokens

    def _packs(self, tokens: Tokens, block: Block, i: int, probe: Probe | None) -> bool:
        config = self.config
        plain = (config.order, config.score, config.keep_class) == ("raster", "class", True)
        usual = plain and config.sampling in ("inverse", "uniform")
        probed = probe is not None and probe.concerns(*(f"{kind}.{i}" for kind in (*block.attn.shows, "tokens")))
        able = usual and not probed and not (block.training and _mixer(block).attention_drop)
        if config.form == "packed" and not usual:
            raise ValueError(
                "packed sampling is by the class token's row, inverse and in raster order, or uniform; use form padded"
            )
        if config.form == "auto":
            return able and not self.policy.even and tokens.sequence.is_cuda and not torch.is_grad_enabled()
        return able and config.form == "packed"

    def _packed(self, block: Block, i: int, tokens: Tokens) -> Tokens:
        tokens = _as_rows(tokens)
        assert tokens.offsets is not None
        assert tokens.index is not None
        mixer, prefix, offsets = _mixer(block), tokens.prefix, tokens.offsets
        qkv = mixer.packed(block.norm1(tokens.sequence))
        points = self.policy.points(i, tokens.counts() - prefix)
        if self.config.sampling == "uniform":
            keep = ragged_uniform_sample(offsets, len(qkv), points, prefix, most=tokens.most)
        else:
            _, keep = ragged_sample(qkv, offsets, points, prefix, most=tokens.most, value_norm=self.config.value_norm)
        most = prefix + self.policy.room(i, tokens.most - prefix)
        batch, j = len(offsets) - 1, self.policy.at.index(i)
        if self.policy.fixed and self.policy.capacity:
            capacity = min(math.ceil(self.policy.capacity[j] * batch), most * batch)
        else:
            capacity = int(keep.sum())
        index, left, overflow = compact(keep, offsets, capacity)
        self.overflow = overflow if self.overflow is None else self.overflow | overflow
        mixed = ragged_attention(qkv, offsets, index, left, most=tokens.most)
        kept = replace(tokens, index=tokens.index[index], offsets=left, most=most)
        x = block.after_mixing(tokens.sequence[index], mixer.proj(mixed.flatten(1)), block.drop_path.rows(kept))
        return kept.but(block.after_channels(x, block.drop_path.rows(kept)))

    def _padded(self, block: Block, i: int, tokens: Tokens, probe: Probe | None) -> Tokens:
        mixer, prefix, x = _mixer(block), tokens.prefix, tokens.sequence
        q, k, v = mixer.shown(block.norm1(x), tokens, i, probe)
        keep = self._drawn(i, q, k, v, tokens)
        places = self._places(i, keep, tokens)  # [batch, prefix + kept]
        mask = None if self.policy.even and tokens.mask is None else keep.gather(1, places)
        left = replace(tokens, mask=mask, index=tokens.original().gather(1, places[:, prefix:] - prefix))
        queries = q.gather(2, places[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))
        attention = None if probe is None else probe.map(f"attention.{i}", lambda: mixer.attention(queries, k, tokens))
        shares = (None, None) if probe is None else probe.keep(i)
        before = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        after = block.after_mixing(before, mixer.mix((queries, k, v), tokens, attention), shares[0])
        after = block.after_channels(after, shares[1])
        if mask is not None and not self.config.keep_class:  # a class token that was not drawn stays as it was
            after = torch.where(mask[..., None] | (places >= prefix)[..., None], after, before)
            left = replace(left, mask=torch.cat([mask.new_ones(len(mask), prefix), mask[:, prefix:]], 1))
        return left.but(after if probe is None else probe(f"tokens.{i}", after))

    def _drawn(self, i: int, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Which tokens go on, [batch, tokens], prefix tokens among them."""
        config, prefix, mask = self.config, tokens.prefix, tokens.mask
        first = prefix if config.keep_class else 0
        if torch.is_grad_enabled():
            self.losses[f"uniform.{i}"] = _unevenness(class_attention(q, k, mask), prefix, mask)
        real = None if mask is None else mask[:, first:]
        points = self.policy.points(i, tokens.counts() - prefix)
        if config.sampling == "uniform":
            scores = k[:, 0, first:, 0]  # not read: one number per token
            keep = uniform_sample(scores, points, real)
        else:
            scores = class_scores(q, k, v, prefix=first, mask=mask, value_norm=config.value_norm, source=config.score)
            if config.sampling == "top":
                keep = top_sample(scores, points, real)
            else:
                keep = DRAW[config.sampling](scores, points, real, config.order)
        _reject_bad(scores)
        return keep if first == 0 else torch.cat([keep.new_ones(len(keep), prefix), keep], 1)

    def _places(self, i: int, keep: Tensor, tokens: Tokens) -> Tensor:
        """Where the tokens that go on are, in their order; then some that do not, for images that keep fewer."""
        prefix, patches = tokens.prefix, keep[:, tokens.prefix :]
        room = self.policy.room(i, patches.shape[1])
        if patches.device.type == "cpu" and not torch.compiler.is_compiling():
            room = max(1, int(patches.sum(1).max()))  # elsewhere asking would wait for the device
        order = kept_first(patches)[:, :room]
        first = torch.arange(prefix, device=order.device).expand(len(order), -1)
        return torch.cat([first, order + prefix], 1)


def _mixer(block: Block) -> SoftmaxMixer:
    assert isinstance(block.attn, SoftmaxMixer)
    return block.attn


def _as_rows(tokens: Tokens) -> Tokens:
    """The same tokens packed."""
    if tokens.offsets is not None:
        return tokens
    batch, count = tokens.sequence.shape[:2]
    index = F.pad(tokens.original(), (tokens.prefix, 0))
    if tokens.mask is None:
        offsets = torch.arange(0, (batch + 1) * count, count, device=index.device)
        rows = tokens.sequence.flatten(0, 1)
        return replace(tokens, sequence=rows, index=index.flatten(), offsets=offsets, most=count)
    rows, offsets, place = pack(tokens.sequence, tokens.mask, batch * count)
    index = index.flatten()[place]
    return replace(tokens, sequence=rows, mask=None, index=index, offsets=offsets, most=count)


def _reject_bad(scores: Tensor) -> None:
    """Where asking costs nothing, an image of NaNs is an error; elsewhere only its own logits are NaN."""
    if scores.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    if bad := (~scores.isfinite().all(1)).nonzero().flatten().tolist():
        raise ValueError(
            f"images {bad[:5]} of a batch of {len(scores)} hold NaN, or the model's weights do; check both"
        )


def _unevenness(row: Tensor, prefix: int, mask: Tensor | None) -> Tensor:
    """Squared distance of the class token's attention [batch, heads, tokens] from an even one, summed over heads.

    Zero exactly where attention is even: the loss that SlowFormer's attack on ATS minimises (Navaneet et al. 2023,
    arXiv 2310.02544). Even means 1 / tokens, over the tokens present in this layer; as in the authors' code, the class
    token's own column is left out.
    """
    row = row.float()
    count = float(row.shape[-1]) if mask is None else mask.sum(1, dtype=torch.float32)[:, None, None]
    distance = (row - 1 / count).square()[..., prefix:]
    return (distance if mask is None else distance * mask[:, None, prefix:]).sum((1, 2))
