"""Routers of mixtures: choices are read and replayed, logits in float32, experts balanced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import MIXTURES, family_folder, family_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from composer_mesh.actors.models.expert_routing import (
    ExpertRouting,
    choices_of,
    expert_sizes,
    intercept_routers,
    numbers_of,
    router_names,
    routers_of,
)
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import empty_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.planning.model_refusals import UnsupportedRouting

OTHERS = ("olmoe", "granitemoe", "ernie4_5_moe", "dots1", "minimax_m2", "deepseek_v2")
SEQUENCES = [[5, 7, 9, 11, 13, 2, 8], [3, 4, 5], [49, 4, 4, 9]]


def intercepted(name: str, tokenizer: Any, float32: bool = False, **sizes: Any) -> Any:
    model = family_model(name, tokenizer, **sizes)
    names = router_names(model)
    intercept_routers(model, decoder_layers(model), names, float32, needed=True)
    return model


def logprobs(model: Any, experts: list[Any], packing: bool = False) -> tuple[Tensor, Any]:
    language = LanguageModel(model, packing)
    hidden = language.hidden(SEQUENCES, experts)
    ids = torch.zeros(3, 7, dtype=torch.long)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    for row, one in enumerate(SEQUENCES):
        ids[row, : len(one)], mask[row, : len(one) - 1] = torch.tensor(one), True
    return language.logprobs(hidden, ids, mask), language.routing


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
def test_replayed_choices_of_a_model_are_what_it_computes_anyway(name: str, tokenizer: Any) -> None:
    model = intercepted(name, tokenizer)
    own, routing = logprobs(model, [])
    sizes = expert_sizes(model.config)
    assert sizes is not None
    shape = (21, routers_of(model), sizes[1])
    chosen = routing.all_chosen()
    assert chosen.shape == shape
    rows = [chosen[row * 7 : row * 7 + len(one) - 1] for row, one in enumerate(SEQUENCES)]
    told = [choices_of(one, model.config) for one in rows]
    again, routing = logprobs(model, told)
    torch.testing.assert_close(again, own)
    assert sum(map(int, routing.rerouted.values())) == 0


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
@pytest.mark.parametrize("packing", [False, True])
def test_other_choices_are_taken_in_place_of_the_models_own(
    name: str, packing: bool, tokenizer: Any
) -> None:
    model = intercepted(name, tokenizer)
    own, _ = logprobs(model, [], packing)
    sizes = expert_sizes(model.config)
    assert sizes is not None
    numbers = torch.arange(sizes[1]).expand(6, routers_of(model), -1)
    changed, routing = logprobs(model, [choices_of(numbers, model.config)], packing)
    assert not torch.allclose(changed[0], own[0])
    torch.testing.assert_close(changed[1:], own[1:])
    assert sum(map(int, routing.rerouted.values())) > 0
    for chosen in routing.chosen.values():
        assert (chosen.sort(-1).values == torch.arange(sizes[1])).all(-1).sum() >= 6


def test_checkpointed_layers_replay_the_same_choices_in_the_backward(tokenizer: Any) -> None:
    gradients = []
    for again in (False, True):
        model = intercepted("qwen3_moe", tokenizer)
        for layer in decoder_layers(model) if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        numbers = torch.arange(2).expand(6, 2, -1)
        found, _ = logprobs(model, [choices_of(numbers, model.config)])
        logprobs(model, [])  # another forward before the backward
        gradients.append(torch.autograd.grad(found.sum(), list(model.parameters())))
    torch.testing.assert_close(*gradients)


def test_routers_get_gradients_through_the_scores_of_replayed_experts(tokenizer: Any) -> None:
    model = intercepted("qwen3_moe", tokenizer)
    numbers = torch.arange(2).expand(6, 2, -1)
    found, _ = logprobs(model, [choices_of(numbers, model.config)])
    found[0].sum().backward()
    for layer in decoder_layers(model):
        assert float(layer.mlp.gate.weight.grad.abs().sum()) > 0


def test_a_router_in_float32_has_no_ties_that_bfloat16_makes(tokenizer: Any) -> None:
    logits = {}
    for float32 in (False, True):
        model = intercepted("qwen3_moe", tokenizer, float32).bfloat16()
        _, routing = logprobs(model, [])
        logits[float32] = routing.logits[0]
    assert logits[True].dtype == torch.float32
    assert logits[False].dtype == torch.bfloat16
    torch.testing.assert_close(logits[True], logits[False].float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(logits[True].bfloat16().float(), logits[True])


def test_the_balance_loss_is_transformers_own_of_each_layer(tokenizer: Any) -> None:
    model = intercepted("qwen3_moe", tokenizer)
    _, routing = logprobs(model, [])
    mask = torch.zeros(3, 7)
    for row, one in enumerate(SEQUENCES):
        mask[row, : len(one)] = 1
    theirs = sum(
        load_balancing_loss_func((one,), 4, 2, mask) / 2 for one in routing.logits.values()
    )
    torch.testing.assert_close(routing.balance_loss(), theirs)


def test_equally_busy_experts_have_a_balance_loss_of_one_and_others_more() -> None:
    routing = ExpertRouting()
    routing.logits, routing.chosen = {0: torch.zeros(4, 4)}, {0: torch.arange(4)[:, None]}
    assert float(routing.balance_loss()) == pytest.approx(1)
    routing.logits = {0: 9.0 * torch.eye(4)[torch.zeros(4, dtype=torch.long)]}
    routing.chosen = {0: torch.zeros(4, 1, dtype=torch.long)}
    assert float(routing.balance_loss()) > 3.9


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2)])
def test_choices_are_bytes_and_come_back_as_they_were(experts: int, width: int) -> None:
    from transformers import Qwen3MoeConfig

    numbers = torch.randint(experts, (5, 3, 2))
    found = choices_of(numbers, Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=2))
    assert found.shape == (3, 2, width)
    assert len(found.contents) == 30 * width
    assert torch.equal(numbers_of(found), numbers)


def test_routers_are_found_in_a_model_without_weights(tokenizer: Any, tmp_path: Path) -> None:
    folder = family_folder("deepseek_v3", tokenizer, tmp_path)
    assert router_names(empty_model(folder)) == ["model.layers.1.mlp.gate"]


def test_routers_are_found_in_a_model_that_compresses_its_keys() -> None:
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    config = DeepseekV4Config(
        vocab_size=50,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=8,
        mlp_layer_types=["hash_moe", "moe"],
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert router_names(model) == ["model.layers.1.mlp.gate"]


def test_a_dense_model_has_no_routers(build_model: Any) -> None:
    model = build_model(1)
    assert router_names(model) == []
    intercept_routers(model, decoder_layers(model), [], True, needed=True)
    assert routers_of(model) == 0


def test_a_mixture_that_chooses_otherwise_is_refused_where_choices_are_needed(
    tokenizer: Any, tmp_path: Path, build_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = family_folder("phimoe", tokenizer, tmp_path)
    for moe in ({"router_replay": True}, {"load_balancing": 0.01}):
        with pytest.raises(UnsupportedRouting, match="PhimoeForCausalLM: no router of it was fou"):
            trained_model(build_config(trainer={"moe": moe}), folder, Ranks())
    trained_model(build_config(trainer={"compute_dtype": "bfloat16"}), folder, Ranks())
    assert "routers of PhimoeForCausalLM were not found" in caplog.text
