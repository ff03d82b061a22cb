"""A plain timm ViT block by block, so that its maps and tokens can be asked for like those of our trunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from vitrail.model.tokens import Probe


def is_plain_vit(backbone: nn.Module) -> bool:
    """Whether timm runs it as `VisionTransformer` does: embedding, blocks one after the other, norm."""
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(backbone, VisionTransformer) and (
        type(backbone).forward_features is VisionTransformer.forward_features
    )


def intermediates(backbone: nn.Module) -> list[str]:
    """Every name that `want` knows."""
    names = []
    for i, block in enumerate(_blocks(backbone)):
        shown = hasattr(block, "attn") and hasattr(block.attn, "fused_attn") and hasattr(block.attn, "attn_drop")
        names += [f"attention.{i}"] * shown + [f"tokens.{i}"]
    return names


def begin(backbone: nn.Module, images: Tensor) -> Tensor:
    """Images to tokens with positions, [batch, tokens, width]."""
    vit = cast("Any", backbone)
    return cast("Tensor", vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images)))))


def run(backbone: nn.Module, x: Tensor, want: Collection[str], until: int | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The blocks and the final norm (not the norm where `until` stops before a block), and what was asked for."""
    vit = cast("Any", backbone)
    probe = Probe(want, {}, intermediates(backbone))
    blocks = _blocks(backbone)
    if not want and until is None and vit.grad_checkpointing and vit.training:
        from timm.models import checkpoint_seq

        return cast("Tensor", vit.norm(checkpoint_seq(vit.blocks, x))), {}
    for i, block in enumerate(blocks[:until]):
        if f"attention.{i}" in probe.want:
            with _unfused(block.attn, probe, f"attention.{i}"):
                x = block(x)
        else:
            x = block(x)
        x = probe(f"tokens.{i}", x)
    return x if until is not None and until < len(blocks) else vit.norm(x), probe.captured


@contextmanager
def _unfused(attention: Any, probe: Probe, name: str) -> Iterator[None]:
    """timm's own unfused path, whose map passes through `attn_drop`."""
    before = attention.fused_attn
    hook = attention.attn_drop.register_forward_hook(lambda module, given, out: probe(name, out))
    attention.fused_attn = False
    try:
        yield
    finally:
        attention.fused_attn = before
        hook.remove()


def _blocks(backbone: nn.Module) -> list[Any]:
    return list(cast("Any", backbone).blocks)
