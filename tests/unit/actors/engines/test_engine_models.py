"""Which Hugging Face models the embedded engine serves: rightly, or not at all.

Generators that get adapters alone serve what the trainer computes.

The embedded engine tells the experts of a mixture, reused, recomputed or new.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_requests import Plain, ask, assert_faithful, put, replay_outcome, serve
from mixture_runs import answers, chosen_by, intercepted, prompts_of, told_by
from model_families import family_model
from pydantic import ValidationError
from step_batches import batch_of
from torch import Tensor

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.embedded_forward import PackedForward
from composer_mesh.actors.engines.embedded_requests import PromptLimits
from composer_mesh.actors.engines.kv_cache import RowCache
from composer_mesh.actors.engines.port import ExpertsUnknown, make_engine
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.mesh.weights.manifest import Entry, WeightManifest, WeightsMismatch
from composer_mesh.planning.model_refusals import ModelNotServed
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


AFMOE = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "sliding_window": 128,
}


GRANITE = {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}


def build(family: str, **settings: Any) -> Any:
    """A tiny model of a family, its predictions sharp and dependent on context."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.3)
    return model.eval()


def requests_of(rng: random.Random) -> list[Any]:
    header = [rng.randrange(120) for _ in range(12)]
    prompts = [header + [rng.randrange(120) for _ in range(rng.randint(0, 9))] for _ in range(7)]
    return [ask(f"r{n}", prompt, rng.randint(1, 9), n) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("family", "settings", "direct"),
    [
        ("Llama", {}, True),
        ("Qwen2", {}, True),
        ("Gemma", {"head_dim": 16}, True),
        ("Phi3", {}, True),
        ("Mixtral", {"num_local_experts": 4}, True),
        ("Granite", GRANITE, False),
        ("Cohere", {}, False),
        ("Afmoe", AFMOE, True),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, False),
    ],
)
def test_a_model_is_called_layer_by_layer_only_where_that_is_all_its_forward_does(
    rng: random.Random, family: str, settings: dict[str, Any], direct: bool
) -> None:
    model = build(family, **settings)
    forward = PackedForward(model, RowCache(2, 1, 16))
    assert forward.direct is direct
    requests = requests_of(rng)
    results = serve(EmbeddedEngine(model, 3, 64), requests)
    for asked in requests:
        assert_faithful(model, asked, results[asked.request_id])


@pytest.mark.parametrize("family", ["Falcon", "StableLm"])
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_attention_is_its_own_is_refused_with_the_repair(family: str) -> None:
    with pytest.raises(
        ModelNotServed, match=f'{family}ForCausalLM.*set generator.engine to "vllm"'
    ):
        EmbeddedEngine(build(family), 3, 64)


SOUND_PROBE = PackedForward._probe


def wrong_at_the_end(forward: PackedForward, tokens: torch.Tensor) -> torch.Tensor:
    logits = SOUND_PROBE(forward, tokens)
    return torch.cat([logits[:-1], logits[:1]])


def test_rounding_that_a_large_vocabulary_makes_far_is_served_and_a_wrong_position_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("Qwen2", vocab_size=20_000).bfloat16()
    probe = PackedForward._probe

    def rounded(forward: PackedForward, tokens: torch.Tensor) -> torch.Tensor:
        logits = probe(forward, tokens)
        return logits + 0.03 * logits.std() * torch.randn(logits.shape)

    monkeypatch.setattr(PackedForward, "_probe", rounded)
    EmbeddedEngine(model, 3, 64)
    monkeypatch.setattr(PackedForward, "_probe", wrong_at_the_end)
    with pytest.raises(ModelNotServed, match=r"a root mean square, and 0\.1 are allowed"):
        EmbeddedEngine(model, 3, 64)


def test_rounding_of_many_layers_is_served_as_far_as_that_of_the_models_own_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("Llama", num_hidden_layers=40).bfloat16()
    EmbeddedEngine(model, 3, 64)
    monkeypatch.setattr(PackedForward, "_probe", wrong_at_the_end)
    with pytest.raises(ModelNotServed, match=r"a root mean square, and 0\.3 are allowed"):
        EmbeddedEngine(model, 3, 64)


