"""A classifier ready for fast inference: gains folded into linear layers, cast, compiled, captured as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vitrail.kernels.cuda_graph import captured
from vitrail.kernels.fp8 import Fp8Linear, supports_fp8
from vitrail.kernels.gelu import Gelu, linear_gelu
from vitrail.model.adapters.apply import merged_copy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.heads.class_attention import ClassAttentionMixer, ClassBlock, XcitClassBlock
from vitrail.model.heads.head import LinearHead
from vitrail.model.mixers.mixer import Mixer
from vitrail.model.mixers.patches import FixedPatches, LinearPatchesMixer
from vitrail.model.parts.block import Affine, Block, LayerScale, Mlp, ParallelBranch, ScalarGate
from vitrail.model.parts.modules import placed, without_adapters
from vitrail.model.parts.stems import ConvEmbed
from vitrail.model.parts.tokens import Probe, Tokens

if TYPE_CHECKING:
    from vitrail.model.classifier import Classifier


class Replay:
    """`replay(*inputs)` is `run(*inputs)` as one CUDA graph, for inputs of the shapes and kinds it was made with.

    What it returns lies where the next call writes: copy what must outlast it.
    """

    def __init__(self, run: Callable[..., Any], *inputs: Tensor) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.graph, self.outputs = captured(lambda: run(*self.inputs), device=inputs[0].device)

    def __call__(self, *inputs: Tensor) -> Any:
        for buffer, given in zip(self.inputs, inputs, strict=True):
            buffer.copy_(given)
        self.graph.replay()
        return self.outputs


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
        elif isinstance(module, ParallelBranch):
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


Precision = Literal["auto", "float32", "bf16", "fp8"]


class Optimized(nn.Module):
    """`optimized(images)` gives the logits of the model it was made from, in float32; for inference only.

    images [batch, 3, height, width], bytes or normalised floats -> [batch, classes]

    Where packed tokens need more room than `calibrate` fixed, the batch is computed again with room enough: the first
    such batch is a warning, `recomputed` counts all of them, of `batches`.
    """

    def __init__(self, model: Classifier, precision: str, compiled: bool, graph: bool) -> None:
        super().__init__()
        self.model, self.precision, self.compiled, self.graph = model, precision, compiled, graph
        self.classes, self.preprocess = model.classes, model.preprocess
        self.batches = self.recomputed = 0
        self._graphs: dict[tuple[torch.Size, torch.dtype], Replay] = {}
        self._run: Callable[[Tensor], tuple[Tensor, Tensor | None]] = self._logits
        if compiled:
            # Otherwise a running sum is not stored but added up again from its terms, block after block.
            self._run = torch.compile(self._logits, dynamic=False, options={"realize_reads_threshold": 1})

    def _logits(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, and for packed tokens whether there was too little room for them."""
        out = self.model.outputs(images)
        return self.model.fused(out.stack).float(), None if out.trace is None else out.trace.overflow

    def forward(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            images = images.to(next(self.model.parameters()).dtype)
        with torch.inference_mode():
            if not (self.graph and images.is_cuda):
                logits, overflow = self._run(images)
            else:
                key = (images.shape, images.dtype)
                if key not in self._graphs:
                    self._graphs[key] = Replay(self._run, images)
                logits, overflow = self._graphs[key](images)
                logits = logits.clone()
            self.batches += 1
            if overflow is not None and overflow:  # waits for the device, once and after all work
                self._warn(len(images))
                with cast("AtsPolicy", self.model.policy).with_room(fixed=False):
                    logits, _ = self._logits(images)
            return logits

    def _warn(self, images: int) -> None:
        self.recomputed += 1
        if self.recomputed == 1:
            warnings.warn(
                f"a batch of {images} images (number {self.batches}) kept more tokens than there is room for and was "
                "computed again, in more than twice the time; `recomputed` counts such batches: calibrate on images "
                "like these, for this batch size, or with a larger margin",
                stacklevel=3,
            )


class LinearGelu(nn.Module):
    """The first half of an MLP, with the activation inside the product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear_gelu(x, self.weight, self.bias)


def optimize(
    model: Classifier,
    precision: Precision = "auto",
    compile: bool | None = None,  # noqa: A002, torch's word
    graph: bool | None = None,
) -> Optimized:
    """A copy of `model` for inference on the device where it is; an adapter in use is merged, in the copy.

    LayerScale, Affine and the BatchNorm of convolutional stems are folded into their neighbours (exactly, up to
    rounding). `precision`: bf16 by itself on CUDA, float32 elsewhere; fp8 quantises the linear layers of the blocks,
    one scale per token and one per output channel: check the accuracy on your data. In bf16 on CUDA GELU is its tanh
    approximation, computed inside the product. `compile` and `graph` are on for CUDA, but not for an adaptive model
    whose work depends on the images (token sampling: fix its room by `calibrate` first).
    Raises `ValueError` where the device lacks the precision.
    """
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"
    chosen = ("bf16" if on_cuda else "float32") if precision == "auto" else precision
    if chosen not in ("float32", "bf16", "fp8"):
        raise ValueError(f"precision must be auto, float32, bf16 or fp8, not {precision!r}")
    if chosen == "fp8" and not supports_fp8(device):
        raise ValueError(f"fp8 needs a CUDA accelerator that multiplies in it (Ada, Hopper or newer), not {device}")
    fast = merged_copy(model).eval().requires_grad_(False)
    fold_affine(fast)
    for module in fast.modules():
        if isinstance(module, ConvEmbed):
            _fold_batchnorm(module)
    if chosen != "float32":
        fast.to(torch.bfloat16)
    if chosen == "fp8":
        _quantise(fast)
    elif chosen == "bf16" and on_cuda:
        for module in fast.modules():
            if isinstance(module, Mlp) and isinstance(module.act, Gelu):
                module.fc1 = LinearGelu(module.fc1)  # type: ignore[assignment]
                module.act = nn.Identity()
    if not on_cuda:
        placed(fast, device)
    if isinstance(fast.policy, AtsPolicy):
        fast.policy.fixed = True  # `Optimized` checks the overflow
    usual = on_cuda and (fast.policy is None or fast.policy.static)
    return Optimized(fast, chosen, usual if compile is None else compile, usual if graph is None else graph)


def _fold_batchnorm(stem: ConvEmbed) -> None:
    for i, (conv, norm) in enumerate(zip(stem.convs, stem.norms, strict=True)):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            stem.convs[i] = fuse_conv_bn_eval(conv, norm)
            stem.norms[i] = nn.Identity()


def _quantise(model: Classifier) -> None:
    """Linear layers of the blocks; stem, norms and head keep their precision."""
    blocks = getattr(model.trunk, "blocks", None)
    if blocks is None:
        raise ValueError(f"fp8 quantises the blocks of our own trunks; {type(model.trunk).__name__} has none")
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.in_features % 16 == 0 and child.out_features % 16 == 0:
                after_gelu = isinstance(parent, Mlp) and name == "fc2" and isinstance(parent.act, Gelu)
                setattr(parent, name, Fp8Linear(child, gelu=after_gelu))
                if after_gelu:
                    parent.act = nn.Identity()
