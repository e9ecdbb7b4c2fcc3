"""Builds the layers of a model of transformers from its configuration, with random or given weights."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from executor.training.models.first_weights import DeferredWeights, load_weights
from executor.training.models.gpt2 import Gpt2Block, PositionedEmbedding
from executor.training.models.random_samples import RandomImages, RandomTokens
from executor.training.models.trainable import ShardedScores
from executor.training.models.transformers_layers import DecoderBlock, LanguageHead, Layer, TokenEmbedding
from executor.training.models.vision import vit_layers
from planner.scenario.scenario import HuggingFaceCode
from traces.common.errors import InputError, unknown_name

# A sample of one token has no next token to predict.
_LEAST_TOKENS = 2


class TransformersModel:
    """A model of transformers: its layers, and random samples as its data.

    Attributes:
        layers: Embedding, blocks and head, with parameters of their own; on torch's meta device those that were not
            chosen when the model was built.
        tied: The copies of the table that embedding and head share, if they do.
    """

    def __init__(
        self, layers: Sequence[Layer], data: RandomTokens | RandomImages, tied: Sequence[tuple[int, str]] = ()
    ) -> None:
        self.layers: Sequence[nn.Module] = layers
        self.tied = tied
        self.samples = data.samples
        self._layers = layers

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the labels."""
        return functional.cross_entropy(outputs.float(), targets)

    def parallel_layout(self, index: int) -> Mapping[str, str]:
        """Return how the submodules of layer ``index`` are sharded; see `TensorParallelModel`."""
        return self._layers[index].layout

    def original(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return parameters, given by the names ``LAYER.PARAMETER``, by their names in transformers."""
        of_layers: list[dict[str, torch.Tensor]] = [{} for _ in self._layers]
        for name, value in parameters.items():
            index, _, own = name.partition(".")
            of_layers[int(index)][own] = value
        named = (layer.original(own) for layer, own in zip(self._layers, of_layers, strict=True))
        return {name: value for each in named for name, value in each.items()}


class LanguageModel(TransformersModel):
    """A causal language model."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each next token, from scores B x T x V and these tokens, B x T.

        Targets that are `NO_TARGET` do not count.
        """
        scores, following = outputs.float().flatten(0, 1), targets.flatten()
        matrix = self.layers[-1].get_submodule("lm_head")
        if isinstance(matrix, ShardedScores):
            return matrix.cross_entropy(scores, following)
        return functional.cross_entropy(scores, following)


class ModelBuilder:
    """Builds a model with the weights of a file, or random ones that follow ``seed`` as transformers draws them.

    Random numbers are drawn once, however often parts of the model are built.

    Args:
        code: The configuration, and the path of the weights.
        seed: Seed of random weights.
    """

    def __init__(self, code: HuggingFaceCode, seed: int) -> None:
        self._code = code
        self._seed = seed
        # Without memory for its matrices: the model, and what fills them.
        self._empty: tuple[Any, DeferredWeights] | None = None

    def build(self, chosen: Collection[int] | None = None) -> TransformersModel:
        """Return the model, of which the ``chosen`` layers have memory and weights; None for all.

        On torch's meta device only names and shapes of the weights are read.

        Raises:
            InputError: The family cannot be trained, its configuration is wrong, or the weights are of another model.
        """
        code = self._code
        if torch.get_default_device().type == "meta":
            model = transformers_model(code, self._seed)
            if code.path is not None:
                load_weights(model, code.path)
            return _split(model, code)
        origins = [] if chosen is None else _origins(code)
        if chosen is not None and len(set(chosen)) == len(origins):
            chosen = None
        if code.path is None and chosen is None:
            return _split(transformers_model(code, self._seed), code)
        empty, deferred = self._without_memory()
        model = deepcopy(empty)
        names = [""] if chosen is None else [name for index in chosen for name in origins[index]]
        deferred.fill(model, map(model.get_submodule, names))
        if code.path is not None:
            load_weights(model, code.path)
        made = _split(model, code)
        for index, layer in enumerate(made.layers):
            if chosen is not None and index not in chosen:
                layer.to("meta")
        return made

    def _without_memory(self) -> tuple[Any, DeferredWeights]:
        if self._empty is None:
            with DeferredWeights(draws=self._code.path is None) as deferred:
                model = transformers_model(self._code, self._seed)
            deferred.named(model)
            self._empty = model, deferred
        return self._empty


def _origins(code: HuggingFaceCode) -> list[list[str]]:
    """Return, for each layer, the names of the submodules of the model of transformers that it consists of."""
    with torch.device("meta"):
        split = _split(transformers_model(code, 0), code)
    return [list(layer.origins.values()) for layer in split.layers if isinstance(layer, Layer)]


def _split(model: Any, code: HuggingFaceCode) -> TransformersModel:
    return _FAMILIES[code.config["model_type"]](model, code.tokens)


def load_family(family: str) -> None:
    """Load the module of transformers with the models of a family, if the family can be trained."""
    if family in _FAMILIES:
        import_module(f"transformers.models.{family}.modeling_{family}")


def transformers_model(code: HuggingFaceCode, seed: int) -> Any:
    """Return the model with random weights as transformers builds it; raises as `ModelBuilder.build` does."""
    family = code.config["model_type"]
    if family not in _FAMILIES:
        raise unknown_name("model_type for training", family, _FAMILIES, where=str(code.source))
    values = {key: value for key, value in code.config.items() if key != "model_type"}
    auto = transformers.AutoModelForImageClassification if family == "vit" else transformers.AutoModelForCausalLM
    make: Callable[..., Any] = auto.from_config
    torch.manual_seed(seed)
    with _quiet():
        config = transformers.AutoConfig.for_model(family, **values)
        return make(config, attn_implementation="sdpa", dtype=torch.float32).train()


def save_model(code: HuggingFaceCode, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the model's configuration and these weights, by their names in transformers, for ``from_pretrained``."""
    with torch.device("meta"):
        model = transformers_model(code, 0)
    model.load_state_dict(weights, assign=True)
    # Weights that are tied are written once.
    model.tie_weights()
    with _quiet():
        model.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a context in which transformers prints errors only."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _llama(model: Any, tokens: int) -> TransformersModel:
    inner, config = model.model, model.config
    kinds = getattr(config, "layer_types", None) or [_usual_attention(config)] * len(inner.layers)
    blocks = [
        DecoderBlock(
            block,
            config,
            f"model.layers.{index}",
            # Layers share nothing, since they may be on different devices.
            deepcopy(inner.rotary_emb),
            has_window=kind == "sliding_attention",
        )
        for index, (block, kind) in enumerate(zip(inner.layers, kinds, strict=True))
    ]
    return _language_model(
        model, TokenEmbedding(inner.embed_tokens, "model.embed_tokens"), blocks, inner.norm, "model.norm", tokens
    )


def _usual_attention(config: Any) -> str:
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def _gpt2(model: Any, tokens: int) -> TransformersModel:
    inner = model.transformer
    blocks = [Gpt2Block(block, model.config, f"transformer.h.{index}") for index, block in enumerate(inner.h)]
    return _language_model(model, PositionedEmbedding(inner), blocks, inner.ln_f, "transformer.ln_f", tokens)


def _language_model(
    model: Any, embedding: Layer, blocks: Sequence[Layer], norm: nn.Module, norm_origin: str, tokens: int
) -> LanguageModel:
    if tokens < _LEAST_TOKENS:
        raise InputError(
            f"samples of {tokens} token cannot be trained on",
            where="model.tokens",
            valid=f"give {_LEAST_TOKENS} or more, since the loss is that of the next token",
        )
    matrix: nn.Linear = model.lm_head
    tied: list[tuple[int, str]] = []
    if matrix.weight is model.get_input_embeddings().weight:
        # Each end of a pipeline holds a copy.
        matrix.weight = nn.Parameter(matrix.weight.detach().clone())
        (table,) = embedding.layout
        tied = [(0, f"{table}.weight"), (len(blocks) + 1, "lm_head.weight")]
    layers = [embedding, *blocks, LanguageHead(norm, matrix, norm_origin)]
    return LanguageModel(layers, RandomTokens(model.config.vocab_size, tokens), tied)


def _vit(model: Any, tokens: int) -> TransformersModel:
    config = model.config
    sizes = (config.num_channels, config.image_size, config.image_size)
    return TransformersModel(vit_layers(model), RandomImages(sizes, config.num_labels))


# By model_type: the function that splits the model of transformers into layers, as the importer does.
_FAMILIES: Mapping[str, Callable[[Any, int], TransformersModel]] = MappingProxyType(
    {"gpt2": _gpt2, "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "vit": _vit}
)
