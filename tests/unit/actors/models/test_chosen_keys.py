"""Attention that reads a few chosen keys: exact up to where it reads all, and refused beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import family_folder

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.model_facts import facts_of
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.planning.model_facts import ModelFacts, check_model_trains
from composer_mesh.planning.model_refusals import UnfitModel

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
