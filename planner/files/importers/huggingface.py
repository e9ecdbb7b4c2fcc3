"""Reads the shape of transformers from Hugging Face's ``config.json``, without weights or the package transformers.

Each family is read as its configuration class in the package ``transformers`` defines it: names and defaults of keys,
biases and norms.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.files.importers import read_bytes
from planner.files.importers.transformer import TransformerShape
from planner.files.importers.vision import VisionShape
from traces.common.errors import InputError, shown, unknown_name

# Largest width, vocabulary or count of a model.
_MOST = 10**9

# The keys of most families, by the fields of `TransformerShape`.
_USUAL = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "longest": "max_position_embeddings",
}
_GPT2 = {
    "vocabulary": "vocab_size",
    "width": "n_embd",
    "blocks": "n_layer",
    "heads": "n_head",
    "longest": "n_positions",
}
_BLOOM = {"vocabulary": "vocab_size", "width": "hidden_size", "blocks": "n_layer", "heads": "n_head"}
_VIT = {key: name for key, name in _USUAL.items() if key not in ("vocabulary", "longest")}
_OPT = {**_USUAL, "inner": "ffn_dim"}
# Number of rows at the start of OPT's and RoBERTa's position tables that stand for no position (padding).
_OPT_OFFSET = _ROBERTA_OFFSET = 2

# Number of kernels of the tanh approximation of GELU, written out in elementwise operations.
_TANH_GELU = 8


class _Config:
    """The checked values of one family's configuration."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str], where: str) -> None:
        self._values = values
        self._where = where
        missing = [key for key in names.values() if values.get(key) is None]
        if missing:
            raise InputError(
                f"keys are missing: {', '.join(missing)}",
                where=where,
                valid=f"a configuration of model_type '{values['model_type']}' has {', '.join(names.values())}",
            )
        self.sizes: dict[str, Any] = {name: self.number(key, 0) for name, key in names.items()}

    def number(self, key: str, otherwise: int) -> int:
        """Return the value of a key, which must be an int above zero; ``otherwise`` if the key is missing or null."""
        value = self._values.get(key)
        if value is None:
            return otherwise
        if type(value) is not int or not 1 <= value <= _MOST:
            valid = f"give a whole number above zero, {_MOST:,} at most"
            raise InputError(f"{key}: {shown(value)} is not allowed", where=self._where, valid=valid)
        return value

    def count(self, key: str, otherwise: int) -> int:
        """Return the number of entries of an object; ``otherwise`` if the key is missing or null."""
        value = self._values.get(key)
        if value is None:
            return otherwise
        if not isinstance(value, dict) or not value:
            raise InputError(f"{key}: {value!r} is not allowed", where=self._where, valid="give an object with entries")
        return len(value)

    def flag(self, key: str, otherwise: bool) -> bool:
        """Return the value of a key, which must be a bool; ``otherwise`` if the key is missing."""
        value = self._values.get(key, otherwise)
        if type(value) is not bool:
            raise InputError(f"{key}: {value!r} is not allowed", where=self._where, valid="give true or false")
        return value

    def text(self, key: str, otherwise: str) -> str:
        """Return the value of a key, which must be text; ``otherwise`` if the key is missing or null."""
        value = self._values.get(key)
        if value is None:
            return otherwise
        if type(value) is not str:
            raise InputError(f"{key}: {value!r} is not allowed", where=self._where, valid="give a name")
        return value

    def head_width(self, otherwise: int | None = None) -> int:
        """Return the width of an attention head: ``head_dim``, or if missing ``otherwise``, or width / heads."""
        width, heads = self.sizes["width"], self.sizes["heads"]
        found = self.number("head_dim", otherwise or width // heads)
        if otherwise is None and "head_dim" not in self._values and width % heads:
            raise InputError(
                f"{heads} heads do not divide a width of {width}", where=self._where, valid="give a multiple"
            )
        return found


# What describes the layers of a model: their work for samples of some tokens, and the number of their parameters.
Shape = TransformerShape | VisionShape


def read_huggingface(path: Path) -> Shape:
    """Return the shape of the model that a ``config.json`` describes.

    Raises:
        InputError: The file is missing or malformed, its family is unknown, or keys that define the shape are missing.
    """
    values = read_config(path)
    names, shape = FAMILIES[values["model_type"]]
    try:
        return shape(_Config(values, names, ""))
    except InputError as error:
        raise error.within(str(path)) from None


def model_name(path: Path) -> str:
    """Return the name of a model: that of its folder if the file is a ``config.json``, else that of the file."""
    path = path.resolve()
    return (path.parent.name or "huggingface") if path.name == "config.json" else path.stem


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json``.

    Raises:
        InputError: The file is missing or malformed, or its family is unknown.
    """
    try:
        values = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the file is not JSON: {error}", where=str(path), valid="give a model's config.json"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError("the file has no key 'model_type'", where=str(path), valid="give a model's config.json")
    family = values["model_type"]
    if family not in FAMILIES:
        raise unknown_name("model_type", family, FAMILIES, where=str(path))
    return values


def _shape(config: _Config, tied: bool = True, **family: Any) -> TransformerShape:
    """Return the shape with the fields of most families, some of them replaced by the values in ``family``.

    ``tied`` is the default of the key ``tie_word_embeddings``.
    """
    usual: dict[str, Any] = {
        "key_value_heads": config.sizes["heads"],
        "head_width": config.head_width(),
        "embedding_width": config.sizes["width"],
        "tied": config.flag("tie_word_embeddings", tied),
    }
    return TransformerShape(**{**config.sizes, **usual, **family})


def _gpt2(config: _Config) -> TransformerShape:
    inner = config.number("n_inner", 4 * config.sizes["width"])
    return _shape(
        config,
        inner=inner,
        positions=config.sizes["longest"],
        activation_kernels=_TANH_GELU if config.text("activation_function", "gelu_new") == "gelu_new" else 1,
    )


def _llama(config: _Config, **family: Any) -> TransformerShape:
    bias = config.flag("attention_bias", False)
    usual: dict[str, Any] = {
        "key_value_heads": config.number("num_key_value_heads", config.sizes["heads"]),
        "gated": True,
        "norm_parameters": 1,
        "rotary": True,
        "query_bias": bias,
        "output_bias": bias,
        "inner_bias": config.flag("mlp_bias", False),
    }
    return _shape(config, tied=False, **{**usual, **family})


def _mistral(config: _Config, **family: Any) -> TransformerShape:
    # Mistral's matrices never have biases, and the default of its key-value heads is the number of heads, not 8.
    window = config.number("sliding_window", 0) or None
    return _llama(config, query_bias=False, output_bias=False, inner_bias=False, window=window, **family)


def _mixtral(config: _Config) -> TransformerShape:
    experts, active = config.number("num_local_experts", 8), config.number("num_experts_per_tok", 2)
    return _mistral(config, experts=experts, active_experts=active)


def _qwen2(config: _Config) -> TransformerShape:
    return _llama(config, query_bias=True, output_bias=False, inner_bias=False)


def _qwen3(config: _Config) -> TransformerShape:
    return _llama(config, head_width=config.head_width(128), inner_bias=False, head_norms=True)


def _gpt_neox(config: _Config) -> TransformerShape:
    bias = config.flag("attention_bias", True)
    return _shape(config, tied=False, query_bias=bias, output_bias=bias, rotary=True)


def _opt(config: _Config) -> TransformerShape:
    bias = config.flag("enable_bias", True)
    first = config.flag("do_layer_norm_before", True)
    return _shape(
        config,
        query_bias=bias,
        output_bias=bias,
        inner_bias=bias,
        positions=config.sizes["longest"] + _OPT_OFFSET,
        embedding_width=config.number("word_embed_proj_dim", config.sizes["width"]),
        final_norm=first and not config.flag("_remove_final_layer_norm", False),
    )


def _bloom(config: _Config) -> TransformerShape:
    return _shape(config, inner=4 * config.sizes["width"], embedding_norm=True, activation_kernels=_TANH_GELU)


def _bert(config: _Config, offset: int = 0) -> TransformerShape:
    """Return the shape with the masked-language-model head, with which BERT is trained."""
    longest = config.sizes["longest"]
    return _shape(
        config,
        longest=longest - offset,
        positions=longest + config.number("type_vocab_size", 2),
        embedding_norm=True,
        final_norm=False,
        head_transform=True,
        head_bias=True,
    )


def _roberta(config: _Config) -> TransformerShape:
    return _bert(config, offset=_ROBERTA_OFFSET)


def _vit(config: _Config) -> VisionShape:
    image_size, patch_size = config.number("image_size", 224), config.number("patch_size", 16)
    bias = config.flag("qkv_bias", True)
    blocks = _shape(config, tied=False, vocabulary=1, query_bias=bias)
    return VisionShape(
        blocks=blocks,
        image_size=image_size,
        patch_size=patch_size,
        channels=config.number("num_channels", 3),
        labels=config.count("id2label", config.number("num_labels", 2)),
    )


# By model_type: the required key for each field of `TransformerShape`, and the function that makes the shape.
FAMILIES: Mapping[str, tuple[Mapping[str, str], Callable[[_Config], Shape]]] = MappingProxyType(
    {
        "bert": (_USUAL, _bert),
        "bloom": (_BLOOM, _bloom),
        "gpt2": (_GPT2, _gpt2),
        "gpt_neox": (_USUAL, _gpt_neox),
        "llama": (_USUAL, _llama),
        "mistral": (_USUAL, _mistral),
        "mixtral": (_USUAL, _mixtral),
        "opt": (_OPT, _opt),
        "qwen2": (_USUAL, _qwen2),
        "qwen3": (_USUAL, _qwen3),
        "roberta": (_USUAL, _roberta),
        "vit": (_VIT, _vit),
    }
)
