"""Cost of training with and without labels, in passes of a network (CMSF, Navaneet et al. 2021, arXiv 2112.04607).

    passes = (forward + backward) x iterations x epochs,  FLOPs = (forward + 2 backward) x FLOPs of one pass

`forward` and `backward` are passes of one batch at full size: an image of K pixels a side counts (K / 224)^2.
`python studies/training_cost.py` prints both for eleven methods.
"""

from __future__ import annotations

from typing import NamedTuple

RESNET50 = 3.9e9  # of one pass, as CMSF has it; multiply-accumulates
IMAGENET = 1_281_167


def crop(side: int) -> float:
    """What a smaller crop counts."""
    return (side / 224) ** 2


class TrainingCost(NamedTuple):
    """How often each image of a batch passes the network, and how long that goes on."""

    batch: int  # images without a label
    forward: float  # passes of each of them
    backward: float
    iterations: int  # in all
    labelled: int = 0  # images of a batch with a label, which pass once each way
    flops_per_pass: float = RESNET50

    @property
    def passes(self) -> float:
        """Forward and backward, one as much as the other."""
        return ((self.forward + self.backward) * self.batch + 2 * self.labelled) * self.iterations

    @property
    def flops(self) -> float:
        """A backward pass costs two forward ones."""
        passes = ((self.forward + 2 * self.backward) * self.batch + 3 * self.labelled) * self.iterations
        return passes * self.flops_per_pass


def _imagenet(batch: int, epochs: int, forward: float, backward: float, labelled: int = 0) -> TrainingCost:
    """Epochs of ImageNet in whole batches."""
    return TrainingCost(batch, forward, backward, IMAGENET // batch * epochs, labelled)


_CROPS = 2 + 6 * crop(96)  # two large and six small crops

METHODS: dict[str, TrainingCost] = {  # ResNet-50; batches and epochs are those of each method's own paper
    "msf": _imagenet(256, 200, 2, 1),
    "cmsf": _imagenet(256, 200, 2, 1),
    "byol": _imagenet(4096, 1000, 4, 2),
    "swav": _imagenet(4096, 800, _CROPS, _CROPS),
    "simclr_v2": _imagenet(4096, 800, 2, 2),
    "uda": TrainingCost(15360, 2, 1, 40_000, 512),
    "fixmatch": _imagenet(5120, 300, 2, 1, 1024),
    # Five passes of 2048 images and two of 256 give the printed sum; how the paper divides them is not known here.
    "mpl": TrainingCost(2048, 3, 2, 500_000, 256),
    "paws_6720": _imagenet(4096, 300, _CROPS, _CROPS, 6720),
    "paws_1680": _imagenet(256, 100, _CROPS, _CROPS, 1680),
    "paws_400": _imagenet(256, 100, _CROPS, _CROPS, 400),
}

if __name__ == "__main__":
    for name, cost in METHODS.items():
        print(f"{name}: {cost.passes / 1e8:.1f}e8 passes, {cost.flops / 1e18:.1f}e18 FLOPs")
