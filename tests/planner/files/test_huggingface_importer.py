"""Language models from their configurations: parameters as published, bytes and work as of a model that is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.files.importers.huggingface import FAMILIES, read_huggingface
from traces.common.errors import InputError

BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
GPT2 = {
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
OPT = {
    "model_type": "opt",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
QWEN2 = {
    **LLAMA,
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3 = {
    **QWEN2,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NEOX = {
    **LLAMA,
    "model_type": "gpt_neox",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 50304,
}

# As the models' own pages and papers count them, and as transformers builds them on the meta device.
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
    "id2label": {str(label): str(label) for label in range(1000)},
}
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", GPT2, 124_439_808),
    ("gpt2-xl", {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200),
    ("llama-2-7b", LLAMA, 6_738_415_616),
    ("mistral-7b-v0.1", MISTRAL, 7_241_732_096),
    ("mixtral-8x7b-v0.1", {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8}, 46_702_792_704),
    ("qwen2-0.5b", QWEN2, 494_032_768),
    ("qwen3-0.6b", QWEN3, 596_049_920),
    ("opt-125m", OPT, 125_239_296),
    (
        "opt-350m",
        {
            **OPT,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
    (
        "bloom-560m",
        {"model_type": "bloom", "hidden_size": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880},
        559_214_592,
    ),
    ("pythia-70m", NEOX, 70_426_624),
    ("vit-base-patch16-224", VIT, 86_567_656),
    ("bert-base-uncased", BERT, 109_514_298),
    (
        "roberta-base",
        {**BERT, "model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265},
        124_697_433,
    ),
]


def shape_of(values: object, folder: Path) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return read_huggingface(path)


@pytest.mark.parametrize(
    ("values", "parameters"), [each[1:] for each in PUBLISHED], ids=[each[0] for each in PUBLISHED]
)
def test_parameters_are_those_that_were_published(values: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    shape = shape_of(values, tmp_path)
    assert shape.parameters == parameters
    # Each end of the pipeline holds the table that they share.
    copy = shape.vocabulary * shape.embedding_width if shape.tied else 0
    tokens = 197 if values["model_type"] == "vit" else 64
    assert sum(layer.parameter_bytes for layer in shape.layers(tokens)) == 4 * (parameters + copy)
    embedding, *_, head = shape.layers(tokens)
    assert embedding.tied_bytes == head.tied_bytes == 4 * copy


def test_every_family_is_held_to_a_published_model() -> None:
    assert {values["model_type"] for _, values, _ in PUBLISHED} == set(FAMILIES)


def test_work_is_two_operations_for_a_parameter_and_token_and_attention(tmp_path: Path) -> None:
    embedding, *blocks, head = shape_of(LLAMA, tmp_path).layers(2048)
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert len(blocks) == 32
    assert {block.forward_flop for block in blocks} == {2 * 2048 * matrices + 4 * 2048**2 * 4096}
    assert (embedding.forward_flop, head.forward_flop) == (0, 2 * 2048 * 4096 * 32000)
    assert [layer.output_bytes for layer in (embedding, *blocks)] == [4 * 2048 * 4096] * 33
    windowed = shape_of({**MISTRAL, "sliding_window": 512}, tmp_path).layers(2048)[1]
    unbounded = shape_of({**MISTRAL, "sliding_window": None}, tmp_path).layers(2048)[1]
    assert unbounded.forward_flop - windowed.forward_flop == 4 * 2048 * (2048 - 512) * 4096
    sparse = shape_of({**MISTRAL, "model_type": "mixtral"}, tmp_path).layers(2048)[1]
    # Of eight experts two compute, and a router that chooses them.
    assert sparse.forward_flop - unbounded.forward_flop == 2 * 2048 * (3 * 4096 * 14336 + 8 * 4096)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "t5"}, "unknown model_type 't5'; valid: bert, bloom, gpt2, gpt_neox, llama"),
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"hidden_size": 3}, "the file has no key 'model_type'"),
        ([], "the file has no key 'model_type'"),
        ({"model_type": "gpt2", "n_embd": 8}, "missing: vocab_size, n_layer, n_head, n_positions"),
        ({**GPT2, "n_embd": "wide"}, "n_embd: 'wide' is not allowed; give a whole number above zero"),
        (
            {**GPT2, "n_embd": 10**30},
            "n_embd: 1000000000000000000000000000000 is not allowed; give a whole number above",
        ),
        ({**GPT2, "n_layer": 10**6}, "1,000,000 blocks are too many; 998 are possible"),
        ({**GPT2, "n_embd": 0}, "n_embd: 0 is not allowed; give a whole number above zero"),
        ({**VIT, "patch_size": 15}, "patches of 15 pixels do not fill an image of 224"),
        ({**VIT, "id2label": ["cat"]}, "id2label: ['cat'] is not allowed; give an object with entries"),
        ({**GPT2, "n_head": 7}, "7 heads do not divide a width of 768; give a multiple"),
        ({**GPT2, "tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not allowed; give true or false"),
        ({**LLAMA, "num_key_value_heads": 5}, "32 heads with 5 key-value heads"),
    ],
)
def test_what_is_no_configuration_is_refused(values: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        shape_of(values, tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_samples_that_the_model_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="samples of 1025 tokens are not allowed; give 1 to 1024"):
        shape_of(GPT2, tmp_path).layers(1025)


def test_a_model_of_images_takes_its_own_number_of_patches(tmp_path: Path) -> None:
    embedding, *blocks, head = shape_of(VIT, tmp_path).layers(197)
    assert embedding.forward_flop == 2 * 196 * 3 * 16 * 16 * 768
    assert {block.forward_flop for block in blocks} == {2 * 197 * 12 * 768**2 + 4 * 197**2 * 768}
    assert (head.forward_flop, head.output_bytes) == (2 * 768 * 1000, 4 * 1000)
    with pytest.raises(InputError, match="samples of 196 tokens are not allowed; give 197"):
        shape_of(VIT, tmp_path).layers(196)
