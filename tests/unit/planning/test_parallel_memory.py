"""Memory of pairs, and of divided positions and experts: the sums are of what torch allocates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocated import peak_allocated
from transformers import AutoConfig, AutoModelForCausalLM

from composer_mesh.actors.learning.replay_channel import ReplayChannel
from composer_mesh.actors.models.expert_parallel import ExpertGroup, divide_experts
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.planning.memory import FLOAT, HALF, RankTraining, training_parts
from composer_mesh.planning.model_sizes import expert_parameters, parameter_count
from composer_mesh.rollouts.batches import PairSample

SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MIXTURE = ModelSizes(**SIZES)
TOKENS = 512


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, whose process group is gone after the test."""
    yield Ranks()
    dist.destroy_process_group()


def made(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SIZES | {"num_hidden_layers": layers})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)


def parts(sizes: ModelSizes = MIXTURE, **how: Any) -> dict[str, int]:
    settings = RankTraining(ranks=8, tokens=TOKENS, trainable=parameter_count(sizes))
    return {one.what: one.bytes for one in training_parts(sizes, replace(settings, **how))}


def ids(count: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,)).tolist()


def of_samples(model: LanguageModel, count: int) -> None:
    """A pass over one sequence, every token of which is trained."""
    tokens = torch.tensor([ids(count)])
    hidden = model.hidden(tokens.tolist())
    model.logprobs(hidden, tokens, torch.ones(1, count - 1, dtype=torch.bool)).sum().backward()


def of_pairs(model: LanguageModel, context: int, answer: int, by_sides: bool) -> None:
    """A pass over a pair."""
    pair = PairSample("p", ids(context), ids(answer), ids(answer), (-1.0, -2.0))
    channel = ReplayChannel(WeightedPreferenceConfig(beta=1.0, use_weighting=True))
    if by_sides:
        channel.backward_by_sides(model, pair, 1, 1.0)
    else:
        channel.loss(model, [pair], 1).loss.backward()


@pytest.mark.parametrize(("context", "answer", "by_sides"), [(128, 128, False), (256, 256, True)])
def test_a_pass_of_pairs_takes_no_more_than_one_of_samples_of_a_microbatch(
    context: int, answer: int, by_sides: bool
) -> None:
    """Both sides of a pair that fits a microbatch; of one that does not, a side at a time."""
    model = LanguageModel(made(4))
    of_samples(model, TOKENS)  # from now on gradients are there
    most = peak_allocated(lambda: of_samples(model, TOKENS))
    assert peak_allocated(lambda: of_pairs(model, context, answer, by_sides)) < 1.05 * most


def held(model: Any) -> int:
    """Bytes that autograd holds after a forward, without the weights."""
    weights = {local(one).untyped_storage().data_ptr() for one in model.parameters()}
    found: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.tensor([ids(TOKENS)]), use_cache=False)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, FLOAT), (torch.bfloat16, HALF)])
def test_a_layer_of_divided_experts_keeps_what_is_planned_beyond_one_of_whole_experts(
    dtype: torch.dtype, number: int, ranks: Ranks
) -> None:
    kept = []
    for divided in (False, True):
        one, two = made(1, dtype), made(2, dtype)
        for model in (one, two) if divided else ():
            alone = ExpertGroup(1, 1, ranks.mesh().get_group(), None)
            for weight in divide_experts(model, ranks.mesh(), alone, dtype):
                torch.nn.init.normal_(local(weight.detach()), std=0.02)
        kept.append(held(two) - held(one))
    planned = [
        parts(number=number, experts_over=over, checkpointing=True)["activations"]
        for over in (1, 8)
    ]
    more = (planned[1] - planned[0]) // 2  # a layer, and its gradients
    assert kept[1] - kept[0] == pytest.approx(more, rel=0.06)


def test_divided_experts_are_not_gathered() -> None:
    whole, divided = (parts(number=HALF, experts_over=over, checkpointing=True) for over in (1, 8))
    experts = expert_parameters(MIXTURE)
    saved = whole["gathered for compute"] - divided["gathered for compute"]
    assert saved == 2 * HALF * 2 * experts
    assert divided["experts of this rank"] == (2 * HALF + FLOAT) * experts // 8
    assert whole["experts of this rank"] == 0
    every = parts(number=HALF, experts_over=8)["experts of this rank"]
    assert every == (5 * HALF + FLOAT) * experts // 8


def test_ranks_of_a_context_repeat_keys_where_there_are_fewer_heads() -> None:
    few, more = (parts(context=size, checkpointing=True)["activations"] for size in (2, 4))
    assert more - few == 2 * TOKENS * 2 * FLOAT * 2 * 32
