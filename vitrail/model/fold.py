"""Folding gains and affine maps into adjacent linear layers: the same function at no cost (inference)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.model.adapters.merged import without_adapters
from vitrail.model.block import Block, Branch, Mlp
from vitrail.model.classifier import Classifier
from vitrail.model.heads.class_attention import ClassAttentionMixer, ClassBlock, XcitClassBlock
from vitrail.model.heads.head import LinearHead
from vitrail.model.mixers.mixer import Mixer
from vitrail.model.mixers.patches import FixedPatches, LinearPatchesMixer
from vitrail.model.norms import Affine
from vitrail.model.residual import LayerScale, ScalarGate
from vitrail.model.tokens import Probe, Tokens


@torch.no_grad()
def fold_layerscale(model: Classifier) -> Classifier:
    """Scale the last linear layer of every branch by its LayerScale or scalar gate, in place.

    Branches that end in a product over patches keep their gain, unless `fold_affine` takes it. A model with adapters
    stays as it is, and a folded copy with the one in use merged is returned.
    """
    model = without_adapters(model)
    for module in model.modules():
        if isinstance(module, Block):
            module.ls1 = _fold_gain(module.ls1, module.attn.last_linear())
            if module.local_mp is not None and module.ls3 is not None:
                module.ls3 = _fold_gain(module.ls3, module.local_mp.conv2)
            if module.mlp is not None and module.ls2 is not None:
                module.ls2 = _fold_gain(module.ls2, module.mlp.fc2)
        elif isinstance(module, Branch):
            operation = module.operation
            last = operation.last_linear() if isinstance(operation, Mixer) else None
            module.ls = _fold_gain(module.ls, operation.fc2 if isinstance(operation, Mlp) else last)
        elif isinstance(module, ClassBlock):
            last = module.attn.proj if isinstance(module.attn, ClassAttentionMixer) else None
            if not isinstance(module, XcitClassBlock):  # there it is the patches' gain, too
                module.ls1 = _fold_gain(module.ls1, last)
            module.ls2 = _fold_gain(module.ls2, module.mlp.fc2)
    model.folded = True
    return model


def _fold_gain(gain: nn.Module, last: nn.Module | None) -> nn.Module:
    if not isinstance(gain, (LayerScale, ScalarGate)) or not isinstance(last, (nn.Linear, nn.Conv2d)):
        return gain
    factor = gain.gamma if isinstance(gain, LayerScale) else gain.gain.expand(len(last.weight))
    last.weight.mul_(factor.view(-1, *[1] * (last.weight.ndim - 1)))
    if last.bias is None and gain.shift is not None:
        last.bias = nn.Parameter(torch.zeros_like(factor))
    if last.bias is not None:
        last.bias.mul_(factor)
        if gain.shift is not None:
            last.bias.add_(gain.shift)
    return nn.Identity()


class FoldedPatches(FixedPatches):
    """A X, times a gain for each channel, plus a constant for each patch and channel.

    With pre-affine (λ, β), matrix A, bias b and gain γ of the branch:
    γ (A (λ X + β) + b) = (γ λ) A X + γ (β rowsum(A) + b).
    """

    def __init__(self, mixer: LinearPatchesMixer, pre: Affine, post: nn.Module) -> None:
        super().__init__(mixer.grid)
        matrix, bias = mixer.tokens.weight, mixer.tokens.bias
        gain = post.gamma if isinstance(post, LayerScale) else torch.ones_like(pre.alpha)
        self.matrix = nn.Parameter(matrix.detach().clone())
        self.gain = nn.Parameter(gain * pre.alpha)
        constant = gain * (matrix.sum(1)[:, None] * pre.beta + bias[:, None])
        if isinstance(post, LayerScale) and post.shift is not None:
            constant = constant + post.shift
        self.constant = nn.Parameter(constant)  # [patches, width]

    def forward(self, x: Tensor, tokens: Tokens, layer: int = 0, probe: Probe | None = None) -> Tensor:
        self.check(tokens)
        return torch.addcmul(self.constant, self.gain, self.matrix @ x)


@torch.no_grad()
def fold_affine(model: Classifier) -> Classifier:
    """Merge every affine map of ResMLP into its neighbours, in place; LayerScale goes, too.

    Channel branches and the classifier fold exactly. In a branch over patches the shift meets a product over patches,
    so it becomes a constant for each patch and channel: ResMLP's claim (arXiv 2105.03404) of zero cost holds up to it.
    Convolutions keep their affine map: at the border, padding sees no shift. With adapters, as `fold_layerscale`.
    """
    model = without_adapters(model)
    for module in model.modules():
        if not isinstance(module, Block):
            continue
        if isinstance(module.norm1, Affine) and isinstance(module.attn, LinearPatchesMixer):
            module.attn = FoldedPatches(module.attn, module.norm1, module.ls1)
            module.norm1, module.ls1 = nn.Identity(), nn.Identity()
        if isinstance(module.norm2, Affine) and module.mlp is not None:
            _fold_before(module.norm2, module.mlp.fc1)
            module.norm2 = nn.Identity()
    norm = getattr(model.trunk, "norm", None)
    if isinstance(norm, Affine) and isinstance(model.head, LinearHead) and not model.head.own_norm:
        _fold_before(norm, model.head.first)
        model.trunk.norm = nn.Identity()
    return fold_layerscale(model)


def _fold_before(affine: Affine, layer: nn.Linear) -> None:
    layer.bias.add_(layer.weight @ affine.beta)
    layer.weight.mul_(affine.alpha)
