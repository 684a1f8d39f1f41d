"""Probes show what depends on lengths, on neighbours and on ids, whatever a config's scales are.

Attention that reads a few chosen keys: exact up to where it reads all, and refused beyond.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sweep import sampled_difference, trained_difference
from model_families import family_folder, family_model
from prefix_trees import MODELS, built
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.model_facts import facts_of, small_copy
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.probes import (
    LENGTHS,
    SCALE,
    error_of,
    probe_sequences,
    short_scales,
)
from composer_mesh.actors.models.template_program import describe_model
from composer_mesh.planning.model_facts import ModelFacts, check_model_trains
from composer_mesh.planning.model_refusals import (
    UnfitModel,
    UnsupportedPacking,
    UnsupportedRows,
    UnsupportedSharing,
)

SEQUENCES = [[random.Random(n).randrange(3, 260) for _ in range(n)] for n in (20, 11, 9, 5)]


FULL_AND_CHUNKED = {"no_rope_layers": [0, 1], "attention_chunk_size": 8, "floor_scale": 4}


FULL_ONLY = {"no_rope_layers": [0, 0], "floor_scale": 4}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [FULL_AND_CHUNKED, FULL_ONLY])
def test_packed_llama_4_has_the_log_probs_and_gradients_of_each_sequence_alone(
    sizes: dict[str, Any], attention: str, build_config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Its chunks and its temperatures are those of a sequence, whatever precedes it in the row."""
    folder = family_folder("llama4_text", tokenizer, tmp_path / "model", **sizes)
    config = build_config(trainer={"packing": True, "attention": attention})
    found = trained_difference(config, folder, load_model(folder), SEQUENCES)
    assert found < 1e-5


def test_the_embedded_engine_scales_queries_by_their_positions(
    tokenizer: Any, tmp_path: Path
) -> None:
    folder = family_folder("llama4_text", tokenizer, tmp_path / "model", **FULL_ONLY)
    assert sampled_difference(folder, load_model(folder), SEQUENCES) < 1e-5


