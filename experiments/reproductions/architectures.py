"""The models of the reproductions as layers with operations and bytes, computed from their published architectures.

Numbers are 32-bit. A convolution with W weights and an output of h x w pixels takes 2 * W * h * w operations for a
sample. The inputs of every convolution and batch normalisation are saved for the backward; ReLU works in place.

Sources: Deep Residual Learning (He et al., 2016; a bottleneck has its stride in the 3 x 3 convolution, as torchvision
does it); BERT (Devlin et al., 2019); GPT-3 (Brown et al., 2020); ViT (Dosovitskiy et al., 2021); activations of a
transformer block: Reducing Activation Recomputation (Korthikanti et al., 2022), there for 16-bit numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from planner.scenario.roofline import LayerWork

NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Image:
    """The shape of a square image or of a convolution's output: ``pixels`` is the length of a side."""

    channels: int
    pixels: int

    @property
    def numbers(self) -> int:
        return self.channels * self.pixels**2


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of layers: multiplications and saved numbers for a sample, and number of parameters."""

    multiplications: int = 0
    parameters: int = 0
    kept: int = 0

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(
            self.multiplications + other.multiplications, self.parameters + other.parameters, self.kept + other.kept
        )

    def layer(self, name: str, outputs: int, backward_input_flop: float | None = None) -> LayerWork:
        sizes = (NUMBER_BYTES * self.parameters, NUMBER_BYTES * outputs, NUMBER_BYTES * self.kept)
        return LayerWork(name, 2.0 * self.multiplications, *sizes, backward_input_flop)


def _convolution(image: _Image, channels: int, kernel: int, stride: int, groups: int = 1) -> tuple[_Work, _Image]:
    """Return the work of a convolution without bias and its batch normalisation, and the output image."""
    output = _Image(channels, ceil(image.pixels / stride))
    weights = kernel**2 * image.channels // groups * channels
    return _Work(weights * output.pixels**2, weights + 2 * channels, 2 * output.numbers), output


def _classifier(image: _Image, classes: int) -> _Work:
    """Return the work of a classifier: the mean over the pixels and a linear layer."""
    weights = image.channels * classes
    return _Work(weights, weights + classes, image.channels)


def mobilenet_v2(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return MobileNetV2's stem, 17 inverted residuals, and head, for images of ``pixels`` x ``pixels``."""
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    return _mobile_network([(*row, 3) for row in rows], pixels, classes, excitation=False)


def efficientnet_b1(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return EfficientNet-B1's stem, 23 inverted residuals with squeeze and excitation, and head."""
    rows = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    deeper = [(a, width, ceil(1.1 * count), stride, kernel) for a, width, count, stride, kernel in rows]
    return _mobile_network(deeper, pixels, classes, excitation=True)


def _mobile_network(
    rows: Sequence[tuple[int, int, int, int, int]], pixels: int, classes: int, excitation: bool
) -> tuple[LayerWork, ...]:
    """Return the layers of a mobile network.

    A row of ``rows`` holds expansion, width, number of blocks, stride of the first block, and side of the kernel.
    """
    work, image = _convolution(_Image(3, pixels), 32, 3, 2)
    layers = [work.layer("stem", image.numbers)]
    for expansion, width, count, first_stride, kernel in rows:
        for index in range(count):
            work, inner = _Work(), image
            if expansion > 1:
                work, inner = _convolution(image, expansion * image.channels, 1, 1)
            deep, inner = _convolution(inner, inner.channels, kernel, first_stride if index == 0 else 1, inner.channels)
            work += deep
            if excitation:
                work += _excitation(inner, image.channels // 4)
            narrow, image = _convolution(inner, width, 1, 1)
            layers.append((work + narrow).layer(f"block-{len(layers)}", image.numbers))
    work, image = _convolution(image, 1280, 1, 1)
    return (*layers, (work + _classifier(image, classes)).layer("head", classes))


def _excitation(image: _Image, squeezed: int) -> _Work:
    weights = 2 * image.channels * squeezed
    return _Work(weights, weights + image.channels + squeezed, image.numbers)


@dataclass(frozen=True, slots=True)
class _ResidualBlock:
    """A block of a ResNet: its group and index in the group, the work of both paths, and its output."""

    group: int
    index: int
    main: _Work
    shortcut: _Work
    output: _Image


def _residual_blocks(image: _Image, depths: Sequence[int], bottleneck: bool) -> Iterator[_ResidualBlock]:
    """Yield the blocks of a ResNet in groups; each group but the first halves the image and doubles the channels."""
    for group, depth in enumerate(depths):
        width = 64 * 2**group
        for index in range(depth):
            stride = 2 if group and not index else 1
            basic = ((width, 3, stride), (width, 3, 1))
            main, output = _Work(), image
            for convolution in ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)) if bottleneck else basic:
                work, output = _convolution(output, *convolution)
                main += work
            projects = output != image
            shortcut = _convolution(image, output.channels, 1, stride)[0] if projects else _Work()
            yield _ResidualBlock(group, index, main, shortcut, output)
            image = output


