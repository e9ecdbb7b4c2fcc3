"""The models of Cannikin's reproduction as layers, from the arithmetic of their published architectures.

Numbers are 32-bit. A convolution of weights W on an output of h x w does 2 * W * h * w operations for a sample. What is
kept for backward is the input of every convolution and of every batch normalisation; ReLU works in place.

Sources: Deep Residual Learning (He et al., 2016; a bottleneck has its stride in the 3 x 3 convolution, as torchvision
does it); BERT (Devlin et al., 2019); activations of a transformer block: Reducing Activation Recomputation (Korthikanti
et al., 2022), there for 16-bit numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from planner.scenario.roofline import LayerWork

NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Shape:
    """An image on its way through convolutions."""

    channels: int
    pixels: int

    @property
    def numbers(self) -> int:
        return self.channels * self.pixels**2


@dataclass(frozen=True, slots=True)
class _Work:
    """Multiplications, parameters and kept numbers of one sample, without the layer's name."""

    multiplications: int = 0
    parameters: int = 0
    kept: int = 0

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(
            self.multiplications + other.multiplications,
            self.parameters + other.parameters,
            self.kept + other.kept,
        )

    def layer(self, name: str, outputs: int) -> LayerWork:
        return LayerWork(
            name,
            2.0 * self.multiplications,
            NUMBER_BYTES * self.parameters,
            NUMBER_BYTES * outputs,
            NUMBER_BYTES * self.kept,
        )


def mobilenet_v2(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return stem, 17 inverted residuals, and head with classifier.

    Args:
        pixels: Of the image's side.
        classes: Of the classifier.
    """
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    return _mobile_network([(*row[:3], row[3], 3) for row in rows], pixels, classes, excitation=False)


def efficientnet_b1(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return stem, 23 inverted residuals with squeeze and excitation, and head with classifier.

    Args:
        pixels: Of the image's side.
        classes: Of the classifier.
    """
    rows = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    deeper = [(expansion, width, ceil(1.1 * count), *rest) for expansion, width, count, *rest in rows]
    return _mobile_network([(a, b, c, d, e) for a, b, c, d, e in deeper], pixels, classes, excitation=True)


def resnet_50(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return stem, 16 bottlenecks, and classifier.

    Args:
        pixels: Of the image's side.
        classes: Of the classifier.
    """
    work, shape = _convolution(_Shape(3, pixels), 64, 7, 2)
    shape = _Shape(64, ceil(shape.pixels / 2))
    layers = [(work + _Work(kept=shape.numbers)).layer("stem", shape.numbers)]
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            stride = first_stride if index == 0 else 1
            narrow, inner = _convolution(shape, width, 1, 1)
            middle, inner = _convolution(inner, width, 3, stride)
            wide, output = _convolution(inner, 4 * width, 1, 1)
            work = narrow + middle + wide
            if index == 0:
                work += _convolution(shape, 4 * width, 1, stride)[0]
            shape = output
            layers.append(work.layer(f"bottleneck-{len(layers)}", shape.numbers))
    return (*layers, _classifier(shape, classes).layer("classifier", classes))


def bert_small(tokens: int, classes: int) -> tuple[LayerWork, ...]:
    """Return embedding, attention and feed-forward of 4 layers, and pooler with classifier.

    Args:
        tokens: Of a sample.
        classes: Of the classifier.
    """
    units, heads, inner = 512, 8, 2048
    outputs = tokens * units
    # Its input has no gradient: numbers of tokens.
    embedding = LayerWork(
        "embedding",
        0.0,
        NUMBER_BYTES * (30522 + 512 + 2 + 2) * units,
        NUMBER_BYTES * outputs,
        NUMBER_BYTES * 2 * outputs,
        0.0,
    )
    attention = _Work(
        4 * outputs * units + 2 * outputs * tokens,
        4 * (units + 1) * units + 2 * units,
        6 * outputs + 2 * heads * tokens**2,
    )
    feed_forward = _Work(2 * outputs * inner, 2 * units * inner + inner + 3 * units, 2 * outputs + 2 * tokens * inner)
    layers = [embedding]
    for index in range(4):
        layers += [attention.layer(f"attention-{index}", outputs), feed_forward.layer(f"feed-forward-{index}", outputs)]
    pooler = _Work(units * (units + classes), (units + 1) * (units + classes), 2 * units)
    return (*layers, pooler.layer("classifier", classes))


def _mobile_network(
    rows: list[tuple[int, int, int, int, int]], pixels: int, classes: int, excitation: bool
) -> tuple[LayerWork, ...]:
    """Rows are expansion, width, blocks, stride of the first, and kernel."""
    work, shape = _convolution(_Shape(3, pixels), 32, 3, 2)
    layers = [work.layer("stem", shape.numbers)]
    for expansion, width, count, first_stride, kernel in rows:
        for index in range(count):
            work, inner = _Work(), shape
            if expansion > 1:
                work, inner = _convolution(shape, expansion * shape.channels, 1, 1)
            deep, inner = _convolution(inner, inner.channels, kernel, first_stride if index == 0 else 1, inner.channels)
            work += deep
            if excitation:
                work += _excitation(inner, shape.channels // 4)
            narrow, shape = _convolution(inner, width, 1, 1)
            layers.append((work + narrow).layer(f"block-{len(layers)}", shape.numbers))
    work, shape = _convolution(shape, 1280, 1, 1)
    return (*layers, (work + _classifier(shape, classes)).layer("head", classes))


def _convolution(shape: _Shape, channels: int, kernel: int, stride: int, groups: int = 1) -> tuple[_Work, _Shape]:
    """A convolution without bias, and its batch normalisation."""
    output = _Shape(channels, ceil(shape.pixels / stride))
    weights = kernel**2 * shape.channels // groups * channels
    return _Work(weights * output.pixels**2, weights + 2 * channels, 2 * output.numbers), output


def _excitation(shape: _Shape, squeezed: int) -> _Work:
    weights = 2 * shape.channels * squeezed
    return _Work(weights, weights + shape.channels + squeezed, shape.numbers)


def _classifier(shape: _Shape, classes: int) -> _Work:
    weights = shape.channels * classes
    return _Work(weights, weights + classes, shape.channels)


_BYTES = 4


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model, and how it is trained.

    Attributes:
        name: With its data.
        layers: The model's layers in order.
        optimizer: One of `planner.scenario.training.OPTIMIZER_STATES`.
        first_batch: B_0, which is the batch of the paper that published the model.
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
