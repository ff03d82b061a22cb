"""ResMLP for sequences: an encoder and a decoder whose self-attention is a linear map over positions.

architectures-and-training §6.5. The decoder keeps cross-attention, and its maps over positions are lower-triangular, so
that a word depends on earlier ones only. A sequence shorter than the longest takes the leading part of every map.
Positions that are padding are set to zero again before each map: shifts and biases have made them something else, and
only so does padding change nothing (§10.2 item 14); the thesis pads without that, which `rezero=False` does, too.

source [batch, source length], target [batch, target length], padding where a token equals `padding`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.block import Mlp
from vitrail.model.norms import Affine
from vitrail.model.residual import LayerScale


@dataclass(frozen=True)
class SequenceConfig:
    """The thesis' base model for a vocabulary of `words`."""

    words: int
    width: int = 512
    hidden: int = 2048
    layers: int = 6
    heads: int = 8
    """Of cross-attention."""
    longest: int = 256
    """Most tokens of a source or target."""
    layerscale: float = 0.2
    drop: float = 0.15
    padding: int = 0
    begin: int = 1
    end: int = 2
    rezero: bool = True


class PositionMixer(nn.Module):
    """A X + b over the positions of X [batch, length, width]; with `causal`, A is lower-triangular."""

    def __init__(self, longest: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(longest, longest))
        self.bias = nn.Parameter(torch.zeros(longest))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[0] ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > len(self.bias):
            raise ValueError(f"a sequence of {length} tokens is longer than the {len(self.bias)} of this model")
        weight = self.weight[:length, :length]
        return (weight.tril() if self.causal else weight) @ x + self.bias[:length, None]


class SequenceBlock(nn.Module):
    """Positions, then (in a decoder) the source, then channels; each affine -> operation -> LayerScale -> add."""

    def __init__(self, config: SequenceConfig, decoder: bool) -> None:
        super().__init__()
        width = config.width
        self.rezero = config.rezero
        self.norm1, self.norm2 = Affine(width), Affine(width)
        self.mix = PositionMixer(config.longest, causal=decoder)
        self.mlp = Mlp(width, config.hidden, "gelu")
        self.ls1, self.ls2 = LayerScale(width, config.layerscale), LayerScale(width, config.layerscale)
        self.drop = nn.Dropout(config.drop)
        self.cross: nn.MultiheadAttention | None = None
        if decoder:
            self.norm_cross, self.ls_cross = Affine(width), LayerScale(width, config.layerscale)
            self.cross = nn.MultiheadAttention(width, config.heads, batch_first=True)

    def forward(self, x: Tensor, real: Tensor, memory: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        inner = self.norm1(x)
        if self.rezero:
            inner = inner * real[..., None]
        x = x + self.drop(self.ls1(self.mix(inner)))
        if self.cross is not None and memory is not None and there is not None:
            found, _ = self.cross(self.norm_cross(x), memory, memory, key_padding_mask=~there, need_weights=False)
            x = x + self.drop(self.ls_cross(found))
        return x + self.drop(self.ls2(self.mlp(self.norm2(x))))


class SequenceResMlp(nn.Module):
    """`model(source, target)` gives logits [batch, target length, words] for the word after each of the target."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.words, config.width, padding_idx=config.padding)
        self.encoder = nn.ModuleList(SequenceBlock(config, decoder=False) for _ in range(config.layers))
        self.decoder = nn.ModuleList(SequenceBlock(config, decoder=True) for _ in range(config.layers))
        self.norm_source, self.norm_target = Affine(config.width), Affine(config.width)
        self.head = nn.Linear(config.width, config.words)
        nn.init.normal_(self.embed.weight, std=config.width**-0.5)
        with torch.no_grad():
            self.embed.weight[config.padding].zero_()

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The source as vectors, and which of them are words."""
        real = source != self.config.padding
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, real)
        return self.norm_source(x), real

    def decode(self, target: Tensor, memory: Tensor, there: Tensor) -> Tensor:
        real = target != self.config.padding
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, real, memory, there)
        return self.head(self.norm_target(x))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))

    def loss(self, source: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
        """Cross entropy of every word of `target` (begin ... end) given those before it."""
        logits = self(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            target[:, 1:].flatten(),
            ignore_index=self.config.padding,
            label_smoothing=smoothing,
        )

    @torch.no_grad()
    def translate(self, source: Tensor, most: int, beams: int = 4) -> Tensor:
        """The likeliest target found by beam search, at most `most` words: [batch, length], padded.

        Beams are compared by the sum of log probabilities over the length.
        """
        config = self.config
        batch = len(source)
        memory, there = (t.repeat_interleave(beams, 0) for t in self.encode(source))
        words = torch.full((batch * beams, 1), config.begin, dtype=torch.int64, device=source.device)
        scores = torch.full((batch, beams), float("-inf"), device=source.device)
        scores[:, 0] = 0  # all beams are the same at first
        done = torch.zeros(batch * beams, dtype=torch.bool, device=source.device)
        for _ in range(most):
            logits = self.decode(words, memory, there)[:, -1].float().log_softmax(-1)
            logits[:, config.padding] = float("-inf")
            still = torch.full_like(logits, float("-inf"))
            still[:, config.padding] = 0.0
            logits = torch.where(done[:, None], still, logits)
            total = scores.view(-1, 1) + logits
            best = total.view(batch, -1).topk(beams, dim=1)
            scores = best.values
            origin = best.indices // config.words + torch.arange(batch, device=source.device)[:, None] * beams
            word = best.indices % config.words
            words = torch.cat([words[origin.flatten()], word.flatten()[:, None]], 1)
            done = done[origin.flatten()] | (word.flatten() == config.end)
            if bool(done.all()):
                break
        lengths = (words != config.padding).sum(1).view(batch, beams)
        winner = (scores / lengths).argmax(1) + torch.arange(batch, device=source.device) * beams
        return words[winner]
