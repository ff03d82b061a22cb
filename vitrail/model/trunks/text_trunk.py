"""Texts to tokens: any transformers encoder or decoder as a trunk, or our own that is both.

texts [batch, 3, length] as `vitrail.data.tokenizer` makes them; tokens [batch, 1 + words, width], the class token first
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrail.data.tokenizer import CLASS, PADDING, WORD, Tokeniser, need_text_extra
from vitrail.model.config import TextBackbone
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.base import BaseTrunk
from vitrail.model.trunks.seq2seq import MODEL_TYPE, SequenceConfig, SequenceResMlp

LAYER = re.compile(r"(?:^|\.)(?:layer|layers|h|block|blocks)\.(\d+)\.")  # how transformers number their blocks
LATE = ("ln_f.", "norm.", "final_layer_norm.", "pooler.")  # what comes after the blocks


class TextTrunk(BaseTrunk):
    """Final hidden states, the class token in front, with a mask of the words.

    BERT's family has the class token first already. In GPT's it is the last token that is not padding; it is moved to
    the front, and the others keep their order. Padding is hidden from attention and from the mask; so are separators
    from the mask, unless `sep_is_word`.
    """

    prefix = 1
    opaque = "a text model gives no intermediates; its layers are transformers' own"

    def __init__(self, config: TextBackbone) -> None:
        super().__init__()
        self.config = config
        self.backbone = build_encoder(config)
        described = cast("Any", self.backbone).config
        self.width = int(described.hidden_size)
        self.depth = self.layers = int(described.num_hidden_layers)
        # GPT's family has no segments, and RoBERTa's has one embedding for both sentences.
        two_sentences = int(getattr(described, "type_vocab_size", 0) or 0) > 1
        self.segments = (config.class_token != "last" and two_sentences) or getattr(described, "needs_segments", False)

    def tokeniser(self, stored: str) -> Tokeniser:
        """The stored tokenizer, set up for this trunk."""
        described = cast("Any", self.backbone).config
        end = getattr(described, "eos_token_id", None)
        end = end[0] if isinstance(end, (list, tuple)) else end
        return Tokeniser(
            stored,
            length=self.config.length,
            class_token=self.config.class_token or "first",
            pad=int(getattr(described, "pad_token_id", None) or 0),
            end=None if end is None else int(end),
        )

    def layer_of(self, name: str) -> int:
        """0 for embeddings, i + 1 for block i, then the final norm and the pooler."""
        if (block := LAYER.search(name)) is not None:
            return int(block[1]) + 1
        return self.layers + 1 if name.removeprefix("backbone.").startswith(LATE) else 0

    def fill_buffers(self) -> None:
        """Buffers that are computed and not stored (positions, rotary angles), for a trunk built without memory."""
        lacking = {name for name, buffer in self.backbone.named_buffers() if buffer.is_meta}
        if not lacking:
            return
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twin = build_encoder(self.config)
        for name, buffer in twin.named_buffers():
            if name in lacking:
                above, _, leaf = name.rpartition(".")
                self.backbone.get_submodule(above)._buffers[leaf] = buffer

    def embed(self, texts: Tensor) -> Tokens:
        """The final tokens: what lies between is transformers' own."""
        if texts.ndim != 3 or texts.shape[1] != 3 or texts.is_floating_point():
            raise ValueError(
                f"a text model takes whole numbers [batch, 3, length], not {texts.dtype} {list(texts.shape)}; "
                "see vitrail.data.tokenizer"
            )
        kinds = texts[:, 2]
        out = self.states(texts)
        sequence: Tensor = out.last_hidden_state
        if self.config.class_token == "last":
            order = _last_first(kinds)
            kinds = kinds.take_along_dim(order, 1)
            sequence = sequence.take_along_dim(order[..., None], 1)
        if self.config.pooler:
            sequence = torch.cat([out.pooler_output[:, None], sequence[:, 1:]], 1)
        mask = kinds != PADDING if self.config.sep_is_word else (kinds == WORD) | (kinds == CLASS)
        return Tokens(sequence, 1, (1, int(sequence.shape[1]) - 1), mask)

    def states(self, texts: Tensor) -> Any:
        """Outputs of transformers' model: `last_hidden_state` [batch, length, width], in the order of the tokens."""
        ids, segments, kinds = texts.unbind(1)
        more = {"token_type_ids": segments} if self.segments else {}
        return self.backbone(input_ids=ids, attention_mask=(kinds != PADDING).long(), return_dict=True, **more)


def _last_first(kinds: Tensor) -> Tensor:
    """[batch, length] the order in which the last token that is no padding comes first, and the others as they are."""
    place = torch.arange(kinds.shape[1], device=kinds.device)
    last = torch.where(kinds != PADDING, place, 0).amax(1, keepdim=True)
    return torch.where(place == 0, last, torch.where(place <= last, place - 1, place))


def transformers() -> Any:
    """The package, or one sentence."""
    try:
        import transformers as package
    except ModuleNotFoundError:
        raise ValueError(need_text_extra("transformers")) from None
    return package


def transformers_config(architecture: Mapping[str, Any]) -> Any:
    """transformers' configuration of a stored architecture."""
    values = dict(architecture)
    return transformers().AutoConfig.for_model(str(values.pop("model_type")), **values)


def build_encoder(config: TextBackbone) -> nn.Module:
    """The architecture of `config`, with new weights."""
    if config.architecture["model_type"] == MODEL_TYPE:
        if config.pooler:
            raise ValueError(f"text:{config.name} has no pooler; leave --model.trunk.pooler out")
        return SequenceResMlp(SequenceConfig(**config.architecture))
    package, described = transformers(), transformers_config(config.architecture)
    if getattr(described, "is_encoder_decoder", False):
        raise ValueError(
            f"text:{config.name} ({described.model_type}) has an encoder and a decoder; use one that has either"
        )
    described.use_cache = False  # for text that is written word by word
    try:
        backbone = package.AutoModel.from_config(described, add_pooling_layer=config.pooler)
    except TypeError:  # not all have one
        backbone = package.AutoModel.from_config(described)
    if config.pooler and getattr(backbone, "pooler", None) is None:
        raise ValueError(f"text:{config.name} ({described.model_type}) has no pooler; leave --model.trunk.pooler out")
    return cast("nn.Module", backbone)
