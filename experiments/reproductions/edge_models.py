"""The four models of Asteroid's evaluation, block by block, from their architectures' own arithmetic.

Sources of the block configurations: MobileNetV2, Sandler et al., CVPR 2018, table 2; EfficientNet-B1, Tan and Le, ICML
2019, table 1 with depth coefficient 1.1; ResNet-50, He et al., CVPR 2016, table 1; BERT-small, Turc et al., 2019 (4
layers of 512 units, 8 heads) with BERT's vocabulary and positions (Devlin et al., 2019). With 1000 classes they have
3.5, 7.8, 25.6 and, without a classifier, 28.8 million parameters; a test holds this.

Sizes are those of float32. A multiplication with its addition counts as two operations. Assumed: normalisation and
activation functions cost no arithmetic but memory traffic; a convolution with its normalisation keeps two tensors of
its output's size until backward, an attention head its scores two times (before and after softmax), and everything
else its output.
"""

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
