"""Shared beginnings are computed once, with the states and gradients of the dense forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from prefix_trees import DECODER, FULL, MODELS, assert_same, built, random_tree
from repetition import repeated
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3NextConfig

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.lora import add_adapters
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.trainer import LoraConfig, Sharing
from composer_mesh.planning.model_refusals import UnsupportedSharing
from composer_mesh.rollouts import prefix_tree

SEEDS = [(name, seed) for name in MODELS for seed in range(6 if name == "Qwen3" else 2)]


@pytest.mark.parametrize("row_capacity", repeated([64, 0, 4096]))
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_random_trees_have_the_states_and_gradients_of_dense_rows(
    name: str, row_capacity: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In levels of single nodes, in branches, and in one row for each root."""
    monkeypatch.setattr(prefix_tree, "ROW_CAPACITY", row_capacity)
    assert_same(built(MODELS[name]), random_tree(seed))


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_a_tree_in_one_row_has_the_states_and_gradients_of_dense_rows(name: str, seed: int) -> None:
    """As for FlexAttention, here with a dense mask."""
    assert_same(built(MODELS[name]), random_tree(seed), "row")


@pytest.mark.parametrize("row_capacity", [0, 512])
def test_checkpointed_layers_share_as_well(
    row_capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "ROW_CAPACITY", row_capacity)
    model = built(MODELS["Qwen3"])
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    prompt = list(range(3, 40))
    assert_same(model, [[*prompt, one, one + 1] for one in range(3, 8)])


@pytest.mark.parametrize("row_capacity", [0, 512])
def test_adapters_get_the_gradients_of_dense_rows(
    row_capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "ROW_CAPACITY", row_capacity)
    model = built(MODELS["Qwen3"])
    add_adapters(model, LoraConfig(rank=2, dropout=0.0), seed=0)
    prompt = list(range(3, 40))
    found = [one for one in model.parameters() if one.requires_grad]
    assert found
    assert_same(model, [[*prompt, one, one + 1] for one in range(3, 8)])


def test_a_model_with_states_is_refused_before_it_trains() -> None:
    hybrid = Qwen3NextConfig(**DECODER, num_experts=2, layer_types=["linear_attention", FULL])
    with pytest.raises(
        UnsupportedSharing, match=r"layers of linear_attention, but prefixes .*: set"
    ):
        LanguageModel(built(hybrid)).check_sharing()


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
