"""vLLM behind the port, with a stand-in for vLLM: names, labels, faults and the order of a swap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stepped import FakeLlm, Plain, completion, request

from composer_mesh.actors.engines.port import LogitsNotFinite, PromptTokens, RequestTooLong
from composer_mesh.actors.engines.vllm_engine import EngineFault, Limits, VllmEngine
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

LIMITS = Limits(length=16, vocabulary=100, concurrent=2)


def engine(llm: FakeLlm, **outputs: Any) -> VllmEngine:
    """An engine whose vLLM answers a request by what its id names here."""

    def sampling(asked: GenerationRequest) -> Any:
        return outputs[asked.request_id]

    return VllmEngine(llm, sampling, lambda weights: llm.calls.append("update"), LIMITS)


def serve(engine: VllmEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    for asked in requests:
        engine.submit(asked, results.append)
    while engine.busy:
        engine.step()
    return results


def test_each_token_has_the_version_of_its_span() -> None:
    spans = [("0", 0, 2), ("3", 2, 3), ("4", 3, 5)]
    served = engine(FakeLlm(), r=completion([9, 8, 7, 6, 5], spans))
    assert serve(served, request("r", new=5)) == [
        GenerationResult(
            "r", [9, 8, 7, 6, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], [0, 0, 3, 4, 4], "length"
        )
    ]


def test_a_stop_token_at_the_last_place_counts_as_a_stop() -> None:
    served = engine(FakeLlm(), r=completion([9, 8], [("0", 0, 2)], "length"))
    assert serve(served, request("r", new=2, stop=[8]))[0].stop_reason == "stop"


def test_requests_wait_here_until_vllm_has_a_free_slot() -> None:
    llm = FakeLlm()
    served = engine(llm, **{name: completion([9], [("0", 0, 1)]) for name in "abc"})
    results: list[GenerationResult] = []
    for name in "abc":
        served.submit(request(name), results.append)
    served.step()
    assert (len(llm.added), served.outstanding) == (2, 1)
    served.step()
    assert [one.request_id for one in results] == ["a", "b", "c"]


def test_the_tokens_that_vllm_had_cached_are_reported() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9], [("0", 0, 1)]))
    llm.cached = 4
    assert serve(served, request("r", [5] * 6))[0].cached_tokens == 4
    llm.cached = None
    assert serve(served, request("r", [5] * 6))[0].cached_tokens == 0
    assert served.prompt_tokens == PromptTokens(prompt=12, cached=4, computed=8)


def test_an_aborted_request_is_aborted_in_vllm_before_its_next_step() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9, 8, 7], [("0", 0, 3)]))
    served.submit(request("r"), lambda _: None)
    served.step()
    served.abort("r")
    assert served.step() == 0
    assert llm.calls[-1] == f"abort {llm.added[0][0]}"
    assert not served.busy


def test_prefixes_are_dropped_before_what_comes_next_unless_something_decodes() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9, 8], [("0", 0, 2)]), s=completion([9], [("0", 0, 1)]))
    served.drop_prefixes()
    served.submit(request("r"), lambda _: None)
    served.step()
    assert llm.calls == ["label 0", "reset False"]
    served.drop_prefixes()
    served.submit(request("s"), lambda _: None)
    served.step()
    assert llm.calls == ["label 0", "reset False"]


def test_what_comes_during_a_step_is_admitted_by_the_next() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9], [("0", 0, 1)]))
    results: list[GenerationResult] = []

    def ask_again(result: GenerationResult) -> None:
        results.append(result)
        if len(results) < 3:
            served.submit(request("r"), ask_again)

    served.submit(request("r"), ask_again)
    sampled = []
    while served.busy:
        assert served.outstanding == 1
        sampled.append(served.step())
    assert (len(results), sampled, served.outstanding) == (3, [1, 1, 1], 0)


def test_a_swap_puts_weights_in_then_drops_what_was_computed_then_labels() -> None:
    llm = FakeLlm()
    served = engine(llm)
    served.swap(Plain(5))
    assert llm.calls == ["label 0", "update", "reset True", "label 5"]
    assert served.version == 5


def test_a_cache_that_stays_under_new_weights_is_a_fault() -> None:
    llm = FakeLlm()
    llm.resets = False
    served = engine(llm)
    with pytest.raises(EngineFault, match="version 0 under the weights of version 5"):
        served.swap(Plain(5))
    assert served.version == 0


def test_an_idle_vllm_that_keeps_prefixes_it_should_drop_is_a_fault() -> None:
    llm = FakeLlm()
    llm.resets = False
    served = engine(llm)
    served.drop_prefixes()
    served.submit(request("r"), lambda _: None)
    with pytest.raises(EngineFault, match="though nothing decodes"):
        served.step()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (completion([9], [("0", 0, 1)], "abort"), "gave r up: abort"),
        (completion([9, 8], [("0", 0, 1)]), "2 tokens, 2 log-probs and 1 versions"),
    ],
)
def test_an_answer_that_should_never_be_is_a_fault(output: Any, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        serve(engine(FakeLlm(), r=output), request("r"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("r", [1] * 10, new=7), "needs 10 prompt and 7 new tokens but a row holds 16"),
        (GenerationRequest("r", [], 3, 1.0, 7, []), "has 0 prompt ids but needs at least one"),
        (request("r", [5, 100]), "all of them from 0 to 99"),
        (request("r", [5, -1]), "all of them from 0 to 99"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(
    asked: GenerationRequest, message: str
) -> None:
    served = engine(FakeLlm())
    with pytest.raises(ValueError, match=message) as caught:
        served.submit(asked, lambda _: None)
    assert isinstance(caught.value, RequestTooLong) == ("holds 16" in message)
    assert not served.busy


def test_closing_ends_the_workers() -> None:
    llm = FakeLlm()
    engine(llm).close()
    assert llm.calls[-1] == "shutdown"


def test_an_answer_without_finite_logits_fails_alone() -> None:
    broken = completion([9, 9], [("5", 0, 2)])
    broken.logprobs.logprobs[1] = float("nan")
    served = engine(FakeLlm(), bad=broken, good=completion([9], [("5", 0, 1)]))
    served.swap(Plain(5))
    found = serve(served, request("bad", new=2), request("good", new=1))
    assert {type(one) for one in found} == {LogitsNotFinite, GenerationResult}
    assert any("logits are not finite at version 5, in bad" in str(one) for one in found)
    assert served.outstanding == 0


def test_a_temperature_that_vllm_would_replace_is_refused() -> None:
    served = engine(FakeLlm())
    with pytest.raises(ValueError, match="whatever is lower"):
        served.submit(replace(request("r"), temperature=0.001), print)
