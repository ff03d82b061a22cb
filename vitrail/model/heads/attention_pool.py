"""PatchConvNet's attention-based pooling: one map, several, or one for each class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.heads.class_attention import ClassAttentionMixer, ClassBlock, ClassDecoderHead
from vitrail.model.heads.config import AttentionPool
from vitrail.model.tokens import Tokens


class AttentionPoolHead(ClassDecoderHead):
    """One layer of class attention whose query is learned, or one query for each class (Touvron et al. 2021, arXiv
    2112.13692, section 3).

    `per_class` has one query, hence one map, for each class, all in one batched product; each class's vector gives its
    logit by a linear map of its own, as in the authors' code, or one shared by all. An MLP ratio of 3 gives the printed
    parameter counts.
    """

    def __init__(self, config: AttentionPool, width: int, classes: int, layerscale: float = 1.0) -> None:
        per_class = config.queries == "per_class"
        if per_class and config.token_in_keys:
            raise ValueError("attention_pool: token_in_keys needs one query; per_class reads patches only")
        start = layerscale if config.layerscale is None else config.layerscale
        mixer = ClassAttentionMixer(width, config.heads, config.token_in_keys, config.qkv_bias)
        block = ClassBlock(mixer, width, config.mlp_ratio, "layernorm", start)
        super().__init__([block], width, classes, "layernorm", queries=classes if per_class else 1)
        self.per_class, self.own_logits = per_class, config.per_class_logit == "own"
        if per_class and not self.own_logits:
            self.fc = nn.Linear(width, 1)
            self.reset_parameters()

    def forward(self, tokens: Tokens) -> Tensor:
        if not self.per_class:
            return super().forward(tokens)
        pooled = self.pooled(tokens)
        if self.own_logits:  # class c's vector against row c: one product, no loop over classes
            return torch.einsum("bcw,cw->bc", pooled, self.fc.weight.to(pooled))[:, None] + self.fc.bias.to(pooled)
        return self.fc(pooled).transpose(1, 2)
