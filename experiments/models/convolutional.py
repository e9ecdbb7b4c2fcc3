"""A small convolutional classifier of synthetic images.

Shapes: B samples, C channels, S side of an image in pixels, K classes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

COLOURS = 3
# Number of groups of channels that are normalised together.
GROUPS = 8
# Each class is a pattern of this many squares a side, hidden in noise as strong as the pattern.
SQUARES = 2
# Separate random streams for the patterns and for the images made from them.
PATTERN_KEY, IMAGE_KEY = 1, 2


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        norm = nn.GroupNorm(GROUPS, channels)
        # Close to the identity at first, which keeps large learning rates stable.
        nn.init.constant_(norm.weight, 0.1)
        self.body = nn.Sequential(
            _convolution(channels, channels), nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm
        )

    def forward(self, image: Tensor) -> Tensor:
        """Map images, B x C x S x S, to images of the same shape."""
        return functional.relu(image + self.body(image))


class Convolutional:
    """The layers, the loss and the data of the classifier.

    Attributes:
        layers: For each scale a convolution, a residual block and, except at the last scale, a pooling; finally the
            head, which maps B x C x S x S to scores, B x K.
    """

    def __init__(self, width: int, scales: int, side: int, classes: int) -> None:
        self.layers: list[nn.Module] = []
        channels_in = COLOURS
        for scale in range(scales):
            channels = width * 2**scale
            self.layers += [_convolution(channels_in, channels), Residual(channels), nn.MaxPool2d(2)]
            channels_in = channels
        self.layers[-1] = nn.Sequential(
            nn.AdaptiveAvgPool2d(SQUARES), nn.Flatten(), nn.Linear(channels_in * SQUARES**2, classes)
        )
        self._side = side
        self._patterns = _patterns(classes, side)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the class numbers."""
        return functional.cross_entropy(outputs, targets)

    def samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return float32 images, B x 3 x S x S, and their class numbers, B, for B = ``count`` samples."""
        random = _random_rows(IMAGE_KEY, first, count, 1 + COLOURS * self._side**2)
        classes = (random[:, 0] * len(self._patterns)).astype(np.int64)
        noise = 2 * random[:, 1:].reshape(count, COLOURS, self._side, self._side) - 1
        images = (self._patterns[classes] + noise).astype(np.float32)
        return torch.from_numpy(images), torch.from_numpy(classes)


def build(*, width: int = 32, scales: int = 3, side: int = 32, classes: int = 10) -> Convolutional:
    """Return the model; its initial parameters follow `torch.manual_seed`.

    Args:
        width: Channels of the first scale, a multiple of 8; each further scale has twice as many.
        scales: Number of scales; at each the image has half the side that it has at the previous one.
        side: Side of the square input images in pixels, a multiple of ``2 ** scales``.
        classes: Number of different classes.
    """
    if width % GROUPS:
        raise ValueError(f"width ({width}) must be a multiple of {GROUPS}")
    if side % 2**scales:
        raise ValueError(f"side ({side}) must be a multiple of 2 ** scales ({2**scales})")
    return Convolutional(width, scales, side, classes)


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    # Group normalisation uses no statistics of the batch, so that the microbatch size does not change the result.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, channels_out), nn.ReLU()
    )


def _patterns(classes: int, side: int) -> NDArray[np.float64]:
    """Return one image per class, K x 3 x S x S, of squares that are -1 or 1."""
    random = _random_rows(PATTERN_KEY, 0, classes, COLOURS * SQUARES**2)
    squares = np.sign(random - 0.5).reshape(classes, COLOURS, SQUARES, SQUARES)
    return squares.repeat(side // SQUARES, axis=2).repeat(side // SQUARES, axis=3)


def _random_rows(key: int, first: int, count: int, width: int) -> NDArray[np.float64]:
    """Return rows ``first`` to ``first + count - 1`` of an endless table of numbers in [0, 1).

    NumPy's generator Philox computes its n-th output from n, so that every row takes equally long. It counts in blocks
    of four outputs; each row of ``width`` numbers starts a block.
    """
    row_blocks = -(-width // 4)
    raw = np.random.Philox(key=key, counter=first * row_blocks).random_raw(count * row_blocks * 4)
    rows: NDArray[np.float64] = (raw >> np.uint64(11)) * np.float64(2**-53)
    return rows.reshape(count, row_blocks * 4)[:, :width]