def counts_along_rows(model: Any, scale: int) -> None:
    """Let a layer scale its output by the index in the row once that exceeds a scale."""

    def scaled(layer: Any, _: Any, output: Tensor) -> Tensor:
        index = torch.arange(output.shape[1])
        return output * (1 + 0.1 * (index // layer.floor_scale))[:, None]

    model.model.layers[0].floor_scale = scale
    model.model.layers[0].register_forward_hook(scaled)


@pytest.mark.parametrize("scale", [8, 8192])
def test_a_layer_that_counts_along_rows_beyond_a_long_scale_is_refused(scale: int) -> None:
    model = built(MODELS["Qwen3"])
    LanguageModel(model).check_packing()
    LanguageModel(model).check_sharing()
    counts_along_rows(model, scale)
    with pytest.raises(UnsupportedPacking):
        LanguageModel(model).check_packing()
    with pytest.raises(UnsupportedSharing):
        LanguageModel(model).check_sharing()
    assert model.model.layers[0].floor_scale == scale


@pytest.mark.parametrize("name", ["sees what follows", "sees its neighbours"])
def test_states_that_depend_on_more_than_what_precedes_are_refused(name: str) -> None:
    axis = 1 if name == "sees what follows" else 0
    model = built(MODELS["Qwen3"])
    LanguageModel(model).check_rows()
    model.model.layers[0].register_forward_hook(
        lambda *call: call[-1] + 0.1 * call[-1].mean(axis, keepdim=True)
    )
    with pytest.raises(UnsupportedRows, match=r"Qwen3ForCausalLM: .* use another model"):
        LanguageModel(model).check_rows()


def test_probes_have_ids_that_are_not_special_and_lengths_beyond_every_scale(
    tokenizer: Any,
) -> None:
    model = family_model("llama4_text", tokenizer)
    sequences = probe_sequences(model.config)
    assert [len(one) for one in sequences] == [*LENGTHS]
    assert sequences[0][: LENGTHS[1]] == sequences[1]
    used = {one for ids in sequences for one in ids}
    assert not used & {model.config.pad_token_id, model.config.eos_token_id}
    attention = model.model.layers[0].self_attn
    before = attention.floor_scale
    with short_scales(model):
        assert attention.floor_scale == model.config.floor_scale == SCALE < LENGTHS[1] < before
    assert attention.floor_scale == model.config.floor_scale == before


def test_check_refuses_packing_where_positions_are_those_of_the_row(
    build_config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """OPT counts its positions along the row."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = OPTConfig(vocab_size=len(tokenizer), hidden_size=16, ffn_dim=32, **sizes)
    save_policy(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "model")
    facts = ModelFacts.of(describe_model(tmp_path / "model", len(tokenizer))["facts"])
    check_model_trains(facts, build_config(trainer={"attention": "eager"}))
    with pytest.raises(UnfitModel, match=r"OPTForCausalLM: .* set trainer\.packing to false"):
        check_model_trains(facts, build_config(trainer={"attention": "eager", "packing": True}))


@pytest.mark.parametrize(
    "family", ["llama4_text", "gemma3_text", "deepseek_v3", "qwen3_moe", "gpt2"]
)
def test_a_small_copy_of_a_large_model_has_its_kinds_of_layers_and_passes_its_probes(
    family: str,
) -> None:
    config = AutoConfig.for_model(family)
    model = small_copy(config, "eager")
    kinds = getattr(config, "layer_types", None) or ()
    assert {*(getattr(model.config, "layer_types", None) or ())} == {*kinds}
    assert sum(one.numel() for one in model.parameters()) < 50e6
    LanguageModel(model).check_rows()
    LanguageModel(model).check_packing()


def test_single_tokens_of_a_mixture_may_have_other_experts_by_rounding(
    tokenizer: Any, tmp_path: Path
) -> None:
    errors = torch.tensor([0.1, 3.0, 0.2, 0.1, 0.2])
    mixture = load_model(family_folder("qwen3_moe", tokenizer, tmp_path / "mixture"))
    dense = load_model(family_folder("qwen3", tokenizer, tmp_path / "dense"))
    assert error_of(errors, mixture.bfloat16()) == pytest.approx(0.2)
    assert error_of(errors, mixture.double()) == pytest.approx(3.0)
    assert error_of(errors, dense.bfloat16()) == pytest.approx(3.0)


KEYS, RATE, LONGER, CHANGED = 4, 4, 80, 1e-4


COMPRESSED, HEAVILY = "compressed_sparse_attention", "heavily_compressed_attention"


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": KEYS,
    "hc_mult": 2,
    "qk_rope_head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "mlp_layer_types": ["moe", "moe"],
    "compress_rates": {COMPRESSED: RATE, HEAVILY: 8},
}


def written(tokenizer: Any, folder: Path, kinds: list[str]) -> Path:
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    torch.manual_seed(0)
    config = DeepseekV4Config(**SIZES, vocab_size=len(tokenizer), layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.15)
    save_policy(model.eval(), tokenizer, folder)
    return folder


@torch.no_grad()
def padding_changes(model: Any, length: int) -> list[bool]:
    """Whether the states of some sequences of a length differ alongside a longer one."""
    language, found = LanguageModel(model), []
    for seed in range(30):
        ids = torch.randint(3, 260, (LONGER,), generator=torch.Generator().manual_seed(seed))
        alone, beside = (
            language.hidden([ids[:length].tolist(), *more]).whole()[0, :length]
            for more in ([], [ids.tolist()])
        )
        found.append(float((alone - beside).abs().max()) > CHANGED)
    return found


def test_keys_of_equal_scores_are_chosen_by_padding_only_beyond_what_check_allows(
    tokenizer: Any, tmp_path: Path, build_config: Any
) -> None:
    folder = written(tokenizer, tmp_path, [HEAVILY, COMPRESSED])
    facts = ModelFacts.of(facts_of(folder)["facts"])
    assert facts.all_keys == KEYS * RATE
    model = load_model(folder)
    assert not any(padding_changes(model, facts.all_keys))
    assert any(padding_changes(model, LONGER - 28))
    with pytest.raises(UnfitModel, match=r"lower policy\.max_context to 16$"):
        check_model_trains(facts, build_config(trainer={"attention": "eager"}))


@pytest.mark.parametrize("family", ["axk2", "glm_moe_dsa"])
def test_an_index_of_single_keys_is_refused_beyond_the_keys_that_it_chooses(
    family: str, tokenizer: Any, tmp_path: Path, build_config: Any
) -> None:
    folder = family_folder(family, tokenizer, tmp_path / family, index_topk=KEYS)
    facts = ModelFacts.of(facts_of(folder)["facts"])
    assert facts.all_keys == KEYS
    assert any(padding_changes(load_model(folder), LONGER - 28))
    with pytest.raises(UnfitModel):
        check_model_trains(facts, build_config())


def test_layers_without_a_choice_read_all_keys(
    tokenizer: Any, tmp_path: Path, build_config: Any
) -> None:
    folder = written(tokenizer, tmp_path, [HEAVILY, "sliding_attention"])
    facts = ModelFacts.of(facts_of(folder)["facts"])
    assert facts.all_keys is None
    assert not any(padding_changes(load_model(folder), LONGER - 28))
    check_model_trains(facts, build_config(trainer={"attention": "eager"}))
