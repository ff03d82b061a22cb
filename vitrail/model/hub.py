"""Weights in the local cache of the Hugging Face hub, and whether the hub can be reached. No torch here."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
WAIT = 2.0  # seconds for an answer of the hub


def hub_cache() -> Path:
    """The folder that huggingface_hub downloads into, by the environment variables that it reads."""
    if place := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(place).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(shared) / "huggingface").expanduser() / "hub"


def snapshot(folder: Path) -> Path:
    """The downloaded files in a folder of the cache (`models--OWNER--NAME`): of `main`, or the newest."""
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if main.is_file() and (named := snapshots / main.read_text(encoding="utf-8").strip()).is_dir():
        return named
    found = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    return max(found, key=lambda path: path.stat().st_mtime, default=folder)


def weights_in(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> Path | None:
    """The weights file of a snapshot folder, of a repository's cache folder, or of a cache of one repository."""
    repositories = sorted(folder.glob("models--*")) if folder.is_dir() else []
    for place in (folder, snapshot(folder), *([snapshot(repositories[0])] if len(repositories) == 1 else [])):
        for name in names:
            if (place / name).is_file():
                return place / name
    return None


def cached_weights(repository: str, names: Sequence[str] = WEIGHT_FILES) -> Path | None:
    """The cached weights file of `OWNER/NAME`."""
    return weights_in(hub_cache() / f"models--{repository.replace('/', '--')}", names)


def cached_repositories() -> Iterator[dict[str, Any]]:
    """Name, file and size of all cached weights; a name that begins with timm: is one for `--model.name`."""
    for folder in sorted(hub_cache().glob("models--*--*")):
        file = weights_in(folder)
        if file is None:
            continue
        owner, _, name = folder.name.removeprefix("models--").partition("--")
        known = f"timm:{name}" if owner == "timm" else f"{owner}/{name}"
        yield {"name": known, "file": str(file), "bytes": file.stat().st_size}


def model_repository(name: str) -> Path:
    """The folder of `hf:FOLDER` or `hf:OWNER/NAME`, a model that `vitrail export RUN hf:...` wrote.

    A repository is looked for in the local cache, then downloaded. Raises `ValueError` where it cannot be had.
    """
    wanted = name.removeprefix("hf:")
    if Path(wanted).is_dir():
        return Path(wanted)
    if wanted.count("/") != 1 or wanted.startswith((".", "/")):
        raise ValueError(f"{name}: there is no such folder; name one, or a repository of the hub (hf:OWNER/NAME)")
    cached = snapshot(hub_cache() / f"models--{wanted.replace('/', '--')}")
    if (cached / "model.json").is_file():
        return cached
    if reason := unreachable():
        raise ValueError(f"{name} is not in {hub_cache()}, and cannot be fetched: {reason}; copy its folder here")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(wanted, allow_patterns=["*.json", "*.safetensors", "config.yaml"]))


def unreachable() -> str:
    """Why the hub cannot be asked, within `WAIT` seconds; empty where it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=WAIT).close()
            answers.append(True)
        except (OSError, ValueError) as error:
            answers.append(isinstance(error, urllib.error.HTTPError))  # an answer, too

    asking = threading.Thread(target=ask, daemon=True)  # the timeout of a socket does not end the look-up of a name
    asking.start()
    asking.join(WAIT)
    return "" if answers == [True] else f"no answer from {address}"
