"""Packed rows: the same hidden states as alone, and no sequence of a row sees another."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from prefix_trees import built
from step_batches import ALL_ON, Make, batch_of, largest_change, taught, weights_of
from torch import Tensor
from transformers import LlamaConfig, OPTConfig, PretrainedConfig, Qwen3Config

from composer_mesh.actors.models.hidden_states import Packed
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.planning.model_refusals import UnsupportedPacking
from composer_mesh.rollouts.packing import microbatches

IDS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
DECODER = {**IDS, **LAYERS, "hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3": Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
    "Llama": LlamaConfig(**DECODER),
}
CPU = torch.device("cpu")
SEQUENCES = [[5, 7, 9, 11, 13, 2, 8], [3], [49, 4, 4], [6, 2, 8, 1], [17, 18]]


def states(model: Any, sequences: list[list[int]], packing: bool) -> Tensor:
    with torch.no_grad():
        return LanguageModel(model, packing).hidden(sequences).whole()


def gradients_of_first(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Gradients of the first sequence's log-probs by every weight, in packed rows."""
    language = LanguageModel(model, packing=True)
    ids = torch.zeros(len(sequences), len(sequences[0]), dtype=torch.long)
    ids[0] = torch.tensor(sequences[0])
    mask = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    mask[0] = True
    loss = language.logprobs(language.hidden(sequences), ids, mask).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_the_states_of_padded_ones(name: str) -> None:
    model = built(MODELS[name])
    together, apart = (states(model, SEQUENCES, packing) for packing in (True, False))
    assert together.shape == apart.shape
    for row, sequence in enumerate(SEQUENCES):
        torch.testing.assert_close(together[row, : len(sequence)], apart[row, : len(sequence)])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("changed", range(1, len(SEQUENCES)))
def test_another_sequence_of_the_row_changes_no_bit_of_states_and_gradients(
    name: str, changed: int
) -> None:
    model, other = built(MODELS[name]), [list(sequence) for sequence in SEQUENCES]
    other[changed] = [(one + 20) % 50 for one in other[changed]]
    before, after = states(model, SEQUENCES, True), states(model, other, True)
    for row in range(len(SEQUENCES)):
        own = slice(len(SEQUENCES[row]))
        assert torch.equal(before[row, own], after[row, own]) == (row != changed)
    for one, two in zip(
        gradients_of_first(model, SEQUENCES), gradients_of_first(model, other), strict=True
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("one_row", [False, True])
def test_rows_hold_every_token_once_with_positions_from_zero(one_row: bool) -> None:
    packed = Packed.of(SEQUENCES, CPU, one_row)
    assert packed.ids.shape == ((1, 17) if one_row else (3, 7))
    found = packed.unpacked(packed.ids[..., None].float()).whole()[..., 0]
    positions = packed.unpacked(packed.positions[..., None].float()).whole()[..., 0]
    for row, sequence in enumerate(SEQUENCES):
        assert found[row, : len(sequence)].tolist() == sequence
        assert positions[row, : len(sequence)].tolist() == list(range(len(sequence)))


def test_one_long_sequence_beside_many_short_ones_keeps_to_the_budget() -> None:
    rng = random.Random(0)
    sequences = [[rng.randrange(50) for _ in range(n)] for n in (64, *([3] * 40))]
    budget = 192
    (together,) = microbatches([len(one) for one in sequences], budget, packed=True)
    model = LanguageModel(built(MODELS["Qwen3"]), packing=True)
    with torch.no_grad():
        found = model.hidden([sequences[index] for index in together])
    assert len(found.computed) <= 1.2 * budget


def test_a_model_that_does_not_keep_sequences_apart_is_refused() -> None:
    model = built(OPTConfig(**IDS, **LAYERS, hidden_size=16, ffn_dim=32))
    with pytest.raises(UnsupportedPacking, match=r"OPTForCausalLM: .* set trainer\.packing to fal"):
        LanguageModel(model).check_packing()
    LanguageModel(built(MODELS["Qwen3"])).check_packing()


@pytest.mark.parametrize("budget", [512, 100_000])
def test_a_packed_step_has_the_losses_and_weights_of_a_padded_one(
    make: Make, build_model: Any, rng: random.Random, budget: int
) -> None:
    trainer = {"microbatch_tokens": budget, "lr": 1e-3}
    model, padded = make(**ALL_ON, trainer=trainer)
    batch = batch_of(model, rng, samples=8, pairs=5)
    wide = [replace(one, reference=(-20.0, -10.0)) for one in batch.pairs]  # ties are nobody's
    batch, teacher = replace(batch, pairs=wide), build_model(2)
    other, packed = make(**ALL_ON, trainer={**trainer, "packing": True})
    expected, found = taught(padded, teacher, batch), taught(packed, teacher, batch)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert largest_change(weights_of(model), weights_of(other)) < 1e-5
