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

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.port import PromptTokens
from composer_mesh.rollouts.generation import GenerationRequest


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300) for _ in range(count)]


def busy_engine(model: Any, rng: random.Random, rows: int = 4, length: int = 128) -> EmbeddedEngine:
    """An engine with one long request under way."""
    engine = EmbeddedEngine(model, rows, length)
    put(engine, [ask("long", ids(rng, 3), new=100)], {})
    engine.step()
    return engine


def answered(engine: EmbeddedEngine, request: GenerationRequest) -> Any:
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
    engine = EmbeddedEngine(model, 8, 64)
    with computed(model) as counts:
        results = serve(engine, [*requests[:3], other, *requests[3:]])
    assert counts == [30 + 20, *[7] * 7]
    for asked in [*requests, other]:
        assert_faithful(model, asked, results[asked.request_id])
    assert len({tuple(result.token_ids) for result in results.values()}) == 7


def test_a_prompt_that_begins_like_a_running_one_is_computed_from_there(
    model: Any, rng: random.Random
) -> None:
    header, engine = ids(rng, 40), EmbeddedEngine(model, 4, 128)
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


def test_what_was_used_longest_ago_makes_room_first(model: Any, rng: random.Random) -> None:
    engine = EmbeddedEngine(model, rows=2, length=64, prefix_tokens=95)
    old, used, new = (ids(rng, 30) for _ in range(3))
    answered(engine, ask("used", used, new=1))
    answered(engine, ask("old", old, new=1))
    answered(engine, ask("again", used, new=1))
    answered(engine, ask("new", new, new=1))
    answered(engine, ask("more", ids(rng, 30), new=1))
    for prompt, tokens in ((used, 1), (new, 1), (old, 30)):
        with computed(model) as counts:
            asked = ask("again", prompt, new=1)
            assert_faithful(model, asked, answered(engine, asked))
        assert counts[0] == tokens


def test_no_more_tokens_are_kept_than_the_bound_says(model: Any, rng: random.Random) -> None:
    engine = EmbeddedEngine(model, rows=4, length=128, prefix_tokens=100)
    header = ids(rng, 20)
    for number in range(12):
        asked = ask("r", header * (number % 2) + ids(rng, 40 + number), new=9, seed=number)
        assert_faithful(model, asked, answered(engine, asked))
        assert engine.prefixes_kept <= 100
    assert engine.prefixes_kept > 50


def test_a_header_in_use_outlives_prompts_that_nobody_goes_on_from(
    model: Any, rng: random.Random
) -> None:
    engine, header = EmbeddedEngine(model, rows=2, length=64, prefix_tokens=80), ids(rng, 30)
    for number in range(5):
        for prompt, new_tokens in (([*header, *ids(rng, 9)], 9), (ids(rng, 30), 30)):
            with computed(model) as counts:
                asked = ask("r", prompt, new=1)
                assert_faithful(model, asked, answered(engine, asked))
            assert number == 0 or counts[0] == new_tokens


def test_prefixes_survive_that_the_engine_is_idle_between_turns(
    model: Any, rng: random.Random
) -> None:
    engine, prompt = EmbeddedEngine(model, rows=2, length=256), ids(rng, 30)
    for turn in range(4):
        asked = ask("turn", list(prompt), new=5, seed=turn)
        with computed(model) as counts:
            result = answered(engine, asked)
        assert not engine.busy
        assert counts == [30 if turn == 0 else 1 + 10, *[1] * 4]
        assert result.cached_tokens == (0 if turn == 0 else len(prompt) - 11)
        assert_faithful(model, asked, result)
        prompt += result.token_ids + ids(rng, 10)


def test_more_sessions_than_rows_lose_no_prefix(model: Any, rng: random.Random) -> None:
    engine = EmbeddedEngine(model, rows=3, length=128, prefix_tokens=2000)
    prompts = [ids(rng, 20) for _ in range(20)]
    for turn in range(3):
        asked = [ask(f"{n}", list(prompt), new=4, seed=n) for n, prompt in enumerate(prompts)]
        before = engine.prompt_tokens.computed
        results = serve(engine, asked)
        assert engine.prompt_tokens.computed - before == 20 * (20 if turn == 0 else 1 + 6)
        for one, prompt in zip(asked, prompts, strict=True):
            assert_faithful(model, one, results[one.request_id])
            prompt += results[one.request_id].token_ids + ids(rng, 6)


def test_samples_of_a_group_that_arrive_one_by_one_compute_the_prompt_once(
    model: Any, rng: random.Random
) -> None:
    engine, prompt, results = EmbeddedEngine(model, rows=2, length=128), ids(rng, 40), Results()
    requests = [ask(f"r{seed}", prompt, seed=seed) for seed in range(8)]
    for asked in requests:
        put(engine, [asked], results)
        engine.step()
    while engine.busy:
        engine.step()
    assert engine.prompt_tokens == PromptTokens(prompt=320, cached=320 - 47, computed=40 + 7)
    assert [results[one.request_id].cached_tokens for one in requests] == [0, *[39] * 7]
    for asked in requests:
        assert_faithful(model, asked, results[asked.request_id])


