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
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.lora import add_adapters
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.trainer import LoraConfig, Sharing
from composer_mesh.planning.model_refusals import UnsupportedSharing
from composer_mesh.rollouts import prefix_tree

IDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256}
DECODER = {**IDS, **LAYERS, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
FULL = "full_attention"
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
    "Llama": LlamaConfig(**DECODER),
    "Mistral": MistralConfig(**DECODER, sliding_window=7),
    "Gemma3": Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=20, layer_types=MIXED),
    "Qwen2": Qwen2Config(
        **DECODER, use_sliding_window=True, sliding_window=40, layer_types=MIXED[::-1]
    ),
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


def trained(
    model: Any, sequences: list[list[int]], sharing: Sharing
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of every token, and the gradients of their weighted sum by all weights."""
    language, ids = LanguageModel(model, sharing=sharing), padded(sequences)
    mask = padded([[True] * len(one) for one in sequences])[:, 1:].bool()
    logprobs = language.logprobs(language.hidden(sequences), ids, mask)
    weights = torch.linspace(0.1, 1.0, logprobs.numel()).view_as(logprobs)
    loss = (logprobs * weights).sum() / mask.sum()
    return logprobs.detach(), list(
        torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad])
    )


def assert_same(model: Any, sequences: list[list[int]], sharing: Sharing = "levels") -> None:
    ways: tuple[Sharing, Sharing] = ("off", sharing)
    (dense, expected), (shared, found) = (trained(model, sequences, way) for way in ways)
    torch.testing.assert_close(shared, dense, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def random_tree(seed: int) -> list[list[int]]:
    """Sequences of one or two roots, shuffled, and one that begins like no other."""
    rng = random.Random(seed)
    roots = [branching(rng, 6 - seed % 6) for _ in range(rng.randrange(1, 3))]
    sequences = [one for root in roots for one in root][:24]
    rng.shuffle(sequences)
    return [*sequences, [7, 8]]


SEEDS = [(name, seed) for name in MODELS for seed in range(6 if name == "Qwen3" else 2)]


@pytest.mark.parametrize("room", [0, 64, 4096])
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_random_trees_have_the_states_and_gradients_of_dense_rows(
    name: str, room: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In levels of single nodes, in branches, and in one row for each root."""
    monkeypatch.setattr(prefix_tree, "ROOM", room)
    assert_same(built(MODELS[name]), random_tree(seed))


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_a_tree_in_one_row_has_the_states_and_gradients_of_dense_rows(name: str, seed: int) -> None:
    """As for FlexAttention, here with a dense mask."""
    assert_same(built(MODELS[name]), random_tree(seed), "row")


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


def test_a_model_with_states_is_refused_before_it_trains() -> None:
    hybrid = Qwen3NextConfig(**DECODER, num_experts=2, layer_types=["linear_attention", FULL])
    with pytest.raises(UnsupportedSharing, match="has layers of linear_attention, but prefixes"):
        LanguageModel(built(hybrid)).check_sharing()
    error = pickle.loads(pickle.dumps(UnsupportedSharing("Mistral", "why")))
    assert str(error) == "Mistral: why: set trainer.prefix_sharing to false"


@pytest.mark.parametrize("name", MODELS)
def test_models_with_and_without_windows_are_tried_and_left_as_they_were(name: str) -> None:
    model = built(MODELS[name])
    before = model.config.to_dict()
    LanguageModel(model).check_sharing()
    assert model.config.to_dict() == before


def test_a_model_that_carries_something_along_its_rows_is_found_by_trying() -> None:
    model = built(MODELS["Mistral"])
    model.model.embed_tokens.register_forward_hook(lambda *call: call[-1].cumsum(1))
    with pytest.raises(UnsupportedSharing, match="with shared prefixes differ by up to"):
        LanguageModel(model).check_sharing()
    assert model.config.sliding_window == 7


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharing", ["row", "levels"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_states_of_dense_rows(name: str, sharing: Sharing) -> None:
    """Uncompiled: FlexAttention has no backward on a CPU."""
    model, sequences = built(MODELS[name]), random_tree(3)
    dense = LanguageModel(model).hidden(sequences).whole()
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        shared = LanguageModel(model, sharing=sharing).hidden(sequences).whole()
    seen = padded([[True] * len(one) for one in sequences]).bool()
    torch.testing.assert_close(shared[seen], dense[seen], rtol=1e-5, atol=1e-5)


def test_a_shared_prompt_is_computed_once() -> None:
    model = built(MODELS["Qwen3"])
    computed: list[int] = []
    model.model.embed_tokens.register_forward_hook(
        lambda *call: computed.append(call[-1][..., 0].numel())
    )
    prompt = list(range(3, 43))
    language = LanguageModel(model, sharing="levels")
    language.hidden([[*prompt, one] for one in range(3, 11)])
    assert computed == [48]  # all in one row
    computed.clear()
    long = [*prompt] * 14
    language.hidden([[*long, one] for one in range(3, 11)])
    assert computed == [560, 8]  # eight answers in one row
