"""A small classifier of real data: scikit-learn's handwritten digits, 1,797 images of 8 x 8 pixels.

Shapes: B samples, P pixels of an image, W width, K classes.
"""

from collections.abc import Sequence
from importlib.metadata import distribution

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

PIXELS, CLASSES = 64, 10
# Largest value of a pixel; the smallest is 0.
BRIGHTEST = 16
# Share of the images that are held out to measure the accuracy; the seed makes them the same in every process.
HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0
# A line for each image: its pixels, then its class.
FILE = "sklearn/datasets/data/digits.csv.gz"


class Digits:
    """The layers, the loss and the data of the classifier.

    Attributes:
        layers: Linear layers of width W with ReLU, then the head, which maps B x W to scores, B x K.
        size: Number of images to train on, without the held-out ones.
    """

    def __init__(self, width: int, depth: int, *, by_class: bool) -> None:
        self.layers: list[nn.Module] = [_layer(PIXELS if index == 0 else width, width) for index in range(depth)]
        self.layers.append(nn.Linear(width, CLASSES))
        # Read here, since benches only need the path of this file; scikit-learn itself would take a second to load.
        table = np.loadtxt(str(distribution("scikit-learn").locate_file(FILE)), delimiter=",")
        images, classes = table[:, :-1], table[:, -1]
        order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
        training, held_out = np.split(order, [len(images) - round(HELD_OUT_SHARE * len(images))])
        if by_class:
            training = training[np.argsort(classes[training], kind="stable")]
        self.size = len(training)
        self._training = _Images(images[training], classes[training])
        self._held_out = _Images(images[held_out], classes[held_out])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the class."""
        return functional.cross_entropy(outputs, targets)

    def select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 images, B x P, and class numbers, B; ``indices``, int64, B, are each 0 to ``size - 1``."""
        return self._training.at(indices.numpy())

    def accuracy(self, layers: Sequence[nn.Module]) -> float:
        """Return the share, 0 to 1, of held-out images that the whole model, ``layers``, classifies correctly."""
        outputs, targets = self._held_out.at(slice(None))
        with torch.no_grad():
            for layer in layers:
                outputs = layer(outputs)
        return float((outputs.argmax(dim=1) == targets).float().mean())


def build(*, width: int = 128, depth: int = 4, by_class: bool = False) -> Digits:
    """Return the model; its initial parameters follow `torch.manual_seed`.

    Args:
        width: Width W of the layers.
        depth: Number of layers before the head.
        by_class: Whether the images to train on are in the order of their classes. If regions own data, each of them
            then has other classes; otherwise each has all of them.
    """
    if width < 1 or depth < 1:
        raise ValueError(f"width ({width}) and depth ({depth}) must be 1 or more")
    return Digits(width, depth, by_class=by_class)


class _Images:
    """Images and their classes as NumPy arrays, which hold data even where torch builds the model on ``meta``."""

    def __init__(self, images: NDArray[np.float64], classes: NDArray[np.float64]) -> None:
        self._pixels = (images / BRIGHTEST).astype(np.float32)
        self._classes = classes.astype(np.int64)

    def at(self, chosen: NDArray[np.int64] | slice) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._pixels[chosen]), torch.from_numpy(self._classes[chosen])


def _layer(width_in: int, width_out: int) -> nn.Sequential:
    linear = nn.Linear(width_in, width_out)
    # This initialisation keeps the variance from layer to layer, so that plain gradient descent trains from the start.
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return nn.Sequential(linear, nn.ReLU())
