"""Parameters are counted exactly, for the models that people run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.planning.model_sizes import (
    KNOWN,
    UnknownSizes,
    adapter_parameters,
    cache_numbers,
    head_width,
    layer_parameters,
    parameter_count,
    read_sizes,
)

# What the models' own config.json files say.
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        (QWEN25_05B, 494_032_768),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_32B, 32_762_123_264),
        (LLAMA31_8B, 8_030_261_248),
    ],
    ids=["Qwen2.5-0.5B", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B"],
)
def test_parameters_are_those_that_the_models_are_published_with(
    sizes: dict[str, Any], published: int
) -> None:
    assert parameter_count(ModelSizes.model_validate(sizes)) == published


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KNOWN)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    kind: str, bias: bool, tied: bool, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8 if kind == "qwen2" else 24,
        "vocab_size": 320,
    }
    extra = {"attention_bias": bias} if kind in ("llama", "qwen3") else {}
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=tied, **sizes, **extra)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    found = read_sizes(tmp_path)
    assert parameter_count(found) == sum(weight.numel() for weight in model.parameters())
    layer = model.model.layers[0]
    assert layer_parameters(found) == sum(weight.numel() for weight in layer.parameters())


def test_adapters_have_both_of_their_ends() -> None:
    sizes = ModelSizes.model_validate(QWEN3_8B)
    one_layer = 16 * ((4096 + 4096) + (4096 + 1024) + (12288 + 4096))
    assert adapter_parameters(sizes, 16, ("q_proj", "v_proj", "down_proj")) == 36 * one_layer


def test_a_cache_has_keys_and_values_of_the_shared_heads() -> None:
    assert cache_numbers(ModelSizes.model_validate(QWEN3_8B)) == 2 * 36 * 8 * 128


def test_heads_without_a_width_share_the_hidden_size() -> None:
    assert head_width(ModelSizes.model_validate(QWEN25_05B)) == 64
    with pytest.raises(ValueError, match="write head_dim too"):
        ModelSizes.model_validate(QWEN25_05B | {"num_attention_heads": 13})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        (json.dumps({"model_type": "mamba"}), "model_type is 'mamba', counted are llama"),
        (json.dumps(QWEN3_8B | {"hidden_size": 0}), "has unfit sizes"),
    ],
)
def test_what_cannot_be_counted_is_said(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownSizes, match=why):
        read_sizes(tmp_path)