def resnet_50(pixels: int, classes: int) -> tuple[LayerWork, ...]:
    """Return ResNet-50's stem, 16 bottlenecks, and classifier, for images of ``pixels`` x ``pixels``."""
    stem, image = _convolution(_Image(3, pixels), 64, 7, 2)
    image = _Image(64, ceil(image.pixels / 2))
    layers = [(stem + _Work(kept=image.numbers)).layer("stem", image.numbers)]
    for block in _residual_blocks(image, (3, 4, 6, 3), bottleneck=True):
        image = block.output
        layers.append((block.main + block.shortcut).layer(f"bottleneck-{len(layers)}", image.numbers))
    return (*layers, _classifier(image, classes).layer("classifier", classes))


BERT_VOCABULARY, BERT_POSITIONS = 30_522, 512


def bert_small(tokens: int, classes: int) -> tuple[LayerWork, ...]:
    """Return BERT-small's embedding, attention and feed-forward of four blocks, and pooler with classifier."""
    width, heads = 512, 8
    layers = [_bert_embedding(tokens, width).layer("embedding", tokens * width, 0.0)]
    for index in range(4):
        layers.append(_attention(tokens, width, heads).layer(f"attention-{index}", tokens * width))
        layers.append(_feed_forward(tokens, width).layer(f"feed-forward-{index}", tokens * width))
    pooler = _Work(width * (width + classes), (width + 1) * (width + classes), 2 * width)
    return (*layers, pooler.layer("classifier", classes))


def _bert_embedding(tokens: int, width: int) -> _Work:
    """Return the work of the embedding of tokens, positions and two segments; look-ups count as no multiplication."""
    return _Work(0, (BERT_VOCABULARY + BERT_POSITIONS + 2 + 2) * width, 2 * tokens * width)


def _attention(tokens: int, width: int, heads: int) -> _Work:
    return _Work(
        4 * tokens * width**2 + 2 * tokens**2 * width,
        4 * (width + 1) * width + 2 * width,
        6 * tokens * width + 2 * heads * tokens**2,
    )


def _feed_forward(tokens: int, width: int) -> _Work:
    """Return the work of two linear layers with four times the width between them."""
    return _Work(8 * tokens * width**2, 8 * width**2 + 7 * width, 10 * tokens * width)


# Values that a block of GPT or ViT saves for the backward, per token and unit of width: 17, from the 34 bytes of
# Korthikanti et al. in half precision; the attention matrices are recomputed, as FlashAttention does.
KEPT_VALUES = 17


def gpt(width: int, blocks: int, vocabulary: int = 50_257, tokens: int = 1024) -> list[LayerWork]:
    """Return the layers of a GPT: an embedding, blocks, and a head that does not share the embedding's matrix."""
    hidden = tokens * width
    return [
        _Work(0, (vocabulary + tokens) * width, hidden).layer("embedding", hidden, 0.0),
        *_plain_blocks(width, blocks, tokens),
        _Work(hidden * vocabulary, vocabulary * width, tokens * vocabulary).layer("head", tokens * vocabulary),
    ]


def vit_huge() -> list[LayerWork]:
    """Return ViT-Huge/14 for images of 224 x 224 and 1,000 classes: 0.63 billion parameters."""
    width, tokens, patch_numbers, classes = 1280, 257, 14 * 14 * 3, 1000
    hidden, patches, head = tokens * width, patch_numbers * width, width * classes
    return [
        _Work(tokens * patches, patches, hidden).layer("patches", hidden, 0.0),
        *_plain_blocks(width, 32, tokens),
        _Work(head, head, width).layer("head", classes),
    ]


