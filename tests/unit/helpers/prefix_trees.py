"""Random trees of sequences, tiny models with windows and without, and what training them gives."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.configs.trainer import Sharing

IDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256}
DECODER = {**IDS, **LAYERS, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 1}
FULL = "full_attention"
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True),
    "Llama": LlamaConfig(**DECODER),
    "Mistral": MistralConfig(**DECODER, sliding_window=7),
    "Gemma3": Gemma3TextConfig(**DECODER, head_dim=16, sliding_window=20, layer_types=MIXED),
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
    language = LanguageModel(model, sharing=sharing)
    ids = padded(sequences, language.device)
    mask = padded([[True] * len(one) for one in sequences], language.device)[:, 1:].bool()
    logprobs = language.logprobs(language.hidden(sequences), ids, mask)
    weights = torch.linspace(0.1, 1.0, logprobs.numel(), device=language.device).view_as(logprobs)
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
