"""A classifier made ready for fast inference: folded, cast, compiled, and launched as one CUDA graph per batch size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vitrail.kernels.fp8 import Fp8Linear
from vitrail.kernels.gelu import Gelu, linear_gelu
from vitrail.model.adapters.merged import merged_copy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.block import Mlp
from vitrail.model.classifier import Classifier
from vitrail.model.fold import fold_affine
from vitrail.model.replay import Replay
from vitrail.model.stems import ConvEmbed

Precision = Literal["auto", "float32", "bf16", "fp8"]


class Optimized(nn.Module):
    """`optimized(images)` gives the logits of the model it was made from, in float32; for inference only.

    images [batch, 3, height, width], bytes or normalised floats -> [batch, classes]

    Where packed tokens need more room than `calibrate` fixed, the batch is computed again with room enough: the first
    such batch is a warning, `recomputed` counts all of them, of `batches`.
    """

    def __init__(self, model: Classifier, precision: str, compiled: bool, graph: bool) -> None:
        super().__init__()
        self.model = model
        self.precision, self.compiled = precision, compiled
        self.classes, self.preprocess = model.classes, model.preprocess
        self.graph = graph
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
                self._tell(len(images))
                with cast("AtsPolicy", self.model.policy).with_room(fixed=False):
                    logits, _ = self._logits(images)
            return logits

    def _tell(self, images: int) -> None:
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
    """A copy of `model` for inference on the device where it is.

    An adapter in use is merged, in the copy.
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
    if chosen == "fp8" and not (on_cuda and torch.cuda.get_device_capability(device) >= (8, 9)):
        raise ValueError(f"fp8 needs a CUDA accelerator that multiplies in it (Ada, Hopper or newer), not {device}")
    made = merged_copy(model).eval().requires_grad_(False)
    fold_affine(made)
    for module in made.modules():
        if isinstance(module, ConvEmbed):
            _fold_batchnorm(module)
    if chosen != "float32":
        made.to(torch.bfloat16)
    if chosen == "fp8":
        _quantise(made)
    elif chosen == "bf16" and on_cuda:
        for module in made.modules():
            if isinstance(module, Mlp) and isinstance(module.act, Gelu):
                module.fc1 = LinearGelu(module.fc1)  # type: ignore[assignment]
                module.act = nn.Identity()
    if isinstance(made.policy, AtsPolicy):
        made.policy.fixed = True  # `Optimized` looks at what did not fit
    usual = on_cuda and (made.policy is None or made.policy.static)
    return Optimized(made, chosen, usual if compile is None else compile, usual if graph is None else graph)


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
