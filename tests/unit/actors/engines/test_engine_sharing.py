"""What prompts have in common is computed once, and nobody can tell from the answers."""

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

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.rollouts.generation import GenerationRequest


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300) for _ in range(count)]


def busy_engine(model: Any, rng: random.Random, rows: int = 4, length: int = 128) -> Engine:
    """An engine with one long request under way."""
    engine = Engine(model, rows, length)
    put(engine, [ask("long", ids(rng, 3), new=100)], {})
    engine.step()
    return engine


def answered(engine: Engine, request: GenerationRequest) -> Any:
    """Serves a request beside what is under way."""
    results: Results = {}
    put(engine, [request], results)
    while not results:
        engine.step()
    return results[request.request_id]


def test_equal_prompts_are_computed_once(model: Any, rng: random.Random) -> None:
    prompt = ids(rng, 30)
    requests = [ask(f"r{seed}", prompt, seed=seed) for seed in range(6)]
    other = ask("other", ids(rng, 20), seed=9)
    engine = Engine(model, 8, 64)
    with computed(model) as counts:
        results = serve(engine, [*requests[:3], other, *requests[3:]])
    assert counts == [30 + 20, *[7] * 7]
    for asked in [*requests, other]:
        assert_faithful(model, asked, results[asked.request_id])
    assert len({tuple(result.token_ids) for result in results.values()}) == 7


def test_a_prompt_that_begins_like_a_running_one_is_computed_from_there(
    model: Any, rng: random.Random
) -> None:
    header, engine = ids(rng, 40), Engine(model, 4, 128)
    put(engine, [ask("first", [*header, 1, 2], new=60)], {})
    engine.step()
    with computed(model) as counts:
        asked = ask("second", [*header, 3, 4, 5])
        result = answered(engine, asked)
    assert counts[0] == 1 + 3
    assert_faithful(model, asked, result)


def test_the_next_turn_computes_only_what_is_new(model: Any, rng: random.Random) -> None:
    engine, prompt = busy_engine(model, rng), ids(rng, 30)
    for turn in range(3):
        asked = ask(f"turn-{turn}", list(prompt), new=5, seed=turn)
        with computed(model) as counts:
            result = answered(engine, asked)
        # The sampled token at a turn's end has never been through the model.
        assert counts[0] - 1 == (30 if turn == 0 else 1 + 10)
        assert_faithful(model, asked, result)
        prompt += result.token_ids + ids(rng, 10)


def test_a_prompt_that_is_known_whole_is_asked_again_from_its_last_token(
    model: Any, rng: random.Random
) -> None:
    engine, prompt = busy_engine(model, rng), ids(rng, 30)
    answered(engine, ask("first", prompt))
    with computed(model) as counts:
        asked = ask("again", prompt, seed=1)
        assert_faithful(model, asked, answered(engine, asked))
    assert counts[0] == 1 + 1


def test_what_was_left_longest_ago_makes_room_first(model: Any, rng: random.Random) -> None:
    engine = busy_engine(model, rng, rows=3)
    old, used, new = (ids(rng, 30) for _ in range(3))
    answered(engine, ask("old", old, new=1))
    answered(engine, ask("used", used, new=1))
    answered(engine, ask("new", new, new=1))
    for prompt, tokens in ((used, 1), (new, 1), (old, 30)):
        with computed(model) as counts:
            asked = ask("again", prompt, new=1)
            assert_faithful(model, asked, answered(engine, asked))
        assert counts[0] == 1 + tokens


def test_a_header_in_use_outlives_prompts_that_nobody_goes_on_from(
    model: Any, rng: random.Random
) -> None:
    engine, header = busy_engine(model, rng, rows=3), ids(rng, 30)
    for number in range(5):
        for prompt, new_tokens in (([*header, *ids(rng, 9)], 9), (ids(rng, 30), 30)):
            with computed(model) as counts:
                asked = ask("r", prompt, new=1)
                assert_faithful(model, asked, answered(engine, asked))
            assert number == 0 or counts[0] == 1 + new_tokens


def test_a_session_with_the_same_header_leaves_another_what_it_has(
    model: Any, rng: random.Random
) -> None:
    engine, header = busy_engine(model, rng), ids(rng, 20)
    one, other = [*header, *ids(rng, 10)], [*header, *ids(rng, 10)]
    for prompt, tokens in ((one, 30), (other, 10), ([*one, 7], 1), ([*other, 7], 1)):
        with computed(model) as counts:
            asked = ask("r", prompt, new=1)
            assert_faithful(model, asked, answered(engine, asked))
        assert counts[0] == 1 + tokens


