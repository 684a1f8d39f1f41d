"""Every engine gives requests up when it is told to: at once, and without an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_requests import ask, assert_faithful, computed
from stepped import FakeLlm, SteppedEngine, completion, request

from composer_mesh.actors.engines import embedded
from composer_mesh.actors.engines.port import DuplicateRequest, Engine
from composer_mesh.actors.engines.vllm_engine import Limits, VllmEngine
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Make = Callable[[int], Engine]


def with_vllm(rows: int) -> VllmEngine:
    def sampling(asked: GenerationRequest) -> Any:
        count = asked.max_new_tokens
        return completion([9] * count, [("0", 0, count)])

    return VllmEngine(FakeLlm(), sampling, lambda _: None, Limits(64, 100, rows))


@pytest.fixture(params=["embedded", "vllm", "the fake of the tests"])
def make(request: Any, build_model: Any) -> Make:
    """Makes an engine for so many requests at once."""
    if request.param == "embedded":
        model = build_model(1)
        return lambda rows: embedded.Engine(model, rows, 64)
    return with_vllm if request.param == "vllm" else lambda rows: SteppedEngine(rows=rows)


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_an_aborted_request_frees_its_slot_and_is_never_answered(make: Make) -> None:
    engine, answered = make(2), list[str]()
    for name in "abc":
        engine.submit(request(name, new=5), lambda result: answered.append(result.request_id))
    engine.step()
    assert (engine.decoding, engine.outstanding) == (2, 3)
    engine.abort("a")
    assert engine.outstanding == 2
    engine.step()
    assert engine.decoding == 2
    drain(engine)
    assert answered == ["b", "c"]


def test_a_request_aborted_while_it_waits_is_never_admitted(make: Make) -> None:
    engine, seen = make(1), list[str]()
    for name in "abc":
        engine.submit(
            request(name),
            lambda result: seen.append(f"{result.request_id} is done"),
            lambda name=name: seen.append(f"{name} is admitted"),
        )
    engine.step()
    engine.abort("b")
    drain(engine)
    assert seen == ["a is admitted", "a is done", "c is admitted", "c is done"]


def test_aborting_what_is_unknown_or_answered_changes_nothing(make: Make) -> None:
    engine, answered = make(2), list[GenerationResult]()
    engine.abort("never")
    engine.submit(request("r"), answered.append)
    drain(engine)
    engine.abort("r")
    assert not engine.busy
    engine.submit(request("r"), answered.append)
    drain(engine)
    assert [result.request_id for result in answered] == ["r", "r"]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_id_may_be_submitted_again_and_is_answered_once(make: Make, steps: int) -> None:
    engine, old, new = make(2), list[GenerationResult](), list[GenerationResult]()
    engine.submit(request("r"), old.append)
    for _ in range(steps):
        engine.step()
    with pytest.raises(DuplicateRequest, match="r is under way already: abort it"):
        engine.submit(request("r"), new.append)
    engine.abort("r")
    engine.submit(request("r", new=4), new.append)
    drain(engine)
    assert (old, [len(result.token_ids) for result in new]) == ([], [4])


def test_an_engine_whose_requests_are_all_aborted_is_idle_after_a_step(make: Make) -> None:
    engine = make(2)
    for name in "abcde":
        engine.submit(request(name, new=50), lambda _: None)
    engine.step()
    for name in "abcde":
        engine.abort(name)
    assert (engine.step(), engine.busy, engine.outstanding, engine.decoding) == (0, False, 0, 0)


def test_requests_and_aborts_of_another_thread_are_each_heeded_once(make: Make) -> None:
    engine, answered = make(4), list[str]()
    names = [f"r{number}" for number in range(60)]
    submitted = threading.Event()

    def submit_and_abort() -> None:
        for number, name in enumerate(names):
            engine.submit(request(name), lambda result: answered.append(result.request_id))
            if number % 3 == 2:
                engine.abort(names[number - 1])
                engine.abort(name)
        submitted.set()

    thread = threading.Thread(target=submit_and_abort)
    thread.start()
    while not submitted.is_set() or engine.busy:
        engine.step()
    thread.join()
    assert len(answered) == len(set(answered))
    assert set(answered) >= {name for number, name in enumerate(names) if number % 3 == 0}
    assert (engine.outstanding, engine.decoding) == (0, 0)


def test_what_an_aborted_request_computed_is_reused(build_model: Any) -> None:
    model = build_model(1)
    engine, answered = embedded.Engine(model, 1, 64), list[GenerationResult]()
    prompt = list(range(30))
    engine.submit(ask("given up", prompt, new=20), answered.append)
    for _ in range(3):
        engine.step()
    engine.abort("given up")
    asked = ask("next", [*prompt, 7], new=2)
    with computed(model) as counts:
        engine.submit(asked, answered.append)
        drain(engine)
    assert counts == [1, 1]
    assert_faithful(model, asked, answered[0])


def test_a_closed_batch_without_an_aborted_member_is_the_batch_that_never_had_it(
    build_model: Any,
) -> None:
    """If it is aborted before the first step; one that took part has changed the others' bits."""
    model = build_model(1)
    batch = [ask(f"r{n}", [n, *range(n + 9)], seed=n) for n in range(6)]

    def served(given_up: str) -> list[GenerationResult]:
        engine, results = embedded.Engine(model, 3, 64), list[GenerationResult]()
        for asked in batch:
            if given_up or asked.request_id != "r2":
                engine.submit(asked, results.append)
        engine.abort(given_up)
        drain(engine)
        return results

    assert served("r2") == served("")
