"""A head of ours on a timm model of yours: nothing of the trainer is imported."""

import timm
import torch

from vitrail.model.heads.config import SecondOrder
from vitrail.model.heads.head import build_head
from vitrail.model.parts.tokens import Tokens

backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0)
head = build_head(SecondOrder(), width=192, classes=10)
features = backbone.forward_features(torch.randn(2, 3, 224, 224))  # [batch, 1 + patches, width]
stack = head(Tokens(features, prefix=1, grid=(14, 14)))  # [batch, classifiers, classes]
logits = head.fuse(stack)  # [batch, classes]
