"""The engine: batching, caching and swapping change nothing that a request can see."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from engine_requests import CLOSE, Plain, Results, put, serve

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.port import RequestTooLong
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.rollouts.generation import GenerationRequest

NEVER: list[int] = []


@pytest.fixture(scope="module")
def model(build_model: Any) -> Any:
    return build_model(1)


def request(
    name: str,
    prompt: list[int],
    *,
    new: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    stop: list[int] = NEVER,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, new, temperature, seed, stop)


def mixed(rng: random.Random, count: int, temperature: float | None = None) -> list[Any]:
    """Requests of different lengths, budgets, temperatures and seeds."""
    return [
        request(
            f"r{index}",
            [rng.randrange(300) for _ in range(rng.randint(1, 30))],
            new=rng.randint(1, 12),
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]) if temperature is None else temperature,
            seed=rng.randrange(1 << 40),
        )
        for index in range(count)
    ]


def drain(engine: EmbeddedEngine, results: Results) -> Results:
    while engine.busy:
        engine.step()
    return results


def forward(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of a plain Hugging Face forward."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def replayed_logprobs(model: Any, asked: GenerationRequest, tokens: list[int]) -> torch.Tensor:
    """Log-probs of the tokens after the prompt, by one forward over everything."""
    logits = forward(model, asked.prompt_ids + tokens)[len(asked.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / (asked.temperature or 1.0), -1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def assert_faithful(model: Any, requests: list[GenerationRequest], results: Results) -> None:
    assert set(results) == {one.request_id for one in requests}
    for asked in requests:
        result = results[asked.request_id]
        expected = replayed_logprobs(model, asked, result.token_ids)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, **CLOSE)


def test_greedy_tokens_are_those_of_decoding_each_request_alone_without_a_cache(
    model: Any, rng: random.Random
) -> None:
    requests = mixed(rng, 20, temperature=0.0)
    results = serve(EmbeddedEngine(model, rows=7, length=64), requests)
    for asked in requests:
        ids = list(asked.prompt_ids)
        for _ in range(asked.max_new_tokens):
            ids.append(int(forward(model, ids)[-1].argmax()))
        assert results[asked.request_id].token_ids == ids[len(asked.prompt_ids) :]
    assert_faithful(model, requests, results)


@pytest.mark.parametrize("rows", [1, 3, 16, 64])
def test_log_probs_are_those_of_a_full_forward_for_many_requests_at_once(
    model: Any, rng: random.Random, rows: int
) -> None:
    requests = mixed(rng, 40)
    results = serve(EmbeddedEngine(model, rows, length=64), requests)
    assert_faithful(model, requests, results)
    lengths = {len(result.token_ids) for result in results.values()}
    assert lengths == {one.max_new_tokens for one in requests}


def test_requests_that_join_while_others_run_are_served_the_same(
    model: Any, rng: random.Random
) -> None:
    requests, results = mixed(rng, 24), Results()
    engine, waiting = EmbeddedEngine(model, rows=5, length=64), list(requests)
    while engine.busy or waiting:
        joining = [waiting.pop() for _ in range(min(len(waiting), rng.randrange(3)))]
        put(engine, joining, results)
        engine.step()
    assert_faithful(model, requests, results)


def test_log_probs_are_those_of_the_trainers_padded_forward(model: Any, rng: random.Random) -> None:
    requests = mixed(rng, 12, temperature=0.7)
    results = serve(EmbeddedEngine(model, rows=5, length=64), requests)
    rows = [
        torch.tensor(asked.prompt_ids + results[asked.request_id].token_ids) for asked in requests
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor([len(row) for row in rows])[:, None]
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        trained = token_logprobs(logits[:, :-1], ids[:, 1:], 0.7)
    for asked, row in zip(requests, trained, strict=True):
        sampled = torch.tensor(results[asked.request_id].logprobs)
        first = len(asked.prompt_ids) - 1
        torch.testing.assert_close(row[first : first + len(sampled)], sampled, **CLOSE)


def test_what_a_seed_samples_does_not_depend_on_what_is_batched_beside_it(
    model: Any, rng: random.Random
) -> None:
    requests = mixed(rng, 16, temperature=1.0)
    together = serve(EmbeddedEngine(model, rows=16, length=64), requests)
    for asked in requests:
        alone = serve(EmbeddedEngine(model, rows=1, length=64), [asked])[asked.request_id]
        assert alone.token_ids == together[asked.request_id].token_ids


def test_different_seeds_sample_different_continuations(model: Any) -> None:
    requests = [request(f"r{seed}", [1, 2, 3], seed=seed) for seed in range(20)]
    results = serve(EmbeddedEngine(model, rows=20, length=64), requests)
    assert len({tuple(result.token_ids) for result in results.values()}) > 15


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_tokens_are_sampled_as_often_as_the_softmax_says(model: Any, temperature: float) -> None:
    draws, prompt = 4000, [5, 3, 9]
    requests = [
        request(f"r{seed}", prompt, new=1, temperature=temperature, seed=seed)
        for seed in range(draws)
    ]
    results = serve(EmbeddedEngine(model, rows=500, length=8), requests)
    counts = Counter(result.token_ids[0] for result in results.values())
    expected = draws * torch.softmax(forward(model, prompt)[-1].double() / temperature, -1)
    common = [token for token, times in enumerate(expected.tolist()) if times >= 5]
    observed = torch.tensor([counts[token] for token in common], dtype=torch.float64)
    wanted = expected[common]
    rest = (draws - float(observed.sum()), draws - float(wanted.sum()))
    statistic = (
        float(((observed - wanted) ** 2 / wanted).sum()) + (rest[0] - rest[1]) ** 2 / rest[1]
    )
    freedom = len(common)
    assert freedom > 10
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_stop_token_is_the_last_id_and_ends_the_request(model: Any, rng: random.Random) -> None:
    free = serve(EmbeddedEngine(model, rows=4, length=64), [request("free", [4, 2], new=20)])[
        "free"
    ]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    asked = request("stopped", [4, 2], new=20, stop=[399, stop])
    result = serve(EmbeddedEngine(model, rows=4, length=64), [*mixed(rng, 6), asked])["stopped"]
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.stop_reason == "stop"
    assert len(result.logprobs) == len(result.versions) == first + 1


def test_a_request_without_a_stop_ends_at_its_own_length(model: Any) -> None:
    requests = [request(f"r{new}", [1], new=new) for new in (1, 2, 9)]
    for name, result in serve(EmbeddedEngine(model, rows=2, length=64), requests).items():
        assert len(result.token_ids) == int(name[1:])
        assert result.stop_reason == "length"


def test_a_stop_at_the_last_allowed_token_counts_as_a_stop(model: Any) -> None:
    free = serve(EmbeddedEngine(model, rows=1, length=64), [request("r", [4, 2], new=3)])["r"]
    assert free.token_ids[2] not in free.token_ids[:2]
    asked = request("r", [4, 2], new=3, stop=[free.token_ids[2]])
    assert serve(EmbeddedEngine(model, rows=1, length=64), [asked])["r"].stop_reason == "stop"


def test_a_request_may_fill_its_row_to_the_last_token(model: Any, rng: random.Random) -> None:
    requests = [
        request(f"r{size}", [rng.randrange(300) for _ in range(size)], new=16 - size)
        for size in range(1, 16)
    ]
    assert_faithful(model, requests, serve(EmbeddedEngine(model, rows=4, length=16), requests))


def test_swapped_weights_label_and_explain_every_later_token(
    build_model: Any, rng: random.Random
) -> None:
    """Requests before, across and after two swaps, with rows that move in between."""
    versions = [build_model(seed) for seed in (1, 2, 3)]
    served, requests, results = build_model(1), mixed(rng, 30), Results()
    engine, waiting = EmbeddedEngine(served, rows=6, length=64), list(requests)
    for version in range(3):
        if version:
            weights = versions[version].state_dict()
            engine.swap(Plain(version, weights))
        put(engine, [waiting.pop() for _ in range(10)], results)
        for _ in range(5):
            engine.step()
    drain(engine, results)
    across = 0
    for asked in requests:
        result = results[asked.request_id]
        assert result.versions == sorted(result.versions)
        across += len(set(result.versions)) > 1
        expected = torch.stack([replayed_logprobs(m, asked, result.token_ids) for m in versions])
        labelled = expected[torch.tensor(result.versions), torch.arange(len(result.versions))]
        torch.testing.assert_close(torch.tensor(result.logprobs), labelled, **CLOSE)
    assert across >= 4


def test_a_swap_drops_no_request_and_needs_none(build_model: Any) -> None:
    engine, other = EmbeddedEngine(build_model(1), rows=2, length=64), build_model(2).state_dict()
    engine.swap(Plain(4, other))
    result = serve(engine, [request("r", [1, 2])])["r"]
    assert result.versions == [4] * 8
    torch.testing.assert_close(
        torch.tensor(result.logprobs),
        replayed_logprobs(build_model(2), request("r", [1, 2]), result.token_ids),
        **CLOSE,
    )


def test_the_same_closed_batch_gives_the_same_bits(model: Any, rng: random.Random) -> None:
    requests = mixed(rng, 24)
    first = serve(EmbeddedEngine(model, rows=9, length=64), requests)
    used = EmbeddedEngine(model, rows=9, length=64)
    serve(used, mixed(rng, 11))
    used.drop_prefixes()
    assert serve(EmbeddedEngine(model, rows=9, length=64), requests) == first
    assert serve(used, requests) == first


def test_a_request_that_does_not_fit_is_refused_with_the_repair(model: Any) -> None:
    engine = EmbeddedEngine(model, rows=1, length=16)
    message = (
        "r needs 10 prompt and 7 new tokens but a row holds 16: raise policy.max_context or lower "
        "generator.max_new_tokens"
    )
    with pytest.raises(RequestTooLong, match=message):
        engine.submit(request("r", [1] * 10, new=7), lambda result: None)
    assert not engine.busy


def test_outstanding_counts_what_waits_and_what_runs(model: Any) -> None:
    engine = EmbeddedEngine(model, rows=2, length=64)
    put(engine, [request(f"r{n}", [1, 2], new=2) for n in range(5)], {})
    counts = [engine.outstanding]
    while engine.busy:
        engine.step()
        counts.append(engine.outstanding)
    assert counts[0] == 5
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert engine.step() == 0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_keys_and_values_are_served_faithfully(
    build_config: Any, tokenizer: Any, rng: random.Random, kv_heads: int
) -> None:
    from composer_mesh.actors.models import policy

    config = build_config(policy={"kv_heads": kv_heads, "layers": 1, "hidden_size": 16})
    model = policy.build_model(config.policy, tokenizer, seed=kv_heads).eval()
    requests = mixed(rng, 10)
    assert_faithful(model, requests, serve(EmbeddedEngine(model, rows=3, length=64), requests))
