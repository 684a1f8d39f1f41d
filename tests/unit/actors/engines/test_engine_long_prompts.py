"""Long prompts of the embedded engine: computed in pieces, beside requests that decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_requests import (
    CLOSE,
    Plain,
    Results,
    ask,
    assert_faithful,
    computed,
    put,
    replay_outcome,
    serve,
)
from repetition import crossed

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.embedded_requests import LongPrompt, PromptLimits

LIMITS = PromptLimits(at_once=32, during_decoding=8)


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def engine_of(model: Any, rows: int = 4, prefix_tokens: int | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(model, rows, 256, prefix_tokens=prefix_tokens, prompt_limits=LIMITS)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300) for _ in range(count)]


def test_pieces_are_small_beside_others_and_larger_alone() -> None:
    prompt = LongPrompt("r", row=3, length=100, computed=90)
    assert prompt.next_piece(LIMITS, [10, 10]) == range(90, 98)
    assert prompt.next_piece(LIMITS, []) == range(90, 100)
    assert LongPrompt("r", 3, 100, 0).next_piece(LIMITS, []) == range(32)


def test_pieces_beside_others_become_shorter_as_tokens_take_longer() -> None:
    limits = PromptLimits(at_once=512, during_decoding=120, doubled_at=1000)
    starts = (0, 1000, 5000, 10**6)
    assert [limits.piece_during_decoding(one) for one in starts] == [120, 60, 20, 8]
    assert PromptLimits(512, 120).piece_during_decoding(10**6) == 120


def test_steps_of_others_follow_a_piece_until_they_took_as_long() -> None:
    limits = PromptLimits(at_once=512, during_decoding=120, doubled_at=1000, step_tokens=8)
    assert limits.steps_for(range(120), [0, 0]) == 12
    assert limits.steps_for(range(120), [1000, 4000]) == 8
    assert limits.steps_for(range(1000, 1060), [0, 0]) == 12
    assert limits.steps_for(range(4), [0, 0]) == 1
    assert PromptLimits(512, 120).steps_for(range(120), [0, 0]) == 1
    prompt = LongPrompt("r", row=3, length=1000, computed=0)
    prompt.next_piece(limits, [0, 0])
    assert [prompt.rests(True) for _ in range(12)] == [True] * 11 + [False]
    prompt.next_piece(limits, [0, 0])
    assert not prompt.rests(False)


def test_steps_between_pieces_change_no_answer(model: Any, rng: random.Random) -> None:
    limits = PromptLimits(at_once=32, during_decoding=8, step_tokens=2)
    engine, results = EmbeddedEngine(model, 4, 256, prompt_limits=limits), Results()
    others = [ask(str(number), ids(rng, 10), new=60) for number in range(2)]
    long = ask("long", ids(rng, 120), new=5)
    put(engine, others, results)
    engine.step()
    put(engine, [long], results)
    with computed(model) as tokens:
        while engine.busy:
            engine.step()
    assert tokens[:4] == [10, 2, 10, 2]
    for asked in (*others, long):
        assert_faithful(model, asked, results[asked.request_id])


def test_a_token_takes_twice_as_long_where_attention_multiplies_as_much_as_the_weights(
    model: Any,
) -> None:
    config = model.config
    matrices = [one for one in model.model.layers.parameters() if one.dim() == 2]
    at = PromptLimits.of(model).doubled_at
    attended = 2 * at * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert attended == pytest.approx(sum(one.numel() for one in matrices), rel=0.05)


@pytest.mark.parametrize("prefix_tokens", [None, 0])
def test_others_decode_in_every_step_while_a_long_prompt_is_computed(
    model: Any, rng: random.Random, prefix_tokens: int | None
) -> None:
    engine, results = engine_of(model, prefix_tokens=prefix_tokens), Results()
    others = [ask(str(number), ids(rng, 10), new=60) for number in range(2)]
    long = ask("long", ids(rng, 120), new=5)
    put(engine, others, results)
    engine.step()
    put(engine, [long], results)
    sampled = []
    with computed(model) as tokens:
        while "long" not in results:
            sampled.append(engine.step())
    assert sampled == [2] * 14 + [3] * 5
    assert max(tokens) == LIMITS.during_decoding + 2
    assert sum(tokens) == 2 * len(sampled) + 120 + 4
    while engine.busy:
        engine.step()
    for asked in (*others, long):
        assert_faithful(model, asked, results[asked.request_id])


def test_a_long_prompt_alone_takes_as_few_forwards_as_the_limit_allows(
    model: Any, rng: random.Random
) -> None:
    engine, asked = engine_of(model), ask("long", ids(rng, 100), new=3)
    with computed(model) as tokens:
        results = serve(engine, [asked])
    assert tokens == [32, 32, 32, 4, 1, 1]
    assert_faithful(model, asked, results["long"])


@pytest.mark.parametrize(("seed", "prefix_tokens"), crossed(range(3), [None, 0, 40]))
def test_any_mixture_of_prompts_is_served_faithfully(
    model: Any, seed: int, prefix_tokens: int | None
) -> None:
    rng = random.Random(seed)
    header = ids(rng, 50)
    engine, results = engine_of(model, rng.randint(1, 5), prefix_tokens), Results()
    asked = []
    for number in range(12):
        prompt = rng.choice([header, []]) + ids(rng, rng.randint(1, 120))
        again = [prompt] * rng.choice([1, 1, 3])
        asked += [ask(f"{number}-{n}", one, rng.randint(1, 20), n) for n, one in enumerate(again)]
    rng.shuffle(asked)
    for one in asked:
        put(engine, [one], results)
        for _ in range(rng.randint(0, 4)):
            engine.step()
    while engine.busy:
        engine.step()
    assert results.keys() == {one.request_id for one in asked}
    for one in asked:
        assert_faithful(model, one, results[one.request_id])


def test_a_second_long_prompt_waits_and_short_ones_pass_it(model: Any, rng: random.Random) -> None:
    engine, results = engine_of(model), Results()
    first, second = (ask(name, ids(rng, 100), new=2) for name in ("first", "second"))
    short = ask("short", ids(rng, 10), new=2)
    put(engine, [first, second, short], results)
    while engine.busy:
        engine.step()
    assert list(results) == ["short", "first", "second"]


def test_equal_long_prompts_are_computed_once(model: Any, rng: random.Random) -> None:
    prompt = ids(rng, 100)
    asked = [ask(str(seed), prompt, new=4, seed=seed) for seed in range(3)]
    engine = engine_of(model)
    results = serve(engine, asked)
    assert engine.prompt_tokens.computed == 100
    assert [results[str(seed)].cached_tokens for seed in range(3)] == [0, 100, 100]
    for one in asked:
        assert_faithful(model, one, results[one.request_id])


def test_a_long_prompt_that_is_aborted_frees_its_row_and_its_pieces_are_reused(
    model: Any, rng: random.Random
) -> None:
    engine, results = engine_of(model, rows=1), Results()
    prompt = ids(rng, 100)
    put(engine, [ask("given up", prompt)], results)
    engine.step()
    engine.step()
    engine.abort("given up")
    again = ask("again", prompt, new=3)
    put(engine, [again], results)
    while engine.busy:
        engine.step()
    assert results.keys() == {"again"}
    assert results["again"].cached_tokens == 64
    assert_faithful(model, again, results["again"])


def test_new_weights_begin_a_long_prompt_again(build_model: Any, rng: random.Random) -> None:
    served, newer = build_model(1), build_model(2)
    engine, results = engine_of(served), Results()
    asked = ask("long", ids(rng, 100), new=6)
    put(engine, [asked], results)
    engine.step()
    engine.step()
    engine.swap(Plain(1, newer.state_dict()))
    while engine.busy:
        engine.step()
    found = results["long"]
    assert found.versions == [1] * 6
    expected = replay_outcome(newer, list(asked.prompt_ids), found.token_ids)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, **CLOSE)
    assert engine.prompt_tokens.computed == 64 + 100
