"""ResMLP for sequences (Touvron et al. 2021, arXiv 2105.03404, machine translation): an encoder and a decoder.

Self-attention is a linear map over positions, lower-triangular in the decoder, so that a token depends on earlier ones
only; cross-attention stays. A sequence shorter than the longest takes the leading part of every map. Positions that are
padding are set to zero again before each map: shifts and biases have made them something else, and only so does padding
change nothing. The paper pads without that, which `rezero=False` does, too. `mixer="attention"` is the same model with
self-attention and, since attention does not know them, learned positions.

source [batch, source length], target [batch, target length]: a target begins with the end mark of its source
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.model.parts.block import Affine, LayerScale, Mlp

MODEL_TYPE = "vitrail-seq2seq"
"""What stands for `model_type` in the description of an architecture; transformers does not know it."""


@dataclass(frozen=True)
class SequenceConfig:
    """The paper's base model for a vocabulary; names as in configurations of transformers, where these have them."""

    vocab_size: int
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_layers: int = 6
    """Of the encoder, and of the decoder."""
    num_attention_heads: int = 8
    max_position_embeddings: int = 256
    """Most tokens of a source or target."""
    mixer: Literal["linear", "attention"] = "linear"
    """What relates positions within a sequence."""
    layerscale: float = 0.2
    drop: float = 0.15
    pad_token_id: int = 0
    eos_token_id: int = 2
    rezero: bool = True
    tie_word_embeddings: bool = False
    model_type: str = MODEL_TYPE

    needs_segments = True  # which tell source from target

    @property
    def num_hidden_layers(self) -> int:
        return 2 * self.num_layers


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

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        length = x.shape[1]
        weight = self.weight[:length, :length]
        return (weight.tril() if self.causal else weight) @ x + self.bias[:length, None]


class PositionAttention(nn.MultiheadAttention):
    """Softmax attention among the real tokens; with `causal`, among earlier ones."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__(width, heads, batch_first=True)
        self.causal = causal

    def forward(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
        hidden = ~real[:, None, :]
        if self.causal:
            length = x.shape[1]
            hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        hidden = hidden.expand(len(x), x.shape[1], -1).repeat_interleave(self.num_heads, 0)
        return super().forward(x, x, x, attn_mask=hidden, need_weights=False)[0]


class SequenceBlock(nn.Module):
    """Positions, then (in a decoder) the source, then channels; each affine -> operation -> LayerScale -> add."""

    def __init__(self, config: SequenceConfig, decoder: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.rezero = config.rezero
        self.norm1, self.norm2 = Affine(width), Affine(width)
        self.mix: PositionMixer | PositionAttention = (
            PositionMixer(config.max_position_embeddings, decoder)
            if config.mixer == "linear"
            else PositionAttention(width, config.num_attention_heads, decoder)
        )
        self.mlp = Mlp(width, config.intermediate_size, "gelu")
        self.ls1, self.ls2 = LayerScale(width, config.layerscale), LayerScale(width, config.layerscale)
        self.drop = nn.Dropout(config.drop)
        self.cross: nn.MultiheadAttention | None = None
        if decoder:
            self.norm_cross, self.ls_cross = Affine(width), LayerScale(width, config.layerscale)
            self.cross = nn.MultiheadAttention(width, config.num_attention_heads, batch_first=True)

    def forward(self, x: Tensor, real: Tensor, memory: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        inner = self.norm1(x)
        if self.rezero:
            inner = inner * real[..., None]
        x = x + self.drop(self.ls1(self.mix(inner, real)))
        if self.cross is not None and memory is not None and there is not None:
            read, _ = self.cross(self.norm_cross(x), memory, memory, key_padding_mask=~there, need_weights=False)
            x = x + self.drop(self.ls_cross(read))
        return x + self.drop(self.ls2(self.mlp(self.norm2(x))))


class States(NamedTuple):
    """As transformers' models give them."""

    last_hidden_state: Tensor  # [batch, length, width]


class SequenceResMlp(nn.Module):
    """Hidden states of targets, from which a head makes the next token; blocks of the encoder come first.

    It is called as a decoder of transformers is, with source and target in one row (`forward`), so that the same data,
    loss and evaluation serve both.
    """

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        width, layers = config.hidden_size, config.num_layers
        self.embed = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.positions = nn.ParameterDict()
        if config.mixer == "attention":
            for side in ("source", "target"):
                self.positions[side] = nn.Parameter(torch.empty(config.max_position_embeddings, width))
        self.blocks = nn.ModuleList(SequenceBlock(config, decoder=i >= layers) for i in range(2 * layers))
        self.norm = nn.ModuleDict({"source": Affine(width), "target": Affine(width)})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed.weight, std=self.config.hidden_size**-0.5)
        for positions in self.positions.values():
            nn.init.normal_(positions, std=0.5)
        with torch.no_grad():
            self.embed.weight[self.config.pad_token_id].zero_()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The source as vectors [batch, source length, width], and which of them are no padding."""
        real = source != self.config.pad_token_id
        x = self._embedded(source, "source")
        for block in self.blocks[: self.config.num_layers]:
            x = block(x, real)
        return self.norm["source"](x), real

    def decode(self, target: Tensor, memory: Tensor, there: Tensor) -> Tensor:
        """States [batch, target length, width] that see the source and the target up to their own position."""
        real = target != self.config.pad_token_id
        x = self._embedded(target, "target")
        for block in self.blocks[self.config.num_layers :]:
            x = block(x, real, memory, there)
        states: Tensor = self.norm["target"](x)
        return states

    def forward(
        self, *, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, return_dict: bool = True
    ) -> States:
        """States at the positions of rows [batch, length] of a source (segment 0), a target (1) and padding.

        Position t of the target sees all of the source and the target up to t; the last token of the source, its end
        mark, is what the target begins with. States at earlier positions of the source mean nothing.
        """
        length = input_ids.shape[1]
        given = (token_type_ids == 0) & (attention_mask > 0)
        start = given.sum(1, keepdim=True) - 1  # where targets begin
        padding = self.config.pad_token_id
        source = input_ids.masked_fill(~given, padding)[:, : int(start.max()) + 1]
        place = torch.arange(length - int(start.min()), device=input_ids.device)
        target = input_ids.gather(1, (start + place).clamp(max=length - 1)).masked_fill(
            start + place >= length, padding
        )
        states = self.decode(target, *self.encode(source))
        back = (torch.arange(length, device=input_ids.device) - start).clamp(0, len(place) - 1)
        return States(states.take_along_dim(back[..., None], 1))

    def _embedded(self, ids: Tensor, side: str) -> Tensor:
        length, longest = ids.shape[1], self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"a sequence of {length} tokens is longer than the {longest} of this model")
        x: Tensor = self.embed(ids) * self.config.hidden_size**0.5  # of variance 1: nothing here would normalise it
        return x if side not in self.positions else x + self.positions[side][:length]