def test_nothing_computed_with_old_weights_is_shared(build_model: Any, rng: random.Random) -> None:
    served, newer = build_model(1), build_model(2)
    engine, prompt = busy_engine(served, rng), ids(rng, 30)
    first = answered(engine, ask("first", prompt))
    engine.swap(Plain(1, newer.state_dict()))
    asked = ask("next", [*prompt, *first.token_ids, 5, 6])
    result = answered(engine, asked)
    assert result.versions == [1] * 8
    assert_faithful(newer, asked, result)


def test_a_swap_recomputes_what_running_requests_share_once(
    build_model: Any, rng: random.Random
) -> None:
    served, newer = build_model(1), build_model(2)
    prompt, results = ids(rng, 200), Results()
    engine = Engine(served, 8, 256)
    requests = [ask(f"r{seed}", prompt, new=12, seed=seed) for seed in range(8)]
    put(engine, requests, results)
    for _ in range(4):
        engine.step()
    with computed(served) as counts:
        engine.swap(Plain(1, newer.state_dict()))
    # The first forward takes 3 of 203 - 512 tokens are reached - and the others share with those.
    assert len(counts) == 2
    assert counts[0] == 3 * 203
    assert counts[1] <= 5 * 3
    while engine.busy:
        engine.step()
    for asked in requests:
        result = results[asked.request_id]
        assert result.versions == [0] * 4 + [1] * 8
        expected = replay_outcome(newer, asked.prompt_ids, result.token_ids)[4:]
        torch.testing.assert_close(torch.tensor(result.logprobs[4:]), expected, **CLOSE)


def test_an_idle_engine_has_forgotten_what_it_served(model: Any, rng: random.Random) -> None:
    header = ids(rng, 20)
    batch = [ask(f"r{n}", [*header, *ids(rng, n % 5)], seed=n) for n in range(12)]
    engine = Engine(model, 5, 64)
    with computed(model) as first:
        results = serve(engine, batch)
    with computed(model) as second:
        assert serve(engine, batch) == results
    assert first == second


@pytest.mark.parametrize("rows", [2, 3, 6, 16])
def test_sessions_of_many_turns_are_served_as_if_nothing_were_shared(
    model: Any, rng: random.Random, rows: int
) -> None:
    """Groups with a header in common, evictions, rows that move, swaps of nothing but a label."""
    engine, header = Engine(model, rows, 256), ids(rng, 12)
    questions = [header + ids(rng, rng.randint(1, 20)) for _ in range(4)]
    prompts = {f"{group}-{n}": list(questions[group]) for group in range(4) for n in range(3)}
    turns, results, asked = dict.fromkeys(prompts, 4), Results(), {}
    waiting = list(prompts)
    while waiting or engine.busy:
        rng.shuffle(waiting)
        for name in [waiting.pop() for _ in range(min(len(waiting), rng.randrange(4)))]:
            asked[name] = ask(name, list(prompts[name]), rng.randint(1, 9), rng.randrange(99))
            put(engine, [asked[name]], results)
        engine.step()
        for name, result in results.items():
            assert_faithful(model, asked[name], result)
            prompts[name] += result.token_ids + ids(rng, rng.randint(1, 9))
            turns[name] -= 1
        waiting += [name for name in results if turns[name]]
        results.clear()
    assert set(turns.values()) == {0}


def test_without_sharing_every_prompt_is_computed(model: Any, rng: random.Random) -> None:
    prompt = ids(rng, 30)
    requests = [ask(f"r{seed}", prompt, new=1, seed=seed) for seed in range(4)]
    engine = Engine(model, 8, 64, sharing=False)
    with computed(model) as counts:
        alone = serve(engine, requests)
    assert counts == [4 * 30]
    shared = serve(Engine(model, 8, 64), requests)
    for name, result in alone.items():
        assert result.token_ids == shared[name].token_ids


def test_prompts_join_until_a_forward_has_enough_tokens(model: Any, rng: random.Random) -> None:
    """A forward over more than the caches of a CPU hold takes longer than two."""
    engine, results = Engine(model, 8, 400), Results()
    put(engine, [ask(f"r{n}", ids(rng, 300), new=4, seed=n) for n in range(5)], results)
    with computed(model) as counts:
        sampled = [engine.step() for _ in range(3)]
    assert sampled == [2, 4, 5]
    assert counts == [600, 2 + 600, 4 + 300]
    while engine.busy:
        engine.step()
    assert len(results) == 5
