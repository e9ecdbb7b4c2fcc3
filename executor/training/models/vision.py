"""The layers of a vision transformer that classifies images.

Shapes: B samples, C channels, N patches and a class token, W width, L labels.
"""

from typing import Any

import torch
from torch import nn

from executor.training.models.transformers_layers import Layer, block_layout


class ImageEmbedding(Layer):
    """The projection of patches, the class token and the table of positions."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__({"embeddings": "vit.embeddings"})
        self.embeddings = embeddings

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images, B x C x height x width, to embeddings, B x N x W."""
        embedded: torch.Tensor = self.embeddings(images)
        return embedded


class EncoderBlock(Layer):
    """A block whose attention covers all patches."""

    def __init__(self, block: nn.Module, origin: str) -> None:
        super().__init__({"block": origin})
        self.block = block
        self.layout = block_layout(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden values, B x N x W, to values of the same shape."""
        outputs: torch.Tensor = self.block(hidden)
        return outputs


class ImageHead(Layer):
    """The last norm, and the matrix that gives the scores of the labels from the class token."""

    def __init__(self, layernorm: nn.Module, classifier: nn.Module) -> None:
        super().__init__({"layernorm": "vit.layernorm", "classifier": "classifier"})
        self.layernorm = layernorm
        self.classifier = classifier

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden values, B x N x W, to scores, B x L."""
        scores: torch.Tensor = self.classifier(self.layernorm(hidden)[:, 0])
        return scores


def vit_layers(model: Any) -> list[Layer]:
    """Split a vision transformer of transformers into embedding, blocks and head."""
    inner = model.vit
    blocks = [EncoderBlock(block, f"vit.layers.{index}") for index, block in enumerate(inner.layers)]
    return [ImageEmbedding(inner.embeddings), *blocks, ImageHead(inner.layernorm, model.classifier)]
