"""Shared beginnings are computed once, with the states and gradients of the dense forward."""

from __future__ import annotations

import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.lora import add_adapters
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.trainer import LoraConfig
from composer_mesh.planning.model_refusals import UnsupportedSharing
from composer_mesh.rollouts import prefix_tree

IDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256}
DECODER = {**IDS, **LAYERS, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
    "Llama": LlamaConfig(**DECODER),
}


def built(config: PretrainedConfig) -> Any:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(std=0.3, generator=generator)
    return model


def branching(rng: random.Random, depth: int) -> list[list[int]]:
    """Random sequences of uneven branches, some of them equal and some a part of others."""
    stem = [rng.randrange(3, 50) for _ in range(rng.randrange(16, 24))]
    if depth == 0:
        return [stem] * rng.randrange(1, 3)
    found = [stem] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(2, 4)):
        found += [stem + rest for rest in branching(rng, rng.randrange(depth))]
    return found


def trained(model: Any, sequences: list[list[int]], sharing: bool) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of every token, and the gradients of their weighted sum by all weights."""
    language, ids = LanguageModel(model, sharing=sharing), padded(sequences)
    mask = padded([[True] * len(one) for one in sequences])[:, 1:].bool()
    logprobs = language.logprobs(language.hidden(sequences), ids, mask)
    weights = torch.linspace(0.1, 1.0, logprobs.numel()).view_as(logprobs)
    loss = (logprobs * weights).sum() / mask.sum()
    return logprobs.detach(), list(
        torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad])
    )


def assert_same(model: Any, sequences: list[list[int]]) -> None:
    (dense, expected), (shared, found) = (trained(model, sequences, on) for on in (False, True))
    torch.testing.assert_close(shared, dense, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [0, 64, 4096])
@pytest.mark.parametrize("seed", range(8))
def test_random_trees_have_the_states_and_gradients_of_dense_rows(
    name: str, room: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In levels of single nodes, in branches, and in one row for each root."""
    monkeypatch.setattr(prefix_tree, "ROOM", room)
    rng = random.Random(seed)
    roots = [branching(rng, 1 + seed % 6) for _ in range(rng.randrange(1, 3))]
    sequences = [one for root in roots for one in root][:40]
    rng.shuffle(sequences)
    assert_same(built(MODELS[name]), [*sequences, [7, 8]])


@pytest.mark.parametrize("room", [0, 512])
def test_checkpointed_layers_share_as_well(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "ROOM", room)
    model = built(MODELS["Qwen3"])
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    prompt = list(range(3, 40))
    assert_same(model, [[*prompt, one, one + 1] for one in range(3, 8)])


@pytest.mark.parametrize("room", [0, 512])
def test_adapters_get_the_gradients_of_dense_rows(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "ROOM", room)
    model = built(MODELS["Qwen3"])
    add_adapters(model, LoraConfig(rank=2, dropout=0.0), seed=0)
    prompt = list(range(3, 40))
    found = [one for one in model.parameters() if one.requires_grad]
    assert found
    assert_same(model, [[*prompt, one, one + 1] for one in range(3, 8)])


def test_a_model_with_a_window_is_refused_before_it_trains() -> None:
    windowed = MistralConfig(**DECODER, sliding_window=8)
    with pytest.raises(UnsupportedSharing, match="sliding_attention: set trainer"):
        LanguageModel(built(windowed)).check_sharing()
    LanguageModel(built(MODELS["Qwen3"])).check_sharing()
    error = pickle.loads(pickle.dumps(UnsupportedSharing("Mistral", "why")))
    assert str(error) == "Mistral: why: set trainer.prefix_sharing to false"


def test_a_shared_prompt_is_computed_once() -> None:
    model = built(MODELS["Qwen3"])
    computed: list[int] = []
    model.model.embed_tokens.register_forward_hook(
        lambda *call: computed.append(call[-1][..., 0].numel())
    )
    prompt = list(range(3, 43))
    language = LanguageModel(model, sharing=True)
    language.hidden([[*prompt, one] for one in range(3, 11)])
    assert computed == [48]  # all in one row
    computed.clear()
    long = [*prompt] * 14
    language.hidden([[*long, one] for one in range(3, 11)])
    assert computed == [560, 8]  # eight answers in one row
