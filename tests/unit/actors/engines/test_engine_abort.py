"""Every engine gives requests up when it is told to: at once, and without an answer.

The generator actor: who gives a request up frees its place, and closed batches repeat.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from engine_requests import ask, assert_faithful, computed
from in_process_host import InProcessActor
from stepped import FakeLlm, SteppedEngine, completion, request

from composer_mesh.actors.engines import embedded
from composer_mesh.actors.engines.port import (
    DecodingDeadlineExceeded,
    DuplicateRequest,
    GenerationEngine,
    RequestAborted,
)
from composer_mesh.actors.engines.vllm_engine import RequestLimits, VllmEngine
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Make = Callable[[int], GenerationEngine]


def with_vllm(rows: int) -> VllmEngine:
    def sampling(asked: GenerationRequest) -> Any:
        count = asked.max_new_tokens
        return completion([9] * count, [("0", 0, count)])

    return VllmEngine(FakeLlm(), sampling, lambda _: None, RequestLimits(64, 100, rows))


@pytest.fixture(params=["embedded", "vllm", "the fake of the tests"])
def make(request: Any, build_model: Any) -> Make:
    """Makes an engine for so many requests at once."""
    if request.param == "embedded":
        model = build_model(1)
        return lambda rows: embedded.EmbeddedEngine(model, rows, 64)
    return with_vllm if request.param == "vllm" else lambda rows: SteppedEngine(rows=rows)


def drain(engine: GenerationEngine) -> None:
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
    with pytest.raises(DuplicateRequest, match="r is already running: abort it"):
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
    engine, answered = embedded.EmbeddedEngine(model, 1, 64), list[GenerationResult]()
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
        engine, results = embedded.EmbeddedEngine(model, 3, 64), list[GenerationResult]()
        for asked in batch:
            if given_up or asked.request_id != "r2":
                engine.submit(asked, results.append)
        engine.abort(given_up)
        drain(engine)
        return results

    assert served("r2") == served("")


NEW = 100


@pytest.fixture
async def generator(build_config: Any, policy_folder: Path) -> AsyncIterator[InProcessActor]:
    actor = GeneratorActor()
    served = InProcessActor("generator-0", 1, actor, asyncio.Lock())
    await served.call("load", build_config(generator={"max_concurrent": 2}), policy_folder)
    yield served
    await actor.__cleanup__(None)


async def details(generator: InProcessActor) -> dict[str, Any]:
    found: dict[str, Any] = await generator.call("describe")
    return found


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(300) for _ in range(20 + n)] for n in range(count)]


async def test_an_aborted_request_raises_and_is_counted(generator: InProcessActor) -> None:
    asked = asyncio.create_task(generator.call("generate", ask("r", [1, 2], NEW)))
    await asyncio.sleep(0)
    assert await generator.call("abort", ["r", "unknown"]) == 1
    with pytest.raises(RequestAborted, match="r was aborted: its caller requested it"):
        await asked
    assert await generator.call("abort", ["r"]) == 0
    described = await details(generator)
    assert (described["aborted"], described["outstanding"]) == (1, 0)


async def test_a_cancelled_call_aborts_its_requests(generator: InProcessActor) -> None:
    one = asyncio.create_task(generator.call("generate", ask("r", [1, 2], NEW)))
    batch = [ask(f"b{n}", [1, n], NEW) for n in range(3)]
    many = asyncio.create_task(generator.call("generate_many", batch))
    await asyncio.sleep(0)
    one.cancel()
    many.cancel()
    await asyncio.wait([one, many])
    described = await details(generator)
    assert (described["aborted"], described["outstanding"]) == (4, 0)


async def test_a_member_of_a_batch_that_is_aborted_has_its_error_in_its_place(
    generator: InProcessActor,
) -> None:
    batch = [ask(f"b{n}", [1, n], NEW) for n in range(4)]
    late = GenerationRequest("late", [7, 8], NEW, 1.0, 5, [], deadline_s=1e-9)
    asked = asyncio.create_task(generator.call("generate_many", [*batch, late]))
    await asyncio.sleep(0)
    await generator.call("abort", ["b1"])
    b0, b1, b2, b3, last = await asked
    assert [result.request_id for result in (b0, b2, b3)] == ["b0", "b2", "b3"]
    assert isinstance(b1, RequestAborted)
    assert isinstance(last, DecodingDeadlineExceeded)


async def test_a_sequence_of_closed_batches_repeats_bit_for_bit_and_reuses_prefixes(
    generator: InProcessActor,
) -> None:
    async def turns() -> list[list[GenerationResult]]:
        asked, sets = prompts(5), list[list[GenerationResult]]()
        for turn in range(3):
            batch = [ask(f"{turn}-{n}", list(one), 6, seed=n) for n, one in enumerate(asked)]
            sets.append(await generator.call("generate_many", batch, continues=turn > 0))
            for prompt, result in zip(asked, sets[-1], strict=True):
                prompt += [*result.token_ids, turn, 9]
        return sets

    first = await turns()
    await generator.call("generate", ask("another", prompts(5)[3], 9))
    assert await turns() == first
    assert [result.cached_tokens for result in first[0]] == [0] * 5
    assert [result.cached_tokens for result in first[2]] == [20 + n + 8 + 5 for n in range(5)]


async def test_what_is_known_of_prompts_is_described(generator: InProcessActor) -> None:
    prompt = prompts(1)[0]
    for seed in range(3):
        await generator.call("generate", ask(f"r{seed}", prompt, 4, seed=seed))
    described = await details(generator)
    keys = ("prompt_tokens", "cached_tokens", "computed_tokens", "decoding")
    assert [described[key] for key in keys] == [60, 38, 22, 0]