def test_a_header_of_prompts_that_join_together_is_computed_once(
    model: Any, rng: random.Random
) -> None:
    header = ids(rng, 30)
    requests = [ask(f"r{n}", [*header, *ids(rng, 5)], seed=n) for n in range(4)]
    other, engine, results = (
        ask("other", ids(rng, 20), seed=9),
        EmbeddedEngine(model, 8, 64),
        Results(),
    )
    put(engine, [*requests, other], results)
    with computed(model) as counts:
        engine.step()
        engine.step()
    assert counts == [35 + 20, 2 + 3 * 5]
    while engine.busy:
        engine.step()
    for asked in [*requests, other]:
        assert_faithful(model, asked, results[asked.request_id])


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
    engine = EmbeddedEngine(served, 8, 256)
    requests = [ask(f"r{seed}", prompt, new=12, seed=seed) for seed in range(8)]
    put(engine, requests, results)
    for _ in range(4):
        engine.step()
    with computed(served) as counts:
        engine.swap(Plain(1, newer.state_dict()))
    # The others wait for the first one's keys; what they sampled differs.
    assert len(counts) == 2
    assert counts[0] == 203
    assert counts[1] <= 7 * 3
    while engine.busy:
        engine.step()
    for asked in requests:
        result = results[asked.request_id]
        assert result.versions == [0] * 4 + [1] * 8
        expected = replay_outcome(newer, asked.prompt_ids, result.token_ids)[4:]
        torch.testing.assert_close(torch.tensor(result.logprobs[4:]), expected, **CLOSE)


def test_sets_of_requests_after_a_drop_give_the_same_bits_again(
    model: Any, rng: random.Random
) -> None:
    """Each set but the first follows the answers to the one before and reuses its prefixes."""
    header, engine = ids(rng, 20), EmbeddedEngine(model, 5, 128)
    starts = [[*header, *ids(rng, n % 5)] for n in range(12)]
    news = [[ids(rng, 6) for _ in starts] for _ in range(3)]

    def turns() -> list[Results]:
        engine.drop_prefixes()
        prompts, sets = [list(prompt) for prompt in starts], list[Results]()
        for new in news:
            asked = [ask(f"{n}", list(prompt), seed=n) for n, prompt in enumerate(prompts)]
            sets.append(serve(engine, asked))
            for n, prompt in enumerate(prompts):
                prompt += sets[-1][f"{n}"].token_ids + new[n]
        return sets

    with computed(model) as first:
        sets = turns()
    serve(engine, [ask(f"{n}", [*header, *ids(rng, 9)], seed=n) for n in range(4)])
    with computed(model) as second:
        assert turns() == sets
    assert first == second
    assert sum(result.cached_tokens for result in sets[-1].values()) > 12 * 30


@pytest.mark.parametrize(
    ("rows", "kept"), [(2, 30), (3, 150), (6, 400), (2, None), (16, None), (3, 0)]
)
def test_sessions_of_many_turns_are_served_as_if_nothing_were_shared(
    model: Any, rng: random.Random, rows: int, kept: int | None
) -> None:
    """Groups with a header in common, evictions, rows that move, requests that are given up."""
    engine, header = EmbeddedEngine(model, rows, 256, prefix_tokens=kept), ids(rng, 12)
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
        given_up = rng.choice(list(asked))
        if rng.random() < 0.2 and given_up not in results and given_up not in waiting:
            engine.abort(given_up)
            if turns[given_up]:
                waiting.append(given_up)
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
    engine = EmbeddedEngine(model, 8, 64, prefix_tokens=0)
    with computed(model) as counts:
        alone = serve(engine, requests)
    assert counts == [4 * 30]
    shared = serve(EmbeddedEngine(model, 8, 64), requests)
    for name, result in alone.items():
        assert result.token_ids == shared[name].token_ids


def test_prompts_join_until_a_forward_has_enough_tokens(model: Any, rng: random.Random) -> None:
    """A forward over more than the caches of a CPU hold takes longer than two."""
    engine, results = EmbeddedEngine(model, 8, 400), Results()
    put(engine, [ask(f"r{n}", ids(rng, 300), new=4, seed=n) for n in range(5)], results)
    with computed(model) as counts:
        sampled = [engine.step() for _ in range(3)]
    assert sampled == [2, 4, 5]
    assert counts == [600, 2 + 600, 4 + 300]
    while engine.busy:
        engine.step()
    assert len(results) == 5
