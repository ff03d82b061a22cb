"""A data source in one file: images of stripes, whose classes are their directions.

VITRAIL_PARTS=stripes_source vitrail train vit --data "stripes:?n=500" --model.name vit_micro_28
"""

import numpy as np
from PIL import Image

from vitrail.data.dataset import DataSet, Location, Source, Split
from vitrail.registry import register

CLASSES = ("horizontal", "vertical")


def read(index: int) -> Image.Image:
    """Image number `index`; a function of the index alone, so that workers and resumed runs see the same one."""
    waves = np.sin(np.arange(28) * (0.5 + index % 7 / 5) + index)
    pixels = np.broadcast_to(waves[:, None] if index % 2 == 0 else waves[None], (28, 28))
    return Image.fromarray(((pixels + 1) * 127).astype(np.uint8)).convert("RGB")


def open_stripes(location: Location) -> DataSet:
    """One undivided split: validation and test images are held out of it."""
    index = np.arange(location.whole_numbers({"n": 200})["n"])
    split = Split("all", read, index, [f"stripes {i}" for i in index], index % 2)
    return DataSet(location.uri, CLASSES, {"all": split})


SOURCE = Source({"stripes:": "horizontal and vertical stripes; ?n=200"}, open_stripes, options=("n",))
register("source", "stripes")(SOURCE)
