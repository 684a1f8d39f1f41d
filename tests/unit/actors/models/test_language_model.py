"""A causal LM taken apart gives the scores of the whole; a head that is not plain is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.losses.blocks import softcapped
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.planning.model_refusals import UnsupportedHead

VOCABULARY = 50
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
DECODER = {**IDS, **LAYERS, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
LINEAR: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER, head_dim=8),
    "Qwen3 tied": Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
    "Llama": LlamaConfig(**DECODER),
    "GPT-2": GPT2Config(**IDS, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "OPT": OPTConfig(**IDS, **LAYERS, hidden_size=16, ffn_dim=32),
    "Phi": PhiConfig(**DECODER),
    "Granite": GraniteConfig(**DECODER, logits_scaling=8.0),
    "Cohere": CohereConfig(**DECODER, logit_scale=0.0625),
    "Gemma2 uncapped": Gemma2Config(**DECODER, head_dim=8, final_logit_softcapping=None),
    "Gemma2": Gemma2Config(**DECODER, head_dim=8, final_logit_softcapping=2.0),
}
NOT_LINEAR: dict[str, PretrainedConfig] = {
    "LlamaForCausalLM": LlamaConfig(**DECODER, logit_scale=2.0),  # which it does not read
    "Qwen2ForCausalLM": Qwen2Config(**DECODER, final_logit_softcapping=30.0),  # nor this
}
SEQUENCES = [[5, 7, 9, 11, 13, 2], [3], [49, 4, 4], [6, 2, 8, 1]]


def built(config: PretrainedConfig, std: float = 0.3) -> Any:
    """Random weights, biases among them, wide enough for sharp predictions."""
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(std=std, generator=generator)
    return model


def logits(model: Any, ids: list[int]) -> Tensor:
    """The model's own scores [T, V] of a sequence alone, without padding."""
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize("name", LINEAR)
def test_head_and_hidden_states_of_padded_rows_give_the_logits_of_each_sequence(name: str) -> None:
    model = built(LINEAR[name])
    apart = LanguageModel(model)
    with torch.no_grad():
        states = apart.hidden(SEQUENCES).whole()
        scores = states @ apart.weight.T
    scores = softcapped(scores if apart.bias is None else scores + apart.bias, apart.softcap)
    assert states.shape == (len(SEQUENCES), 6, 16)
    for row, ids in zip(scores, SEQUENCES, strict=True):
        torch.testing.assert_close(row[: len(ids)], logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["Qwen3 tied", "GPT-2", "Phi", "Gemma2"])
def test_log_probs_are_those_of_whole_logits_under_the_mask_and_zero_elsewhere(
    name: str, temperature: float
) -> None:
    model = built(LINEAR[name])
    apart, ids = LanguageModel(model), padded(SEQUENCES)
    mask = torch.zeros(ids[:, 1:].shape, dtype=torch.bool)
    mask[0, 1:4] = mask[2, 1] = mask[3, :3] = True
    with torch.no_grad():
        found = apart.logprobs(apart.hidden(SEQUENCES), ids, mask, temperature)
    for row, one in enumerate(SEQUENCES):
        rest = torch.tensor(one[1:], dtype=torch.long)
        expected = token_logprobs(logits(model, one)[:-1], rest, temperature)
        expected = torch.where(mask[row, : len(rest)], expected, 0.0)
        torch.testing.assert_close(found[row, : len(rest)], expected, rtol=1e-4, atol=1e-5)
        assert not found[row, len(rest) :].any()


def test_the_bias_of_a_head_is_found_and_counts() -> None:
    phi, llama = (LanguageModel(built(LINEAR[name])) for name in ("Phi", "Llama"))
    assert llama.bias is None
    assert phi.bias is not None
    assert phi.bias.shape == (VOCABULARY,)
    ids, mask = padded(SEQUENCES[:1]), torch.ones(1, 5, dtype=torch.bool)
    states = phi.hidden(SEQUENCES[:1])
    before = phi.logprobs(states, ids, mask)
    before.sum().backward()
    assert phi.bias.grad is not None
    assert phi.bias.grad.abs().max() > 0
    with torch.no_grad():
        phi.bias[7] += 5.0
        after = phi.logprobs(states, ids, mask)
    assert after[0, 0] > before[0, 0] + 0.1  # 7 is the first of the next ids
    assert (after[0, 1:] < before[0, 1:]).all()


@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_head_is_accepted_and_left_as_it_is(name: str, std: float) -> None:
    model = built(LINEAR[name], std)
    before = logits(model, SEQUENCES[0])
    LanguageModel(model).check_head()
    assert torch.equal(logits(model, SEQUENCES[0]), before)


@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_head_that_is_not_linear_is_refused_by_the_name_of_its_model(
    name: str, std: float
) -> None:
    """Also with the small logits of a fresh model, which a cap hardly changes."""
    model = built(NOT_LINEAR[name], std)
    with pytest.raises(
        UnsupportedHead, match=f"{name}: its logits differ .* fused losses do not support"
    ):
        LanguageModel(model).check_head()


def test_rows_are_padded_with_zeros_on_the_right() -> None:
    assert padded([[1, 2], [3]]).tolist() == [[1, 2], [3, 0]]
    assert padded([[True], [False, True]]).tolist() == [[True, False], [False, True]]
