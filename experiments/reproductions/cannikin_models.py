"""The models of Cannikin's reproduction as layers, from the arithmetic of their published architectures.

Numbers are 32-bit. A convolution of weights W on an output of h x w does 2 * W * h * w operations for a sample. What is
kept for backward is the input of every convolution and of every batch normalisation; ReLU works in place.

Sources: Deep Residual Learning (He et al., 2016; a bottleneck has its stride in the 3 x 3 convolution, as torchvision
does it); BERT (Devlin et al., 2019); activations of a transformer block: Reducing Activation Recomputation (Korthikanti
et al., 2022), there for 16-bit numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.scenario.roofline import LayerWork

_BYTES = 4


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model, and how it is trained.

    Attributes:
        name: With its data.
        layers: In order.
        optimizer: One of `planner.scenario.scenario.OPTIMIZER_STATES`.
        first_batch: B_0: the batch of the paper that published the model.
    """

    name: str
    layers: tuple[LayerWork, ...]
    optimizer: str
    first_batch: int


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution and the batch normalisation behind it."""

    inputs: int
    outputs: int
    width: int
    size: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.width**2

    @property
    def parameters(self) -> int:
        return self.weights + 2 * self.outputs

    @property
    def flop(self) -> int:
        return 2 * self.weights * self.elements // self.outputs

    @property
    def elements(self) -> int:
        return self.outputs * self.size**2


def _block(name: str, main: list[_Convolution], shortcut: list[_Convolution]) -> LayerWork:
    """A residual block: of each convolution its output is kept, normalised once more as the input of the next."""
    every = [*main, *shortcut]
    kept = 2 * sum(each.elements for each in main) + sum(each.elements for each in shortcut)
    return LayerWork(
        name,
        float(sum(each.flop for each in every)),
        _BYTES * sum(each.parameters for each in every),
        _BYTES * main[-1].elements,
        _BYTES * kept,
    )


def _shortcut(inputs: int, outputs: int, size: int, stride: int) -> list[_Convolution]:
    return [_Convolution(inputs, outputs, 1, size)] if stride != 1 or inputs != outputs else []


def _bottleneck(name: str, inputs: int, middle: int, size: int, stride: int) -> LayerWork:
    """1 x 1, 3 x 3 and 1 x 1; ``size`` is that of the output."""
    outputs = 4 * middle
    main = [
        _Convolution(inputs, middle, 1, size * stride),
        _Convolution(middle, middle, 3, size),
        _Convolution(middle, outputs, 1, size),
    ]
    return _block(name, main, _shortcut(inputs, outputs, size, stride))


def _basic(name: str, inputs: int, outputs: int, size: int, stride: int) -> LayerWork:
    """Two of 3 x 3; ``size`` is that of the output."""
    main = [_Convolution(inputs, outputs, 3, size), _Convolution(outputs, outputs, 3, size)]
    return _block(name, main, _shortcut(inputs, outputs, size, stride))


def _head(inputs: int, classes: int, size: int) -> LayerWork:
    """Mean over the picture and a linear layer."""
    weights = inputs * classes + classes
    return LayerWork(
        "head", 2.0 * inputs * classes, _BYTES * weights, _BYTES * classes, _BYTES * inputs * (size**2 + 1)
    )


def _stem(convolution: _Convolution, input_elements: int, pooled: int) -> LayerWork:
    kept = input_elements + 2 * convolution.elements + pooled
    output = pooled or convolution.elements
    sizes = (_BYTES * convolution.parameters, _BYTES * output, _BYTES * kept)
    # Nobody asks for the gradient of a picture.
    return LayerWork("stem", float(convolution.flop), *sizes, backward_input_flop=0.0)


def _residual_layers(
    stem: LayerWork,
    block: Callable[[str, int, int, int, int], LayerWork],
    depths: tuple[int, ...],
    expansion: int,
    size: int,
    classes: int,
) -> tuple[LayerWork, ...]:
    """Four groups of blocks; each but the first halves the picture and doubles the channels."""
    layers, inputs = [stem], 64
    for group, depth in enumerate(depths):
        middle, side = 64 * 2**group, size // 2**group
        for index in range(depth):
            stride = 2 if group and not index else 1
            layers.append(block(f"group {group + 1} block {index + 1}", inputs, middle, side, stride))
            inputs = expansion * middle
    return (*layers, _head(inputs, classes, size // 2 ** (len(depths) - 1)))


def resnet18_cifar() -> TrainedModel:
    """Return ResNet-18 for pictures of 32 x 32 (a 3 x 3 stem, no pooling): 11,173,962 parameters."""
    stem = _stem(_Convolution(3, 64, 3, 32), 3 * 32**2, 0)
    return TrainedModel("ResNet-18, CIFAR-10", _residual_layers(stem, _basic, (2, 2, 2, 2), 1, 32, 10), "momentum", 128)


def resnet50_imagenet() -> TrainedModel:
    """Return ResNet-50 for pictures of 224 x 224: 25,557,032 parameters, 4.09e9 multiply-adds."""
    stem = _stem(_Convolution(3, 64, 7, 112), 3 * 224**2, 64 * 56**2)
    layers = _residual_layers(stem, _bottleneck, (3, 4, 6, 3), 4, 56, 1000)
    return TrainedModel("ResNet-50, ImageNet", layers, "momentum", 256)


def bert_base_squad() -> TrainedModel:
    """Return BERT-base without pooler for 384 tokens, with SQuAD's head: 108,893,186 parameters."""
    width, tokens, heads, vocabulary, positions = 768, 384, 12, 30_522, 512
    output_bytes = _BYTES * tokens * width
    embedding = LayerWork(
        "embedding",
        # Adding up three embeddings and normalising them, about ten operations a number.
        10.0 * tokens * width,
        _BYTES * ((vocabulary + positions + 2) * width + 2 * width),
        output_bytes,
        2 * output_bytes,
        backward_input_flop=0.0,
    )
    # Of 34 bytes per token and channel two are masks of one byte, of 5 per pair of tokens one.
    kept = (2 * (34 - 2) + 2) * tokens * width + (2 * (5 - 1) + 1) * heads * tokens**2
    flop = 24.0 * width**2 * tokens + 4.0 * tokens**2 * width
    blocks = [
        LayerWork(f"block {index + 1}", flop, _BYTES * (12 * width**2 + 13 * width), output_bytes, kept)
        for index in range(12)
    ]
    head = LayerWork("head", 4.0 * width * tokens, _BYTES * (2 * width + 2), 8 * tokens, output_bytes)
    return TrainedModel("BERT-base, SQuAD", (embedding, *blocks, head), "adamw", 32)


MODELS: Mapping[str, Callable[[], TrainedModel]] = {
    "resnet18": resnet18_cifar,
    "resnet50": resnet50_imagenet,
    "bert": bert_base_squad,
}
