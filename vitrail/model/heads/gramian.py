"""Gramian attention heads: several small classifiers, each querying the features with its Gram matrix (GA).

Ryu, Han and Lim 2023, arXiv 2310.16483; details follow the released code (Lab-LVM/imagenet-models, GA).

features [batch, tokens, width]; what belongs to heads lies side by side as in a grouped convolution,
[batch, heads * channels], so that all heads are one matrix product and any of them can be cut out of every tensor.

Parameters of one head, with C the width, d `gram_width`, E `attention_width`, g and m the groups of embedding and MLP:

    contraction  C d + 3 d            gram layer  8 d^2 + 58 d       embedding   d (d + 1) / 2 * C / g + 3 C
    attention    4 C E + 7 C          MLP         8 C^2 / m + 5 C    classifier  (C + 1) classes

which is 4.783 M for C = 768, d = E = 192, g = 8, m = 4, 1000 classes and the gram layer (4.477 M without), as released.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels.covariance import gram_vector, without_autocast
from vitrail.model.heads.config import Gramian
from vitrail.model.heads.head import Head
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.block import LayerScale
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens

NORM_EPS = 1e-6


class GramianHead(Head):
    """`heads` classifiers on the patch tokens; prefix tokens of the trunk are left out.

    The stack holds every head's logits and, with `auxiliary`, those of a mean-pooling classifier last; `fuse` sums the
    heads. The trunk keeps its final norm: the heads do not normalise after their layers, and a trunk whose heads are
    all left out at deployment must be a plain backbone. A masked token changes nothing in eval mode; in training it
    still counts in the batch statistics of the contraction.

    Gram matrix, its normalisation and the class token are computed in float32 under autocast. The authors' float64 is
    not needed: the vector is divided by its own length, so only relative errors count, and those of float32 sums over
    a few hundred tokens are about 1e-6, a thousand times below the rounding of bfloat16 features.
    """

    def __init__(self, config: Gramian, width: int, classes: int) -> None:
        super().__init__()
        _check(config, width)
        heads, gram = config.heads, config.gram_width
        self.config, self.heads, self.width, self.classes = config, heads, width, classes
        self.classifiers = heads + config.auxiliary
        self.features = heads * width
        vector = gram * (gram + 1) // 2
        self.contract = GroupedLinear(width, heads * gram, 1)
        self.contract_norm = nn.BatchNorm1d(heads * gram)
        self.gram_layer = GramLayer(heads, gram) if config.gram_layer else None
        self.token = GroupedLinear(heads * vector, heads * width, heads * config.embed_groups)
        # A unit vector has entries of size 1 / sqrt(length): the usual eps would outweigh their variance.
        self.token_norm = nn.BatchNorm1d(heads * width, eps=1e-5 / vector)
        inner = _attention_width(config, width)
        self.attention = GramianAttention(heads, width, inner, config.attention_heads)
        self.ls1 = LayerScale(heads * width, config.layerscale)
        self.mlp = ShuffledMlp(heads, width, config.mlp_groups)
        self.ls2 = LayerScale(heads * width, config.layerscale)
        self.fc = GroupedLinear(heads * width, heads * classes, heads)
        self.auxiliary = MeanHead(width, classes) if config.auxiliary else None

    def embed(self, tokens: Tokens) -> Tensor:
        """The final class tokens of all heads, one after the other, `[batch, heads * width]`."""
        features, mask = _features(tokens)
        token = self.gram_token(tokens).to(self.fc.weight.dtype)
        token = token + self.ls1(self.attention(token, features, mask))
        return token + self.ls2(self.mlp(token))

    def maps(self, tokens: Tokens) -> Tensor:
        """Attention maps of the class tokens, `[batch, heads * attention heads, patches]`."""
        token = self.gram_token(tokens).to(self.fc.weight.dtype)
        return self.attention.maps(token, *_features(tokens))

    def gram_token(self, tokens: Tokens) -> Tensor:
        """The class token that each head makes of its Gram matrix, `[batch, heads * width]`."""
        features, mask = _features(tokens)
        if self.training and len(features) == 1:
            raise ValueError(
                "Gramian heads normalise class tokens over the batch; train with at least 2 images per batch"
            )
        contracted = self.contract_norm(self.contract(features).flatten(0, 1)).unflatten(0, features.shape[:2])
        if self.gram_layer is not None:
            contracted = self.gram_layer(_zeroed(contracted, mask), _whole_grid(tokens))
        contracted = _zeroed(contracted, mask)  # only scales the Gram matrix, and its vector has length 1
        vector = gram_vector(contracted.unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1))
        with without_autocast(vector):
            return self.token_norm(self.token(vector.flatten(1).to(self.token.weight.dtype)))

    def forward(self, tokens: Tokens) -> Tensor:
        stack = self.fc(self.embed(tokens)).unflatten(-1, (self.heads, self.classes))
        return stack if self.auxiliary is None else torch.cat([stack, self.auxiliary(tokens)], dim=1)

    def biases(self) -> list[list[Tensor]]:
        assert self.fc.bias is not None
        heads = [[part] for part in self.fc.bias.unflatten(0, (self.heads, -1))]
        return heads if self.auxiliary is None else [*heads, *self.auxiliary.biases()]

    def fuse(self, stack: Tensor) -> Tensor:
        """Mean of the heads' logits; the auxiliary classifier has no part in it.

        The paper sums: the same argmax, but logits scaled by the number of heads, so probabilities are overconfident.
        """
        return stack[:, : self.heads].mean(1)

    def losses(self, stack: Tensor, target: Tensor) -> dict[str, Tensor]:
        """`decorrelation`: weight * sum over heads of KL(anchor || head), reduced as the task loss.

        With a negative weight the term has no lower bound, so it may take back at most `limit` of the summed task
        losses: beyond, it is multiplied by a constant, which changes the length of its gradient and not the direction.
        """
        weight, heads = self.config.decorrelation, self.heads
        if weight == 0 or heads == 1:
            return {}
        stack = stack[:, :heads].float()
        scale = {"task": self.loss_scale, "mean": 1 / self.classes, "batch": 1.0}[self.config.reduction]
        term = weight * heads * scale * mean_divergence(stack)
        if weight < 0:
            most = self.config.limit * heads * self.loss_scale * _task_loss(stack.detach(), target)
            term = term * (most / term.detach().abs().clamp(min=1e-30)).clamp(max=1)
        return {"decorrelation": term}

    def keep(self, indices: Sequence[int]) -> Head:
        """A smaller head: only the heads of these numbers, with their weights; this one is left as it is.

        The auxiliary classifier goes too, except that with no heads at all it is what remains. Without one, a new
        `MeanHead` remains, to be trained on the frozen trunk (linear probe) or with it (fine-tuning). The paper does
        not say which it used, so report it. Raises `ValueError` for a number that is no head or comes twice.
        """
        if len(set(indices)) != len(indices) or not all(0 <= i < self.heads for i in indices):
            raise ValueError(f"heads to keep must be different numbers from 0 to {self.heads - 1}, not {list(indices)}")
        if not indices:
            pooled = MeanHead(self.width, self.classes).to(self.fc.weight)
            if self.auxiliary is None:
                warnings.warn(
                    "no head is kept and no auxiliary classifier was trained; train the new one", stacklevel=2
                )
            else:
                pooled.load_state_dict(self.auxiliary.state_dict())
            return pooled.train(self.training)
        with torch.device("meta"):
            smaller = GramianHead(replace(self.config, heads=len(indices), auxiliary=False), self.width, self.classes)
        wanted, chosen = smaller.state_dict(), list(indices)
        # Every tensor is [heads * anything, ...]; counters of batches are the exception.
        cut = {
            name: tensor.unflatten(0, (self.heads, -1))[chosen].flatten(0, 1) if tensor.ndim else tensor.clone()
            for name, tensor in self.state_dict().items()
            if name in wanted
        }
        smaller.load_state_dict(cut, assign=True)
        for name, parameter in self.named_parameters():
            if name in wanted:
                smaller.get_parameter(name).requires_grad_(parameter.requires_grad)
        return smaller.train(self.training)


def mean_divergence(stack: Tensor) -> Tensor:
    """Mean over images and heads of KL(anchor || head), the anchor a constant: softmax of the mean logits.

    `[batch, heads, classes]` to a scalar; exactly zero for one head.
    """
    each = stack.log_softmax(-1)
    anchor = stack.detach().mean(1, keepdim=True).log_softmax(-1)
    return (anchor.exp() * (anchor - each)).sum(-1).mean()


def _task_loss(stack: Tensor, target: Tensor) -> Tensor:
    """The smaller of cross entropy and binary cross entropy summed over classes, mean over images and heads.

    It bounds both: the head does not know which of them it is trained with, nor the smoothing.
    """
    dense = F.one_hot(target, stack.shape[-1]) if target.ndim == 1 else target
    dense = dense[:, None].to(stack.dtype).expand_as(stack)
    cross = -(dense * stack.log_softmax(-1)).sum(-1).mean()
    return torch.minimum(cross, stack.shape[-1] * F.binary_cross_entropy_with_logits(stack, dense))


class GroupedLinear(nn.Module):
    """A grouped 1x1 convolution as one batched matrix product: `[..., inputs]` to `[..., outputs]`."""

    hidden_matrix = True

    def __init__(self, inputs: int, outputs: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(outputs, inputs // groups))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.groups, self.weight.shape[1])
        bias = None if self.bias is None else self.bias.unflatten(0, (self.groups, -1))
        out = grouped_product(rows, self.weight.unflatten(0, (self.groups, -1)), bias)
        return out.reshape(*x.shape[:-1], -1)


def grouped_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map for every group, `[n, groups, inputs]` to `[n, groups, outputs]`.

    weight `[groups, outputs, inputs]`, bias `[groups, outputs]`
    """
    # A file holds one graph for all batches, so it cannot choose.
    if torch.compiler.is_exporting() or len(rows) <= weight.shape[-1]:
        # Weights first: their gradient then comes out as they lie, and what is transposed are the few results.
        columns = rows.permute(1, 2, 0)
        out = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias[..., None], weight, columns)
        return out.permute(2, 0, 1).contiguous()
    rows = rows.transpose(0, 1)
    out = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return out.transpose(0, 1)


