"""Cost of training with and without labels, in passes of a network (CMSF, Navaneet et al. 2021, arXiv 2112.04607).

    passes = (forward + backward) x iterations x epochs,  FLOPs = (forward + 2 backward) x FLOPs of one pass

`forward` and `backward` are passes of one batch at full size: an image of K pixels a side counts (K / 224)^2.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_SIZE = 224
RESNET50 = 3.9e9  # of one pass, as CMSF has it; multiply-accumulates
IMAGENET = 1_281_167


def crop(side: int, full: int = FULL_SIZE) -> float:
    """What a smaller crop counts.

    >>> round(crop(96), 3)
    0.184
    """
    return (side / full) ** 2


@dataclass(frozen=True)
class TrainingCost:
    """How often each image of a batch passes the network, and how long that goes on."""

    batch: int  # images without a label
    forward: float  # passes of each of them
    backward: float
    iterations: int  # of an epoch
    epochs: int = 1
    labelled_batch: int = 0
    labelled_forward: float = 0
    labelled_backward: float = 0
    flops_per_pass: float = RESNET50

    @property
    def forward_passes(self) -> float:
        """Over the whole training."""
        each = self.forward * self.batch + self.labelled_forward * self.labelled_batch
        return each * self.iterations * self.epochs

    @property
    def backward_passes(self) -> float:
        """Over the whole training."""
        each = self.backward * self.batch + self.labelled_backward * self.labelled_batch
        return each * self.iterations * self.epochs

    @property
    def passes(self) -> float:
        """Forward and backward, one as much as the other."""
        return self.forward_passes + self.backward_passes

    @property
    def flops(self) -> float:
        """A backward pass costs two forward ones."""
        return (self.forward_passes + 2 * self.backward_passes) * self.flops_per_pass


def _imagenet(batch: int, epochs: int, forward: float, backward: float, *, labelled: int = 0) -> TrainingCost:
    """Epochs of ImageNet in whole batches; labelled images pass once each way."""
    once = float(labelled > 0)
    return TrainingCost(batch, forward, backward, IMAGENET // batch, epochs, labelled, once, once)


_CROPS = 2 + 6 * crop(96)  # two large and six small crops

METHODS: dict[str, TrainingCost] = {  # ResNet-50; batches and epochs are those of each method's own paper
    "msf": _imagenet(256, 200, 2, 1),
    "cmsf": _imagenet(256, 200, 2, 1),
    "byol": _imagenet(4096, 1000, 4, 2),
    "swav": _imagenet(4096, 800, _CROPS, _CROPS),
    "simclr_v2": _imagenet(4096, 800, 2, 2),
    "uda": TrainingCost(15360, 2, 1, 40_000, 1, 512, 1, 1),
    "fixmatch": _imagenet(5120, 300, 2, 1, labelled=1024),
    # Five passes of 2048 images and two of 256 give the printed sum; how the paper divides them is not known here.
    "mpl": TrainingCost(2048, 3, 2, 500_000, 1, 256, 1, 1),
    "paws_6720": _imagenet(4096, 300, _CROPS, _CROPS, labelled=6720),
    "paws_1680": _imagenet(256, 100, _CROPS, _CROPS, labelled=1680),
    "paws_400": _imagenet(256, 100, _CROPS, _CROPS, labelled=400),
}
