"""The embedded engine tells the experts of a mixture, reused, recomputed or new."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import Plain, ask, put
from mixture_runs import answers, chosen_by, intercepted, prompts_of, told_by
from model_families import family_model

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.actors.engines.embedded_requests import PromptLimits
from composer_mesh.actors.engines.port import ExpertsUnknown
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

SMALL_PIECES = PromptLimits(at_once=32, beside_decoding=8)


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
    engine = Engine(model, 4, 256, prefix_tokens=prefix_tokens, prompt_limits=limits)
    prompts = [*prompts_of(random.Random(0), 4), [7] * 90, [7] * 90]
    for prompt, result in zip(prompts, answers(engine, prompts), strict=True):
        assert_experts(mixture(tokenizer), prompt, result)


def test_a_prompt_whose_keys_are_reused_has_their_experts(model: Any, tokenizer: Any) -> None:
    engine, (prompt,) = Engine(model, 4, 512), prompts_of(random.Random(0), 1)
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
    engine, found = Engine(model, 4, 256), dict[str, GenerationResult]()
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
    (result,) = answers(Engine(model, 4, 256), [[5] * 20], start=None)
    assert result.experts is None
    dense = Engine(build_model(1), 4, 256)
    with pytest.raises(ExpertsUnknown, match="one asks for the experts of its tokens, which this"):
        dense.submit(GenerationRequest("one", [5], 3, 1.0, 0, [], experts_from=0), lambda _: None)
    put(dense, [ask("two", [5])], {})


@pytest.mark.parametrize("start", [-1, 20])
def test_experts_from_a_position_that_the_prompt_has_not_are_refused(
    model: Any, start: int
) -> None:
    asked = GenerationRequest("one", [5] * 20, 3, 1.0, 0, [], experts_from=start)
    with pytest.raises(ValueError, match=f"experts from position {start} on, .* from 0 to 19"):
        Engine(model, 2, 64).submit(asked, lambda _: None)


def test_the_engine_calls_layers_itself_for_a_mixture_too(model: Any, tmp_path: Path) -> None:
    assert Engine(model, 2, 64)._forward.direct