def test_a_model_that_looks_back_less_than_a_row_is_refused() -> None:
    model = build("Mistral", sliding_window=32)
    EmbeddedEngine(model, 3, 32)
    with pytest.raises(ModelNotServed, match="looks back 32 tokens but a row has 33"):
        EmbeddedEngine(model, 3, 33)


def test_layers_of_different_shapes_are_refused() -> None:
    cache = RowCache(2, 3, 8)
    cache.aim(torch.tensor([[0], [0]]))
    cache.write(0, torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match="layer 1 has 1 key heads of width 4 and layer 0 has 2 of"):
        cache.write(1, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))


def test_a_served_model_answers_others_as_before(rng: random.Random) -> None:
    model = build("Llama")
    ids = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.inference_mode():
        before = model(input_ids=ids, attention_mask=mask).logits
        serve(EmbeddedEngine(model, 3, 64), requests_of(rng))
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_bfloat16_weights_are_sampled_from_in_float32(rng: random.Random) -> None:
    model = build("Qwen2").to(torch.bfloat16)
    requests = requests_of(rng)
    results = serve(EmbeddedEngine(model, 3, 64), requests)
    for asked in requests:
        result = results[asked.request_id]
        away = torch.tensor(result.logprobs) - replay_outcome(
            model, asked.prompt_ids, result.token_ids
        )
        assert away.abs().max() < 0.2
        assert torch.tensor(result.logprobs).bfloat16().tolist() != result.logprobs


LORA = {"rank": 4, "sync": "adapters"}


pytest.importorskip("peft", exc_type=ModuleNotFoundError)


@dataclass(frozen=True)
class Published:
    """Tensors of a version, that fill what a manifest of them finds in a model."""

    version: int
    state: dict[str, Tensor]

    @property
    def manifest(self) -> WeightManifest:
        found = ((name, one) for name, one in self.state.items())
        return WeightManifest(
            tuple(Entry((name,), tuple(one.shape), one.dtype) for name, one in found)
        )

    @torch.no_grad()
    def apply(self, model: Any, rate: float = 1.0) -> None:
        for places, one in zip(self.manifest.places(model), self.state.values(), strict=True):
            for place in places:
                place.copy_(one)

    def tensors(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def test_an_engine_that_gets_adapters_alone_serves_the_trained_policy(
    folder: Path, build_config: Any
) -> None:
    config = build_config(trainer={"lora": LORA, "lr": 1e-2}, policy={"path": folder})
    learner, engine = Learner(config, folder, Ranks()), make_engine(config, folder)
    assert isinstance(engine, EmbeddedEngine)
    learner.train(batch_of(load_model(folder), random.Random(0)), None)
    published = learner.published()
    assert all(".lora_" in name for name in published)
    moved = sum(one.nbytes for one in published.values())
    assert moved < 0.2 * sum(one.nbytes for one in learner.export().values())
    engine.swap(Published(1, published))
    merged = load_model(folder)
    merged.load_state_dict(learner.export())
    asked = ask("one", [5, 6, 7, 8], new=20)
    result = serve(engine, [asked])["one"]
    assert result.versions == [1] * len(result.token_ids)
    assert_faithful(merged, asked, result)


def test_adapters_of_another_rank_and_missing_ones_are_refused(
    folder: Path, build_config: Any
) -> None:
    config = build_config(trainer={"lora": LORA}, policy={"path": folder})
    published = Learner(config, folder, Ranks()).published()
    other = build_config(trainer={"lora": {**LORA, "rank": 2}}, policy={"path": folder})
    engine = make_engine(other, folder)
    with pytest.raises(WeightsMismatch, match="lora_A"):
        engine.swap(Published(1, published))
    first = next(iter(published))
    published.pop(first)
    with pytest.raises(WeightsMismatch, match=f"{first} is missing in the published weights"):
        make_engine(config, folder).swap(Published(1, published))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"sdpo": {"alpha": 0.1}}, "but sdpo.placement is of a kind that takes whole weights"),
    ],
)
def test_receivers_of_whole_weights_are_refused(
    sections: dict[str, Any], why: str, build_config: Any
) -> None:
    with pytest.raises(ValidationError, match=why):
        build_config(trainer={"lora": LORA}, **sections)


