"""The generator actor: who gives a request up frees its place, and closed batches repeat."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_requests import ask
from in_process_host import InProcessActor

from composer_mesh.actors.engines.port import DecodingDeadlineExceeded, RequestAborted
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

NEW = 100


@pytest.fixture(scope="module")
def policy(build_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    build_model(1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
async def generator(build_config: Any, policy: Path) -> AsyncIterator[InProcessActor]:
    actor = GeneratorActor()
    served = InProcessActor("generator-0", 1, actor, asyncio.Lock())
    await served.call("load", build_config(generator={"max_concurrent": 2}), policy)
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
    with pytest.raises(RequestAborted, match="r was aborted: its caller asked for it"):
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
