"""OpenAI's API on a training server, by OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from served_world import World, named_snapshot, served

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat

QUESTION: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]


@pytest.fixture(scope="module")
def format(tokenizer: Any) -> CaptureFormat:
    chat = ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])
    return CaptureFormat.of(chat, 400)


@pytest.fixture
async def world(tmp_path: Path, format: CaptureFormat) -> AsyncIterator[World]:
    async with served(tmp_path, ServeConfig(max_open_per_client=4), format=format) as world:
        yield world


async def test_chats_and_texts_are_answered_from_the_base_model(
    world: World, format: CaptureFormat
) -> None:
    client = world.openai()
    chat = await client.chat.completions.create(
        model="base", messages=QUESTION, max_tokens=3, temperature=0.5, top_p=0.9, logprobs=True
    )
    (asked,) = world.samplers.asked
    assert (asked.temperature, asked.truncation.top_p) == (0.5, 0.9)
    assert asked.prompt_ids == format.chat.first_prompt(QUESTION)
    (choice,) = chat.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert [one.logprob for one in choice.logprobs.content or []] == [-0.5] * 3
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3
    text = await client.completions.create(model="base", prompt=[5, 6], n=2, max_tokens=2, seed=3)
    assert [one.text for one in text.choices] == [format.chat.raw_text([6, 6])] * 2
    again = await client.completions.create(model="base", prompt=[5, 6], n=2, max_tokens=2, seed=3)
    assert again.choices == text.choices
    seeds = [one.seed for one in world.samplers.asked[1:]]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


async def test_a_stream_has_the_same_text(world: World) -> None:
    client = world.openai()
    stream = await client.completions.create(model="base", prompt=[5, 6], max_tokens=2, stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in stream])
    whole = await client.completions.create(model="base", prompt=[5, 6], max_tokens=2)
    assert streamed == whole.choices[0].text


async def test_models_are_the_base_and_the_clients_own_saved_weights(world: World) -> None:
    mine = world.client("tml-one")
    path = await named_snapshot(mine, await mine.model())
    listed = [one.id async for one in world.openai("tml-one").models.list()]
    assert listed == ["base", path]
    await world.openai("tml-one").completions.create(model=path, prompt=[5], max_tokens=1)
    assert world.samplers.snapshots[-1].endswith(".safetensors")
    others = world.openai("tml-two")
    assert [one.id async for one in others.models.list()] == ["base"]
    with pytest.raises(openai.NotFoundError, match="of yours here"):
        await others.completions.create(model=path, prompt=[5], max_tokens=1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": "gpt-5"}, "choose 'base'"),
        ({"prompt": [5] * 700}, "the context of this run is"),
        ({"prompt": [100_000]}, "100000"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"temperature": 1e-40}, "use 0, which is greedy, or raise it"),
        ({"top_p": 1e-40}, "top_p"),
        ({"extra_body": {"min_p": 0.1}}, "less than or equal to 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"n": 65}, "64"),
    ],
)
async def test_what_is_not_served_is_refused_with_a_reason(
    world: World, wrong: dict[str, Any], told: str
) -> None:
    asked: dict[str, Any] = {"model": "base", "prompt": [5], "max_tokens": 1}
    with pytest.raises(openai.BadRequestError, match=told):
        await world.openai().completions.create(**asked | wrong)
    await world.openai().completions.create(**asked)


async def test_the_limit_of_open_operations_holds_here_too(world: World) -> None:
    with pytest.raises(openai.RateLimitError, match="operations of yours are open"):
        await world.openai().completions.create(model="base", prompt=[5], n=6, max_tokens=1)
    async with asyncio.timeout(60):
        while world.tasks.server.metrics()["open_operations"]:
            await world.openai("tml-two").completions.create(model="base", prompt=[5], max_tokens=1)
    await world.openai().completions.create(model="base", prompt=[5], n=2, max_tokens=1)


async def test_without_a_key_nothing_is_answered(tmp_path: Path, format: CaptureFormat) -> None:
    async with served(tmp_path, keys=["tml-" + "k" * 40], format=format) as world:
        with pytest.raises(openai.AuthenticationError):
            await world.openai("tml-other").models.list()
        await world.openai("tml-" + "k" * 40).models.list()