SMALL_PIECES = PromptLimits(at_once=32, during_decoding=8)


def mixture(tokenizer: Any) -> Any:
    return intercepted(family_model("qwen3_moe", tokenizer))


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return mixture(tokenizer)


def assert_experts(plain: Any, prompt: list[int], result: GenerationResult, start: int = 0) -> None:
    wanted = chosen_by(plain, [*prompt, *result.token_ids])[start:-1]
    assert torch.equal(told_by(result), wanted)


@pytest.mark.parametrize("prefix_tokens", [None, 0])
@pytest.mark.parametrize("limits", [None, SMALL_PIECES])
def test_experts_of_all_computed_positions_are_those_of_a_plain_forward(
    model: Any, tokenizer: Any, prefix_tokens: int | None, limits: PromptLimits | None
) -> None:
    engine = EmbeddedEngine(model, 4, 256, prefix_tokens=prefix_tokens, prompt_limits=limits)
    prompts = [*prompts_of(random.Random(0), 4), [7] * 90, [7] * 90]
    for prompt, result in zip(prompts, answers(engine, prompts), strict=True):
        assert_experts(mixture(tokenizer), prompt, result)


def test_a_prompt_whose_keys_are_reused_has_their_experts(model: Any, tokenizer: Any) -> None:
    engine, (prompt,) = EmbeddedEngine(model, 4, 512), prompts_of(random.Random(0), 1)
    (first,) = answers(engine, [prompt])
    later = [*prompt, *first.token_ids, 9, 8, 7]
    (second,) = answers(engine, [later], start=len(prompt) + len(first.token_ids) - 1)
    assert second.cached_tokens >= len(later) - 8
    assert_experts(mixture(tokenizer), later, second, len(prompt) + len(first.token_ids) - 1)
    assert first.experts is not None
    assert first.experts.positions == len(prompt) + len(first.token_ids) - 1


def test_after_new_weights_the_experts_are_those_of_the_recomputed_keys(
    model: Any, tokenizer: Any
) -> None:
    engine, found = EmbeddedEngine(model, 4, 256), dict[str, GenerationResult]()
    other = mixture(tokenizer)
    with torch.no_grad():
        for weights in other.parameters():
            weights.mul_(1.1)
    request = GenerationRequest("one", [5] * 20, 30, 1.0, 0, [], experts_from=0)
    put(engine, [request], found)
    for _ in range(10):
        engine.step()
    engine.swap(Plain(1, other.state_dict()))
    while engine.busy:
        engine.step()
    assert_experts(other, [5] * 20, found["one"])


def test_experts_are_told_only_where_they_are_asked_for(model: Any, build_model: Any) -> None:
    (result,) = answers(EmbeddedEngine(model, 4, 256), [[5] * 20], start=None)
    assert result.experts is None
    dense = EmbeddedEngine(build_model(1), 4, 256)
    with pytest.raises(ExpertsUnknown, match="one requests the experts of its tokens, which this"):
        dense.submit(GenerationRequest("one", [5], 3, 1.0, 0, [], experts_from=0), lambda _: None)
    put(dense, [ask("two", [5])], {})


@pytest.mark.parametrize("start", [-1, 20])
def test_experts_from_a_position_that_the_prompt_has_not_are_refused(
    model: Any, start: int
) -> None:
    asked = GenerationRequest("one", [5] * 20, 3, 1.0, 0, [], experts_from=start)
    with pytest.raises(ValueError, match=f"experts from position {start} on, .* from 0 to 19"):
        EmbeddedEngine(model, 2, 64).submit(asked, lambda _: None)


def test_the_engine_calls_layers_itself_for_a_mixture_too(model: Any, tmp_path: Path) -> None:
    assert EmbeddedEngine(model, 2, 64)._forward.direct
