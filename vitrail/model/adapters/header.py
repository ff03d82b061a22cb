"""Header of an adapter file, read without torch and without its parameters."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

ADAPTER = "adapter.safetensors"
KEY, FORMAT = "vitrail_adapter", 1


def read_header(path: str | Path) -> dict[str, Any]:
    """The JSON of an adapter file, and `bytes`, its size; `tensors` has the shapes as they are stored.

    Raises `ValueError` with one sentence for a file that is damaged or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no adapter at {path}")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("it is cut off")
            found = json.loads(file.read(length))
        described: dict[str, Any] | None = json.loads((found.pop("__metadata__", None) or {}).get(KEY, "null"))
        end = max((one["data_offsets"][1] for one in found.values()), default=0)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is damaged or no adapter file ({type(error).__name__}: {error})") from None
    if described is None:
        raise ValueError(f"{path} is no adapter file of vitrail; `vitrail export RUN FILE.safetensors` writes one")
    if described.get("format", 0) > FORMAT:
        raise ValueError(f"{path} was written by a newer vitrail ({described.get('vitrail')}); update to read it")
    if 8 + length + end != path.stat().st_size:
        raise ValueError(f"{path} is damaged: it has {path.stat().st_size} bytes, and should have {8 + length + end}")
    shapes = {name: tuple(one["shape"]) for name, one in found.items()}
    return {**described, "tensors": shapes, "bytes": path.stat().st_size}


def summary(header: dict[str, Any]) -> dict[str, Any]:
    """What a person wants to know of an adapter file."""
    configs = header["configs"]
    seeds = sorted({config["seed"] for config in configs if "seed" in config})
    options = (
        *("rank", "coefficients", "coefficients_in", "scale", "shared", "tokens", "deep", "drop"),
        *("targets", "train_head", "train_norms"),
    )
    return {
        "kind": " + ".join(dict.fromkeys(str(config["kind"]) for config in configs)),
        "name": header["name"],
        "parts": [
            {k: config[k] for k in options if config.get(k) is not None} | ({"layers": len(layers)} if layers else {})
            for config, layers in zip(configs, header["layers"], strict=True)
        ],
        "trained": header["numbers"]["trained"],
        "of_these_whole": header["numbers"]["whole"],
        "stored": header["numbers"]["stored"],
        "bytes": header["bytes"],
        "bits": header["bits"] or 32,
        "seed": seeds[0] if len(seeds) == 1 else seeds or None,
        "base": {"architecture": header["architecture"], "hash": header["base"]},
        "classes": None if header["classes"] is None else len(header["classes"]),
    }