class HeadwiseNorm(nn.Module):
    """LayerNorm over the channels of every head, `[..., heads * width]`, with gains and shifts for each."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.weight = nn.Parameter(torch.empty(heads * width))
        self.bias = nn.Parameter(torch.empty(heads * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        plain = F.layer_norm(x.unflatten(-1, (self.heads, self.width)), (self.width,), eps=NORM_EPS)
        return torch.addcmul(self.bias, plain.flatten(-2), self.weight)


class GramLayer(nn.Module):
    """One ConvNeXt block per head at the contracted width, `[batch, tokens, heads * width]`."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        channels = heads * width
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = HeadwiseNorm(heads, width)
        self.fc1 = GroupedLinear(channels, 4 * channels, heads)
        self.fc2 = GroupedLinear(4 * channels, channels, heads)
        self.ls = LayerScale(channels, 1e-6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.conv)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        spread = self.conv(x.mT.unflatten(-1, grid)).flatten(2).mT
        return x + self.ls(self.fc2(F.gelu(self.fc1(self.norm(spread)))))


class GramianAttention(nn.Module):
    """The class token of every head queries itself and the features (CaiT's class attention with an inner width).

    With one query per head, keys and values of the features need not be formed: q . W_k f = (W_k^T q) . f and
    sum a W_v f = W_v sum a f. The query is brought to the width of the features instead, and every attention head costs
    two vectors of that width: E / attention heads times fewer products (24 in the released models), and no tensor of
    heads x tokens x width. Statistics of LayerNorm are the same for all heads, so the features are normalised once; a
    head's gain goes into its query and its result, its shift cancels in the softmax and is added to the result.
    """

    def __init__(self, heads: int, width: int, inner: int, attention_heads: int) -> None:
        super().__init__()
        self.heads, self.width, self.attention_heads = heads, width, attention_heads
        self.many = heads * attention_heads
        self.scale = (inner // attention_heads) ** -0.5
        self.norm = HeadwiseNorm(heads, width)
        self.query, self.key, self.value = (
            GroupedLinear(heads * width, heads * inner, heads, bias=False) for _ in range(3)
        )
        self.proj = GroupedLinear(heads * inner, heads * width, heads)

    def forward(self, token: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        shape = (self.heads, self.attention_heads)
        own, features = self._plain(token, features)
        weights = self._weights(token, own, features, mask).to(features.dtype)
        found = (weights[..., 1:] @ features).unflatten(1, shape) + weights[..., :1].unflatten(1, shape) * own
        gain, shift = (t.view(self.heads, 1, self.width) for t in (self.norm.weight, self.norm.bias))
        found = torch.addcmul(shift, found, gain).flatten(1, 2)
        value = self.value.weight.unflatten(0, (self.many, -1))
        return self.proj(grouped_product(found, value).flatten(1))

    def maps(self, token: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        """Attention to the features, `[batch, heads * attention heads, tokens]`, without the token's own share."""
        weights = self._weights(token, *self._plain(token, features), mask)[..., 1:]
        return weights / weights.sum(-1, keepdim=True)

    def _plain(self, token: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Class tokens [batch, heads, 1, width] and features, normalised but without gain and shift of a head."""
        own = token.unflatten(-1, (self.heads, 1, self.width))
        return F.layer_norm(own, own.shape[-1:], eps=NORM_EPS), F.layer_norm(features, own.shape[-1:], eps=NORM_EPS)

    def _weights(self, token: Tensor, own: Tensor, features: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, heads * attention heads, 1 + tokens], the token itself first."""
        query = self.query(self.norm(token)).unflatten(-1, (self.many, -1)) * self.scale
        asked = torch.einsum("bge,gec->bgc", query, self.key.weight.unflatten(0, (self.many, -1)))
        asked = asked.unflatten(1, (self.heads, -1)) * self.norm.weight.view(self.heads, 1, self.width)
        scores = asked.flatten(1, 2).to(features.dtype) @ features.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -math.inf)
        return torch.cat([(asked * own).sum(-1).flatten(1)[..., None], scores], dim=-1).softmax(-1)


class ShuffledMlp(nn.Module):
    """LayerNorm and a grouped MLP with a channel shuffle between its layers, for every head."""

    def __init__(self, heads: int, width: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm = HeadwiseNorm(heads, width)
        self.fc1 = GroupedLinear(heads * width, heads * 4 * width, heads * groups)
        self.fc2 = GroupedLinear(heads * 4 * width, heads * width, heads * groups)

    def forward(self, token: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(self.norm(token)))
        return self.fc2(hidden.unflatten(-1, (self.heads, self.groups, -1)).mT.flatten(1))


def _attention_width(config: Gramian, width: int) -> int:
    heads = config.attention_heads
    return config.attention_width or max(heads, width // 4 // heads * heads)


def _check(config: Gramian, width: int) -> None:
    """Raise `ValueError` for values that do not divide each other, naming the parameter and what would do."""
    vector = config.gram_width * (config.gram_width + 1) // 2
    divided = {
        "embed_groups": (config.embed_groups, math.gcd(width, vector), f"width {width} and Gram vector {vector}"),
        "mlp_groups": (config.mlp_groups, width, f"width {width}"),
        "attention_heads": (config.attention_heads, _attention_width(config, width), "attention_width"),
    }
    for name, (value, whole, what) in divided.items():
        if whole % value:
            fitting = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0 and n <= 64)
            raise ValueError(f"head.{name} = {value} does not divide {what} of the Gramian heads; use one of {fitting}")


def _features(tokens: Tokens) -> tuple[Tensor, Tensor | None]:
    """Patch tokens, those that are not real set to zero, and which are real."""
    mask = None if tokens.mask is None else tokens.mask[:, tokens.prefix :].bool()
    return _zeroed(tokens.patches, mask), mask


def _zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def _whole_grid(tokens: Tokens) -> tuple[int, int]:
    rows, columns = tokens.grid
    if tokens.index is not None or tokens.patches.shape[1] != rows * columns:
        raise ValueError(
            f"the gram layer needs all {rows} x {columns} patches in place, here are {tokens.patches.shape[1]}; "
            "use gram_layer=False where tokens are left out"
        )
    return rows, columns
