"""Estimates of memory: their parts are what torch and the caches hold, and they add up.

Memory of pairs, and of divided positions and experts: the sums are of what torch allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocated import peak_allocated
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from composer_mesh.actors.learning.replay_channel import ReplayChannel
from composer_mesh.actors.models.expert_parallel import ExpertGroup, divide_experts
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.level_cache import cache_argument
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.losses.fused import linear_logits
from composer_mesh.planning.memory import (
    FLOAT,
    GB,
    HALF,
    MemoryTerm,
    RankTraining,
    activation_bytes,
    cache_bytes,
    in_words,
    total,
    training_parts,
)
from composer_mesh.planning.memory_estimate import Memory, memory_of
from composer_mesh.planning.model_sizes import (
    adapter_parameters,
    expert_parameters,
    parameter_count,
)
from composer_mesh.rollouts.batches import PairSample

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


SMALL = ModelSizes(model_type="qwen3", **SIZES)


EIGHT_BILLION = ModelSizes(
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def training(sizes: ModelSizes = EIGHT_BILLION, **changes: Any) -> dict[str, int]:
    how = replace(RankTraining(ranks=4, tokens=16384, trainable=parameter_count(sizes)), **changes)
    return {part.what: part.bytes for part in training_parts(sizes, how)}


def saved_bytes(
    kind: str, layers: int, dtype: torch.dtype, tokens: int, how: str = "sdpa", **sizes: int
) -> int:
    """Bytes that autograd holds after a forward of one sequence, without the weights."""
    config = AutoConfig.for_model(kind, **SIZES | {"num_hidden_layers": layers} | sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=how).to(dtype)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    held: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, FLOAT), (torch.bfloat16, HALF)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_keeps_as_many_bytes_of_a_token_as_autograd_holds(
    kind: str, dtype: torch.dtype, number: int
) -> None:
    tokens = 128
    held = (saved_bytes(kind, 2, dtype, tokens) - saved_bytes(kind, 1, dtype, tokens)) / tokens
    sizes = ModelSizes(model_type=kind, **SIZES)  # type: ignore[arg-type]
    assert activation_bytes(sizes, number) == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, FLOAT), (torch.bfloat16, HALF)])
def test_a_layer_of_gpt_oss_keeps_as_many_bytes_beside_attentions_scores(
    dtype: torch.dtype, number: int
) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512}
    held = []
    for tokens in (64, 128):
        one, two = (saved_bytes("gpt_oss", n, dtype, tokens, "eager", **experts) for n in (1, 2))
        held.append((two - one) / tokens)
    sizes = ModelSizes(
        model_type="gpt_oss",
        **SIZES | {"intermediate_size": 512},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    without_scores = 2 * held[0] - held[1]  # those of a token grow with the sequence
    assert activation_bytes(sizes, number) == pytest.approx(without_scores, rel=0.02)


def test_weights_gradients_and_moments_are_sixteen_bytes_of_a_parameter() -> None:
    parts = training(ranks=1, sharded=False)
    states = parts["master weights"] + parts["gradients"] + parts["optimizer state"]
    assert states == 16 * parameter_count(EIGHT_BILLION)


def test_ranks_share_states_but_not_activations() -> None:
    one, four = training(ranks=1, sharded=False), training(ranks=4)
    for what in ("master weights", "gradients", "optimizer state"):
        assert four[what] == one[what] // 4
    tokens = 1 << 18
    assert training(ranks=1, tokens=tokens)["activations"] == training(tokens=tokens)["activations"]


def test_ranks_that_do_not_shard_hold_all_of_it() -> None:
    assert training(sharded=False)["master weights"] == FLOAT * parameter_count(EIGHT_BILLION)
    assert training(sharded=False)["gathered for compute"] == 0


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others() -> None:
    kept, again = training()["activations"], training(checkpointing=True)["activations"]
    per_layer = activation_bytes(EIGHT_BILLION, FLOAT)
    inputs = 35 * 16384 * (per_layer - FLOAT * 4096)
    assert kept - again == inputs - 16384 * FLOAT * 4096
    assert again < kept / 8


def test_adapters_need_no_gradients_of_the_rest() -> None:
    adapters = adapter_parameters(EIGHT_BILLION, 16, ("q_proj", "v_proj"))
    parts = training(trainable=adapters)
    assert parts["gradients"] == FLOAT * adapters // 4
    assert parts["master weights"] == FLOAT * parameter_count(EIGHT_BILLION) // 4


def test_a_mask_has_a_row_of_the_longest_sequence_for_each_token() -> None:
    assert training()["attention mask"] == 0
    mask = torch.zeros(2, 1, 8192, 8192, dtype=torch.bool)
    half = training(longest=8192, number=HALF)["attention mask"]
    assert half == mask.numel() * (mask.element_size() + HALF)


def test_eager_attention_stores_the_scores_of_each_layer_or_of_one() -> None:
    assert training(longest=8192)["attention scores"] == 0
    kept = training(longest=8192, scored=True)["attention scores"]
    again = training(longest=8192, scored=True, checkpointing=True)["attention scores"]
    scores = FLOAT * EIGHT_BILLION.num_attention_heads * 16384 * 8192
    assert (kept, again) == ((2 * 36 + 2) * scores, 4 * scores)


def test_scores_of_a_whole_microbatch_are_never_in_the_sum() -> None:
    wide = EIGHT_BILLION.model_copy(update={"vocab_size": 8 * EIGHT_BILLION.vocab_size})
    assert training(wide)["activations"] == training()["activations"]
    assert training(wide)["blocks of scores"] == training()["blocks of scores"]


def test_a_cache_is_as_large_as_the_tensors_of_the_model_in_it() -> None:
    rows, context = 3, 40
    config = AutoConfig.for_model("qwen3", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(rows, context, dtype=torch.long)
    cache = DynamicCache(config=config)
    model(input_ids=ids, use_cache=True, **cache_argument(model, cache))
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert cache_bytes(SMALL, FLOAT, rows, context) == held
    assert cache_bytes(SMALL, HALF, rows, context, split=2) == held // 4


def test_a_sum_is_written_with_its_terms_and_nothing_is_lost_in_it() -> None:
    parts = (
        MemoryTerm("weights", 2 * GB),
        MemoryTerm("tiny", GB // 1000),
        MemoryTerm("none", 0),
        MemoryTerm("small", 9),
    )
    assert in_words(parts) == "weights 2.00 + others 0.00 = 2.00 GB"
    assert total(parts) == 2 * GB + GB // 1000 + 9


@pytest.mark.parametrize("kind", ["trainer", "generator", "sdpo_teacher", "reference"])
def test_many_long_turns_in_one_context_need_no_more_memory_than_few(
    kind: str, build_config: Any
) -> None:
    """Fifty turns of 2,048 tokens are an ordinary agent; the context bounds what an episode is."""

    def needed(turns: int, answer: int) -> Memory:
        config = build_config(
            environment={"max_turns": turns},
            generator={"max_new_tokens": answer},
            policy={"max_context": 65_536},
            trainer={"microbatch_tokens": 65_536},
            sdpo={"alpha": 1.0},
        )
        return memory_of(kind, config, SMALL)

    assert needed(50, 2_048) == needed(2, 64)


def of_kind(build_config: Any, kind: str, **sdpo: Any) -> dict[str, int]:
    config = build_config(sdpo={"alpha": 1.0, **sdpo}, generator={"dtype": "bfloat16"})
    return {part.what: part.bytes for part in memory_of(kind, config, SMALL, 0, SMALL).host}


@pytest.mark.parametrize(
    ("teacher", "follows"), [("live", True), ("ema", True), ("frozen", False), ("model", False)]
)
def test_only_teachers_that_follow_the_trainer_hold_weights_that_arrive(
    build_config: Any, teacher: str, follows: bool
) -> None:
    """Nor do they make the trainer publish in full precision where generators serve half of it."""
    other = {"teacher_model": {"path": "large"}} if teacher == "model" else {}
    parts = of_kind(build_config, "sdpo_teacher", teacher=teacher, **other)
    assert ("weights that arrive" in parts) == follows
    offered = of_kind(build_config, "trainer", teacher=teacher, **other)["weights on offer"]
    assert offered == 2 * (FLOAT if follows else HALF) * parameter_count(SMALL)


@pytest.mark.parametrize(("teacher", "heads"), [("live", 0), ("ema", 1), ("trust_region", 2)])
def test_a_trainer_holds_the_head_of_teachers_that_have_their_own(
    build_config: Any, teacher: str, heads: int
) -> None:
    parts = of_kind(build_config, "trainer", teacher=teacher)
    wanted = heads * FLOAT * SMALL.vocab_size * SMALL.hidden_size
    assert parts.get("head of the SDPO teacher", 0) == wanted
    parts = of_kind(build_config, "trainer", teacher=teacher, teacher_output="full")
    assert "head of the SDPO teacher" not in parts


def test_only_a_loss_that_reads_logits_takes_memory_for_tokens_times_vocabulary(
    build_config: Any,
) -> None:
    def parts(*needs: str, **trainer: Any) -> dict[str, int]:
        loss = {"type": "custom", "import_path": "mine.loss", "needs": needs}
        config = build_config(loss=loss, trainer={"microbatch_tokens": 1024, **trainer})
        return {part.what: part.bytes for part in memory_of("trainer", config, SMALL).host}

    scores = 4 * FLOAT * 1024 * SMALL.vocab_size
    assert "logits of the custom loss" not in parts("entropies", "hidden_states")
    assert parts("logits")["logits of the custom loss"] == scores
    half = parts("logits", compute_dtype="bfloat16")["logits of the custom loss"]
    assert half == scores + 2 * FLOAT * SMALL.vocab_size * SMALL.hidden_size


def test_the_logits_of_a_loss_are_no_more_than_planned() -> None:
    """Of a cross-entropy on them, counted with all that its backward makes."""
    rows, width = 64, 32
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(4096, width, requires_grad=True)

    def run() -> None:
        logits = linear_logits(hidden, weight, temperature=0.7)
        (-logits.log_softmax(-1)[:, 3].sum()).backward()

    most = peak_allocated(run)
    assert most <= 4 * FLOAT * rows * 4096 + 2 * FLOAT * (rows + 4096) * width


PARALLEL_SIZES: dict[str, Any] = {
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


MIXTURE = ModelSizes(**PARALLEL_SIZES)


TOKENS = 512


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, whose process group is gone after the test."""
    yield Ranks()
    dist.destroy_process_group()


def made(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**PARALLEL_SIZES | {"num_hidden_layers": layers})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)


def parts(sizes: ModelSizes = MIXTURE, **how: Any) -> dict[str, int]:
    settings = RankTraining(ranks=8, tokens=TOKENS, trainable=parameter_count(sizes))
    return {one.what: one.bytes for one in training_parts(sizes, replace(settings, **how))}


def ids(count: int) -> list[int]:
    return torch.randint(0, PARALLEL_SIZES["vocab_size"], (count,)).tolist()


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
