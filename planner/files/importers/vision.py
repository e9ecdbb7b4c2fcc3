"""Parameters, saved activations and FLOP of a vision transformer's layers, counted from its shape.

Symbols: N patches and a class token, p pixels of a patch in all channels, W width, L labels. Blocks are those of a
language model (planner/files/importers/transformer.py) on N tokens without a causal mask.

    embedding    a convolution with p W weights and W biases, W numbers of the class token and N W of positions; it
                 saves the image
    head         a norm, and L W weights and L biases that are applied to the class token; it saves its input, the
                 normed values, and the logarithms of L probabilities
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.files.importers.transformer import TransformerShape
from planner.scenario.kind_table import MatrixProduct
from planner.scenario.roofline import LayerWork
from traces.common.errors import InputError

_NUMBER_BYTES = 4
_LABEL_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """A stack of equal blocks between the embedding of an image's patches and a classifier.

    Attributes:
        blocks: The shape of the blocks; its vocabulary is not used.
        image_size: Pixels in a row and in a column of the square image.
        patch_size: Pixels in a row and in a column of a patch.
        channels: Numbers of a pixel.
        labels: Number of different labels.

    Raises:
        InputError: Patches do not fill the image.
    """

    blocks: TransformerShape
    image_size: int
    patch_size: int
    channels: int
    labels: int

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise InputError(
                f"patches of {self.patch_size} pixels do not fill an image of {self.image_size}",
                valid="give an image_size that is a multiple of patch_size",
            )

    @property
    def tied(self) -> bool:
        """Whether embedding and head share parameters: they do not."""
        return False

    @property
    def longest(self) -> int:
        """Number of patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameter_bytes for layer in self.layers(self.longest)) // _NUMBER_BYTES

    def layers(self, tokens: int) -> Sequence[LayerWork]:
        """Return the work of embedding, blocks and head, in this order.

        Raises:
            InputError: ``tokens`` is not `longest`, the only number that the model accepts.
        """
        if tokens != self.longest:
            raise InputError(
                f"samples of {tokens} tokens are not allowed",
                valid=f"give {self.longest}: the patches of an image, and the class token",
            )
        width = self.blocks.width
        between = _NUMBER_BYTES * tokens * width
        image_bytes = _NUMBER_BYTES * self.channels * self.image_size**2
        patch = self.channels * self.patch_size**2
        embedding = LayerWork(
            "embedding",
            2 * (tokens - 1) * patch * width,
            _NUMBER_BYTES * (patch * width + 2 * width + tokens * width),
            between,
            image_bytes,
            backward_input_flop=0.0,
            products=(MatrixProduct(tokens - 1, patch, width),),
            # The convolution, the class token before its outputs, and the positions.
            kernels=3,
        )
        scores_bytes = _NUMBER_BYTES * self.labels
        head = LayerWork(
            "head",
            2 * width * self.labels,
            _NUMBER_BYTES * (2 * width + width * self.labels + self.labels),
            scores_bytes,
            2 * between + 2 * _NUMBER_BYTES * tokens + scores_bytes + _LABEL_BYTES,
            fixed_bytes=scores_bytes + _LABEL_BYTES,
            products=(MatrixProduct(1, width, self.labels),),
            # A norm, the scores and the two of the loss.
            kernels=4,
        )
        return [embedding, *self.blocks.layers(tokens)[1:-1], head]
