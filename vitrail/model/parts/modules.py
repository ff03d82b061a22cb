"""Functions of any network: initial weights, hidden matrices (for Muon), layout, and the same without adapters."""

from __future__ import annotations

import platform
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PIXELS = 3  # input channels of a convolution that reads images


def hidden_matrices(network: nn.Module) -> dict[str, int]:
    """Names of the hidden weight matrices of a network, with the number of equal matrices that each is stacked of.

    | weight                                                            | hidden matrix | stacked of         |
    |-------------------------------------------------------------------|---------------|--------------------|
    | linear layer of a block, head, projector, predictor, stem          | yes           | 1                  |
    | linear or 1x1 layer that gives q, k and v at once                  | yes           | 3, as it declares  |
    | convolution, flattened to [out, in * k * k]                        | yes           | 1                  |
    | grouped convolution or grouped linear layer                        | yes           | its groups         |
    | patch embedding, first convolution (3 input channels)              | no            |                    |
    | depth-wise kernels; one row or one column                          | no            |                    |
    | classifiers, decisions, pixel outputs, positions (`edge_layers`)   | no            |                    |
    | tokens, positions, embeddings, prototypes, gains, norms, biases,   | no            |                    |
    | coefficients of adapters, attack patches                           |               |                    |

    Modules declare what their type does not say: `edge_layers` names child layers at the input or output end of the
    network, `fused_layers` maps a child layer to the number of matrices in its weight, and `hidden_matrix = True`
    marks a layer of another type whose `weight` is [out, in / groups].

    >>> from torch import nn
    >>> first, depth_wise, grouped = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 3, groups=2)
    >>> hidden_matrices(nn.Sequential(first, depth_wise, grouped))
    {'2.weight': 2}
    """
    edges: set[str] = set()
    fused: dict[str, int] = {}
    for name, module in network.named_modules():
        prefix = f"{name}." if name else ""
        edges |= {prefix + child for child in getattr(module, "edge_layers", ())}
        fused |= {prefix + child: parts for child, parts in getattr(module, "fused_layers", {}).items()}
    hidden: dict[str, int] = {}
    for name, module in network.named_modules():
        if not isinstance(module, LAYERS) and not getattr(module, "hidden_matrix", False):
            continue
        parents = name.split(".")
        if any(".".join(parents[:depth]) in edges for depth in range(1, len(parents) + 1)):
            continue
        if isinstance(module, LAYERS[1:]) and module.in_channels == PIXELS:
            continue
        parts = fused.get(name, 1) * int(getattr(module, "groups", 1))
        weight = module._parameters.get("weight")
        if weight is not None and min(weight.shape[0] // parts, weight[0].numel()) > 1:
            hidden[f"{name}.weight"] = parts
    return hidden


def small_normal(*layers: nn.Module | None) -> None:
    """Truncated normal weights of deviation 0.02 and biases of 0, in linear layers and convolutions among `layers`."""
    for layer in layers:
        if isinstance(layer, LAYERS):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def reset(module: nn.Module) -> None:
    """Draw the initial weights of every part anew, inner parts first (after `to_empty` from the meta device)."""
    for child in module.children():
        reset(child)
    draw = getattr(module, "reset_parameters", None)
    if callable(draw):
        draw()


def without_adapters(model: M) -> M:
    """The model itself where it has no adapters, otherwise a copy into which the one in use is merged."""
    if "adapters" not in model._modules:
        return model
    from vitrail.model.adapters.apply import adapters_of, merged_copy

    return model if adapters_of(model) is None else merged_copy(model)


def is_convolutional(model: nn.Module) -> bool:
    """Whether most layers of a network are convolutions over images."""
    convolutions = sum(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules())
    return convolutions > sum(isinstance(m, nn.Linear) for m in model.modules())


def channels_last_works(module: nn.Module, device: torch.device, training: bool = True) -> bool:
    """Whether convolutions may keep the channels of a pixel together in memory: on CUDA, and on x86.

    There, in training, the backward pass of oneDNN (torch 2.15) writes outside its memory for strided 1x1 convolutions
    of fewer than 16 channels, as FastViT has one; of 2,500 random convolutions all 39 that crashed were such. Other
    CPUs: not tried.
    """
    x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    fragile = [m for m in convolutions if max(m.kernel_size) == 1 and max(m.stride) > 1 and m.in_channels < 16]
    return device.type == "cuda" or (x86 and not (training and fragile))


def placed(model: M, device: torch.device) -> M:
    """The model on a device to be evaluated, convolutional networks in the layout that is faster there."""
    if is_convolutional(model) and channels_last_works(model, device, training=False):
        return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)
