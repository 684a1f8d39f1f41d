"""Packed rows whose sequences attend by themselves: the numbers of a dense mask, without one."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from largest_tensor import LargestTensor
from model_families import family_folder
from repetition import LONG
from step_batches import batch_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.attention_calls import PACKED
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.packed_attention import LEAST_BLOCK, computes_by_sequences
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import decoder_layers, local
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.planning.model_facts import CHUNKED, FULL, SLIDING, AttentionCall

IDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048}
DECODER: dict[str, Any] = {
    **IDS,
    **LAYERS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER),
    "Llama": LlamaConfig(**{**DECODER, "num_key_value_heads": 4}),
    "Mistral": MistralConfig(**DECODER, sliding_window=5),
    "Gemma3": Gemma3TextConfig(**DECODER, sliding_window=4, layer_types=MIXED),
}
LENGTHS = (31, 12, 9, 7, 1, 2)
WIDE = AttentionCall(replaceable=True, window=None, more=())
NARROW = AttentionCall(replaceable=True, window=8, more=())


def built(config: PretrainedConfig, attention: str) -> Any:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(std=0.2, generator=generator)
    model.set_attn_implementation(attention)
    return model


def sequences_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(50) for _ in range(length)] for length in lengths]


def logprobs_and_gradients(model: Any, sequences: list[list[int]]) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of all next ids in packed rows, and the gradients of a weighted sum of them."""
    language = LanguageModel(model, packing=True)
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest - 1, dtype=torch.bool)
    for row, one in enumerate(sequences):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : len(one) - 1] = True
    found = language.logprobs(language.hidden(sequences), ids, mask)
    weights = [one for one in model.parameters() if one.requires_grad]
    loss = (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum()
    return found.detach(), list(torch.autograd.grad(loss, weights))


def assert_as_with_dense_masks(config: PretrainedConfig, sequences: list[list[int]]) -> None:
    found = logprobs_and_gradients(built(config, PACKED), sequences)
    dense = logprobs_and_gradients(built(config, "sdpa"), sequences)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_rows_without_a_mask_have_the_logprobs_and_gradients_of_a_dense_one(name: str) -> None:
    assert_as_with_dense_masks(MODELS[name], sequences_of(*LENGTHS))


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("length", [LEAST_BLOCK, LEAST_BLOCK + 1, 2 * LEAST_BLOCK + 70])
def test_windows_reach_across_blocks(name: str, length: int) -> None:
    assert_as_with_dense_masks(MODELS[name], sequences_of(length, 3))


@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_grows_with_the_square_of_a_row(name: str) -> None:
    model, sequences = built(MODELS[name], PACKED), sequences_of(1024, 512, 512)
    with LargestTensor() as largest:
        logprobs_and_gradients(model, sequences)
    assert largest.numbers <= 4 * LEAST_BLOCK * LEAST_BLOCK < 1024 * 1024 + 2 * 512 * 512


def test_checkpointed_layers_and_adapters_change_nothing() -> None:
    peft = pytest.importorskip("peft", exc_type=ModuleNotFoundError)
    found = []
    for attention, checkpointed in ((PACKED, True), ("sdpa", False)):
        model = built(MODELS["Mistral"], attention)
        settings = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        torch.manual_seed(0)
        model = peft.inject_adapter_in_model(settings, model)
        for layer in decoder_layers(model) if checkpointed else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        found.append(logprobs_and_gradients(model, sequences_of(*LENGTHS)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_without_packed_rows_it_is_sdpa() -> None:
    ids = torch.tensor(sequences_of(9, 9))
    with torch.no_grad():
        found, plain = (
            built(MODELS["Gemma3"], how)(input_ids=ids).logits for how in (PACKED, "sdpa")
        )
    assert torch.equal(found, plain)


@LONG
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_sees_in_one_row_what_a_dense_mask_shows() -> None:
    """Uncompiled: the mask is the same, and compiling takes half a minute."""
    sequences = sequences_of(*LENGTHS)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        flex, dense = (
            LanguageModel(built(MODELS["Gemma3"], how), packing=True).hidden(sequences).whole()
            for how in ("flex_attention", "sdpa")
        )
    for row, sequence in enumerate(sequences):
        own = slice(len(sequence))
        torch.testing.assert_close(flex[row, own], dense[row, own], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("calls", "kinds", "possible"),
    [
        ((WIDE, WIDE), [FULL], True),
        ((WIDE, NARROW), [FULL, SLIDING], True),
        ((WIDE, WIDE), [FULL, SLIDING], False),
        ((WIDE, WIDE), [FULL, CHUNKED], True),
        ((WIDE, NARROW), [FULL, CHUNKED], False),
        ((WIDE,), [FULL, FULL], False),
        ((WIDE, AttentionCall(False, None, ())), [FULL], False),
        ((AttentionCall(True, None, ("s_aux",)),), [FULL], False),
        (None, [FULL], False),
        ((), [FULL], False),
    ],
)
def test_only_layers_that_tell_their_window_are_computed_by_sequences(
    calls: tuple[AttentionCall, ...] | None, kinds: list[str], possible: bool
) -> None:
    assert computes_by_sequences(calls, kinds) is possible


@pytest.mark.parametrize(
    ("family", "attention"), [("qwen3", PACKED), ("cohere2", PACKED), ("stablelm", "sdpa")]
)
def test_the_trainer_says_where_packed_rows_keep_dense_masks(
    family: str,
    attention: str,
    build_config: Any,
    tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = family_folder(family, tokenizer, tmp_path)
    config = build_config(trainer={"packing": True})
    with caplog.at_level(logging.WARNING):
        model = trained_model(config, folder, Ranks())
    assert model.config._attn_implementation == attention
    assert ("have dense masks" in caplog.text) is (attention == "sdpa")


@pytest.mark.parametrize("offload", [False, True])
def test_sharded_packed_rows_have_the_losses_and_weights_of_padded_ones(
    offload: bool, build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    save_policy(build_model(1), tokenizer, tmp_path)
    again = {"activation_checkpointing": True, "activation_offload": offload}
    weights = []
    for how in ({"sharding": "none"}, {"sharding": "fsdp2", "packing": True, **again}):
        config = build_config(trainer={**how, "lr": 1e-3}, policy={"path": tmp_path})
        learner = Learner(config, tmp_path, Ranks())
        learner.train(batch_of(load_model(tmp_path), random.Random(0)), None)
        weights.append({name: local(one) for name, one in learner.export().items()})
    dist.destroy_process_group()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-5)
