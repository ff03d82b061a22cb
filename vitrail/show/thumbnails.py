"""Pictures small enough to live inside a page."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Picture = Image.Image | NDArray[np.uint8]  # an image, or uint8 [height, width, 3]

TINY = 48  # pixels; JPEG spoils images of this side or less, and PNG keeps them small


def data_uri(picture: Picture, side: int = 160) -> str:
    """`picture` as the text of an `<img>` source, its longer side at most `side` pixels; never enlarged."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    kind = "png" if max(image.size) <= TINY else "jpeg"
    stored = io.BytesIO()
    image.save(stored, kind, quality=82, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"