def _plain_blocks(width: int, blocks: int, tokens: int) -> list[LayerWork]:
    """Return transformer blocks without biases and normalisations.

    The forward of a block takes 24 * T * d**2 + 4 * T**2 * d operations for T tokens and width d.
    """
    multiplications = 12 * tokens * width**2 + 2 * tokens**2 * width
    work = _Work(multiplications, 12 * width**2, KEPT_VALUES * tokens * width)
    return [work.layer(f"block-{index}", tokens * width) for index in range(blocks)]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its training.

    Attributes:
        optimizer: One of `planner.scenario.training.OPTIMIZER_STATES`.
        first_batch: Number of samples of the first steps, as in the paper that published the model.
    """

    name: str
    layers: tuple[LayerWork, ...]
    optimizer: str
    first_batch: int


def _trained_resnet(
    picture: _Image, stem_kernel: int, depths: Sequence[int], classes: int, imagenet: bool
) -> tuple[LayerWork, ...]:
    """Return the layers of a ResNet for training; with ``imagenet`` it has bottlenecks and a pooling stem.

    Saved for the backward are also the input image, and the outputs of shortcuts instead of two tensors for each.
    """
    stem, image = _convolution(picture, 64, stem_kernel, 2 if imagenet else 1)
    if imagenet:
        image = _Image(64, image.pixels // 2)
        stem += _Work(kept=image.numbers)
    # No gradient of the input image is computed.
    layers = [(stem + _Work(kept=picture.numbers)).layer("stem", image.numbers, 0.0)]
    for block in _residual_blocks(image, depths, bottleneck=imagenet):
        work = block.main + replace(block.shortcut, kept=block.shortcut.kept // 2)
        image = block.output
        layers.append(work.layer(f"group {block.group + 1} block {block.index + 1}", image.numbers))
    head = _classifier(image, classes) + _Work(kept=image.numbers)
    return (*layers, head.layer("head", classes))


def resnet18_cifar() -> TrainedModel:
    """Return ResNet-18 for pictures of 32 x 32 (a 3 x 3 stem, no pooling): 11,173,962 parameters."""
    layers = _trained_resnet(_Image(3, 32), 3, (2, 2, 2, 2), 10, imagenet=False)
    return TrainedModel("ResNet-18, CIFAR-10", layers, "momentum", 128)


def resnet50_imagenet() -> TrainedModel:
    """Return ResNet-50 for pictures of 224 x 224: 25,557,032 parameters, 4.09e9 multiply-adds."""
    layers = _trained_resnet(_Image(3, 224), 7, (3, 4, 6, 3), 1000, imagenet=True)
    return TrainedModel("ResNet-50, ImageNet", layers, "momentum", 256)


def bert_base_squad() -> TrainedModel:
    """Return BERT-base without pooler for 384 tokens, with SQuAD's head: 108,893,186 parameters."""
    width, tokens, heads = 768, 384, 12
    hidden = tokens * width
    # Adding three embeddings and normalising the sum takes about ten operations per number.
    embedding = replace(_bert_embedding(tokens, width).layer("embedding", hidden, 0.0), forward_flop=10.0 * hidden)
    block = (_attention(tokens, width, heads) + _feed_forward(tokens, width)).layer("block", hidden)
    # Dropout saves masks of a byte per number: two of tokens by width, one of each head's pairs of tokens.
    block = replace(block, activation_bytes=block.activation_bytes + 2 * hidden + heads * tokens**2)
    blocks = [replace(block, name=f"block {index + 1}") for index in range(12)]
    head = _Work(2 * hidden, 2 * width + 2, hidden).layer("head", 2 * tokens)
    return TrainedModel("BERT-base, SQuAD", (embedding, *blocks, head), "adamw", 32)


MODELS: Mapping[str, Callable[[], TrainedModel]] = {
    "resnet18": resnet18_cifar,
    "resnet50": resnet50_imagenet,
    "bert": bert_base_squad,
}
